"""A bound on the likelihood of tokens for systems that denoise latents, of which `flow.likelihood` has the mathematics.

The ODE has the field of one prediction without an earlier one (s = 0, w = 1), as the loss trains it for half of the rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from jpeg_dlm.flow.likelihood import code_nats, signal_grid
from jpeg_dlm.methods.base import Batch, LatentModel, Likelihood
from jpeg_dlm.util.rng import RowNoise

STEPS = 16  # Runge-Kutta steps, of four evaluations each
# Of the states that tokens are read from: latents with noise of width 2. Of 0.3, 0.5, 0.7 and 1, the bundled model's bound on
# captions is least here (measured): with less noise the code costs more than the decoder gains.
SIGNAL = 0.5


@torch.no_grad()
def latent_likelihood(model: LatentModel, batch: Batch, noise: RowNoise) -> Likelihood:
    """Estimate the bound from one code of each row; the decoder reads the denoiser's prediction of the code."""

    def predict(y: Tensor, r: float) -> Tensor:
        return model.predict(model.noisy(torch.zeros_like(y), y, 1 / r), 1 / r)

    x = model.encode(batch)
    y, nats_B = code_nats(predict, x, *code_noise(noise, x), signal_grid(STEPS, SIGNAL))
    logits_BLV = model.logits(predict(y, SIGNAL))
    nll_BL = F.cross_entropy(logits_BLV.transpose(1, 2), batch.tokens_BL, reduction="none")
    return Likelihood.over(nll_BL.double(), batch.real_BL).plus(nats_B)


def code_noise(noise: RowNoise, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the noise of codes with the shape of x, and random signs."""
    return noise.normal("code", *x.shape[1:]), torch.where(noise.uniform("signs", *x.shape[1:]) < 0.5, -1.0, 1.0)
