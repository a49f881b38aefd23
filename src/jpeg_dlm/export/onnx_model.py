"""The networks of Algorithm 2 in ONNX Runtime, and a folder of them that is complete for sampling.

It holds export.json, ONNX graphs, tokenizer.json and manifest.json. export.json has the precision, the versions that wrote
it, how closely it agreed with torch, and the config. Shapes: B batch, N latents, D latent width, L tokens.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from jpeg_dlm.checkpoints.model_folder import TOKENIZER_FILE, ModelParts, portable_config
from jpeg_dlm.config import Config, validate
from jpeg_dlm.encoders.small import SmallEncoder
from jpeg_dlm.export.onnx_networks import build_graph, input_sizes, network_names, onnx_package
from jpeg_dlm.flow.guidance import Guidance
from jpeg_dlm.flow.sampler import Capability, Watch, sample
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.methods.jpeg_dlm_config import JpegDlmModel
from jpeg_dlm.options import from_dict, to_dict
from jpeg_dlm.util.errors import CheckpointError, UsageError, reason_of
from jpeg_dlm.util.files import atomic_directory, dump_json, load_json, verify_manifest, write_atomic, write_manifest
from jpeg_dlm.util.rng import RowNoise

Precision = Literal["fp32", "int8"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")
DECODED_LOGITS = 1 << 23  # computed at once: those of more texts would take gigabytes at the paper's sizes (assumed)
EXPORT_FILE = "export.json"
EXPORT_BYTES = 1 << 20  # a whole config has 3,000
CHECK_ROWS, CHECK_TIME = 4, 0.5
# Largest difference to torch, as a share of the largest value of x (measured: 3e-6 and 0.05 at the sizes of LM1B).
LARGEST_ERROR: dict[Precision, float] = {"fp32": 1e-3, "int8": 0.3}
# Share of equal tokens of random latents; rounding may turn over those that are nearly as probable as another.
LEAST_AGREEMENT: dict[Precision, float] = {"fp32": 0.99, "int8": 0.8}


# ---------------------------------------------------------------- the networks


def open_network(name: str, graph: bytes, config: Config) -> Any:
    """Return a session on the CPU with as many threads as torch has; refuse a graph with other inputs than the config's."""
    onnxruntime = onnx_package("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    # Between two calls torch computes: threads that wait for work by spinning would take its cores.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its error types have nothing but Exception in common
        raise CheckpointError(f"ONNX Runtime cannot run the {name} network ({reason_of(error)}): export it again.") from error
    shapes = {i.name: tuple(i.shape[1:]) for i in session.get_inputs()}
    if shapes != input_sizes(name, config):
        raise CheckpointError(f"The {name} network does not take what its config says ({shapes}): export the model again.")
    return session


def run(session: Any, **inputs: Tensor) -> Tensor:
    """Return the output of a session."""
    arrays: dict[str, np.ndarray] = {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in inputs.items()}
    return torch.from_numpy(session.run(None, arrays)[0])


class OnnxNetworks:
    """The networks of Algorithm 2 on ONNX graphs, on the CPU; they have no gradient, so they take no guidance."""

    title, device, supports = "JPEG-DLM", torch.device("cpu"), frozenset[Capability]()
    noise_scale, v_floor = JpegDlm.noise_scale, JpegDlm.v_floor

    def __init__(self, config: Config, graphs: dict[str, bytes]) -> None:
        self.config = config
        self.latent_shape = (config.model.latent_len, config.model.latent_dim)
        self._sessions = {name: open_network(name, graphs[name], config) for name in network_names(config)}

    def sample(
        self,
        sampler: Any,
        noise: RowNoise,
        watch: Watch | None = None,
        fixed_BL: Tensor | None = None,
        guidance: Guidance | None = None,
        source: Batch | None = None,
    ) -> Tensor:
        denoise = partial(self.denoise, seen=self.read(source), scale=sampler.source_scale) if source else None
        return sample(self, sampler, noise, watch, fixed_BL, guidance, denoise)

    def read(self, source: Batch) -> dict[str, Tensor]:
        """Return the inputs of `denoise` that tell it of sources."""
        present_BC = source.real_BL.float()
        return {"memory": run(self._sessions["read"], source=source.tokens_BL, present=present_BC), "present": present_BC}

    def denoise(
        self, z: Tensor, t: float, s: Tensor | None, w: float, seen: dict[str, Tensor] | None = None, scale: float = 1.0
    ) -> Tensor:
        t_B, w_B, seen = torch.full((len(z),), t), torch.full((len(z),), w), seen or {}
        evaluate = partial(run, self._sessions["denoise"], z=z, t=t_B, s=torch.zeros_like(z) if s is None else s, w=w_B)
        if not seen or scale == 1:
            return evaluate(**seen)
        unseen = seen | {"present": torch.zeros_like(seen["present"])}
        return torch.lerp(evaluate(**unseen), evaluate(**seen), scale)

    def tokens(self, z: Tensor, w: float) -> Tensor:
        parts = z.split(max(1, DECODED_LOGITS // (self.config.data.token_len * self.config.data.vocab_size)))
        return torch.cat([run(self._sessions["decode"], z=part, w=torch.full((len(part),), w)) for part in parts])

    def logits(self, z: Tensor, w: float) -> Tensor:
        raise UsageError("Exported networks have no gradient to guide them: use the model that they were exported from.")


def exportable(parts: ModelParts) -> JpegDlm:
    """Return the networks of a model, of which only jpeg-dlm has those that can be exported."""
    method = parts.method
    if not isinstance(method, JpegDlm) or type(method).greedy is not JpegDlm.greedy:
        raise UsageError(f"Only jpeg-dlm has an ONNX form, not {parts.config.method}: use the torch backend.")
    if parts.config.data.source_len:
        method.encoder = encoder = parts.read_encoder().to(method.device)
        if parts.config.model.source != "features" or not isinstance(encoder.model, SmallEncoder):
            raise UsageError("Of models of pairs, those that read features of a small encoder have an ONNX form: use torch.")
    return method


def build_graphs(networks: JpegDlm, precision: Precision) -> dict[str, bytes]:
    """Return the networks as serialized ONNX graphs; int8 is that of the products in the DiT's blocks and of the logits."""
    return {name: build_graph(name, networks, int8=precision == "int8") for name in network_names(networks.config)}


def onnx_backend(parts: ModelParts, precision: Precision) -> OnnxNetworks:
    """Return a sampler on ONNX graphs of a model's weights as they are now."""
    return OnnxNetworks(parts.config, build_graphs(exportable(parts), precision))


# ---------------------------------------------------------------- the folder


def is_exported(path: Path) -> bool:
    return (path / EXPORT_FILE).is_file()


def write_exported(
    parts: ModelParts, out: Path, precision: Precision = "fp32", files: Mapping[str, bytes] | None = None
) -> Path:
    """Write a folder that `load` reads, with more files in it; nothing is written unless its networks agree with torch's."""
    networks = exportable(parts)
    if out.exists():
        raise CheckpointError(f"'{out}' already exists: name another folder, nothing was overwritten.")
    graphs = build_graphs(networks, precision)
    agreement = compare(networks, OnnxNetworks(parts.config, graphs), precision)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_directory(out, new=True) as temp:
        for name, content in {**(files or {}), **{f"{name}.onnx": graph for name, graph in graphs.items()}}.items():
            (temp / name).write_bytes(content)
        parts.copy_tokenizer(temp)
        versions = {package: importlib.metadata.version(package) for package in ("torch", "onnx", "onnxruntime")}
        config = portable_config(parts)
        config = replace(config, encoder=replace(config.encoder, name=""))  # nothing here reads one
        facts = {"precision": precision, "versions": versions, "agreement": agreement, "config": to_dict(config)}
        write_atomic(temp / EXPORT_FILE, dump_json(facts))
        write_manifest(temp, {})
    return out


@torch.no_grad()
def compare(networks: JpegDlm, exported: OnnxNetworks, precision: Precision) -> dict[str, float]:
    """Return the largest error of x relative to its largest value and the share of equal tokens; refuse other networks."""
    m, w, noise = networks.config.model, networks.config.sampler.w, RowNoise(0, range(CHECK_ROWS))
    z, s = (noise.normal(name, m.latent_len, m.latent_dim) for name in ("z", "s"))
    t_B, w_B = torch.full((CHECK_ROWS,), CHECK_TIME), torch.full((CHECK_ROWS,), w)
    device, memory, seen = networks.latent_mean.device, None, None
    if length := networks.config.data.source_len:
        tokens_BC = (noise.uniform("source", length) * networks.config.data.vocab_size).long()
        source = Batch(tokens_BC.to(device), (torch.arange(length) < length - torch.arange(CHECK_ROWS)[:, None]).to(device))
        memory = networks.dit.read(networks.source_context(source))
        seen = exported.read(Batch(tokens_BC, source.real_BL.cpu()))
    x = networks.dit(*(value.to(device) for value in (z, t_B, s, w_B)), memory=memory).cpu()
    error = float((exported.denoise(z, CHECK_TIME, s, w, seen) - x).abs().max() / x.abs().max().clamp_min(1e-8))
    same = float((exported.tokens(z, w) == networks.tokens(z.to(device), w).cpu()).float().mean())
    if not (error <= LARGEST_ERROR[precision] and same >= LEAST_AGREEMENT[precision]):  # NaN does not
        raise CheckpointError(f"The exported networks do not compute what torch does ({error:g}, {same:g}): use safetensors.")
    return {"denoise": error, "decode": same}


def read_exported(path: Path) -> ModelParts:
    """Return the parts of `jpeg_dlm.api.Model`, after every file proved to be what was written."""
    verify_manifest(path)
    facts = load_json(path / EXPORT_FILE, EXPORT_BYTES)
    values, precision = facts.get("config"), facts.get("precision")
    config = validate(from_dict(values)) if isinstance(values, dict) else None
    files = {name: path / f"{name}.onnx" for name in (network_names(config) if config else ())}
    complete = all(file.is_file() for file in files.values())
    if not complete or config is None or not isinstance(config.model, JpegDlmModel) or precision not in PRECISIONS:
        raise CheckpointError(f"'{path}' is not a whole folder of exported networks: export the model again.")
    sampler = OnnxNetworks(config, {name: file.read_bytes() for name, file in files.items()})
    tokenizer = path / TOKENIZER_FILE if (path / TOKENIZER_FILE).is_file() else None
    return ModelParts(None, config, path, tokenizer, None, exported=sampler, precision=precision)
