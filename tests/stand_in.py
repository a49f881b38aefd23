"""Micro models of every method, and a model with independent tokens, for which closed forms exist."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from jpeg_dlm.config import Checks, Config, opt
from jpeg_dlm.methods.base import FILL, FREE, Batch, Likelihood, Method, ParameterGroup
from jpeg_dlm.methods.discrete import draw_tokens
from jpeg_dlm.methods.registry import METHODS, Entry


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two methods below, by name."""
    monkeypatch.setitem(METHODS, "unigram", Entry("system", "stand_in:Unigram"))
    monkeypatch.setitem(METHODS, "noisy", Entry("system", "stand_in:NoisyUnigram"))


@dataclass(frozen=True)
class NoOptions:
    def checks(self, config: Config) -> Checks:
        return []


@dataclass(frozen=True)
class UnigramSampler(NoOptions):
    temperature: float = opt(1.0, "divides the logits")

    def label(self) -> str:
        return f"temperature {self.temperature:g}"

    def evaluations(self, token_len: int) -> int:
        return 1


class Unigram(Method):
    supports = FILL
    title = "Unigram"
    groups = {"model": NoOptions, "objective": NoOptions, "sampler": UnigramSampler}
    exact_likelihood = True

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.loss_weights = config, {"ce": 1.0}
        self.scores = nn.Parameter(torch.randn(config.data.vocab_size))

    @classmethod
    def adapt(cls, base, name):
        return replace(base, method=name, model=NoOptions(), objective=NoOptions(), sampler=UnigramSampler())

    def nll(self, tokens: Tensor) -> Tensor:
        return -self.scores.log_softmax(-1)[tokens]

    def losses(self, batch, noise):
        return {"ce": self.nll(batch.tokens_BL).mean()}

    def likelihood(self, batch: Batch, noise) -> Likelihood:
        mask = torch.ones_like(batch.tokens_BL) if batch.mask_BL is None else batch.mask_BL
        return Likelihood((self.nll(batch.tokens_BL) * mask).sum(1), mask.sum(1))

    @torch.no_grad()
    def sample(self, sampler, noise, watch=None, fixed_BL=None):
        p = (self.scores / sampler.temperature).softmax(-1).expand(len(noise.rows), self.config.data.token_len, -1)
        tokens = draw_tokens(p, noise.uniform("sample", self.config.data.token_len))
        return tokens if fixed_BL is None else torch.where(fixed_BL == FREE, tokens, fixed_BL)

    def parameter_groups(self):
        return [ParameterGroup("flow", dict(self.named_parameters()))]


class NoisyUnigram(Unigram):
    """Its likelihood is right only on average over times in [0, 1)."""

    title = "Noisy"
    exact_likelihood = False

    def likelihood(self, batch, noise):
        exact = super().likelihood(batch, noise)
        return Likelihood(2 * noise.stratified("time") * exact.nats_B, exact.tokens_B)
