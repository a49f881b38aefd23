"""jpeg-dlm report"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from jpeg_dlm.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="RUN",
        help="runs, models, results of evaluate, compare or study, or folders that contain them",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("report"), help="folder for index.html and report.md")
    parser.add_argument("--title", help="heading of the page (default: the names of the folders)")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    from jpeg_dlm.report.collect import collect
    from jpeg_dlm.report.write import write_report

    written = write_report(collect(args.folders, args.title), args.out)
    print(f"Wrote {' and '.join(map(str, written))}.")
    return 0
