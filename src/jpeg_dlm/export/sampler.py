"""Algorithm 2 with networks that run outside torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jpeg_dlm.config import Config
from jpeg_dlm.export.interface import Opened
from jpeg_dlm.flow.latent_sampler import Denoise, LatentSampler

DECODE_ROWS = 8  # decoded at once: the logits of more would take gigabytes at the paper's vocabulary (assumed)


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
