"""jpeg-dlm verify"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.errors import CheckpointError, JpegDlmError


def add_arguments(parser: Parser) -> None:
    parser.add_argument("path", type=Path, help="run directory, checkpoint, model folder or prepared text")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    path: Path = args.path
    if (path / "index.json").is_file():
        verify_blocks(path)
    elif (path / "manifest.json").is_file():
        from jpeg_dlm.files import verify_manifest

        verify_manifest(path)
    else:
        return verify_parts(path)
    print(f"'{path}' is whole.")
    return 0


def verify_parts(run: Path) -> int:
    """A line for every part of a run, to the last one also when some are damaged."""
    errors = []
    for name, size, error in parts(run):
        print(f"{name}  {size / 1e6:8.1f} MB  {error or 'whole'}")
        errors.append(error)
    if not errors:
        raise CheckpointError(f"'{run}' holds nothing to verify: name a run, a checkpoint, a model folder or prepared text.")
    return 1 if any(errors) else 0


def parts(run: Path) -> Iterator[tuple[str, int, str | None]]:
    """(name within the run, bytes, what is wrong) of prepared text and of the checkpoints of every stage."""
    from jpeg_dlm.training.checkpoint import verify_run

    if (run / "data" / "index.json").is_file():
        size = sum(entry.stat().st_size for entry in (run / "data").iterdir())
        yield "data", size, complaint(lambda: verify_blocks(run / "data"))
    for stage in [*sorted(run.glob("*-training")), run]:
        for report in verify_run(stage):
            yield str(report.path.relative_to(run)), report.size, report.error


def verify_blocks(folder: Path) -> None:
    """Every shard and the tokenizer against the hashes in the index."""
    from jpeg_dlm.text.blocks import Blocks

    for split in ("train", "heldout"):
        Blocks(folder, split).verify()
    Blocks(folder).tokenizer()


def complaint(check: Callable[[], None]) -> str | None:
    try:
        check()
    except JpegDlmError as error:
        return str(error)
    return None
