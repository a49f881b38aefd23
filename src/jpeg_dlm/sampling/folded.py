"""The trained networks of Algorithm 2 as plain tensors, folded where that leaves the mathematics alone.

Gains of norms go into the linear that follows and gates into the one before, linears without anything between them become one
where that is smaller, linears of the same input are joined, and what depends on no input is computed here. The engine and
the ONNX graphs compute with these tensors. Their originals are `nn.dit` and `nn.perceiver`.
Shapes: N latents, C latents of the context, D latent width, H hidden width, P prefix tokens with the context, S = P + N,
L tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.flow.latent_sampler import LatentNetworks
from jpeg_dlm.nn.dit import DiT, DitBlock, Head, ScalarEmbedder, scalar_frequencies
from jpeg_dlm.nn.perceiver import DecompressorLayer, Gate


class Weights(NamedTuple):
    """y = x W^T + b."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]

    def reordered(self, outputs: Tensor) -> Weights:
        """Return the weights with their outputs in another order."""
        return Weights(self.weight[outputs], None if self.bias is None else self.bias[outputs])


# ---------------------------------------------------------------- the DiT


@dataclass(frozen=True)
class FoldedBlock:
    """Norms have no gain but those of q and k, between which and their product positions are turned."""

    heads: int
    qkv: Weights
    q_gain: Tensor
    k_gain: Tensor
    proj: Weights
    w12: Weights
    w3: Weights


@dataclass(frozen=True)
class FoldedScalar:
    """Learned tokens (1, P, H) and the network that embeds a time or a scale."""

    learned: Tensor
    frequencies: Tensor
    mlp_0: Weights
    mlp_2: Weights

    def tokens_of(self, x_B: Tensor) -> Tensor:
        """Return learned tokens plus the embedding of each scalar (B, P, H)."""
        angles = x_B[:, None] * self.frequencies
        h = F.linear(torch.cat([angles.cos(), angles.sin()], dim=-1), *self.mlp_0)
        return self.learned + F.linear(F.silu(h), *self.mlp_2)[:, None]


@dataclass(frozen=True)
class FoldedDiT:
    """f before its heads: widen(in_z(z) + in_s(s)) behind the prefix, then the blocks.

    The latents of a context are widen(in_z(z)) + kind; in place of those that do not exist stand the vectors `none`.
    """

    time: FoldedScalar
    scale: FoldedScalar
    mode: Tensor  # (1, P, H), zeros in denoise mode
    none: Tensor  # (1, C, H)
    kind: Tensor  # (1, 1, H)
    in_z: Weights
    in_s: Weights
    widen: Weights
    blocks: tuple[FoldedBlock, ...]
    cos: Tensor  # (S, H / heads), of pairs of channels
    sin: Tensor

    @property
    def prefix(self) -> int:
        return sum(tokens.shape[1] for tokens in (self.time.learned, self.scale.learned, self.mode, self.none))


def copied(linear: nn.Linear) -> Weights:
    return Weights(linear.weight.clone(), linear.bias.clone())


def after_gain(gain: Tensor, linear: nn.Linear) -> Weights:
    """Return the weights of linear(gain * x)."""
    return Weights(linear.weight * gain, linear.bias.clone())


def fold_head(head: Head) -> Weights:
    return after_gain(head.norm_final.weight, head.linear)


def fold_block(block: DitBlock) -> FoldedBlock:
    a, mlp = block.attn, block.mlp
    return FoldedBlock(
        heads=a.heads, qkv=after_gain(block.norm1.weight, a.qkv), q_gain=a.q_norm.weight.clone(),
        k_gain=a.k_norm.weight.clone(), proj=copied(a.proj), w12=after_gain(block.norm2.weight, mlp.w12), w3=copied(mlp.w3),
    )  # fmt: skip


def fold_scalar(tokens: Tensor, embedder: ScalarEmbedder) -> FoldedScalar:
    frequencies = scalar_frequencies(embedder.freq_dim, tokens.device)
    return FoldedScalar(tokens.detach().clone(), frequencies, copied(embedder.mlp_0), copied(embedder.mlp_2))


def fold_dit(dit: DiT) -> FoldedDiT:
    outer, narrow = dit.self_cond_proj, dit.in_proj.proj1.weight
    of_z, of_s = outer.weight.chunk(2, dim=1)
    no_context = dit.mode_tokens[:, :0], dit.mode_tokens[:, :1]  # C is 0, and `kind` is not read
    none, kind = (dit.no_context, dit.context_kind) if dit.context_len else no_context
    return FoldedDiT(
        time=fold_scalar(dit.t_emb_tokens, dit.t_embedder), scale=fold_scalar(dit.sc_tokens, dit.sc_embedder),
        mode=dit.mode_tokens.detach().clone(), none=none.detach().clone(), kind=kind.detach().clone(),
        widen=copied(dit.in_proj.proj2),
        in_z=Weights(narrow @ of_z, narrow @ outer.bias), in_s=Weights(narrow @ of_s),
        blocks=tuple(fold_block(cast(DitBlock, block)) for block in dit.blocks),
        cos=cast(Tensor, dit.rope_cos), sin=cast(Tensor, dit.rope_sin),
    )  # fmt: skip


# ---------------------------------------------------------------- D and W


@dataclass(frozen=True)
class FoldedLayer:
    """A layer of D. `qkv` is of the tokens' own states; q carries the gains of q and k, which meet in products only."""

    heads: int
    qkv: Weights
    q_gain: Tensor
    out: Weights
    widen: Weights
    narrow: Weights
    layer_norm_eps: float


@dataclass(frozen=True)
class FoldedDecoder:
    """Standardized latents to logits: z * spread + shift, the layers over the queries, head(gelu(up(down(x))))."""

    queries: Tensor  # (L, D)
    spread: Tensor
    shift: Tensor  # (N, D)
    kv_ctx: Weights  # keys and values of the latents for all layers, one after the other
    layers: tuple[FoldedLayer, ...]
    down: Weights
    up: Weights
    lm_head: Weights
    seen: Tensor | None  # (L, N + L), the mask of a causal codec


def gate_value(gate: Gate) -> Tensor:
    return gate(torch.ones((), device=gate.scale_mlp.weight.device))


def fold_layer(layer: DecompressorLayer) -> FoldedLayer:
    a, gate, net = layer.attn, gate_value(layer.ffn_gate), layer.ffn.net
    norm, widen, narrow = cast(nn.LayerNorm, net[0]), cast(nn.Linear, net[1]), cast(nn.Linear, net[4])
    return FoldedLayer(
        heads=a.heads, q_gain=a.q_norm.gamma * a.k_norm.gamma, layer_norm_eps=norm.eps,
        qkv=Weights(torch.cat([a.to_q.weight, a.to_kv_latents.weight]) * a.norm_latents.gamma),
        out=Weights(a.out.weight * gate_value(layer.attn_gate)),
        widen=Weights(widen.weight * norm.weight, widen.bias + widen.weight @ norm.bias),
        narrow=Weights(narrow.weight * gate, narrow.bias * gate),
    )  # fmt: skip


def fold_decoder(networks: LatentNetworks) -> FoldedDecoder:
    d, first = networks.decompressor, networks.unembed_proj
    layers = [cast(DecompressorLayer, layer) for layer in d.layers]
    return FoldedDecoder(
        queries=(d.query_gate(d.query_ffn(d.base_query)) + d.position_scale * d.pos_emb.weight)[0],
        spread=1 / networks.latent_scale, shift=networks.latent_mean + d.position_scale * d.pos_latent.weight,
        kv_ctx=Weights(torch.cat([layer.attn.to_kv_ctx.weight * layer.attn.norm_ctx.gamma for layer in layers])),
        layers=tuple(map(fold_layer, layers)), down=Weights(d.out_proj.down.weight.clone()),
        up=Weights(first.weight @ d.out_proj.up.weight, first.bias.clone()), lm_head=copied(networks.lm_head),
        seen=d.seen,
    )  # fmt: skip


# ---------------------------------------------------------------- both networks


@dataclass(frozen=True)
class Folded:
    """Both networks of Algorithm 2."""

    dit: FoldedDiT
    denoise_head: Weights
    denoise_skip: bool  # x = c_skip(t) z + c_out(t) head
    predictor: FoldedDiT  # of the decode evaluation; the same object where the network is shared
    decode_seen: Tensor | None  # (S, S), the mask of that evaluation for a causal codec
    decode_head: Weights
    decode_residual: bool  # zhat = z + head
    decoder: FoldedDecoder


@torch.no_grad()
def fold(networks: LatentNetworks) -> Folded:
    """Fold the networks as they are now: weights that change later are not seen."""
    dit, predictor = networks.dit, networks.predictor or networks.dit
    folded = fold_dit(dit)
    return Folded(
        dit=folded, denoise_head=fold_head(dit.denoise_head), denoise_skip=dit.denoise_skip,
        predictor=folded if predictor is dit else fold_dit(predictor), decode_head=fold_head(predictor.decode_head),
        decode_seen=predictor.decode_seen,
        decode_residual=networks.config.model.decode_residual, decoder=fold_decoder(networks),
    )  # fmt: skip
