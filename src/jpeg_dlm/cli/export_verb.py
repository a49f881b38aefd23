"""jpeg-dlm export"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from jpeg_dlm.cli.options import refuse_rest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="run, checkpoint or model folder")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    refuse_rest(rest, ("--out",))

    from jpeg_dlm.model_folder import read_model, write_model

    write_model(read_model(args.checkpoint), args.out)
    print(f"Wrote '{args.out}': load it with  jpeg_dlm.load('{args.out}')  or  jpeg-dlm generate {args.out}")
    return 0
