"""A system in one file: each token is predicted from the one before it, which is hidden now and then.

Shapes: B batch, L tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.config import Config, opt
from jpeg_dlm.methods.base import Batch, Method, Watch
from jpeg_dlm.methods.discrete import draw_tokens
from jpeg_dlm.util.rng import RowNoise


@dataclass(frozen=True)
class ToyModel:
    hidden: int = opt(16, "width", ge=1, le=1 << 16)
    depth: int = opt(1, "layers", ge=1, le=1024)


@dataclass(frozen=True)
class ToyObjective:
    hide: float = opt(0.1, "share of tokens that are hidden", ge=0, lt=1)


@dataclass(frozen=True)
class ToySampler:
    temperature: float = opt(1.0, "divides the logits", gt=0, le=1e6)

    def label(self) -> str:
        return f"temperature {self.temperature:g}"

    def evaluations(self, token_len: int) -> int:
        return token_len


class Toy(Method):
    """A chain of tokens."""

    title = "Toy"
    groups = {"model": ToyModel, "objective": ToyObjective, "sampler": ToySampler}

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.loss_weights = config, {"ce": 1.0}
        m, self.hidden_id = config.model, config.data.vocab_size
        self.embedding = nn.Embedding(self.hidden_id + 1, m.hidden)
        self.layers = nn.ModuleList(nn.Linear(m.hidden, m.hidden) for _ in range(m.depth))
        self.head = nn.Linear(m.hidden, self.hidden_id)

    @classmethod
    def adapt(cls, base: Config, name: str) -> Config:
        model = ToyModel(base.model.hidden, base.model.depth)
        return replace(base, method=name, model=model, objective=ToyObjective(), sampler=ToySampler())

    def logits(self, before: Tensor) -> Tensor:
        x = self.embedding(before)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        before_BL = F.pad(batch.tokens_BL, (1, 0), value=self.hidden_id)[:, :-1]
        hidden_BL = noise.uniform("hide", before_BL.shape[1]) < self.config.objective.hide
        logits_BLV = self.logits(before_BL.masked_fill(hidden_BL, self.hidden_id))
        nll_BL = F.cross_entropy(logits_BLV.mT.float(), batch.tokens_BL, reduction="none")
        return {"ce": batch.token_mean(nll_BL)}

    @torch.no_grad()
    def sample(
        self, sampler: ToySampler, noise: RowNoise, watch: Watch | None = None, fixed_BL: Tensor | None = None
    ) -> Tensor:
        u_BL = noise.uniform("sample", self.config.data.token_len)
        tokens = [torch.full_like(u_BL[:, 0], self.hidden_id, dtype=torch.long)]
        for u_B in u_BL.unbind(1):
            tokens.append(draw_tokens((self.logits(tokens[-1]) / sampler.temperature).softmax(-1), u_B))
        return torch.stack(tokens[1:], 1)
