"""Checkpoints: one directory per step, `RUN/checkpoints/step-00001234/`, written atomically.

It holds safetensors files, `state.json` and a manifest; loading verifies every byte and falls back to the previous one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from jpeg_dlm.util import files
from jpeg_dlm.util.errors import CheckpointError
from jpeg_dlm.util.files import write_manifest

STATE = "state.json"
STATE_BYTES = 16 << 20
KEPT = 2  # newest checkpoints that a run keeps
STEP_NAME = re.compile(r"step-(\d{8,15})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files have all been verified."""

    path: Path
    step: int
    state: dict[str, Any]
    manifest: dict[str, Any]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Load one group of tensors: 'model', 'ema', 'optimizer', or any other that was saved."""
        return files.load_tensors(self.path / f"{name}.safetensors")

    def changed_environment(self) -> str | None:
        """Return a warning if the torch version or thread count has changed, because last bits then differ; else None."""
        then, now = ({"threads": w["threads"], "torch": w["versions"]["torch"]} for w in (self.manifest, files.environment()))
        changes = [f"{name} {then[name]}, not {now[name]}" for name in now if then[name] != now[name]]
        if not changes:
            return None
        return f"'{self.path}' was saved with {' and '.join(changes)}: the run goes on, but its last bits may differ."


def save_checkpoint(
    run: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], keep: int = KEPT
) -> Path:
    """Save `step`, then delete all but the newest `keep` checkpoints; those before stay if it cannot be saved."""
    folder = run / "checkpoints"
    path, text = folder / f"step-{step:08d}", files.dump_json(state)
    try:
        files.make_directory(folder)
        files.sweep_temps(folder)  # first, because a killed save may occupy the space that is needed
        with files.atomic_directory(path) as temp:
            for name, group in tensors.items():
                files.save_tensors(temp / f"{name}.safetensors", group)
            files.write_atomic(temp / STATE, text)
            write_manifest(temp, {"step": step})
    except OSError as error:
        raise CheckpointError(
            f"Cannot save '{path}' ({error.strerror or error}): earlier checkpoints are intact, so mend the disk and resume."
        ) from error
    # Keep the newest up to `step`; later ones were passed over by a fallback and stay as they are.
    for _, old in [(s, old) for s, old in _steps(folder) if s <= step][:-keep]:
        files.remove_directory(old)
    return path


def latest_checkpoint(run: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest whole checkpoint, or None if there is none at all; call `warn` for every damaged one skipped."""
    errors = []
    for step, path in reversed(_steps(run / "checkpoints")):
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
    return max((step for step, _ in _steps(run / "checkpoints")), default=None)


def load_checkpoint(path: Path, step: int | None = None) -> Checkpoint:
    """Verify and load the checkpoint in a directory; if `step` is given, it must be of that step."""
    manifest = files.verify_manifest(path)
    saved = manifest["extra"].get("step")
    if STATE not in manifest["files"] or step not in (None, saved):
        raise CheckpointError(f"'{path}' is not the checkpoint of step {step} but of {saved}: give it its own name back.")
    return Checkpoint(path, saved, files.load_json(path / STATE, STATE_BYTES), manifest)


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """List checkpoints by step."""
    matches = [(STEP_NAME.fullmatch(path.name), path) for path in folder.glob("step-*/")]
    return sorted((int(match[1]), path) for match, path in matches if match)
