"""Read and write model folders: config.json, model.safetensors, tokenizer.json, encoder.*, manifest.json.

`read_model` also accepts a run directory or one of its checkpoints, and then uses the averaged weights.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from jpeg_dlm.config import Config, validate
from jpeg_dlm.config_io import from_dict, read_json_file, to_dict
from jpeg_dlm.encoders.build import build_encoder
from jpeg_dlm.encoders.frozen import STATISTICS_FILE, FrozenEncoder, features_fingerprint, read_statistics
from jpeg_dlm.encoders.small import CONFIG_FILE, WEIGHTS_FILE
from jpeg_dlm.errors import CheckpointError, UsageError, reason_of
from jpeg_dlm.files import MANIFEST, atomic_directory, load_tensors, save_tensors, verify_manifest, write_atomic, write_manifest
from jpeg_dlm.flow.latent_sampler import LatentSampler, Writer
from jpeg_dlm.folders.checkpoint import latest_checkpoint, load_checkpoint
from jpeg_dlm.methods.base import Method, copy_tensors
from jpeg_dlm.methods.registry import build_method
from jpeg_dlm.text.tokenizer import TextTokenizer, load_tokenizer

MODEL_FILE, TOKENIZER_FILE = "model.safetensors", "tokenizer.json"
MODEL_FILES = ("config.json", MODEL_FILE, TOKENIZER_FILE, MANIFEST)
ENCODER_FILES = (CONFIG_FILE, WEIGHTS_FILE, STATISTICS_FILE)  # a trained encoder, or the statistics of a pretrained one

# How much larger than its stored tensors a model may be while it is built (assumed: target networks and
# moving averages double it, weights are initialized one by one, and constant tables do not grow with it).
SLACK, SLACK_BYTES, SLACK_TENSORS = 8, 1 << 28, 500


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
    exported: LatentSampler | None = field(default=None, kw_only=True)

    @property
    def method(self) -> Method:
        """The trained method, which an exported model does not have."""
        if self.trained is None:
            raise UsageError("An ONNX or OpenVINO model only writes and decodes: use the model it was exported from.")
        return self.trained

    @property
    def writer(self) -> Writer:
        """The object that samples."""
        return self.exported or self.method

    def read_tokenizer(self) -> TextTokenizer:
        """Load the tokenizer that the model was trained with."""
        found = TextTokenizer.from_file(self.tokenizer) if self.tokenizer else load_tokenizer(self.config.data.tokenizer)
        if self.tokenizer_fingerprint and self.tokenizer_fingerprint != found.fingerprint:
            raise CheckpointError(f"'{self.tokenizer}' is not the tokenizer of this model: put the right one back.")
        return found

    def read_encoder(self) -> FrozenEncoder:
        """Load the frozen encoder that the model was trained with."""
        found = build_encoder(self.config.encoder, self.config.data.vocab_size, self.config.train.seed, self.encoder)
        if self.encoder:  # an encoder without files here is pinned by its loader
            self._compare_encoder(found.fingerprint)
        return found

    def check_encoder(self) -> None:
        """Raise `CheckpointError` if the encoder files are not those that the model was trained with."""
        if self.config.encoder.kind == "small":
            self.read_encoder()
        elif self.encoder and (self.encoder / STATISTICS_FILE).is_file():
            # The statistics suffice; the encoder itself may not be available.
            weights, mean, std = read_statistics(self.encoder / STATISTICS_FILE)
            self._compare_encoder(features_fingerprint(mean, std, weights, self.config.encoder.scale))

    def _compare_encoder(self, fingerprint: str) -> None:
        if self.encoder_fingerprint and self.encoder_fingerprint != fingerprint:
            raise CheckpointError(f"The encoder in '{self.encoder}' is not the one of this model: restore it from a copy.")

    def copy_tokenizer(self, folder: Path) -> None:
        """Copy the tokenizer to a folder, after checking that the model was trained with it."""
        if self.tokenizer:
            self.read_tokenizer()
            shutil.copyfile(self.tokenizer, folder / TOKENIZER_FILE)

    def copy_encoder(self, folder: Path) -> None:
        """Copy the encoder files to a folder, after checking that the model was trained with them."""
        if self.encoder is None or _encoder_folder(self.encoder) is None:
            return  # not needed to generate text
        self.check_encoder()
        for name in ENCODER_FILES:
            if (self.encoder / name).is_file():
                shutil.copyfile(self.encoder / name, folder / name)


BUNDLED = "bundled"
PACKAGED = {BUNDLED: "bundled", "stories": "bundled_stories"}  # names of the models in the package, and their folders


def bundled_folder(name: str = BUNDLED) -> Path:
    """Return the folder of a model that ships with the package."""
    return Path(__file__).parent.parent / PACKAGED[name]


def is_bundled(folder: Path) -> bool:
    """Return True if a folder is that of a model of the package."""
    return folder in map(bundled_folder, PACKAGED)


def named_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder of a model that is given by its path or as a name in `PACKAGED`; a folder of that name comes first."""
    name = os.fspath(path)
    return bundled_folder(name) if name in PACKAGED and not Path(name).exists() else Path(name)


def named_model(path: str | os.PathLike[str]) -> ModelParts:
    """Read a model that is given by its path or as a name in `PACKAGED`."""
    return read_model(named_folder(path))


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)  # standard output is for results


def read_model(path: Path, warn: Callable[[str], None] = _warn) -> ModelParts:
    """Read a model from a model folder, a run directory or a checkpoint."""
    if not path.is_dir():
        if path.is_file():
            raise CheckpointError(
                f"'{path}' is a file, not the folder of a model or a run: name a folder, or convert a published checkpoint "
                "with  jpeg-dlm import."
            )
        raise CheckpointError(f"'{path}' does not exist: name a folder that holds a model or a run.")
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
    if config.encoder.kind == "small" and config.encoder.name:
        raise CheckpointError(
            f"The config in '{path}' points to an encoder outside the folder, which is not allowed: do not use it."
        )
    tensors = load_tensors(path / MODEL_FILE)
    method = build_stored(config, tensors, path)
    method.import_state(tensors, str(path / MODEL_FILE))
    return ModelParts(method.eval(), config, path, _if_there(path / TOKENIZER_FILE), _encoder_folder(path))


def _from_checkpoint(checkpoint, run: Path) -> ModelParts:  # noqa: ANN001 - training.checkpoint.Checkpoint
    saved, provenance = checkpoint.state.get("config"), checkpoint.state.get("provenance", {})
    if not isinstance(saved, dict) or not isinstance(provenance, dict):
        raise CheckpointError(f"'{checkpoint.path}' has no config of its model: use another checkpoint.")
    config = validate(from_dict(saved))
    state = checkpoint.tensors("model") | checkpoint.tensors("ema")
    method = build_stored(config, state, checkpoint.path)
    copy_tensors({name: t for name, t in method.state_dict().items()}, state, str(checkpoint.path))
    encoder = _encoder_folder(run / "encoder")
    if encoder is None and config.encoder.kind == "small" and config.encoder.name:
        encoder = Path(config.encoder.name)
    known = [str(provenance.get(name, "")) for name in ("tokenizer", "encoder")]
    return ModelParts(method.eval(), config, checkpoint.path, _if_there(run / TOKENIZER_FILE), encoder, *known)


class _Allocations(TorchDispatchMode):
    """Raises `MemoryError` when more tensors or bytes are allocated than allowed."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.count, self.size = count, size

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch loads its compiler, a third of the time to write a text (measured)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not any(isinstance(arg, Tensor) for arg in args):  # new, memory not touched yet
            self.count, self.size = self.count - 1, self.size - made.nbytes
            if min(self.count, self.size) < 0:
                raise MemoryError("its config is larger than its tensors")
        return made


def build_stored(config: Config, tensors: Mapping[str, Tensor], origin: Path) -> Method:
    """Build the method of a stored config, which can claim any size, within the memory that its stored `tensors` justify."""
    size = sum(t.numel() for t in tensors.values()) * SLACK * 4  # a model is built in fp32
    try:
        with _Allocations(SLACK * len(tensors) + SLACK_TENSORS, size + SLACK_BYTES):
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


def without_paths(parts: ModelParts) -> Config:
    """Return the config without local paths; tokenizer and small encoder are saved as files next to it."""
    config, source = parts.config, parts.config.data.source
    on_hub = source.startswith("hf:") and source[3:4] not in ("/", "~", ".")
    data = replace(config.data, source=source if on_hub else Path(source).name)
    if parts.tokenizer and Path(data.tokenizer).is_file():
        data = replace(data, tokenizer=TOKENIZER_FILE)
    if config.encoder.kind == "small":
        config = replace(config, encoder=replace(config.encoder, name=""))
    if teacher := getattr(config.objective, "teacher", ""):
        config = replace(config, objective=replace(config.objective, teacher=Path(teacher).name))
    if config.train.init:
        config = replace(config, train=replace(config.train, init=Path(config.train.init).name))
    return replace(config, data=data)


def halved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return matrices in fp16, at half the size, if their numbers are in its range, and everything else as it is."""

    def fits(t: Tensor) -> bool:
        return t.ndim > 1 and t.is_floating_point() and bool(t.half().isfinite().all())

    return {name: t.half() if fits(t) else t for name, t in tensors.items()}


def write_model(parts: ModelParts, out: Path, extra: dict[str, str] | None = None, half: bool = False) -> Path:
    """Write a model folder atomically, with `half` in fp16; raise `CheckpointError` if it already exists."""
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise CheckpointError(f"'{out}' already exists: name another folder, nothing was overwritten.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_directory(out, new=True) as temp:
        write_atomic(temp / "config.json", json.dumps(to_dict(without_paths(parts)), indent=1) + "\n")
        tensors = parts.method.export_state()
        save_tensors(temp / MODEL_FILE, halved(tensors) if half else tensors, {"format": "pt"})
        parts.copy_tokenizer(temp)
        parts.copy_encoder(temp)
        write_manifest(temp, extra or {})
    return out
