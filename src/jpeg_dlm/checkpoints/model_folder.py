"""Read and write model folders: config.json, model.safetensors, tokenizer.json, encoder.*, manifest.json.

`read_model` also accepts a run directory or one of its checkpoints, and then uses the averaged weights.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from jpeg_dlm.checkpoints.checkpoint import STATE, Checkpoint, latest_checkpoint, load_checkpoint
from jpeg_dlm.config import Config, validate
from jpeg_dlm.encoders.frozen import STATISTICS_FILE, FrozenEncoder, build_encoder, features_fingerprint, read_statistics
from jpeg_dlm.encoders.small import CONFIG_FILE, WEIGHTS_FILE
from jpeg_dlm.flow.sampler import TextSampler
from jpeg_dlm.methods.base import Method, copy_tensors
from jpeg_dlm.methods.registry import build_method
from jpeg_dlm.options import from_dict, read_json_file, to_dict
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.tokenizer import TextTokenizer, load_tokenizer
from jpeg_dlm.util import files
from jpeg_dlm.util.errors import CheckpointError, JpegDlmError, UsageError, reason_of
from jpeg_dlm.util.files import MANIFEST

MODEL_FILE, TOKENIZER_FILE = "model.safetensors", "tokenizer.json"
MODEL_FILES = ("config.json", MODEL_FILE, TOKENIZER_FILE, MANIFEST)
ENCODER_FILES = (CONFIG_FILE, WEIGHTS_FILE, STATISTICS_FILE)  # a trained encoder, or the statistics of a pretrained one


@dataclass(frozen=True)
class ModelParts:
    """A writer of texts, and the paths of its tokenizer and encoder (None: they come from elsewhere)."""

    trained: Method | None  # the method with its weights; None for a model of exported networks
    config: Config
    origin: Path
    tokenizer: Path | None
    encoder: Path | None
    tokenizer_fingerprint: str = ""  # of the tokenizer in training, if known
    encoder_fingerprint: str = ""
    exported: TextSampler | None = field(default=None, kw_only=True)
    precision: Literal["fp32", "int8"] = field(default="fp32", kw_only=True)  # of the exported networks
    scratch: Any = field(default=None, kw_only=True)  # a temporary folder that must live as long as these parts

    @property
    def method(self) -> Method:
        """The trained method, which an exported model does not have."""
        if self.trained is None:
            raise UsageError("An exported model only writes and decodes: use the model it was exported from.")
        return self.trained

    @property
    def writer(self) -> TextSampler:
        """The object that samples."""
        return self.exported or self.method

    def read_tokenizer(self) -> TextTokenizer:
        """Load the tokenizer that the model was trained with."""
        tokenizer = TextTokenizer.from_file(self.tokenizer) if self.tokenizer else load_tokenizer(self.config.data.tokenizer)
        if self.tokenizer_fingerprint not in ("", tokenizer.fingerprint):
            raise CheckpointError(f"'{self.tokenizer}' is not the tokenizer of this model: put the right one back.")
        return tokenizer

    def read_encoder(self) -> FrozenEncoder:
        """Load the frozen encoder that the model was trained with."""
        encoder = build_encoder(self.config.encoder, self.config.data.vocab_size, self.config.train.seed, self.encoder)
        if self.encoder:  # an encoder without files here is pinned by its loader
            self._compare_encoder(encoder.fingerprint)
        return encoder

    def _compare_encoder(self, fingerprint: str) -> None:
        if self.encoder_fingerprint not in ("", fingerprint):
            raise CheckpointError(f"The encoder in '{self.encoder}' is not the one of this model: restore it from a copy.")

    def copy_tokenizer(self, folder: Path) -> None:
        """Copy the tokenizer to a folder, after checking that the model was trained with it."""
        if self.tokenizer:
            self.read_tokenizer()
            shutil.copyfile(self.tokenizer, folder / TOKENIZER_FILE)

    def copy_encoder(self, folder: Path, half: bool = False) -> None:
        """Copy the encoder files, if any, after checking that the model was trained with them; with `half` in fp16."""
        paths = [self.encoder / name for name in ENCODER_FILES if (self.encoder / name).is_file()] if self.encoder else []
        if paths and self.config.encoder.kind == "small":
            self.read_encoder()
        elif paths:  # the statistics suffice; the encoder itself may not be available
            weights, mean, std = read_statistics(paths[0])
            self._compare_encoder(features_fingerprint(mean, std, weights, self.config.encoder.scale))
        for path in paths:
            if half and path.name == WEIGHTS_FILE:
                files.save_tensors(folder / path.name, halved(files.load_tensors(path)))
            else:
                shutil.copyfile(path, folder / path.name)


PACKAGE = Path(__file__).parent.parent
PACKAGED = {name: PACKAGE / name for name in ("bundled", "translator")}  # the models in the package
BUNDLED_FOLDER = PACKAGED["bundled"]


def named_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder of a model that is given by path or by its name in the package; such a folder comes first."""
    name = os.fspath(path)
    return PACKAGED[name] if name in PACKAGED and not Path(name).exists() else Path(name)


def named_model(path: str | os.PathLike[str]) -> ModelParts:
    """Read a model that is given by its path or by its name in the package."""
    return read_model(named_folder(path))


def read_model(path: Path, warn: Callable[[str], None] | None = None) -> ModelParts:
    """Read a model from a model folder, a run directory or a checkpoint."""
    if not path.is_dir():
        raise CheckpointError(f"'{path}' is not a folder: name that of a model or a run (jpeg-dlm import converts files).")
    if (path / STATE).is_file():
        return _from_checkpoint(load_checkpoint(path), path.parent.parent)
    if (path / "checkpoints").is_dir() or any(path.glob("*-training")):  # of a stage before the method
        from jpeg_dlm.util.console import Console  # loads rich, which generating does not need

        checkpoint = latest_checkpoint(path, warn or Console().warn)
        if checkpoint is None:
            raise CheckpointError(f"The run '{path}' has no checkpoint yet: train it longer or wait for its first save.")
        return _from_checkpoint(checkpoint, path)
    if (path / MODEL_FILE).is_file():
        return _from_model_folder(path)
    raise CheckpointError(f"'{path}' holds neither a model nor a run: name a folder made by train, import or save.")


def _from_model_folder(path: Path) -> ModelParts:
    files.verify_manifest(path)
    values = read_json_file(path / "config.json")
    if "auto_map" in values:
        raise CheckpointError(f"'{path}' was exported for transformers: load it there, or name the model it was made from.")
    config = validate(from_dict(values))
    if config.encoder.kind == "small" and config.encoder.name:
        raise CheckpointError(
            f"The config in '{path}' points to an encoder outside the folder, which is not allowed: do not use it."
        )
    tensors = files.load_tensors(path / MODEL_FILE)
    method = build_stored(config, tensors, path)
    method.import_state(tensors, str(path / MODEL_FILE))
    return ModelParts(method.eval(), config, path, _if_there(path / TOKENIZER_FILE), _encoder_folder(path))


def _from_checkpoint(checkpoint: Checkpoint, run: Path) -> ModelParts:
    saved, provenance = checkpoint.state.get("config"), checkpoint.state.get("provenance", {})
    if not isinstance(saved, dict) or not isinstance(provenance, dict):
        raise CheckpointError(f"'{checkpoint.path}' has no config of its model: use another checkpoint.")
    config = validate(from_dict(saved))
    state = checkpoint.tensors("model") | checkpoint.tensors("ema")
    method = build_stored(config, state, checkpoint.path)
    copy_tensors(method.state_dict(), state, str(checkpoint.path))
    encoder = _encoder_folder(run / "encoder")
    if encoder is None and config.encoder.kind == "small" and config.encoder.name:
        encoder = Path(config.encoder.name)
    fingerprints = [str(provenance.get(name, "")) for name in ("tokenizer", "encoder")]
    return ModelParts(method.eval(), config, checkpoint.path, _if_there(run / TOKENIZER_FILE), encoder, *fingerprints)


def build_stored(config: Config, tensors: Mapping[str, Tensor], origin: Path) -> Method:
    """Build the method of a stored config, whose sizes are within the bounds of the options, for its stored `tensors`."""
    try:
        method = build_method(config)
    except (RuntimeError, MemoryError, OverflowError, ValueError, TypeError, ArithmeticError) as error:
        raise CheckpointError(
            f"The model in '{origin}' cannot be built ({reason_of(error)}): "
            "its config does not match its tensors, so restore it from a copy."
        ) from error
    if not isinstance(method, Method):
        raise UsageError(f"'{origin}' is of a stage that writes no text ({method.title}): name a model of a system.")
    own = method.export_state()
    for name in own.keys() & tensors.keys():
        if tensors[name].is_floating_point() != own[name].is_floating_point() or tensors[name].is_complex():
            kind = str(tensors[name].dtype).removeprefix("torch.")
            raise CheckpointError(f"'{origin}' has {kind} numbers for '{name}': save it as fp32, fp16 or bf16.")
    return method


def _encoder_folder(path: Path) -> Path | None:
    return path if any((path / name).is_file() for name in ENCODER_FILES) else None


def _if_there(path: Path) -> Path | None:
    return path if path.is_file() else None


def portable_config(parts: ModelParts) -> Config:
    """Return the config without local paths; tokenizer and small encoder are saved as files next to it."""
    config, source = parts.config, parts.config.data.source
    on_hub = source.startswith("hf:") and source[3:4] not in ("/", "~", ".")
    data = replace(config.data, source=source if on_hub else Path(source).name)
    if parts.tokenizer and Path(data.tokenizer).is_file():
        data = replace(data, tokenizer=TOKENIZER_FILE)
    if config.encoder.kind == "small":
        config = replace(config, encoder=replace(config.encoder, name=""))
    if config.train.init:
        config = replace(config, train=replace(config.train, init=Path(config.train.init).name))
    return replace(config, data=data)


def halved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return matrices in fp16, at half the size, if their numbers are in its range, and everything else as it is."""
    matrices = {name: t.half() for name, t in tensors.items() if t.ndim > 1 and t.is_floating_point()}
    return dict(tensors) | {name: t for name, t in matrices.items() if t.isfinite().all()}


def write_model(parts: ModelParts, out: Path, half: bool = False) -> Path:
    """Write a model folder atomically, with `half` in fp16; raise `CheckpointError` if it already exists."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic_directory(out, new=True) as temp:
        files.write_atomic(temp / "config.json", json.dumps(to_dict(portable_config(parts)), indent=1) + "\n")
        tensors = parts.method.export_state()
        files.save_tensors(temp / MODEL_FILE, halved(tensors) if half else tensors)
        parts.copy_tokenizer(temp)
        parts.copy_encoder(temp, half)
        files.write_manifest(temp, {})
    return out


@torch.no_grad()
def blend(parts: ModelParts, other: ModelParts, share: float) -> None:
    """Replace the weights of a model by (1 - share) of them plus `share` of another's, of the same layout (WiSE-FT)."""
    mine, theirs = parts.method.export_state(), other.method.export_state()
    names = f"'{other.origin}' and '{parts.origin}'"
    same = parts.config.method == other.config.method and mine.keys() == theirs.keys()
    if not same or any(mine[name].shape != theirs[name].shape for name in mine):
        raise UsageError(f"{names} differ in method or sizes: blend two models of one layout.")
    if parts.read_tokenizer().fingerprint != other.read_tokenizer().fingerprint:
        raise UsageError(f"{names} differ in their tokenizers: blend two models with one.")
    mixed = {name: torch.lerp(t, theirs[name], share) if t.is_floating_point() else t for name, t in mine.items()}
    parts.method.import_state(mixed, names)


# ---------------------------------------------------------------- verification


def verify(path: Path) -> Iterator[tuple[Path, str | None]]:
    """Yield each run, checkpoint, model folder or prepared text in `path`, or `path` itself, and what is damaged, or None."""
    is_one = any((path / name).is_file() for name in (MANIFEST, "index.json", STATE, MODEL_FILE))
    folders = [path] if is_one else sorted({*path.glob("**/checkpoints/step-*/"), *(p.parent for p in path.rglob(MANIFEST))})
    if not folders:
        raise CheckpointError(f"'{path}' holds nothing to verify: name a run, a checkpoint, a model folder or prepared text.")
    for folder in folders:
        try:
            if (folder / "index.json").is_file():
                for split in ("train", "heldout"):
                    Blocks(folder, split).verify()
                Blocks(folder).tokenizer()
            elif folder.parent.name == "checkpoints" or (folder / MODEL_FILE).exists():
                files.verify_manifest(folder)
            else:  # other files may lie beside what the manifest lists
                files.check_listed(folder)
            yield folder, None
        except JpegDlmError as error:
            yield folder, str(error)
