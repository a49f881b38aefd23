"""jpeg-dlm demo"""

from __future__ import annotations

import argparse
import shlex
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from shutil import which

from jpeg_dlm.cli.parser import Parser

SENTENCE = "A woman in a red dress is walking down the street."
STORY = 250  # tokens at most
ENDS = ("Two dogs are running in the grass.", "A woman is sitting on a bench in the park.")


def add_arguments(parser: Parser) -> None:
    """No options."""


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    from jpeg_dlm.api import load
    from jpeg_dlm.cli.watch import Watcher

    model = load()
    m, d = model.config.model, model.config.data
    began = time.monotonic()
    print(
        f"1. Writing: {m.latent_len} latents of noise become a sentence of up to {d.token_len} tokens (bundled model, CPU).\n"
        "   Each moment shows what the model would write if it had to stop there.\n",
        flush=True,
    )
    model.generate(1, seed=7, watch=Watcher(model))
    print("\n   Eight more, not chosen:\n")
    for text in model.generate(8, seed=0):
        print(f"   - {text}")
    print(f"\n2. The codec: a sentence through {m.latent_len} latents per {d.token_len} tokens and back.\n")
    print(f"   in   {SENTENCE}\n   out  {model.reconstruct([SENTENCE])[0]}")
    print("\n3. Halfway between two sentences, in latent space.\n")
    for i, text in enumerate(model.interpolate(*ENDS, points=5)):
        print(f"   {i / 4:.2f}  {text}")
    stories = load("stories")
    m, d = stories.config.model, stories.config.data
    print(
        f"\n4. A story of the model `stories`, not chosen: {m.latent_len} latents become {d.token_len} tokens, after those of "
        "the block before.\n"
    )
    print(textwrap.fill(stories.generate(1, length=STORY)[0], 100, initial_indent="   ", subsequent_indent="   "))
    seconds = time.monotonic() - began
    print(
        "\nText formed out of noise, went through a quarter of its positions and back, blended, and became a story, in "
        f"{seconds:.1f} s."
    )
    program = shlex.quote(sys.argv[0]) if Path(sys.argv[0]).name == "jpeg-dlm" and not which("jpeg-dlm") else "jpeg-dlm"
    print(
        "\nWhat to try next:\n"
        f"   {program} generate -n 8 --steps 64 --watch\n"
        f"   {program} reconstruct 'Your own sentence here.'\n"
        f"   {program} generate stories --prompt 'One day, a little dog' --length 200 --stream\n"
        f"   {program} train --preset smoke --data sotu-modern --out runs/first   (a few minutes)\n"
        f"   {program} train --preset captions --out runs/captions                (this model before fine-tuning, two hours)"
    )
    return 0
