"""jpeg-dlm verify"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from jpeg_dlm.cli.options import refuse_rest
from jpeg_dlm.errors import CheckpointError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="run directory, checkpoint, model folder or prepared text")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    refuse_rest(rest)
    path: Path = args.path
    if (path / "index.json").is_file():
        from jpeg_dlm.text.blocks import Blocks

        Blocks(path, "train").verify()
        Blocks(path, "heldout").verify()
        print(f"'{path}' is whole.")
        return 0
    if (path / "checkpoints").is_dir():
        from jpeg_dlm.training.checkpoint import verify_run

        reports = verify_run(path)
        for report in reports:
            print(f"{report.path.name}  {report.size / 1e6:8.1f} MB  {report.error or 'whole'}")
        return 1 if any(report.error for report in reports) else 0
    if not (path / "manifest.json").is_file():
        raise CheckpointError(f"'{path}' holds nothing to verify: name a run, a checkpoint, a model folder or prepared text.")
    from jpeg_dlm.files import verify_manifest

    verify_manifest(path)
    print(f"'{path}' is whole.")
    return 0
