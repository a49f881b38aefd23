"""jpeg-dlm info"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from jpeg_dlm.cli.options import add_config_arguments, read_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, default="lm1b")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    config = read_config(args, rest)

    from jpeg_dlm.evaluation.info import describe, format_description

    description = describe(config)
    print(json.dumps(description, indent=1) if args.json else format_description(description))
    return 0
