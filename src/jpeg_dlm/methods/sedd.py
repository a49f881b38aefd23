"""SEDD-Absorb: masked diffusion whose network predicts ratios of probabilities (scores), trained by score entropy.

The score of token y at a masked position is s_y = e^logit_y / (e^sigma - 1) / (V - 1), with V ids including the mask: an
untrained network, whose logits are zero, has the scores of uniform tokens. The noise level cancels in the weights
w_y = s_y (e^sigma - 1), and with r = 1 / (e^sigma - 1) the score entropy sum_y s_y - r log s_x0 + r (log r - 1) is r times
`cost`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from jpeg_dlm.config import Config, opt
from jpeg_dlm.methods.base import Publication
from jpeg_dlm.methods.common.absorbing import Absorbing, AbsorbingSampler
from jpeg_dlm.methods.common.discrete import (
    DIFFUSION_TENSORS,
    PAPER_TOKENIZERS,
    DditConfig,
    DiscreteObjective,
    adapted,
    ddit_model,
    paper_data,
    sampler_steps,
)


@dataclass(frozen=True)
class SeddObjective(DiscreteObjective):
    """Score entropy with SEDD's times and reduction."""

    stratified: bool = opt(False, "one time in each of as many intervals as the global batch has rows; else independent (SEDD)")
    reduction: Literal["token_mean", "sequence_sum"] = opt(
        "sequence_sum", "sum over a row's tokens and mean over rows (SEDD), or mean over tokens"
    )


@dataclass(frozen=True)
class SeddSampler(AbsorbingSampler):
    """SEDD's samplers, whose last evaluation samples the tokens still masked."""

    solver: Literal["euler", "analytic"] = opt(
        "analytic", "Tweedie tau-leaping or Euler (SEDD); they are the same step here, as alpha is linear in t"
    )

    def label(self) -> str:
        return f"{self.steps} {self.solver} steps"


class Sedd(Absorbing):
    """Masked diffusion with the weights w_y = s_y (e^sigma - 1) = e^logit_y / (V - 1)."""

    title = "SEDD-Absorb"
    publication = Publication(
        ("sedd",), "sedd", hub="sedd", keys=frozenset({"tokens", "graph", "noise"}), tensors=DIFFUSION_TENSORS,
        fixed={("graph", "type"): "absorb", ("noise", "type"): "loglinear", ("model", "scale_by_sigma"): True},
    )  # fmt: skip
    groups = {"model": DditConfig, "objective": SeddObjective, "sampler": SeddSampler}
    time_conditioned = True

    @classmethod
    def adapt(cls, base: Config, name: str) -> Config:
        """Use SEDD's own recipe at the paper's sizes: GPT-2's tokenizer on both corpora, and rows without a frame.

        A small preset keeps its data and uses stratified times and a mean over tokens: less noise, and a comparable loss.
        """
        data, mask_id = paper_data(base, "gpt2")
        objective = SeddObjective(ce_chunk=base.objective.ce_chunk)
        if base.preset in PAPER_TOKENIZERS:
            data = replace(data, frame=False)
        else:
            objective = replace(objective, stratified=True, reduction="token_mean")
        model = DditConfig(**ddit_model(base), mask_id=mask_id)
        return adapted(base, name, objective, SeddSampler(sampler_steps(base)), model, data, steps=1_300_001)

    def weights(self, h_NH: Tensor) -> Tensor:
        return (self.logits(h_NH) - math.log(self.vocab - 1)).exp()

    def total_weight(self, h_NH: Tensor) -> Tensor:
        return self.weights(h_NH).sum(-1)

    def cost(self, h_NH: Tensor, x0_N: Tensor) -> Tensor:
        logits_NV, offset = self.logits(h_NH), math.log(self.vocab - 1)
        log_total_N, log_w_N = logits_NV.logsumexp(-1) - offset, logits_NV.gather(-1, x0_N[:, None]).squeeze(-1) - offset
        return log_total_N.expm1() - log_w_N

    def chances(self, sampler: SeddSampler, t: Tensor, s: Tensor) -> Tensor:
        """Return c = (e^(sigma_t - sigma_s) - 1) / (e^sigma_t - 1), with the numerator sigma' (t - s) for Euler."""
        sigma_t, sigma_s = self.schedule.sigma(t), self.schedule.sigma(s)
        per_score = (t - s) * self.schedule.dsigma(t) if sampler.solver == "euler" else (sigma_t - sigma_s).expm1()
        return per_score / sigma_t.expm1()

    def finish(self, sampler: SeddSampler, h_NH: Tensor, u_N: Tensor) -> Tensor:
        return self.draw(h_NH, u_N)
