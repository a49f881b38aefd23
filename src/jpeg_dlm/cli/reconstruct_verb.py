"""jpeg-dlm reconstruct"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.errors import DataError

if TYPE_CHECKING:
    from jpeg_dlm.api import Model


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
    if m.codec == "causal":
        print(*latent_lines(model, text), sep="\n", file=sys.stderr)
    return 0


def latent_lines(model: Model, text: str) -> Iterator[str]:
    """Yield a line for each latent of a causal codec: the text of its span, and what it became if that differs."""
    from jpeg_dlm.nn.spans import span_ends

    rows, size, offset = model.round_trip(text), model.layout.payload, model.layout.start
    ends = span_ends(model.config.data.token_len, model.config.model.latent_len)
    for first in range(0, len(rows[0]), size):
        stop = min(first + size, len(rows[0]))
        places = [min(stop, first + max(0, end - offset)) for end in (0, *ends)]  # a frame's begin token is no text
        for n, (start, end) in enumerate(pairwise(places)):
            before, after = (model.tokenizer.decode(row[start:end]) for row in rows)
            if start < end:
                name = f"latent {n}" if len(rows[0]) <= size else f"block {first // size}, latent {n}"
                yield f'{name}: "{before}"' + ("" if after == before else f', decoded to "{after}"')
