"""The two networks of Algorithm 2 as files: x = f(z, t; s, w), and the decode evaluation at t = 1 to the most probable tokens.

Shapes: B batch, N latents, D latent width, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from jpeg_dlm.config import Config
from jpeg_dlm.errors import CheckpointError, reason_of
from jpeg_dlm.flow.latent_sampler import Denoise, LatentNetworks, LatentSampler
from jpeg_dlm.rng import RowNoise

DENOISE, DECODE = "denoise", "decode"
DECODE_ROWS = 8  # decoded at once: the logits of more would take gigabytes at the paper's vocabulary (assumed)
OUTPUTS = {DENOISE: "x", DECODE: "tokens"}


def input_sizes(name: str, config: Config) -> dict[str, tuple[int, ...]]:
    """The inputs of a network and their sizes after the batch."""
    latents = (config.model.latent_len, config.model.latent_dim)
    return {"z": latents, "t": (), "s": latents, "w": ()} if name == DENOISE else {"z": latents, "w": ()}


def random_inputs(name: str, config: Config, rows: int) -> dict[str, Tensor]:
    """Such as sampling meets them."""
    noise = RowNoise(0, range(rows))
    given = {"t": noise.uniform("t"), "w": torch.full((rows,), config.sampler.w)}
    return {key: given[key] if key in given else noise.normal(key, *sizes) for key, sizes in input_sizes(name, config).items()}


@torch.no_grad()
def in_torch(name: str, networks: LatentNetworks, inputs: Mapping[str, Tensor]) -> Tensor:
    """Compute the output of a network in torch, which its export must match."""
    if name == DENOISE:
        return networks.dit(*inputs.values())
    return networks.tokens(inputs["z"], float(inputs["w"][0]))


@dataclass(frozen=True)
class Opened:
    """A network in a runtime: arrays by name to its one output; `shapes` has None where a size is free."""

    run: Callable[[dict[str, np.ndarray]], np.ndarray]
    shapes: dict[str, tuple[int | None, ...]]

    def __call__(self, **inputs: Tensor) -> Tensor:
        device = inputs["z"].device
        arrays = {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in inputs.items()}
        return torch.from_numpy(self.run(arrays)).to(device)


def not_runnable(path: Path, runtime: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"'{path}' is not a network that {runtime} can run ({reason_of(error)}): export it again.")


def exported_sampler(config: Config, denoise: Opened, decode: Opened) -> LatentSampler:
    """The sampler of two opened files, on the CPU."""

    def denoiser(times: Sequence[float], w: float) -> Denoise:
        def act(z: Tensor, t: float, s: Tensor | None) -> Tensor:
            t_B, w_B = torch.full((len(z),), t), torch.full((len(z),), w)
            return denoise(z=z, t=t_B, s=torch.zeros_like(z) if s is None else s, w=w_B)

        return act

    def tokens(z: Tensor, w: float) -> Tensor:
        return torch.cat([decode(z=part, w=torch.full((len(part),), w)) for part in z.split(DECODE_ROWS)])

    return LatentSampler("JPEG-DLM, exported", config, torch.device("cpu"), denoiser, tokens)
