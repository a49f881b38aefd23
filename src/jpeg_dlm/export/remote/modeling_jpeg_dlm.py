"""JPEG-DLM for `transformers`: a text is written as a short sequence of latents, and decoded once (arXiv 2609.33698).

Symbols of the paper: E encoder, f shared network (the DiT), D decompressor, W token projection. The sampler, Algorithm 2,
is in latent_flow.py. The weights have the names of the released checkpoints.
Shapes: B batch, L tokens, N latents, D latent width, F feature width, H hidden width, S tokens of a source.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .latent_flow import Encoder, LatentFlow, LatentTransformer, attend, head, named, split_heads
from .text_diffusion import TextDiffusionConfig


class JpegDlmConfig(TextDiffusionConfig):
    model_type = "jpeg-dlm"


# ---------------------------------------------------------------- D: latents to features


class CodecNorm(nn.Module):
    """x / rms(x) * gamma."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.gamma.shape, self.gamma, 1e-16)


class Gate(nn.Module):
    """y * (1 + w + b), with one number each."""

    def __init__(self) -> None:
        super().__init__()
        self.scale_mlp = nn.Linear(1, 1)

    def forward(self, y: Tensor) -> Tensor:
        return y * (1 + self.scale_mlp.weight[0, 0] + self.scale_mlp.bias[0])


def mlp(dim: int) -> nn.Sequential:
    # The identity is a dropout in training.
    layers = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Identity(), nn.Linear(4 * dim, dim)
    return named(net=nn.Sequential(*layers))


class CrossAttention(nn.Module):
    """Tokens attend to the latents and to themselves."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_ctx, self.norm_latents = CodecNorm(dim), CodecNorm(dim)
        self.to_q, self.out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.to_kv_ctx, self.to_kv_latents = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.q_norm, self.k_norm = CodecNorm(dim // heads), CodecNorm(dim // heads)

    def forward(self, x: Tensor, ctx: Tensor) -> Tensor:
        x = self.norm_latents(x).expand(len(ctx), -1, -1)
        kv = torch.cat([self.to_kv_ctx(self.norm_ctx(ctx)), self.to_kv_latents(x)], 1)
        (q,), (k, v) = split_heads(self.to_q(x), 1, self.heads), split_heads(kv, 2, self.heads)
        return self.out(attend(self.q_norm(q), self.k_norm(k), v))


class DecompressorLayer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attn, self.attn_gate = CrossAttention(dim, heads), Gate()
        self.ffn, self.ffn_gate = mlp(dim), Gate()

    def forward(self, x: Tensor, ctx: Tensor) -> Tensor:
        x = x + self.attn_gate(self.attn(x, ctx))
        return x + self.ffn_gate(self.ffn(x))


class Decompressor(nn.Module):
    """D: latents (B, N, D) to features (B, L, F)."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        dim = c.latent_dim
        self.scale, self.base_query = c.position_scale or dim**-0.5, nn.Parameter(torch.zeros(1, 1, dim))
        self.query_ffn, self.query_gate = mlp(dim), Gate()
        self.pos_emb, self.pos_latent = nn.Embedding(c.token_len, dim), nn.Embedding(c.latent_len, dim)
        self.layers = nn.ModuleList(DecompressorLayer(dim, c.codec_heads) for _ in range(c.codec_layers))
        down, up = nn.Linear(dim, c.bottleneck_dim, bias=False), nn.Linear(c.bottleneck_dim, c.feature_dim, bias=False)
        self.out_proj = named(down=down, up=up)

    def forward(self, z: Tensor) -> Tensor:
        x = self.query_gate(self.query_ffn(self.base_query)) + self.scale * self.pos_emb.weight
        ctx = z + self.scale * self.pos_latent.weight
        for layer in self.layers:
            x = layer(x, ctx)
        return self.out_proj(x)


# ---------------------------------------------------------------- the model


class DiT(LatentTransformer):
    """f with a second head, for the decode mode."""

    def __init__(self, c: Any, source_len: int = 0) -> None:
        super().__init__(c, c.latent_dim, source_len)
        self.decode_head = head(c.hidden, c.latent_dim)


class JpegDlmModel(LatentFlow):
    """f, D and W, and E where the model writes targets of sources."""

    config_class = JpegDlmConfig

    def __init__(self, config: JpegDlmConfig) -> None:
        super().__init__(config)
        c: Any = config
        self.latent_shape = (c.latent_len, c.latent_dim)
        self.dit, self.decompressor = DiT(c, c.source_len), Decompressor(c)
        self.predictor = None if c.shared else DiT(c)  # a network of its own for the decode mode
        self.unembed_proj, self.lm_head = nn.Linear(c.feature_dim, c.proj_dim), nn.Linear(c.proj_dim, c.vocab_size)
        self.encoder: Any = Encoder(c) if c.source_len else None
        self.register_buffer("latent_mean", torch.zeros(c.latent_dim))
        self.register_buffer("latent_scale", torch.ones(c.latent_dim))  # one over the deviation
        self.post_init()

    def read(self, source: Tensor) -> Any:
        """Return the source as the DiT's layers have read it, and where it is not padding."""
        present = source != self.c.pad_token_id
        return self.dit.read(self.encoder(source, present), present), present

    def denoise(self, z: Tensor, t: float, s: Tensor, o: SimpleNamespace, seen: Any) -> Tensor:
        x = self.predicted(z, t, self.dit.states(z, t, s, o.w, False, *(seen or ())))
        if seen is None or o.source_scale == 1:
            return x
        return torch.lerp(self.predicted(z, t, self.dit.states(z, t, s, o.w)), x, o.source_scale)

    def predicted(self, z: Tensor, t: float, h: Tensor) -> Tensor:
        """Return the head, or with `denoise_skip` c_skip(t) z + c_out(t) head: the best linear estimate of x and the rest."""
        x = self.dit.denoise_head(h)
        if not self.c.denoise_skip:
            return x
        t_B = z.new_full((len(z), 1, 1), t)
        variance = t_B**2 + (1 - t_B) ** 2
        return t_B / variance * z + (1 - t_B) * variance.rsqrt() * x

    def decode(self, z: Tensor, w: float, seen: Any) -> Tensor:
        """Return hhat = D(f(z, t = 1)): features, after one evaluation in decode mode without self-conditioning."""
        network = self.predictor or self.dit
        zhat = network.decode_head(network.states(z, 1.0, torch.zeros_like(z), w, True))
        zhat = zhat + z if self.c.decode_residual else zhat
        return self.decompressor(zhat / self.latent_scale + self.latent_mean)

    def project(self, h: Tensor) -> Tensor:
        """Return W(hhat)."""
        return self.lm_head(F.gelu(self.unembed_proj(h)))
