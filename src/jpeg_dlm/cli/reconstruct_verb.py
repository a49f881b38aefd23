"""jpeg-dlm reconstruct"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.errors import DataError


def add_arguments(parser: Parser) -> None:
    parser.add_argument("text", nargs="*", help="the text; without it, standard input is read")
    parser.add_argument("--checkpoint", type=Path, help="model folder, run or checkpoint (default: the bundled model)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    text = " ".join(args.text) if args.text else sys.stdin.read()
    if not text.strip():
        raise DataError("There is no text: give it as an argument or on standard input.")

    from jpeg_dlm.api import load

    model = load(args.checkpoint, args.device)
    (back,) = model.reconstruct([text])
    before, after = model.tokenizer.encode(text), model.tokenizer.encode(back)
    same = sum(a == b for a, b in zip(before, after, strict=False))
    m = model.config.model
    print(back)
    print(
        f"{same} of {len(before)} tokens kept, through {m.latent_len} latents for every {model.config.data.token_len} tokens",
        file=sys.stderr,
    )
    return 0
