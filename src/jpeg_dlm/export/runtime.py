"""The two networks of Algorithm 2 in ONNX Runtime: x = f(z, t; s, w), and the decode evaluation at t = 1 to tokens.

Shapes: B batch, N latents, D latent width, L tokens.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from jpeg_dlm.config import Config
from jpeg_dlm.export.onnx_networks import NETWORKS, input_sizes, network
from jpeg_dlm.flow.sampler import Capability, sample
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.util.errors import CheckpointError, MissingPackageError, UsageError, reason_of

Precision = Literal["fp32", "int8"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")
DECODE_ROWS = 8  # decoded at once: the logits of more would take gigabytes at the paper's vocabulary (assumed)


def open_network(name: str, graph: bytes, config: Config) -> Any:
    """Return a session on the CPU with as many threads as torch has; refuse a graph with other inputs than the config's."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingPackageError("onnxruntime", "onnx", "The ONNX backend") from error

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
    """The networks of Algorithm 2 on two ONNX graphs, on the CPU; they have no gradient, so they take no guidance."""

    title, device, supports = "JPEG-DLM", torch.device("cpu"), frozenset[Capability]()
    noise_scale, v_floor = JpegDlm.noise_scale, JpegDlm.v_floor

    def __init__(self, config: Config, graphs: dict[str, bytes]) -> None:
        self.config = config
        self.latent_shape = (config.model.latent_len, config.model.latent_dim)
        self._denoise, self._decode = (open_network(name, graphs[name], config) for name in NETWORKS)

    sample = sample

    def denoise(self, z: Tensor, t: float, s: Tensor | None, w: float) -> Tensor:
        t_B, w_B = torch.full((len(z),), t), torch.full((len(z),), w)
        return run(self._denoise, z=z, t=t_B, s=torch.zeros_like(z) if s is None else s, w=w_B)

    def tokens(self, z: Tensor, w: float) -> Tensor:
        return torch.cat([run(self._decode, z=part, w=torch.full((len(part),), w)) for part in z.split(DECODE_ROWS)])

    def logits(self, z: Tensor, w: float) -> Tensor:
        raise UsageError("Exported networks have no gradient to guide them: use the model that they were exported from.")


def build_graphs(networks: JpegDlm, precision: Precision) -> dict[str, bytes]:
    """Return both networks as serialized ONNX graphs; int8 is that of the products in the blocks of the denoiser."""
    return {name: network(name, networks, int8=precision == "int8" and name == "denoise") for name in NETWORKS}
