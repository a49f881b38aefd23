"""jpeg-dlm demo"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import which

from jpeg_dlm.cli.parser import Parser

SENTENCE = "We must work together to build a stronger economy and a better future for our children."
ENDS = ("We must work together to build a stronger economy.", "The American people want peace and freedom around the world.")


def add_arguments(parser: Parser) -> None:
    """No options."""


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    from jpeg_dlm.api import load
    from jpeg_dlm.cli.watch import Watcher

    model = load()
    m, d = model.config.model, model.config.data
    print(f"1. Writing: {m.latent_len} latents of noise become {d.token_len} tokens (bundled model, CPU).\n", flush=True)
    model.generate(1, seed=7, watch=Watcher(model))
    print("\n   Four more, not chosen:\n")
    for text in model.generate(4, seed=0):
        print(f"   - {text}")
    print(f"\n2. The codec: a sentence through {m.latent_len} latents per {d.token_len} tokens and back.\n")
    print(f"   in   {SENTENCE}\n   out  {model.reconstruct([SENTENCE])[0]}")
    print("\n3. Halfway between two sentences, in latent space.\n")
    for i, text in enumerate(model.interpolate(*ENDS, points=5)):
        print(f"   {i / 4:.2f}  {text}")
    program = shlex.quote(sys.argv[0]) if Path(sys.argv[0]).name == "jpeg-dlm" and not which("jpeg-dlm") else "jpeg-dlm"
    print(
        "\nWhat to try next:\n"
        f"   {program} generate -n 8 --steps 64 --watch\n"
        f"   {program} reconstruct 'Your own sentence here.'\n"
        f"   {program} train --preset smoke --data sotu-modern --out runs/first   (a few minutes)\n"
        f"   {program} train --preset tiny --data YOUR.txt --out runs/mine        (an evening on two cores)"
    )
    return 0
