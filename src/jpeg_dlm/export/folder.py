"""An exported model on disk, complete for sampling: export.json, two networks, tokenizer.json and manifest.json.

export.json has the format, a hash of the weights, the versions that wrote it, how closely it agreed with torch, and the config.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from jpeg_dlm.config import Config, validate
from jpeg_dlm.config_io import from_dict, to_dict
from jpeg_dlm.errors import CheckpointError, UsageError
from jpeg_dlm.export.interface import DECODE, DENOISE, Opened, exported_sampler, in_torch, input_sizes, random_inputs
from jpeg_dlm.export.onnx_builder import onnx_package
from jpeg_dlm.export.onnx_networks import write_network
from jpeg_dlm.export.onnx_runtime import open_onnx
from jpeg_dlm.export.openvino_runtime import convert_onnx, open_openvino
from jpeg_dlm.fetch.assets import cache_dir
from jpeg_dlm.files import atomic_directory, dump_json, load_json, verify_manifest, write_atomic, write_manifest
from jpeg_dlm.flow.latent_sampler import LatentNetworks, networks_of
from jpeg_dlm.folders.model_folder import TOKENIZER_FILE, ModelParts, without_paths
from jpeg_dlm.machine.cpu import Runtime, make_safe
from jpeg_dlm.methods.jpeg_dlm_config import JpegDlmModel

EXPORT_FILE = "export.json"
EXPORT_BYTES = 1 << 20  # a whole config has 3,000
CHECK_ROWS = 4
LARGEST_ERROR = 1e-3  # of the largest value of x (measured: 3e-6 at the sizes of LM1B)
LEAST_AGREEMENT = 0.99  # share of tokens; rounding may turn over the few that are nearly as probable as another


@dataclass(frozen=True)
class Format:
    """A kind of file and its runtime."""

    suffix: str
    open: Callable[[Path], Opened]
    runtime: Runtime  # the package that runs it

    def open_safely(self, path: Path) -> Opened:
        """The network of a file, in a runtime that was tried on this CPU."""
        make_safe(self.runtime)
        return self.open(path)


FORMATS = {
    "onnx": Format(".onnx", open_onnx, "onnxruntime"),
    "openvino": Format(".xml", open_openvino, "openvino"),
}


def is_exported(path: Path) -> bool:
    return (path / EXPORT_FILE).is_file()


def exports_folder() -> Path:
    """Return the folder of exports that `generate` finds by itself."""
    return cache_dir() / "exports"


def cached_export(parts: ModelParts, kind: str) -> Path:
    """Return the place of an export among those that `generate` finds."""
    return exports_folder() / weights_key(exportable(parts, kind)) / kind


def weights_key(networks: LatentNetworks) -> str:
    """Return a hash of everything that sampling computes with."""
    found = hashlib.sha256(dump_json(to_dict(networks.config)["model"]).encode())
    parts = {"dit": networks.dit, "decompressor": networks.decompressor, "up": networks.unembed_proj, "head": networks.lm_head}
    parts |= {"predictor": networks.predictor} if networks.predictor is not None else {}
    tensors = {f"{part}.{name}": value for part, module in parts.items() for name, value in module.state_dict().items()}
    for name, value in sorted((tensors | {"mean": networks.latent_mean, "scale": networks.latent_scale}).items()):
        found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:32]


def write_exported(parts: ModelParts, kind: str, out: Path, tell: Callable[[str], None] = lambda text: None) -> Path:
    """The model as a folder of `kind`, one of FORMATS; nothing is written unless its networks agree with torch's."""
    networks = exportable(parts, kind)
    if out.exists():
        raise CheckpointError(f"'{out}' already exists: name another folder, nothing was overwritten.")
    onnx_package()  # its absence is told before the work begins
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_directory(out, new=True) as temp:
        agreement = {}
        for name in (DENOISE, DECODE):
            tell(f"Exporting the {name} network ...")
            agreement[name] = agreement_of(name, networks, written_and_opened(name, networks, kind, temp))
        parts.copy_tokenizer(temp)
        said = {"format": kind, "weights": weights_key(networks), "versions": _versions(kind), "agreement": agreement}
        config = without_paths(parts)
        config = replace(config, encoder=replace(config.encoder, name=""))  # nothing here reads one, of whatever kind
        write_atomic(temp / EXPORT_FILE, dump_json(said | {"config": to_dict(config)}))
        write_manifest(temp, {})
    return out


def exportable(parts: ModelParts, kind: str) -> LatentNetworks:
    """Return the networks of a model, of which only jpeg-dlm has those that can be exported."""
    networks = networks_of(parts.writer)
    if networks is None:
        raise UsageError(f"Only jpeg-dlm has an {kind} form, not {parts.config.method}: use --format safetensors.")
    if networks.token_decoder is not None:
        raise UsageError(f"A contextual token decoder has no {kind} form: use --format safetensors.")
    return networks


def written_and_opened(name: str, networks: LatentNetworks, kind: str, folder: Path) -> Opened:
    """A network as a file of `kind` in a folder, in its runtime."""
    path, onnx = folder / f"{name}{FORMATS[kind].suffix}", folder / f"{name}.onnx"
    write_network(name, networks, onnx)
    if kind == "openvino":
        convert_onnx(onnx, path)
        onnx.unlink()
    return FORMATS[kind].open_safely(path)


def agreement_of(name: str, networks: LatentNetworks, opened: Opened) -> float:
    """Return the agreement of a file with torch: the largest error relative to x, or the share of equal tokens."""
    inputs = random_inputs(name, networks.config, CHECK_ROWS)
    wanted, found = in_torch(name, networks, inputs), opened(**inputs)
    if name == DENOISE:
        agreement = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-8))
        agrees = agreement <= LARGEST_ERROR
    else:
        agreement = float((found == wanted).float().mean())
        agrees = agreement >= LEAST_AGREEMENT
    if not agrees:  # NaN does not
        raise CheckpointError(
            f"The exported {name} network does not compute what torch does ({agreement:g}), so nothing was written: "
            "use --format safetensors."
        )
    return agreement


def _versions(kind: str) -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in ("torch", "onnx", FORMATS[kind].runtime)}


def read_exported(path: Path) -> ModelParts:
    """The parts of `jpeg_dlm.api.Model`, after every file proved to be what was written."""
    verify_manifest(path)
    said = load_json(path / EXPORT_FILE, EXPORT_BYTES)
    kind, values = str(said.get("format")), said.get("config")
    if kind not in FORMATS or not isinstance(values, dict):
        raise CheckpointError(f"'{path / EXPORT_FILE}' names no format or config that is known here: export the model again.")
    config = validate(from_dict(values))
    if not isinstance(config.model, JpegDlmModel):
        raise CheckpointError(f"'{path / EXPORT_FILE}' is of {config.method}, which is never exported: export the model again.")
    opened = {name: _open(path, name, kind, config) for name in (DENOISE, DECODE)}
    tokenizer = path / TOKENIZER_FILE
    sampler = exported_sampler(config, opened[DENOISE], opened[DECODE])
    return ModelParts(None, config, path, tokenizer if tokenizer.is_file() else None, None, exported=sampler)


def _open(folder: Path, name: str, kind: str, config: Config) -> Opened:
    path = folder / f"{name}{FORMATS[kind].suffix}"
    if not path.is_file():
        raise CheckpointError(f"'{path}' is missing: export the model again.")
    opened = FORMATS[kind].open_safely(path)
    if opened.shapes != {key: (None, *sizes) for key, sizes in input_sizes(name, config).items()}:
        raise CheckpointError(f"'{path}' does not take what its config says ({opened.shapes}): export the model again.")
    return opened
