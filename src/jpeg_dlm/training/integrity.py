"""Verifies the files of a run: each belongs to a part that is whole, damaged, or not recorded.

Encoder, prepared text, cached features and checkpoints have manifests; other files of the run are recorded in
`RUN/files.jsonl`; logs, which grow, only have to be readable. Runs of earlier versions lack most of this: their tokenizer
and encoder are compared with the fingerprints in the newest checkpoint, and the rest is reported as unproved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jpeg_dlm.errors import JpegDlmError
from jpeg_dlm.files import MANIFEST, TEMP_PREFIX, check_listed, compare_file, verify_manifest
from jpeg_dlm.folders.checkpoint import verify_run
from jpeg_dlm.folders.model_folder import TOKENIZER_FILE, ModelParts, read_model
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.training.feature_cache import COMPLETE_FILE
from jpeg_dlm.training.lock import LOCK
from jpeg_dlm.training.metrics import read_metrics
from jpeg_dlm.training.record import FILES, INVOCATIONS, read_rows, recorded

UNRECORDED = "not recorded, so there is no hash to compare it with"
FOLDERS = ("checkpoints", "data", "encoder", "features")  # have their own manifests
STAGES = "*-training"
LOGS = ("metrics.jsonl", "alarms.jsonl", "nonfinite-rank*.jsonl")
TOLD = 5  # most names of unrecorded files in a line


@dataclass(frozen=True)
class RunPart:
    """A group of files of a run; `said` describes its state."""

    name: str
    size: int
    state: Literal["whole", "damaged", "unproved"]
    said: str


def run_parts(run: Path) -> Iterator[RunPart]:
    """Yield the parts of a run: first its inputs, then its stages, then its own files. Yield nothing if it is not a run."""
    stages = sorted(run.glob(STAGES))
    if not stages and not any((run / name).exists() for name in (FILES, "checkpoints", "data/index.json")):
        return
    yield from _folder_parts(run)
    for stage in [*stages, run]:
        prefix = "" if stage == run else f"{stage.name}/"
        for report in verify_run(stage):
            yield _part(str(report.path.relative_to(run)), report.size, report.error)
        yield from _own_files(stage, prefix)


def verify_blocks(folder: Path) -> None:
    """Compare every file of prepared text with its hash."""
    for split in ("train", "heldout"):
        Blocks(folder, split).verify()
    Blocks(folder).tokenizer()


def _part(name: str, size: int, error: str | None, unproved: str = "") -> RunPart:
    if error:
        return RunPart(name, size, "damaged", error)
    return RunPart(name, size, "unproved" if unproved else "whole", unproved or "whole")


def _complaint(check: Callable[[], object]) -> str | None:
    try:
        check()
    except JpegDlmError as error:
        return str(error)
    return None


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


# ---------------------------------------------------------------- folders with manifests


def _folder_parts(run: Path) -> Iterator[RunPart]:
    data, features, encoder = run / "data", run / "features", run / "encoder"
    if (data / "index.json").is_file():
        older = "" if (data / MANIFEST).is_file() else f"tokens and tokenizer are whole; heldout.jsonl is {UNRECORDED}"
        yield _part("data", _size(data), _complaint(lambda: verify_blocks(data)), older)
    if (features / COMPLETE_FILE).is_file():
        older = "" if (features / MANIFEST).is_file() else UNRECORDED
        yield _part("features", _size(features), _complaint(lambda: check_listed(features)), older)
    if encoder.is_dir() and any(encoder.iterdir()):
        if (encoder / MANIFEST).is_file():
            yield _part("encoder", _size(encoder), _complaint(lambda: verify_manifest(encoder)))
        else:
            model = _model(run)
            known = model and model.encoder_fingerprint
            error = _complaint(model.check_encoder) if model and known else None
            yield _part("encoder", _size(encoder), error, "" if known else UNRECORDED)


def _model(run: Path) -> ModelParts | None:
    """Read the model of a run for the fingerprints of its tokenizer and encoder."""
    try:
        return read_model(run, warn=lambda sentence: None)
    except JpegDlmError:
        return None  # no whole checkpoint, which is reported separately


# ---------------------------------------------------------------- files that the run itself wrote


def _own_files(run: Path, prefix: str) -> Iterator[RunPart]:
    files: dict[str, list[dict[str, Any]]] = {}
    records = {FILES: lambda: files.update(recorded(run)), INVOCATIONS: lambda: read_rows(run / INVOCATIONS)}
    for name, read in records.items():
        if (run / name).exists():
            yield _part(prefix + name, _size_of(run / name), _complaint(read))
    damaged = {name: error for name in files if (error := _complaint(lambda name=name: compare_file(run, name, files[name])))}
    for name, error in damaged.items():
        yield _part(prefix + name, _size_of(run / name), error)
    if whole := files.keys() - damaged.keys():
        noun = "file" if len(whole) == 1 else "files"
        yield _part(f"{prefix}{len(whole)} {noun} in {FILES}", sum(_size_of(run / name) for name in whole), None)
    logs = {path for pattern in LOGS for path in run.glob(pattern)}
    for path in sorted(logs):
        error = _complaint(lambda path=path: read_metrics(path))
        yield RunPart(prefix + path.name, _size_of(path), "damaged" if error else "whole", error or "readable")
    rest = {str(path.relative_to(run)) for path in _plain_files(run) if path not in logs} - files.keys() - {LOCK, *records}
    if TOKENIZER_FILE in rest and (model := _model(run)) and model.tokenizer_fingerprint:
        rest -= {TOKENIZER_FILE}
        yield _part(prefix + TOKENIZER_FILE, _size_of(run / TOKENIZER_FILE), _complaint(model.read_tokenizer))
    if rest:
        shown = sorted(rest)[:TOLD] + ([f"{len(rest) - TOLD} more"] if len(rest) > TOLD else [])
        yield _part(prefix + ", ".join(shown), sum(_size_of(run / name) for name in rest), None, UNRECORDED)


def _plain_files(run: Path) -> Iterator[Path]:
    """Yield the files of a run outside of its stages and of folders with manifests."""
    for path in sorted(run.iterdir()):
        if path.name in FOLDERS or path.name.startswith(TEMP_PREFIX) or path.match(STAGES):
            continue
        yield from (found for found in path.rglob("*") if not found.is_dir()) if path.is_dir() else [path]


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
