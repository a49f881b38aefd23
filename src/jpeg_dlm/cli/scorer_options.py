"""The options that choose a scorer, the same for every verb that scores text."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.cli.values import scorer

if TYPE_CHECKING:
    from jpeg_dlm.machine.console import Console
    from jpeg_dlm.scorers.scoring import Scorer


def add_scorer_arguments(parser: Parser, default: str | None = "smollm2", help: str = "as for evaluate") -> None:
    parser.add_argument("--scorer", type=scorer, default=default, metavar="NAME", help=help)
    parser.add_argument(
        "--scorer-precision", choices=("auto", "fp32", "bf16"), default="auto", metavar="TYPE",
        help="fp32, bf16 or auto: bf16 on a GPU alone; it takes half the time on a CPU that has its instructions",
    )  # fmt: skip
    parser.add_argument("--mauve", choices=("auto", "on", "off"), default="auto", help="auto: if available")


def scorer_of(args: argparse.Namespace, device: str, console: Console, name: str = "") -> Scorer:
    """Build the scorer that was asked for, or the one of this name."""
    from jpeg_dlm.scorers.language_models import build_scorer

    return build_scorer(name or args.scorer, device, console, args.scorer_precision)
