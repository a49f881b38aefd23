"""jpeg-dlm info"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from jpeg_dlm.cli.options import add_config_arguments, list_options, read_config
from jpeg_dlm.errors import UsageError
from jpeg_dlm.methods.registry import METHODS, STAGES

SYSTEMS = [name for name in METHODS if name not in STAGES]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, default="lm1b")
    parser.add_argument("--method", metavar="NAME", help=f"one of {', '.join(SYSTEMS)} (default: jpeg-dlm)")
    parser.add_argument("--options", action="store_true", help="every option of the method instead, with its value and meaning")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    if args.method and args.method not in SYSTEMS:
        raise UsageError(f"Unknown method '{args.method}'; choose one of {', '.join(SYSTEMS)}.")
    config = read_config(args, rest, method=args.method)
    if args.options:
        print(list_options(config))
        return 0
    if config.method == "jpeg-dlm":  # by formula, without torch
        from jpeg_dlm.evaluation.info import describe, format_description

        description, show = describe(config), format_description
    else:
        from jpeg_dlm.evaluation.method_info import describe_method, format_method

        description, show = describe_method(config), format_method
    print(json.dumps(description, indent=1) if args.json else show(description))
    return 0
