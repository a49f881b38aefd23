"""MDLM for `transformers`: masked diffusion, whose sampler unmasks tokens in random order.

Shapes: B batch, L tokens, H hidden width, V vocabulary, N selected positions of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .text_diffusion import FREE, Noise, TextDiffusion, TextDiffusionConfig

LAST_TIME, LEAST_ALPHA = 1e-5, 1e-3  # the last time of the sampler, and the share of tokens without noise at time 1
POSITIONS_AT_ONCE = 1024  # whose logits exist at the same time


class MdlmConfig(TextDiffusionConfig):
    model_type = "mdlm"


class Embedding(nn.Module):
    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(vocab, hidden))


class Block(nn.Module):
    """Attention with rotary positions and an MLP, both modulated and gated by the condition."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        hidden, self.heads = c.hidden, c.heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden, bias=False), nn.LayerNorm(hidden, bias=False)
        self.attn_qkv, self.attn_out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(approximate="tanh"), nn.Linear(4 * hidden, hidden))
        self.adaLN_modulation = nn.Linear(c.cond_dim, 6 * hidden)

    def forward(self, x: Tensor, condition: Tensor, angles: Tensor) -> Tensor:
        def rotate(y: Tensor) -> Tensor:  # channel i of the first half together with i of the second
            first, second = y.chunk(2, -1)
            return y * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(condition)[:, None].chunk(6, -1)
        qkv = self.attn_qkv(self.norm1(x) * (1 + scale1) + shift1)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v).transpose(1, 2).flatten(2)
        x = x + gate1 * self.attn_out(y)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class OutputLayer(nn.Module):
    def __init__(self, c: Any, vocab: int) -> None:
        super().__init__()
        self.norm_final, self.linear = nn.LayerNorm(c.hidden, bias=False), nn.Linear(c.hidden, vocab)
        self.adaLN_modulation = nn.Linear(c.cond_dim, 2 * c.hidden)


class NoiseLevel(nn.Module):
    """The condition of a noise level sigma, which is always 0 here: the number of masks tells it."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.freq_dim = c.freq_dim
        self.mlp = nn.Sequential(nn.Linear(c.freq_dim, c.cond_dim), nn.SiLU(), nn.Linear(c.cond_dim, c.cond_dim))

    def forward(self, x: Tensor) -> Tensor:
        cosines, sines = x.new_ones(len(x), self.freq_dim // 2), x.new_zeros(len(x), self.freq_dim // 2)
        return F.silu(self.mlp(torch.cat([cosines, sines], -1)))


class Backbone(nn.Module):
    """The transformer of MDLM: ids (B, L) to the inputs of its head (B, L, H)."""

    def __init__(self, c: Any, vocab: int) -> None:
        super().__init__()
        self.width = c.hidden // c.heads
        self.vocab_embed, self.sigma_map = Embedding(vocab, c.hidden), NoiseLevel(c)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.depth))
        self.output_layer = OutputLayer(c, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.vocab_embed.embedding)
        condition = self.sigma_map(x)
        exponents = torch.arange(0, self.width, 2, dtype=torch.float32, device=x.device) / self.width
        positions = torch.arange(x.shape[1], dtype=torch.float32, device=x.device)
        angles = torch.outer(positions, 10_000.0**-exponents).repeat(1, 2)
        for block in self.blocks:
            x = block(x, condition, angles)
        shift, scale = self.output_layer.adaLN_modulation(condition)[:, None].chunk(2, -1)
        return self.output_layer.norm_final(x) * (1 + scale) + shift


class MdlmModel(TextDiffusion):
    """The network predicts masked tokens; others never change, so that given ones are simply not masked."""

    config_class = MdlmConfig

    def __init__(self, config: MdlmConfig) -> None:
        super().__init__(config)
        c: Any = config
        added = c.mask_id == -1  # the mask is an id after the tokenizer's
        vocab, self.mask_id = (c.vocab_size + 1, c.vocab_size) if added else (c.vocab_size, c.mask_id)
        self.backbone = Backbone(c, vocab)
        self.post_init()

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits (B, L, V) at ids some of which are masks."""
        return self.logits(self.backbone(input_ids))

    def logits(self, h: Tensor) -> Tensor:
        """Return logits (..., V) of states; the mask is never predicted."""
        logits = self.backbone.output_layer.linear(h)
        logits[..., self.mask_id] = -torch.inf
        return logits

    def sample(self, o: SimpleNamespace, noise: Noise, given: Tensor | None) -> Tensor:
        """Unmask each token in a random step. A row is evaluated again only after one of its tokens changed."""
        size = self.c.token_len
        x = torch.full((len(noise.rows), size), FREE, device=self.device)
        if given is not None:
            x = torch.cat([given, x], 1) if self.c.source_len else given
        x = x.masked_fill(x == FREE, self.mask_id)
        alpha = 1 - (1 - LEAST_ALPHA) * torch.linspace(1, LAST_TIME, o.steps + 1, dtype=torch.float64)
        chances = (alpha[1:] - alpha[:-1]) / (1 - alpha[:-1])
        h = self.backbone(x)
        for step, chance in enumerate(chances.tolist(), start=1):
            coin, u = noise.uniform(f"sample@{step}", 2, x.shape[1]).unbind(1)
            leave = (x == self.mask_id) & (coin < chance)
            x[leave] = in_parts(lambda h, u: drawn(self.logits(h), u, o), h[leave], u[leave])
            stale = leave.any(1) & (x == self.mask_id).any(1)
            if stale.any():
                h[stale] = self.backbone(x[stale])
        masked = x == self.mask_id
        x[masked] = in_parts(lambda h: self.logits(h).argmax(-1), h[masked])
        return x[:, -size:]


def in_parts(f: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Apply f to some positions at a time."""
    return torch.cat([f(*part) for part in zip(*(x.split(POSITIONS_AT_ONCE) for x in inputs), strict=True)])


def drawn(logits: Tensor, u_N: Tensor, o: SimpleNamespace) -> Tensor:
    """Draw tokens (N) by inverting the cumulative distribution at u, after temperature and top-p."""
    if o.temperature == 0:
        return logits.argmax(-1)
    if o.temperature != 1:
        logits = (logits - logits.amax(-1, keepdim=True)) / o.temperature
    if o.top_p < 1:  # the token that crosses top_p stays
        p, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
        struck = p.cumsum(-1) - p >= o.top_p
        logits = logits.masked_fill(torch.zeros_like(struck).scatter_(-1, order, struck), -torch.inf)
    total = logits.softmax(-1).double().cumsum(-1)
    end = total[:, -1:]
    place = (u_N[:, None] * end).minimum(end.nextafter(torch.zeros_like(end)))  # below the sum, in spite of rounding
    return torch.searchsorted(total, place, right=True)[:, 0].clamp_max(logits.shape[-1] - 1)
