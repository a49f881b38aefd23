"""Algorithm 2 with networks that run outside torch."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor, nn

from jpeg_dlm.config import Config
from jpeg_dlm.errors import UsageError
from jpeg_dlm.export.networks import Opened
from jpeg_dlm.methods.base import Batch, Method
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.nn.dit import DiT

NOT_EXPORTED = ("compressor", "target", "predictor", "decompressor", "unembed_proj", "lm_head", "latent_mean", "latent_scale")
DECODE_ROWS = 8  # decoded at once: the logits of more would take gigabytes at the paper's vocabulary (assumed)


class ExportedDiT(nn.Module):
    """f in denoise mode, called like `DiT`."""

    def __init__(self, network: Opened) -> None:
        super().__init__()
        self.network = network

    def forward(self, z_BND: Tensor, t_B: Tensor, s_BND: Tensor | None, w_B: Tensor) -> Tensor:
        return self.network(z=z_BND, t=t_B, s=torch.zeros_like(z_BND) if s_BND is None else s_BND, w=w_B)


class ExportedSampler(JpegDlm):
    """JPEG-DLM whose two networks are files: noise, grids, solvers and self-conditioning are those of `JpegDlm.sample`.

    It writes and decodes. What needs the rest of the model, which is not exported, is refused.
    """

    title = "JPEG-DLM, exported"
    uses_encoder: ClassVar[bool] = False

    def __init__(self, config: Config, denoise: Opened, decode: Opened) -> None:
        Method.__init__(self)  # and not JpegDlm's, which would build the networks
        self.config = config
        self.dit = cast(DiT, ExportedDiT(denoise))
        self.decode = decode
        self.nothing = nn.Parameter(torch.empty(0), requires_grad=False)  # a module without one has no device to ask for

    def tokens(self, z: Tensor, w: Tensor) -> Tensor:
        parts = zip(z.split(DECODE_ROWS), w.split(DECODE_ROWS), strict=True)
        return torch.cat([self.decode(z=z, w=w) for z, w in parts])

    # ------------------------------------------------------------ what was not exported

    def __getattr__(self, name: str) -> Any:
        return self._refuse() if name in NOT_EXPORTED else super().__getattr__(name)

    def features(self, batch: Batch) -> NoReturn:
        self._refuse()

    def export_state(self) -> NoReturn:
        self._refuse()

    def reconstruction(self, batch: Batch, w: float = 1.0) -> None:
        return None

    def latent_space(self, batch: Batch, w: float = 1.0) -> None:
        return None

    def _refuse(self) -> NoReturn:
        raise UsageError("An ONNX or OpenVINO model only writes and decodes: use the model it was exported from.")
