"""Checkpoints: one directory per step, `RUN/checkpoints/step-00001234/`, written atomically.

It holds safetensors files, `state.json` and a manifest; loading verifies every byte and falls back to the previous one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jpeg_dlm.errors import CheckpointError
from jpeg_dlm.files import (
    FULL_DISK,
    OLD_SUFFIX,
    atomic_directory,
    dump_json,
    free_bytes,
    load_json,
    load_tensors,
    make_directory,
    remove_directory,
    save_tensors,
    sweep_temps,
    verify_manifest,
    write_atomic,
    write_manifest,
    writer,
)

STATE = "state.json"
STATE_BYTES = 16 << 20
MARGIN_BYTES = 1 << 20  # manifest, headers and file-system blocks, generously
STEP_NAME = re.compile(r"step-(\d{8,15})(" + re.escape(OLD_SUFFIX) + r")?")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files have all been verified."""

    path: Path
    step: int
    state: dict[str, Any]
    manifest: dict[str, Any]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Load one group of tensors: 'model', 'ema', 'optimizer', or any other that was saved."""
        return load_tensors(self.path / f"{name}.safetensors")

    def foreign(self) -> str | None:
        """Return a warning if the torch version or thread count has changed, because last bits then differ; else None."""
        then, now = ({"threads": w["threads"], "torch": w["versions"]["torch"]} for w in (self.manifest, writer()))
        changes = [f"{name} {then[name]}, not {now[name]}" for name in now if then[name] != now[name]]
        if not changes:
            return None
        return f"'{self.path}' was saved with {' and '.join(changes)}: the run goes on, but its last bits may differ."


@dataclass(frozen=True)
class CheckpointReport:
    """Result of verifying one checkpoint; `error` is None if it is whole."""

    path: Path
    step: int
    size: int
    error: str | None


def host_copies(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Copy groups of tensors to the host, from CUDA into pinned memory with one wait for all; training may go on after it."""
    copies = {
        name: {key: t.detach().to("cpu", non_blocking=t.is_cuda, copy=True) for key, t in group.items()}
        for name, group in tensors.items()
    }
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return copies


def save_checkpoint(
    run: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    keep: int,
    *,
    attempts: int = 3,
    wait_s: float = 20.0,
) -> Path:
    """Save `step`, then delete all but the newest `keep` checkpoints. On a full disk, try up to `attempts` times."""
    if step < 0 or keep < 1:
        raise CheckpointError(f"Cannot save step {step} with keep {keep}: use a step of at least 0 and keep at least 1.")
    folder = run / "checkpoints"
    path = folder / f"step-{step:08d}"
    text = dump_json(state)
    needed = sum(t.nbytes for group in tensors.values() for t in group.values()) + len(text) + MARGIN_BYTES
    for left in reversed(range(attempts)):
        try:
            make_directory(folder)
            sweep_temps(folder)  # first, because a killed save may occupy the space that is needed
            if free_bytes(folder) >= needed:
                _write_checkpoint(path, step, tensors, text)
                break
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise CheckpointError(
                    f"Cannot save '{path}' ({error.strerror or error}): check the disk and its permissions; "
                    "earlier checkpoints are intact."
                ) from error
        if left == 0:
            raise CheckpointError(
                f"Saving '{path}' needs {_megabytes(needed)} but {_megabytes(free_bytes(run))} are free: "
                "earlier checkpoints are intact, so make room and resume."
            )
        time.sleep(wait_s)
    _retire(folder, step, keep)
    return path


def _write_checkpoint(path: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: str) -> None:
    with atomic_directory(path) as temp:
        for name, group in tensors.items():
            save_tensors(temp / f"{name}.safetensors", group, {"format": "pt"})
        write_atomic(temp / STATE, state)
        write_manifest(temp, {"step": step})


def _retire(folder: Path, step: int, keep: int) -> None:
    """Keep the newest `keep` checkpoints up to `step`. Later ones were passed over by a fallback and stay as they are."""
    past = sorted((s, path) for s, path in _found(folder) if s <= step)
    for s in sorted({s for s, _ in past})[:-keep]:
        for other, path in past:
            if other == s:
                remove_directory(path)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def latest_checkpoint(run: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest whole checkpoint, or None if there is none at all; call `warn` for every damaged one skipped."""
    errors = []
    for step, path in reversed(sorted(_found(run / "checkpoints"), key=_preference)):
        try:
            checkpoint = load_checkpoint(path, step)
        except CheckpointError as error:
            errors.append(str(error))
            continue
        for sentence in errors:
            warn(f"DAMAGED CHECKPOINT: {sentence} Falling back to step {step}.")
        return checkpoint
    if errors:
        raise CheckpointError(f"No checkpoint of '{run}' is whole, so it cannot resume. {' '.join(errors)}")
    return None


def newest_step(run: Path) -> int | None:
    """Return the step of the newest checkpoint by name, without verifying it, or None if there is none."""
    return max((step for step, _ in _found(run / "checkpoints")), default=None)


def load_checkpoint(path: Path, step: int | None = None) -> Checkpoint:
    """Verify and load the checkpoint in a directory; if `step` is given, it must be of that step."""
    manifest = verify_manifest(path)
    extra = manifest.get("extra")
    saved = extra.get("step") if isinstance(extra, dict) else None
    if not isinstance(saved, int) or step not in (None, saved):
        raise CheckpointError(f"'{path}' holds step {saved}, not {step}: give the directory its own name back.")
    if STATE not in manifest["files"]:
        raise CheckpointError(f"'{path / STATE}' is missing: this is not a training checkpoint.")
    return Checkpoint(path, saved, load_json(path / STATE, STATE_BYTES), manifest)


def verify_run(run: Path) -> list[CheckpointReport]:
    """Verify every checkpoint of a run, oldest first."""
    reports = []
    for step, path in sorted(_found(run / "checkpoints"), key=_preference):
        size = sum(entry.lstat().st_size for entry in path.iterdir())
        try:
            load_checkpoint(path, step)
            reports.append(CheckpointReport(path, step, size, None))
        except CheckpointError as error:
            reports.append(CheckpointReport(path, step, size, str(error)))
    return reports


def _found(folder: Path) -> list[tuple[int, Path]]:
    """List directories named like a checkpoint, including one set aside by an interrupted replacement."""
    matches = [(STEP_NAME.fullmatch(path.name), path) for path in folder.glob("step-*") if path.is_dir()]
    return [(int(match[1]), path) for match, path in matches if match]


def _preference(found: tuple[int, Path]) -> tuple[int, bool]:
    """Sort key: later steps are better, and of one step the directory that was set aside is worse."""
    return found[0], not found[1].name.endswith(OLD_SUFFIX)
