"""The forward pass of a llama-style language model on tensors named and laid out as in GGUF files.

Shapes: B batch, L tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaSizes:
    """What the weights alone do not say."""

    layers: int
    heads: int
    kv_heads: int
    rope_base: float
    norm_eps: float


class KeyValues:
    """Keys and values of the tokens read so far, for a batch that goes on token by token and may lose rows."""

    def __init__(self, sizes: LlamaSizes, rows: int, context: int, head_dim: int) -> None:
        shape = (sizes.layers, 2, rows, sizes.kv_heads, context, head_dim)
        self.kept = torch.empty(shape)
        self.length = 0

    def add(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, with those (B, heads, 1, d) of the next token behind them."""
        for place, new in enumerate((k, v)):
            self.kept[layer, place, :, :, self.length] = new[:, :, 0]
        k, v = self.kept[layer, :, :, :, : self.length + 1]
        return k, v

    def keep(self, rows_B: Tensor) -> None:
        """Drop the other rows."""
        self.kept = self.kept[:, :, rows_B]


class Llama(nn.Module):
    """RMSNorm, rotary grouped-query attention, SwiGLU; the output head is `output.weight`, or tied to the embedding.

    Rotary positions pair neighboring channels (2i, 2i + 1), as GGUF files keep them; transformers pairs halves instead
    and permutes the rows of q and k to match.
    """

    def __init__(self, sizes: LlamaSizes, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.sizes = sizes
        # Parameter names may not hold dots, so the flat GGUF names are kept with underscores.
        self.weights = nn.ParameterDict(
            {name.replace(".", "_"): nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}
        )
        self.tied = "output.weight" not in tensors

    def _w(self, name: str) -> Tensor:
        return self.weights[f"{name}_weight"]

    def _norm(self, x_BLH: Tensor, name: str) -> Tensor:
        weight = self._w(name)
        return F.rms_norm(x_BLH.float(), weight.shape, weight, self.sizes.norm_eps)

    def _rotate(self, x: Tensor, rotation: Tensor) -> Tensor:
        """x (B, heads, L, d) times exp(i angle), neighboring channels being real and imaginary part."""
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)

    def _attention(self, x_BLH: Tensor, number: int, rotation: Tensor, cache: KeyValues | None) -> Tensor:
        B, L, _ = x_BLH.shape
        s, layer = self.sizes, f"blk_{number}"
        q = F.linear(x_BLH, self._w(f"{layer}_attn_q")).view(B, L, s.heads, -1).transpose(1, 2)
        k = F.linear(x_BLH, self._w(f"{layer}_attn_k")).view(B, L, s.kv_heads, -1).transpose(1, 2)
        v = F.linear(x_BLH, self._w(f"{layer}_attn_v")).view(B, L, s.kv_heads, -1).transpose(1, 2)
        shared = s.heads // s.kv_heads  # query heads that read one key head
        q, k = self._rotate(q, rotation), self._rotate(k, rotation)
        if cache is not None:
            k, v = cache.add(number, k, v)
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        return F.linear(mixed.transpose(1, 2).reshape(B, L, -1), self._w(f"{layer}_attn_output"))

    @torch.no_grad()
    def hidden(self, tokens_BL: Tensor, cache: KeyValues | None = None) -> Tensor:
        """Final normed states. Attention is causal, so padding on the right needs no mask.

        With a cache the tokens (B, 1) follow those that it holds, and are added to it.
        """
        x_BLH = F.embedding(tokens_BL, self._w("token_embd"))
        start = cache.length if cache else 0
        rotation = self._rotation(start + tokens_BL.shape[1], tokens_BL.device)[start:]
        for i in range(self.sizes.layers):
            layer = f"blk_{i}"
            x_BLH = x_BLH + self._attention(self._norm(x_BLH, f"{layer}_attn_norm"), i, rotation, cache)
            y_BLH = self._norm(x_BLH, f"{layer}_ffn_norm")
            gate = F.silu(F.linear(y_BLH, self._w(f"{layer}_ffn_gate")))
            inner = gate * F.linear(y_BLH, self._w(f"{layer}_ffn_up"))
            x_BLH = x_BLH + F.linear(inner, self._w(f"{layer}_ffn_down"))
        if cache is not None:
            cache.length += 1
        return self._norm(x_BLH, "output_norm")

    @property
    def head_dim(self) -> int:
        return self._w("blk_0_attn_q").shape[0] // self.sizes.heads

    def _rotation(self, length: int, device: torch.device) -> Tensor:
        even = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32)
        frequencies = self.sizes.rope_base ** (-even / self.head_dim)
        angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies
        return torch.polar(torch.ones_like(angles), angles)

    @property
    def head(self) -> Tensor:
        """The output head (V, H)."""
        return self._w("token_embd" if self.tied else "output")

    def logits(self, h_BLH: Tensor) -> Tensor:
        """Scores over the vocabulary, for any leading shape."""
        return F.linear(h_BLH, self.head)
