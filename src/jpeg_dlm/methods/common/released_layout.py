"""Sizes of a model, read from the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from jpeg_dlm.config import Config
from jpeg_dlm.errors import CheckpointError


def shapes_of(tensors: Mapping[str, Tensor], layout: str) -> Callable[..., tuple[int, ...]]:
    """Return a function that looks up the shape of a tensor by name, and refuses one that is missing, empty or misshapen."""

    def shape(name: str, dims: int = 2) -> tuple[int, ...]:
        found = tuple(tensors[name].shape) if name in tensors else None
        if found is None or len(found) != dims or 0 in found:
            problem = f"it lacks the tensor '{name}'" if found is None else f"'{name}' has the shape {found}"
            raise CheckpointError(f"The file is not in {layout}: {problem}.")
        return found

    return shape


def repeated(tensors: Mapping[str, Tensor], prefix: str) -> int:
    """Return the number of layers whose tensors are named PREFIX.NUMBER.REST."""
    return len({name[len(prefix) + 1 :].partition(".")[0] for name in tensors if name.startswith(f"{prefix}.")})


def swiglu_ratio(inner: int, hidden: int) -> float:
    """Return the MLP ratio whose two-thirds rule results in `inner`."""
    for expanded in range(inner * 3 // 2, inner * 3 // 2 + 3):
        if int(expanded * 2 / 3) == inner and int(hidden * (expanded / hidden)) == expanded:
            return expanded / hidden
    raise CheckpointError(f"A SwiGLU width of {inner} does not fit a hidden width of {hidden}.")


def released_config(tensors: Mapping[str, Tensor], base: Config) -> Config:
    """Return `base` with the sizes of a checkpoint of JPEG-DLM in the released layout."""
    shape = shapes_of(tensors, "the released layout")
    latent_len, dim = shape("compressor.latents")
    token_len, _ = shape("decompressor.pos_emb.weight")
    hidden = shape("dit.t_emb_tokens", 3)[2]
    proj_dim, feature_dim = shape("unembed_proj.weight")
    model = replace(
        base.model, latent_len=latent_len, latent_dim=dim, proj_dim=proj_dim, hidden=hidden,
        bottleneck_dim=shape("compressor.in_proj.down.weight")[0], codec_layers=repeated(tensors, "compressor.layers"),
        codec_heads=dim // shape("compressor.layers.0.attn.q_norm.gamma", 1)[0],
        codec_mlp_ratio=shape("compressor.layers.0.ffn.net.1.weight")[0] / dim,
        depth=repeated(tensors, "dit.blocks"), heads=hidden // shape("dit.blocks.0.attn.q_norm.weight", 1)[0],
        mlp_ratio=swiglu_ratio(shape("dit.blocks.0.mlp.w3.weight")[1], hidden),
        freq_dim=shape("dit.t_embedder.mlp_0.weight")[1], time_tokens=shape("dit.t_emb_tokens", 3)[1],
        sc_tokens=shape("dit.sc_tokens", 3)[1], mode_tokens=shape("dit.mode_tokens", 3)[1],
        shared=not any(name.startswith("predictor.") for name in tensors),
        context_blocks=shape("dit.no_context", 3)[1] // latent_len if "dit.no_context" in tensors else 0,
        **contextual_decoder(tensors),
    )  # fmt: skip
    data = replace(base.data, token_len=token_len, vocab_size=shape("lm_head.weight")[0])
    kind = "none" if "embedding.weight" in tensors else base.encoder.kind
    return replace(base, data=data, model=model, encoder=replace(base.encoder, kind=kind, feature_dim=feature_dim))


def contextual_decoder(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the options of the contextual token decoder whose tensors a checkpoint has."""
    if not any(name.startswith("token_decoder.") for name in tensors):
        return {"decoder": "projection"}
    return {
        "decoder": "autoregressive" if "token_decoder.start" in tensors else "two_pass",
        "decoder_layers": repeated(tensors, "token_decoder.layers"),
        "decoder_hidden": shapes_of(tensors, "the released layout")("token_decoder.norm_final.weight", 1)[0],
    }
