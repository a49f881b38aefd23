"""A model on disk, complete for use: config, tensors, tokenizer and, if the project trained it, the encoder.

    config.json  model.safetensors  tokenizer.json  encoder.json  encoder.safetensors  manifest.json

`read_model` also takes a run directory or one of its checkpoints, and then uses the averaged weights.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from jpeg_dlm.config import Config, from_dict, read_json_file, to_dict, validate
from jpeg_dlm.encoders.base import STATISTICS_FILE
from jpeg_dlm.encoders.small import CONFIG_FILE, WEIGHTS_FILE
from jpeg_dlm.errors import CheckpointError
from jpeg_dlm.files import MANIFEST, atomic_directory, load_tensors, save_tensors, verify_manifest, write_atomic, write_manifest
from jpeg_dlm.methods.base import Method, copy_tensors
from jpeg_dlm.methods.registry import build_method
from jpeg_dlm.training.checkpoint import latest_checkpoint, load_checkpoint

MODEL_FILE, TOKENIZER_FILE = "model.safetensors", "tokenizer.json"
MODEL_FILES = ("config.json", MODEL_FILE, TOKENIZER_FILE, MANIFEST)
ENCODER_FILES = (CONFIG_FILE, WEIGHTS_FILE, STATISTICS_FILE)  # a trained encoder, or what was measured of a foreign one


@dataclass(frozen=True)
class ModelParts:
    """A method with its weights, and where its tokenizer and encoder lie (they may come from elsewhere)."""

    method: Method
    config: Config
    origin: Path
    tokenizer: Path | None
    encoder: Path | None
    tokenizer_fingerprint: str = ""  # what the model was trained with, where that is known


def bundled_folder() -> Path:
    """The model that ships with the package."""
    return Path(__file__).parent / "bundled"


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)  # standard output is for results


def read_model(path: Path, warn: Callable[[str], None] = _warn) -> ModelParts:
    """A model folder, a run directory, or a checkpoint of one."""
    if not path.is_dir():
        what = (
            "is a file, not a folder: import it first with  jpeg-dlm import"
            if path.is_file()
            else "does not exist: name a folder"
        )
        raise CheckpointError(f"'{path}' {what} that holds a model or a run.")
    if (path / "state.json").is_file():
        return _from_checkpoint(load_checkpoint(path), path.parent.parent)
    if (path / "checkpoints").is_dir():
        checkpoint = latest_checkpoint(path, warn)
        if checkpoint is None:
            raise CheckpointError(f"The run '{path}' has no checkpoint yet: train it longer or wait for its first save.")
        return _from_checkpoint(checkpoint, path)
    if (path / MODEL_FILE).is_file():
        return _from_model_folder(path)
    raise CheckpointError(f"'{path}' holds neither a model nor a run: name a folder made by train, import or save.")


def _from_model_folder(path: Path) -> ModelParts:
    verify_manifest(path)
    config = validate(from_dict(read_json_file(path / "config.json")))
    method = build_method(config)
    method.import_state(load_tensors(path / MODEL_FILE), str(path / MODEL_FILE))
    return ModelParts(method.eval(), config, path, _if_there(path / TOKENIZER_FILE), _encoder_folder(path))


def _from_checkpoint(checkpoint, run: Path) -> ModelParts:  # noqa: ANN001 - training.checkpoint.Checkpoint
    config = validate(from_dict(checkpoint.state["config"]))
    method = build_method(config)
    state = checkpoint.tensors("model") | checkpoint.tensors("ema")
    copy_tensors({name: t for name, t in method.state_dict().items()}, state, str(checkpoint.path))
    encoder = _encoder_folder(run / "encoder")
    if encoder is None and config.encoder.kind == "small" and config.encoder.name:
        encoder = Path(config.encoder.name)
    fingerprint = checkpoint.state.get("provenance", {}).get("tokenizer", "")
    return ModelParts(method.eval(), config, checkpoint.path, _if_there(run / TOKENIZER_FILE), encoder, fingerprint)


def _encoder_folder(path: Path) -> Path | None:
    return path if any((path / name).is_file() for name in ENCODER_FILES) else None


def _if_there(path: Path) -> Path | None:
    return path if path.is_file() else None


def write_model(parts: ModelParts, out: Path, extra: dict[str, str] | None = None) -> Path:
    """Save a model folder atomically; an existing folder of that name is refused, not overwritten."""
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise CheckpointError(f"'{out}' already exists: name another folder, nothing was overwritten.")
    if out.exists():
        out.rmdir()
    config = parts.config
    if config.encoder.kind == "small":  # the encoder's files travel along, so no path of the training machine is kept
        config = replace(config, encoder=replace(config.encoder, name=""))
    config = replace(config, data=replace(config.data, source=Path(config.data.source).name))
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_directory(out) as temp:
        write_atomic(temp / "config.json", json.dumps(to_dict(config), indent=1) + "\n")
        save_tensors(temp / MODEL_FILE, parts.method.export_state(), {"format": "pt"})
        if parts.tokenizer:
            shutil.copyfile(parts.tokenizer, temp / TOKENIZER_FILE)
        if parts.encoder:
            for name in ENCODER_FILES:
                if (parts.encoder / name).is_file():
                    shutil.copyfile(parts.encoder / name, temp / name)
        write_manifest(temp, extra or {})
    return out
