"""MDLM: masked diffusion whose network predicts the masked tokens without receiving the noise level.

In the SUBS parameterization, the mask has probability zero and unmasked tokens stay. Both hold by construction here,
because only masked positions are predicted. The bound is a cross-entropy with weight 1 / t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from jpeg_dlm.config import Config, opt
from jpeg_dlm.methods.base import Publication
from jpeg_dlm.methods.common.absorbing import Absorbing, AbsorbingSampler, RowCache
from jpeg_dlm.methods.common.discrete import (
    DIFFUSION_TENSORS,
    DditConfig,
    DiscreteObjective,
    adapted,
    ddit_model,
    paper_data,
    sampler_steps,
)


@dataclass(frozen=True)
class MdlmSampler(AbsorbingSampler):
    """MDLM's sampler `ddpm_cache`."""

    cache: bool = opt(True, "evaluate a row again only after one of its tokens changed (MDLM: after any of the batch did)")
    final: Literal["greedy", "sampled"] = opt(
        "greedy", "tokens still masked at the end: the most probable one (MDLM), or a sample (Duo's version of MDLM)"
    )

    def evaluations(self, token_len: int) -> int:
        """With the cache, return the expected number of steps that unmask a token; each token has one, uniformly drawn."""
        if not self.cache:
            return super().evaluations(token_len)
        return round(self.steps * (1 - (1 - 1 / self.steps) ** token_len))


class Mdlm(Absorbing):
    """Masked diffusion with the probabilities p(x0 = y | x_t) as weights."""

    title = "MDLM"
    publication = Publication(
        ("mdlm",), "subs", hub="mdlm", tensors=DIFFUSION_TENSORS,
        fixed={(*where, "time_conditioning"): False for where in ((), ("config",), ("config", "algo"))},
    )  # fmt: skip
    groups = {"model": DditConfig, "objective": DiscreteObjective, "sampler": MdlmSampler}
    time_conditioned = False

    @classmethod
    def adapt(cls, base: Config, name: str) -> Config:
        data, mask_id = paper_data(base)
        objective, model = DiscreteObjective(ce_chunk=base.objective.ce_chunk), DditConfig(**ddit_model(base), mask_id=mask_id)
        return adapted(base, name, objective, MdlmSampler(sampler_steps(base)), model, data)

    def weights(self, h_NH: Tensor) -> Tensor:
        return self.logits(h_NH).softmax(-1)

    def total_weight(self, h_NH: Tensor) -> Tensor:
        """Return 1, so that the head runs only for positions that are unmasked."""
        return h_NH.new_ones(len(h_NH))

    def cost(self, h_NH: Tensor, x0_N: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(h_NH), x0_N, reduction="none")

    def chances(self, sampler: MdlmSampler, t: Tensor, s: Tensor) -> Tensor:
        alpha_t, alpha_s = self.schedule.alpha(t), self.schedule.alpha(s)
        return (alpha_s - alpha_t) / (1 - alpha_t)

    def finish(self, sampler: MdlmSampler, h_NH: Tensor, u_N: Tensor) -> Tensor:
        return self.draw(h_NH, u_N) if sampler.final == "sampled" else self.logits(h_NH).argmax(-1)

    def sampling_states(self, sampler: MdlmSampler) -> Callable[[Tensor, float], Tensor]:
        states = super().sampling_states(sampler)
        if not sampler.cache:
            return states
        cache = RowCache(lambda x_BL: states(x_BL, 0.0), self.mask_id)  # the network ignores time
        return lambda x_BL, t: cache(x_BL)
