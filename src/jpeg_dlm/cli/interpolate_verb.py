"""jpeg-dlm interpolate"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.cli.values import whole


def add_arguments(parser: Parser) -> None:
    parser.add_argument("first", help="the text at one end")
    parser.add_argument("second", help="the text at the other end")
    parser.add_argument("more", nargs="*", default=[], help="texts to go on to from there, one after the other")
    parser.add_argument("--points", type=whole(2), default=5, help="texts along the way from one to the next, ends included")
    parser.add_argument("--checkpoint", type=Path, help="model folder, run or checkpoint (default: the bundled model)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    from jpeg_dlm.api import load

    texts = load(args.checkpoint, args.device).interpolate(args.first, args.second, *args.more, points=args.points)
    for i, text in enumerate(texts):
        print(f"{i / (args.points - 1):.2f}  {text}")
    return 0
