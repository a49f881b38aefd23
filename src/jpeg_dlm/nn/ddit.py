"""The transformer that MDLM, SEDD, Duo, LangFlow and FLM share, and its causal variant for AR.

A pre-norm transformer over token positions with adaLN-zero conditioning on one number per row (the noise level), rotary
positions in the NeoX layout, and an untied head. Parameter names match the published checkpoints.
Shapes: B batch, L tokens, H hidden width, C condition width, V vocabulary, K attention heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.config import Checks, Config, head_checks, opt
from jpeg_dlm.nn.layers import attend, fp32_island, rotary_table, rotate_halves, scalar_embedding, zero_linear

MLP_RATIO = 4  # (MDLM)

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]  # attention of queries, keys and values


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of the transformer."""

    hidden: int = opt(768, "width (paper)", ge=1, le=1 << 16)
    depth: int = opt(12, "layers (paper)", ge=1, le=1024)
    heads: int = opt(12, "attention heads (paper)", ge=1, le=1024)
    dropout: float = opt(0.1, "dropout of both branches of a layer (MDLM)", ge=0, lt=1)

    def checks(self, config: Config) -> Checks:
        return head_checks(self.hidden, self.heads)


@dataclass(frozen=True)
class DditConfig(TransformerConfig):
    """Sizes of the transformer with a noise level."""

    cond_dim: int = opt(128, "width of the noise level embedding (MDLM)", ge=1, le=1 << 16)
    freq_dim: int = opt(256, "sinusoid width of the noise level, an even number (MDLM)", ge=2, le=1 << 16)

    def checks(self, config: Config) -> Checks:
        return [*super().checks(config), (self.freq_dim % 2 == 0, "model.freq_dim must be even")]


class Embedding(nn.Module):
    """One row per token; for distributions over tokens (..., V), `forward` returns the mean row."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(vocab, hidden))
        nn.init.kaiming_uniform_(self.embedding, a=math.sqrt(5))

    def forward(self, tokens: Tensor) -> Tensor:
        if not tokens.is_floating_point():
            return F.embedding(tokens, self.embedding)
        with fp32_island(tokens):  # as precise as looking up a row
            return tokens.to(self.embedding.dtype) @ self.embedding


class NoiseLevel(nn.Module):
    """Embeds the noise level: sinusoids through a small SiLU network."""

    def __init__(self, freq_dim: int, cond_dim: int) -> None:
        super().__init__()
        self.freq_dim = freq_dim
        self.mlp = nn.Sequential(nn.Linear(freq_dim, cond_dim), nn.SiLU(), nn.Linear(cond_dim, cond_dim))

    def forward(self, sigma_B: Tensor) -> Tensor:
        return self.mlp(scalar_embedding(sigma_B, self.freq_dim))


@dataclass
class KvCache:
    """Rotated keys and values of one layer, preallocated so that a step copies only its new positions."""

    k_BKLd: Tensor
    v_BKLd: Tensor
    length: int = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the next positions and return all positions so far."""
        end = self.length + k.shape[2]
        self.k_BKLd[:, :, self.length : end] = k
        self.v_BKLd[:, :, self.length : end] = v
        self.length = end
        return self.k_BKLd[:, :, :end], self.v_BKLd[:, :, :end]


class DditBlock(nn.Module):
    """A transformer layer; with `cond_dim` the condition modulates and gates it, otherwise it is plain."""

    def __init__(self, m: TransformerConfig, cond_dim: int | None, mix: Mix = attend) -> None:
        super().__init__()
        self.heads, self.mix, self.drop = m.heads, mix, nn.Dropout(m.dropout)
        inner = MLP_RATIO * m.hidden
        self.norm1 = nn.LayerNorm(m.hidden, bias=False)
        self.attn_qkv = nn.Linear(m.hidden, 3 * m.hidden, bias=False)
        self.attn_out = nn.Linear(m.hidden, m.hidden, bias=False)
        self.norm2 = nn.LayerNorm(m.hidden, bias=False)
        self.mlp = nn.Sequential(nn.Linear(m.hidden, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, m.hidden))
        self.adaLN_modulation = None if cond_dim is None else zero_linear(cond_dim, 6 * m.hidden)

    def forward(self, x: Tensor, c_BC: Tensor | None, cos: Tensor, sin: Tensor, cache: KvCache | None = None) -> Tensor:
        if self.adaLN_modulation is None:
            x = x + self.drop(self.attention(self.norm1(x), cos, sin, cache))
            return x + self.drop(self.mlp(self.norm2(x)))
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c_BC)[:, None].chunk(6, dim=-1)
        x = x + gate1 * self.drop(self.attention(modulate(self.norm1(x), shift1, scale1), cos, sin, cache))
        return x + gate2 * self.drop(self.mlp(modulate(self.norm2(x), shift2, scale2)))

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KvCache | None) -> Tensor:
        qkv = self.attn_qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # 3 B K L d
        v = qkv[2]
        q, k = rotate_halves(qkv[:2].float(), cos, sin).to(v.dtype)
        if cache is not None:
            k, v = cache.append(k, v)
        return self.attn_out(self.mix(q, k, v).transpose(1, 2).flatten(2))


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention in which the queries are the last positions of the keys."""
    new, seen = q.shape[2], k.shape[2]
    if new == 1:
        return attend(q, k, v)
    if new == seen:
        return attend(q, k, v, is_causal=True)
    visible = torch.ones(new, seen, dtype=torch.bool, device=q.device).tril(seen - new)
    return attend(q, k, v, attn_mask=visible)


def capped_attention(q: Tensor, k: Tensor, v: Tensor, cap: float) -> Tensor:
    """Compute bidirectional attention with scores squashed to cap * tanh(score / cap)."""
    with fp32_island(q):  # as fused kernels do: a bf16 score near the cap is only accurate to 1/8
        scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(q.shape[-1])
        weights = (cap * torch.tanh(scores / cap)).softmax(-1)
    return weights.to(v.dtype) @ v


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


class OutputLayer(nn.Module):
    """Norm, modulation if there is a condition, and the vocabulary head, initialized to zero."""

    def __init__(self, hidden: int, vocab: int, cond_dim: int | None) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(hidden, bias=False)
        self.linear = zero_linear(hidden, vocab)
        self.adaLN_modulation = None if cond_dim is None else zero_linear(cond_dim, 2 * hidden)

    def states(self, x: Tensor, c_BC: Tensor | None) -> Tensor:
        """Return the inputs of the head."""
        if self.adaLN_modulation is None:
            return self.norm_final(x)
        shift, scale = self.adaLN_modulation(c_BC)[:, None].chunk(2, dim=-1)
        return modulate(self.norm_final(x), shift, scale)


class DDiT(nn.Module):
    """Maps tokens and noise levels to logits. The parts are public for methods whose inputs are not tokens."""

    def __init__(self, vocab: int, m: DditConfig, softcap: float = 0.0) -> None:
        super().__init__()
        self.head_dim = m.hidden // m.heads
        self.vocab_embed = Embedding(vocab, m.hidden)
        self.sigma_map = NoiseLevel(m.freq_dim, m.cond_dim)
        mix = partial(capped_attention, cap=softcap) if softcap else attend
        self.blocks = nn.ModuleList(DditBlock(m, m.cond_dim, mix) for _ in range(m.depth))
        self.output_layer = OutputLayer(m.hidden, vocab, m.cond_dim)

    def states(self, tokens_BL: Tensor, sigma_B: Tensor) -> Tensor:
        """Return the inputs of the head (B, L, H) for token ids (B, L) or distributions over tokens (B, L, V)."""
        return self.embedded_states(self.vocab_embed(tokens_BL), sigma_B)

    def embedded_states(self, x_BLH: Tensor, sigma_B: Tensor) -> Tensor:
        """Return the inputs of the head for inputs that are embedded already."""
        with fp32_island(sigma_B):
            c_BC = F.silu(self.sigma_map(sigma_B))
        cos, sin = rotary_table(x_BLH.shape[1], self.head_dim, x_BLH.device)
        for block in self.blocks:
            x_BLH = block(x_BLH, c_BC, cos, sin)
        return self.output_layer.states(x_BLH, c_BC)

    def head(self, h: Tensor) -> Tensor:
        """Map states (..., H) to logits (..., V); pass only the positions that need logits."""
        return self.output_layer.linear(h)

    def forward(self, tokens_BL: Tensor, sigma_B: Tensor) -> Tensor:
        return self.head(self.states(tokens_BL, sigma_B))


class CausalTransformer(nn.Module):
    """The same network with causal attention and without a condition."""

    def __init__(self, vocab: int, m: TransformerConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = m.heads, m.hidden // m.heads
        self.vocab_embed = Embedding(vocab, m.hidden)
        self.blocks = nn.ModuleList(DditBlock(m, None, causal_attention) for _ in range(m.depth))
        self.output_layer = OutputLayer(m.hidden, vocab, None)

    def new_cache(self, batch: int, length: int) -> list[KvCache]:
        """Return empty caches for sequences of at most `length` positions."""
        like = self.vocab_embed.embedding
        shape = (batch, self.heads, length, self.head_dim)
        return [KvCache(like.new_zeros(shape), like.new_zeros(shape)) for _ in self.blocks]

    def states(self, tokens_BL: Tensor, cache: list[KvCache] | None = None) -> Tensor:
        """Return the states (B, L, H) of the given positions, which follow those in the cache, if any."""
        start = cache[0].length if cache else 0
        cos, sin = rotary_table(tokens_BL.shape[1], self.head_dim, tokens_BL.device, start)
        x_BLH = self.vocab_embed(tokens_BL)
        for i, block in enumerate(self.blocks):
            x_BLH = block(x_BLH, None, cos, sin, cache[i] if cache else None)
        return self.output_layer.states(x_BLH, None)

    def head(self, h: Tensor) -> Tensor:
        return self.output_layer.linear(h)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """Return logits (B, L, V); position i predicts token i + 1."""
        return self.head(self.states(tokens_BL))
