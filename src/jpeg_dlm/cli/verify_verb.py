"""jpeg-dlm verify"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.errors import CheckpointError


def add_arguments(parser: Parser) -> None:
    parser.add_argument("path", type=Path, help="run directory, checkpoint, model folder or prepared text")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    from jpeg_dlm.files import MANIFEST, verify_manifest
    from jpeg_dlm.folders.model_folder import named_folder
    from jpeg_dlm.training.integrity import verify_blocks

    path = named_folder(args.path)
    if (path / "index.json").is_file():
        verify_blocks(path)
    elif (path / MANIFEST).is_file():
        verify_manifest(path)
    else:
        return verify_parts(path)
    print(f"'{path}' is whole.")
    return 0


def verify_parts(run: Path) -> int:
    """Print a line for every part of a run; return 1 if any is damaged."""
    from jpeg_dlm.training.integrity import run_parts

    states = []
    for part in run_parts(run):
        print(f"{part.name}  {part.size / 1e6:8.1f} MB  {part.said}")
        states.append(part.state)
    if not states:
        raise CheckpointError(f"'{run}' holds nothing to verify: name a run, a checkpoint, a model folder or prepared text.")
    return 1 if "damaged" in states else 0
