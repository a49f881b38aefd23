"""The released network and sampler as plain eager operations, written from their description: the baseline for speed.

Every step follows the formulas: queries and keys are normalized and rotated separately, [z, s] and the prefix are
concatenated at every evaluation, the conditioning is embedded again at every step, all logits exist at once.
It takes tensors under the released names and shares no code with the package.
Shapes: B batch, L tokens, N latents, S prefix and latents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Released:
    """Algorithm 2 on a state dict; only the numbers of heads cannot be read from the tensors."""

    p: Mapping[str, Tensor]
    heads: int
    codec_heads: int

    # ------------------------------------------------------------ sampler

    @torch.no_grad()
    def sample(self, z: Tensor, grid: list[float], w: float) -> Tensor:
        """Take Euler steps with self-conditioning, then decode."""
        s = None
        for t, u in zip(grid, grid[1:], strict=False):
            x = self.evaluate(z, t, s, w)
            z = z + (u - t) * (x - z) / (1 - t)
            s = x
        return self.tokens(z, w)

    @torch.no_grad()
    def evaluate(self, z: Tensor, t: float, s: Tensor | None, w: float, decode: bool = False) -> Tensor:
        """Return the predicted clean latents."""
        z_and_s = torch.cat([z, torch.zeros_like(z) if s is None else s], dim=-1)
        x = self.linear("dit.in_proj.proj2", self.linear("dit.in_proj.proj1", self.linear("dit.self_cond_proj", z_and_s)))
        x = torch.cat([self.prefix(len(z), t, w, decode), x], dim=1)
        prefix = x.shape[1] - z.shape[1]
        cos, sin = self.rotations(prefix, z.shape[1])
        for i in range(self.count("dit.blocks.")):
            name = f"dit.blocks.{i}."
            x = x + self.attention(name + "attn.", self.rms(name + "norm1.weight", x), cos, sin)
            gate, up = self.linear(name + "mlp.w12", self.rms(name + "norm2.weight", x)).chunk(2, dim=-1)
            x = x + self.linear(name + "mlp.w3", F.silu(gate) * up)
        head = "dit.decode_head." if decode else "dit.denoise_head."
        return self.linear(head + "linear", self.rms(head + "norm_final.weight", x[:, prefix:]))

    @torch.no_grad()
    def tokens(self, z: Tensor, w: float) -> Tensor:
        """Apply the decode evaluation and the decompressor; return the most probable tokens."""
        z = self.evaluate(z, 1.0, None, w, decode=True)
        h = self.decompress(z / self.p["latent_scale"] + self.p["latent_mean"])
        return self.linear("lm_head", F.gelu(self.linear("unembed_proj", h))).argmax(-1)

    # ------------------------------------------------------------ DiT

    def prefix(self, batch: int, t: float, w: float, decode: bool) -> Tensor:
        time = self.p["dit.t_emb_tokens"] + self.embedded("dit.t_embedder.", batch, t)[:, None]
        scale = self.p["dit.sc_tokens"] + self.embedded("dit.sc_embedder.", batch, w)[:, None]
        mode = self.p["dit.mode_tokens"].expand(batch, -1, -1) * float(decode)
        return torch.cat([time, scale, mode], dim=1)

    def embedded(self, name: str, batch: int, value: float) -> Tensor:
        half = self.p[name + "mlp_0.weight"].shape[1] // 2
        angles = torch.full((batch, 1), value) * torch.exp(-math.log(1e4) * torch.arange(half) / half)
        sinusoids = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return self.linear(name + "mlp_2", F.silu(self.linear(name + "mlp_0", sinusoids)))

    def rotations(self, prefix: int, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines; latent positions count from 0, and the prefix is not rotated."""
        size = self.p["dit.blocks.0.attn.q_norm.weight"].shape[0]
        frequencies = 1e4 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(length).float(), frequencies).repeat_interleave(2, dim=-1)
        angles = torch.cat([torch.zeros(prefix, size), angles])
        return angles.cos(), angles.sin()

    def attention(self, name: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.linear(name + "qkv", x).chunk(3, dim=-1)
        q, k, v = self.split_heads(q, self.heads), self.split_heads(k, self.heads), self.split_heads(v, self.heads)
        q = turn(self.rms(name + "q_norm.weight", q), cos, sin)
        k = turn(self.rms(name + "k_norm.weight", k), cos, sin)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.linear(name + "proj", y.transpose(1, 2).flatten(2))

    # ------------------------------------------------------------ decompressor

    def decompress(self, z: Tensor) -> Tensor:
        table = self.p["decompressor.pos_emb.weight"]
        length, width = table.shape
        query = self.p["decompressor.base_query"].expand(len(z), length, width)
        x = self.gate("decompressor.query_gate", self.feed_forward("decompressor.query_ffn.net.", query)) + table * width**-0.5
        ctx = z + self.p["decompressor.pos_latent.weight"] * width**-0.5
        for i in range(self.count("decompressor.layers.")):
            name = f"decompressor.layers.{i}."
            x = x + self.gate(name + "attn_gate", self.cross_attention(name + "attn.", x, ctx))
            x = x + self.gate(name + "ffn_gate", self.feed_forward(name + "ffn.net.", x))
        return self.linear("decompressor.out_proj.up", self.linear("decompressor.out_proj.down", x))

    def cross_attention(self, name: str, x: Tensor, ctx: Tensor) -> Tensor:
        x, ctx = self.codec_rms(name + "norm_latents.gamma", x), self.codec_rms(name + "norm_ctx.gamma", ctx)
        kv = torch.cat([self.linear(name + "to_kv_ctx", ctx), self.linear(name + "to_kv_latents", x)], dim=1)
        k, v = kv.chunk(2, dim=-1)
        q, k, v = (self.split_heads(y, self.codec_heads) for y in (self.linear(name + "to_q", x), k, v))
        q, k = self.codec_rms(name + "q_norm.gamma", q), self.codec_rms(name + "k_norm.gamma", k)
        return self.linear(name + "out", F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        x = F.layer_norm(x, x.shape[-1:], self.p[name + "0.weight"], self.p[name + "0.bias"])
        return self.linear(name + "4", F.gelu(self.linear(name + "1", x)))

    def gate(self, name: str, y: Tensor) -> Tensor:
        return y * (1 + self.linear(name + ".scale_mlp", torch.ones(*y.shape[:2], 1)))

    # ------------------------------------------------------------ pieces

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.p[name + ".weight"], self.p.get(name + ".bias"))

    def rms(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.p[name]

    def codec_rms(self, name: str, x: Tensor) -> Tensor:
        norm = x.norm(dim=-1, keepdim=True) * x.shape[-1] ** -0.5
        return x / norm.clamp_min(1e-8) * self.p[name]

    def split_heads(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    def count(self, prefix: str) -> int:
        return len({name.removeprefix(prefix).split(".")[0] for name in self.p if name.startswith(prefix)})


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of the last axis."""
    even, odd = x[..., ::2], x[..., 1::2]
    return x * cos + torch.stack([-odd, even], dim=-1).flatten(-2) * sin
