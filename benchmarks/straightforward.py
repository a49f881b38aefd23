"""The training step written directly from the paper: the baseline of `benchmarks/training.py`.

It has the weights, random numbers and losses of `methods/jpeg_dlm.py` without its optimizations: a pass of the network for
each branch, self-conditioning on all rows with a mask afterwards, all logits at once, all knots of SIGReg at once, gradients
by autograd alone, an optimizer and moving averages that loop over parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.config import TrainConfig
from jpeg_dlm.flow.path import guidance_scale, guided_target, interpolate, logit_normal, per_row
from jpeg_dlm.machine.collectives import world_size
from jpeg_dlm.methods.base import Batch, linear_ramp, masked_mean
from jpeg_dlm.methods.common.regularizers import unit_directions
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.nn.dit import DiT, DitBlock
from jpeg_dlm.nn.perceiver import Compressor, Decompressor, PerceiverAttention
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.training.optim import build_optimizer, schedule_factor, set_learning_rates

# ---------------------------------------------------------------- networks


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], gain, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return x * cos + torch.stack([-odd, even], dim=-1).flatten(-2) * sin


def dit_block(block: DitBlock, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    attn, mlp = block.attn, block.mlp
    q, k, v = (
        y.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for y in attn.qkv(rms_norm(x, block.norm1.weight, 1e-6)).chunk(3, -1)
    )
    q = rotate(rms_norm(q, attn.q_norm.weight, 1e-6), cos, sin)
    k = rotate(rms_norm(k, attn.k_norm.weight, 1e-6), cos, sin)
    x = x + attn.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    gate, up = mlp.w12(rms_norm(x, block.norm2.weight, 1e-6)).chunk(2, -1)
    return x + mlp.w3(F.silu(gate) * up)


def dit(network: DiT, z: Tensor, t: Tensor, s: Tensor, w: Tensor, decode: bool = False) -> Tensor:
    x = network.in_proj(network.self_cond_proj(torch.cat([z, s], -1)))
    time = network.t_emb_tokens + network.t_embedder(t)[:, None]
    scale = network.sc_tokens + network.sc_embedder(w)[:, None]
    mode = (network.mode_tokens if decode else torch.zeros_like(network.mode_tokens)).expand(len(z), -1, -1)
    x = torch.cat([time, scale, mode, x], dim=1)
    for block in network.blocks:
        assert isinstance(block, DitBlock)
        x = dit_block(block, x, network.rope_cos, network.rope_sin)  # pyright: ignore[reportArgumentType]
    head = network.decode_head if decode else network.denoise_head
    return head.linear(rms_norm(x[:, network.prefix :], head.norm_final.weight, 1e-6))


def codec_attention(attn: PerceiverAttention, x: Tensor, ctx: Tensor, mask: Tensor | None) -> Tensor:
    own = rms_norm(x, attn.norm_latents.gamma, 1e-16)
    parts = [attn.to_kv_latents(own), attn.to_kv_ctx(rms_norm(ctx, attn.norm_ctx.gamma, 1e-16))]
    real = None if mask is None else [mask.new_ones(x.shape[:2]), mask]
    if attn.context_first:
        parts, real = parts[::-1], real and real[::-1]
    k, v = torch.cat(parts, dim=1).chunk(2, -1)
    q, k, v = (y.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for y in (attn.to_q(own), k, v))
    q, k = rms_norm(q, attn.q_norm.gamma, 1e-16), rms_norm(k, attn.k_norm.gamma, 1e-16)
    seen = None if real is None else torch.cat(real, dim=1)[:, None, None, :]
    return attn.out(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2))


def compress(c: Compressor, h: Tensor, mask: Tensor | None) -> Tensor:
    ctx = c.in_proj(h) + c.position_scale * c.pos_emb.weight
    z = rms_norm(c.latents, c.latent_norm.gamma, 1e-16).expand(len(h), -1, -1)
    for layer in c.layers:
        z = z + codec_attention(layer.attn, z, ctx, mask)  # pyright: ignore[reportArgumentType]
        z = z + layer.ffn.net(z)  # pyright: ignore
    return rms_norm(z, c.output_norm.gamma, 1e-16)


def decompress(d: Decompressor, z: Tensor) -> Tensor:
    query = d.query_gate(d.query_ffn.net(d.base_query)) + d.position_scale * d.pos_emb.weight
    x, ctx = query.expand(len(z), -1, -1), z + d.position_scale * d.pos_latent.weight
    for layer in d.layers:
        x = x + layer.attn_gate(codec_attention(layer.attn, x, ctx, None))  # pyright: ignore
        x = x + layer.ffn_gate(layer.ffn.net(x))  # pyright: ignore
    return d.out_proj(x)


# ---------------------------------------------------------------- losses


def sigreg(u: Tensor, directions: Tensor, knots: int, t_max: float) -> Tensor:
    """Compute SIGReg with all knots at once, as written in LeJEPA."""
    t = torch.linspace(0, t_max, knots)
    weights = torch.full_like(t, 2 * t_max / (knots - 1))
    weights[0] = weights[-1] = t_max / (knots - 1)
    phi = torch.exp(-0.5 * t**2)
    angles = (u @ directions)[..., None] * t
    distance = (angles.cos().mean(0) - phi) ** 2 + angles.sin().mean(0) ** 2
    return (distance @ (weights * phi) * len(u)).mean()


def variance_covariance(u: Tensor) -> tuple[Tensor, Tensor]:
    cov = torch.cov(u.T)
    hinge = F.relu(1 - torch.sqrt(cov.diagonal() + 1e-4)).mean()
    return hinge, (cov - torch.diag(cov.diagonal())).square().sum() / len(cov)


class Straightforward(JpegDlm):
    """Algorithm 1, line by line, on one device in fp32, for the paper's objective without its ablations."""

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        o = self.config.objective
        assert world_size() == 1 and self.predictor is None and not self.config.model.dropout
        assert o.flow_loss == "x" and o.ce_time_min >= 1 and o.reg_space == "raw"
        h = self.features(batch)
        with torch.no_grad():
            z = compress(self.target, h, batch.mask_BL)
            if self.training and noise.step < self.standardize_steps:
                self.update_statistics(z)
            z_tgt = self.standardize(z)
        z_raw = compress(self.compressor, h + o.sigma * noise.normal("feature", *h.shape[1:]), batch.mask_BL)
        z_c = self.standardize(z_raw)

        t = logit_normal(noise.normal("time"), o.time_mean, o.time_std)
        z_t = interpolate(z_tgt, noise.normal("latent", *z_tgt.shape[1:]), t)
        w = guidance_scale(noise.uniform("scale"), o.w_min, o.w_max)
        zeros = torch.zeros_like(z_t)
        with torch.no_grad():
            first = dit(self.dit, z_t, t, zeros, w)
            second = dit(self.dit, z_t, t, first, w)
        chosen = per_row(noise.uniform("self_condition") < o.sc_prob, z_t)
        s = torch.where(chosen, first, zeros)
        z_flow = torch.where(chosen, guided_target(z_tgt, second, first, w), z_tgt)

        zhat_tgt = self.with_residual(dit(self.dit, z_c, torch.ones_like(t), zeros, w, decode=True), z_c)
        zhat_1 = dit(self.dit, z_t, t, s, w)
        hhat = decompress(self.decompressor, self.unstandardize(zhat_tgt))
        nll_BL = F.cross_entropy(self.project(hhat).transpose(1, 2), batch.tokens_BL, reduction="none")

        u = z_raw.flatten(0, 1)
        directions = unit_directions(noise.shared_normal("sigreg", u.shape[1], o.sigreg_slices))
        var, cov = variance_covariance(u)
        return {
            "jep": F.mse_loss(zhat_tgt, z_tgt),
            "flow": F.mse_loss(zhat_1, z_flow),
            "feat": masked_mean(((hhat - h) ** 2).mean(-1), batch.mask_BL),
            "ce": masked_mean(nll_BL, batch.mask_BL),
            "sigreg": (o.sigreg_vectors / len(u) if o.sigreg_vectors else 1.0)
            * sigreg(u, directions, o.sigreg_knots, o.sigreg_t_max),
            "var": var,
            "cov": cov,
        }


# ---------------------------------------------------------------- the step


class Stream(Protocol):
    def micro_batches(self, step: int) -> Iterator[tuple[Batch, RowNoise]]: ...


class StraightforwardStep:
    """A training step: forward, backward, clipping, AdamW and both moving averages, parameter by parameter."""

    def __init__(self, method: Straightforward, train: TrainConfig, stream: Stream) -> None:
        self.method, self.train, self.stream, self.step = method, train, stream, 0
        groups = method.parameter_groups()
        self.parameters = {name: p for group in groups for name, p in group.parameters.items()}
        shared = build_optimizer(groups, train)  # for its groups of rates and decay
        self.optimizer = torch.optim.AdamW(
            [group | {"fused": None, "foreach": False} for group in shared.param_groups],
            betas=(train.beta1, train.beta2), eps=train.adam_eps,
        )  # fmt: skip
        self.average = {name: p.detach().clone() for name, p in self.parameters.items()}

    def train_step(self) -> dict[str, float]:
        """Take one optimizer step with the single micro-batch of the stream."""
        method, train = self.method.train(), self.train
        ((batch, noise),) = self.stream.micro_batches(self.step)
        set_learning_rates(self.optimizer, schedule_factor(self.step, train))
        self.optimizer.zero_grad()
        losses = method.losses(batch, noise)
        losses["loss"] = method.total_loss(losses)
        losses["loss"].backward()
        nn.utils.clip_grad_norm_(self.parameters.values(), train.clip, foreach=False)
        self.optimizer.step()
        o = method.config.objective
        m = linear_ramp(o.target_ema_start, o.target_ema_end, self.step, train.steps)
        with torch.no_grad():
            for average, p in zip(method.target.parameters(), method.compressor.parameters(), strict=True):
                average.copy_(m * average + (1 - m) * p)
            for name, p in self.parameters.items():
                self.average[name].copy_(train.ema * self.average[name] + (1 - train.ema) * p)
        self.step += 1
        return {name: x.item() for name, x in losses.items()}
