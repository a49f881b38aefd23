"""The networks of JPEG-DLM on prepared weights, arranged so that matrix products take most of the time.

`methods.jpeg_dlm` is the reference. In fp32 the two differ by rounding alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jpeg_dlm.errors import UsageError
from jpeg_dlm.flow.latent_sampler import Denoise, LatentNetworks, LatentSampler, Writer
from jpeg_dlm.machine.cpu import make_safe
from jpeg_dlm.nn.dit import NORM_EPS, Context, linear_estimate
from jpeg_dlm.sampling.engine_decoder import ContextualEnd, FastDecoder
from jpeg_dlm.sampling.engine_dit import FastDiT
from jpeg_dlm.sampling.folded import fold
from jpeg_dlm.sampling.linear import DenseLinear, Dtype, full_precision, linear_maker


class Engine:
    """The networks as they are now: weights that change later are not seen.

    `dtype` is that of the products in the blocks of DiT and decompressor; input projections, prefix, norms, softmax,
    heads, vocabulary and a contextual token decoder stay fp32. `compile` fuses what lies between the products; it takes a
    minute at first and gains nothing on a CPU (measured).
    """

    @torch.no_grad()
    def __init__(self, networks: LatentNetworks, dtype: Dtype = "fp32", compile: bool = False) -> None:
        self.device = networks.latent_mean.device
        if dtype != "fp32" and self.device.type == "cpu":
            make_safe()
        make, folded = linear_maker(dtype), fold(networks)
        self.dit = FastDiT(folded.dit, make, compile)
        self.predictor = self.dit if folded.predictor is folded.dit else FastDiT(folded.predictor, make, compile)
        self.denoise_head, self.decode_head = full_precision(*folded.denoise_head), full_precision(*folded.decode_head)
        self.decoder = FastDecoder(folded.decoder, make, compile)
        decoder = networks.token_decoder
        self.contextual = None if decoder is None else ContextualEnd(networks, decoder)
        self.denoise_skip, self.decode_residual = folded.denoise_skip, folded.decode_residual
        self.decode_seen = folded.decode_seen

    @torch.inference_mode()
    def denoiser(self, times: Sequence[float], w: float, context: Context | None = None) -> Denoise:
        """Return f(z, t; s, w) for the times of a grid, after a context."""
        prefixes = dict(zip(times, self.dit.prefixes(times, w, decode=False), strict=True))
        before = None if context is None else self.dit.context_tokens(context)

        @torch.inference_mode()
        def denoise(z: Tensor, t: float, s: Tensor | None) -> Tensor:
            x = predicted(self.denoise_head, self.dit.states(z, s, prefixes[t], before))
            if not self.denoise_skip:
                return x
            c_skip, c_out = linear_estimate(x.new_tensor([t]))
            return c_skip * z + c_out * x

        return denoise

    def tokens(self, z: Tensor, w: float, given_BL: Tensor | None = None) -> Tensor:
        """Return the most probable tokens of one decode evaluation; a contextual decoder reads given ids, not its own."""
        with torch.inference_mode():
            zhat = self.decode_latents(z, w)
            if self.contextual is None:
                tokens = self.decoder(zhat)
            else:
                tokens = self.contextual(self.decoder.states(zhat), len(zhat), given_BL)
        return tokens.clone()  # a tensor of inference mode could not be changed in place

    def decode_latents(self, z: Tensor, w: float) -> Tensor:
        """Return f(z, t = 1) in decode mode."""
        (prefix,) = self.predictor.prefixes([1.0], w, decode=True)
        zhat = predicted(self.decode_head, self.predictor.states(z, None, prefix, seen_SS=self.decode_seen))
        return zhat + z if self.decode_residual else zhat


def predicted(head: DenseLinear, x_BNH: Tensor) -> Tensor:
    """Apply a head to hidden states: norm and linear, in fp32."""
    return head.of_unit_rms(x_BNH.flatten(0, 1), NORM_EPS).unflatten(0, x_BNH.shape[:2])


def accelerated(writer: Writer, dtype: Dtype = "fp32", compile: bool = False) -> LatentSampler:
    """Return Algorithm 2 on the weights of a writer's networks as they are now; guides use the networks themselves."""
    sampler = writer.latent_sampler
    if sampler is None or sampler.networks is None:
        raise UsageError(f"{writer.title} samples as it is: a dtype and compilation are for jpeg-dlm.")
    engine = Engine(sampler.networks, dtype, compile)
    return LatentSampler(
        sampler.title, sampler.config, engine.device, engine.denoiser, engine.tokens,
        supports=sampler.supports, logits=sampler.logits, known=sampler.known,
    )  # fmt: skip
