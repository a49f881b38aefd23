"""Algorithm 2 of JPEG-DLM on prepared weights: what `JpegDlm.sample` does, rearranged to leave the machine to products.

`methods.jpeg_dlm` is the reference. In fp32 the two differ by rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from jpeg_dlm.config import SamplerConfig
from jpeg_dlm.cpu import make_safe
from jpeg_dlm.flow.grids import make_grid
from jpeg_dlm.flow.solvers import SOLVERS
from jpeg_dlm.methods.base import Watch, refuse_given
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.sampling.engine_decoder import FastDecoder
from jpeg_dlm.sampling.engine_dit import FastDiT, FastHead
from jpeg_dlm.sampling.engine_graph import Recorded
from jpeg_dlm.sampling.linear import Dtype, linear_maker


class Engine:
    """A sampler of `method` as it is now: weights that change later are not seen.

    `dtype` is that of the products in the blocks of DiT and decompressor; input projections, prefix, norms, softmax,
    heads and vocabulary stay fp32. `compile` fuses what lies between the products; it takes a minute at first and gains
    nothing on a CPU (measured).
    """

    title = JpegDlm.title

    @torch.no_grad()
    def __init__(self, method: JpegDlm, dtype: Dtype = "fp32", compile: bool = False) -> None:
        self.config, self.dtype = method.config, dtype
        self.device = method.latent_mean.device
        if dtype != "fp32" and self.device.type == "cpu":
            make_safe()
        make = linear_maker(dtype)
        self.dit = FastDiT(method.dit, make, compile)
        self.predictor = self.dit if method.predictor is None else FastDiT(method.predictor, make, compile)
        self.with_skip = method.dit.with_skip
        self.denoise_head = FastHead(method.dit.denoise_head)
        self.decode_head = FastHead((method.predictor or method.dit).decode_head)
        self.decoder = FastDecoder(method, make, compile)
        self.denoise, self.decode = Recorded(self._denoise), Recorded(self._decode)

    # ------------------------------------------------------------ Algorithm 2

    def sample(
        self, sampler: SamplerConfig, noise: RowNoise, watch: Watch | None = None, given_BL: Tensor | None = None
    ) -> Tensor:
        """As `JpegDlm.sample`."""
        refuse_given(given_BL, self.title)
        m = self.config.model
        z = noise.normal("sample", m.latent_len, m.latent_dim)
        s = sampler
        grid = make_grid(s.grid, s.steps, s.grid_mean, s.grid_std, noise.shared("grid"), s.times)
        return self.integrate(z, grid, sampler, watch)

    def integrate(self, z: Tensor, grid: Tensor, sampler: SamplerConfig, watch: Watch | None = None) -> Tensor:
        """As `JpegDlm.integrate`: from the noise z along the grid to tokens."""
        with torch.inference_mode():
            tokens = self._integrate(z, grid.tolist(), sampler, watch)
        return tokens.clone()  # a tensor of inference mode could not be changed in place

    def _integrate(self, z: Tensor, times: list[float], sampler: SamplerConfig, watch: Watch | None) -> Tensor:
        def on_step(k: int, t: float, z: Tensor, x: Tensor) -> None:
            if watch:
                watch(k, sampler.steps, t, lambda: self.tokens(x, sampler.w))

        z = SOLVERS[sampler.solver](self.self_conditioned(times, sampler.w), z, times, on_step)
        tokens = self.tokens(z, sampler.w)
        if watch:
            watch(sampler.steps, sampler.steps, 1.0, lambda: tokens)
        return tokens

    def self_conditioned(self, times: list[float], w: float) -> Callable[[Tensor, float], Tensor]:
        """`predict(z, t)` for the times of a grid, each call conditioned on the prediction of the call before."""
        prefixes = dict(zip(times, self.dit.prefixes(times, w, decode=False), strict=True))
        s: Tensor | None = None

        def predict(z: Tensor, t: float) -> Tensor:
            nonlocal s
            out = self.denoise(z, s, prefixes[t])
            s = x = self.with_skip(out, z, out.new_tensor([t]))
            return x

        return predict

    def tokens(self, z: Tensor, w: float) -> Tensor:
        """One decode evaluation at t = 1, then greedy tokens."""
        return self.decode(z, self.predictor.prefixes([1.0], w, decode=True)[0])

    # ------------------------------------------------------------ what is recorded on CUDA

    def _denoise(self, z: Tensor, s: Tensor | None, prefix_PH: Tensor) -> Tensor:
        return self.denoise_head(self.dit.states(z, s, prefix_PH))

    def _decode(self, z: Tensor, prefix_PH: Tensor) -> Tensor:
        zhat = self.decode_head(self.predictor.states(z, None, prefix_PH))
        return self.decoder(zhat + z if self.config.model.decode_residual else zhat)
