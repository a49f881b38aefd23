"""AR: the shared transformer as an autoregressive language model.

Symbols: x_i token i of a row. Every token is predicted from a start token and the tokens before it; if the rows of the
data begin with the start token, as for published checkpoints, it is given and not predicted.
Shapes: B batch, L tokens, H hidden width, V ids of the network, S positions it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from jpeg_dlm.config import Checks, Config, opt
from jpeg_dlm.methods import discrete
from jpeg_dlm.methods.base import FREE, Batch, CheckpointSignature, Likelihood, Watch
from jpeg_dlm.methods.discrete import DditMethod, Reduction, TokenSampler
from jpeg_dlm.nn.ddit import CausalTransformer, TransformerConfig
from jpeg_dlm.nn.token_loss import most_probable, token_nll
from jpeg_dlm.util.rng import RowNoise

FORBIDDEN = -1e6  # logit of the mask token (Duo); its probability is zero even in float64
START_IDS = {"bert-base-uncased": 101, "gpt2": 50_256}  # [CLS] and <|endoftext|>, which start framed rows (MDLM, Duo)
UNWRITTEN = 0  # placeholder for tokens to come: the padding of BERT's, T5's and our own tokenizers, which decodes to nothing


@dataclass(frozen=True)
class ArConfig(TransformerConfig):
    """Sizes of the transformer and its two special ids."""

    mask_id: int = opt(-1, "never sampled; -1 adds an id after the tokenizer's (MDLM: GPT-2 -1, BERT 103)", ge=-1, le=1 << 20)
    start_id: int = opt(
        -1,
        "id that starts every row and is not predicted (MDLM: GPT-2 50256, BERT 101); -1 puts the mask before each row",
        ge=-1,
        le=1 << 20,
    )

    def checks(self, config: Config) -> Checks:
        vocab_size = config.data.vocab_size
        return [
            *super().checks(config),
            (self.mask_id < vocab_size, "model.mask_id must be -1 or an id of the tokenizer"),
            (self.start_id < vocab_size, "model.start_id must be -1 or an id of the tokenizer"),
            (self.start_id == -1 or config.data.token_len >= 2, "model.start_id needs data.token_len of at least 2"),
        ]


@dataclass(frozen=True)
class ArObjective:
    """Reduction of the loss."""

    reduction: Reduction = opt("token_mean", "mean over tokens (MDLM, Duo), or over rows of the sum of a row's tokens")
    ce_chunk: int = opt(0, discrete.CE_CHUNK, ge=0, le=1 << 30)


@dataclass(frozen=True)
class ArSampler(TokenSampler):
    """Options for drawing the next token."""

    top_k: int = opt(0, "draw from this many most probable tokens only; 0 is off", ge=0, le=1 << 20)
    kv_cache: bool = opt(True, "cache keys and values; false reads the whole prefix for each token (paper's speed 1.00)")

    def label(self) -> str:
        """Return the name in tables."""
        top_k = f", top-k {self.top_k}" if self.top_k and self.temperature else ""
        return ("KV cache" if self.kv_cache else "no KV cache") + top_k + self.sharpening()

    def evaluations(self, token_len: int) -> int:
        """Return the network evaluations of one sample: one per token."""
        return token_len


class Ar(DditMethod):
    """A causal language model of token rows."""

    title = "AR"
    groups = {"model": ArConfig, "objective": ArObjective, "sampler": ArSampler}
    exact_likelihood = True
    signature = CheckpointSignature(("ar",), "ar", tensors=("backbone.vocab_embed.embedding",))

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        ids, self.mask_id = discrete.with_mask(config.model.mask_id, config.data.vocab_size)
        self.backbone = CausalTransformer(ids, config.model)
        # Exactly one is 1: positions before a row, or positions of a row that are not predicted.
        self.before, self.unpredicted = (1, 0) if config.model.start_id == -1 else (0, 1)
        self.loss_weights = {"ce": 1.0}

    @classmethod
    def adapt(cls, base: Config, name: str) -> Config:
        config = super().adapt(base, name)
        start_id = START_IDS.get(config.data.tokenizer, -1) if config.data.frame else -1
        return replace(config, model=replace(config.model, start_id=start_id))

    @classmethod
    def config_of(cls, tensors: Mapping[str, Tensor], base: Config) -> Config:
        config = super().config_of(tensors, base)
        tokenizer = config.data.tokenizer
        start_id = START_IDS[tokenizer] if tokenizer in START_IDS else base.model.start_id
        return replace(config, model=replace(config.model, start_id=start_id if start_id < config.data.vocab_size else -1))

    # ------------------------------------------------------------ reading

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        first = batch.source_len or self.unpredicted
        nll = self.token_nll(batch.tokens_BL, first)
        return {"ce": discrete.reduce_loss(nll, batch, self.config.objective.reduction, first)}

    @torch.no_grad()
    def likelihood(self, batch: Batch, noise: RowNoise) -> Likelihood:
        """Compute the exact likelihood; a first token that is never predicted does not count."""
        first = batch.source_len or self.unpredicted
        return Likelihood.over(self.token_nll(batch.tokens_BL, first).double(), batch.real_BL[:, first:])

    def token_nll(self, tokens_BL: Tensor, first: int) -> Tensor:
        """Return -log p(x_i | x_<i) of the tokens from position `first` of rows of any length."""
        return token_nll(self.logits, self._states(tokens_BL, first), tokens_BL[:, first:], self.config.objective.ce_chunk)

    def most_probable(self, tokens_BL: Tensor, first: int) -> Tensor:
        """Return the most probable token at every position from `first`, after the tokens before it."""
        return most_probable(self.logits, self._states(tokens_BL, first), self.config.data.vocab_size)

    def _states(self, tokens_BL: Tensor, first: int) -> Tensor:
        return self.backbone.states(self._with_start(tokens_BL)[:, :-1])[:, first - self.unpredicted :]

    def logits(self, h: Tensor) -> Tensor:
        """Map states (..., H) to logits of the next token (..., V)."""
        logits = self.backbone.head(h)
        logits[..., self.mask_id] = FORBIDDEN
        return logits

    def _with_start(self, tokens_BL: Tensor) -> Tensor:
        """Return the input of the network (B, S)."""
        return F.pad(tokens_BL, (self.before, 0), value=self.mask_id)

    # ------------------------------------------------------------ writing

    @torch.no_grad()
    def sample(self, sampler: ArSampler, noise: RowNoise, watch: Watch | None = None, fixed_BL: Tensor | None = None) -> Tensor:
        """Sample exactly L tokens per row; an end token does not stop a row."""
        B, L = len(noise.rows), self.config.data.row_len
        if fixed_BL is None:
            fixed_BL = torch.full((B, L), FREE, device=noise.device)
        if self.unpredicted:
            fixed_BL = fixed_BL.clone()
            fixed_BL[:, 0] = fixed_BL[:, 0].where(fixed_BL[:, 0] != FREE, self.config.model.start_id)
        # Drawn all at once, so that a row's numbers do not depend on the given tokens of its neighbors.
        u_BL = noise.streams("sample").uniform(L)
        free_BL = fixed_BL == FREE
        read_BS = self._with_start(fixed_BL.masked_fill(free_BL, UNWRITTEN))
        tokens_BL = read_BS[:, self.before :]  # a view
        cache = self.backbone.new_cache(B, read_BS.shape[1]) if sampler.kv_cache else None
        for i, anything_free in enumerate(free_BL.any(0).tolist()):
            if watch:
                watch(i, L, i / L, tokens_BL.clone)
            if anything_free:
                # Read all given tokens since the last evaluation, such as a prompt, at once.
                start = cache[0].length if cache else 0
                h_BSH = self.backbone.states(read_BS[:, start : i + self.before], cache)
                p_BV = next_token_probabilities(self.logits(h_BSH[:, -1]), sampler)
                tokens_BL[:, i] = torch.where(free_BL[:, i], discrete.draw_tokens(p_BV, u_BL[:, i]), tokens_BL[:, i])
        if watch:
            watch(L, L, 1.0, tokens_BL.clone)
        return tokens_BL.clone()


def next_token_probabilities(logits_BV: Tensor, sampler: ArSampler) -> Tensor:
    """Return next-token probabilities in float64: temperature, then top-k, then top-p of the remaining tokens."""
    logits_BV = discrete.cooled(logits_BV.double(), sampler.temperature)
    if sampler.top_k:
        order_BV = logits_BV.argsort(dim=-1, descending=True, stable=True)
        logits_BV = logits_BV.scatter(-1, order_BV[:, sampler.top_k :], -torch.inf)
    return discrete.nucleus(logits_BV, sampler.top_p).softmax(-1)
