"""The contextual token decoder of a config, and the options that the tensors of one tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from jpeg_dlm.config import Config
from jpeg_dlm.methods.jpeg_dlm_config import JpegDlmModel
from jpeg_dlm.nn.token_decoder import AutoregressiveDecoder, TokenDecoder, TwoPassDecoder


def build_token_decoder(config: Config) -> TokenDecoder | None:
    """Return the contextual decoder between D and W; None for the paper's position-wise projection."""
    m: JpegDlmModel = config.model
    if m.decoder == "projection":
        return None
    kind = AutoregressiveDecoder if m.decoder == "autoregressive" else TwoPassDecoder
    return kind(
        config.encoder.feature_dim, m.proj_dim, m.decoder_width, m.decoder_layers, m.codec_heads, m.dropout, m.decoder_corrupt
    )  # fmt: skip


def decoder_sizes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the options of the contextual decoder whose tensors a checkpoint has."""
    names = [name for name in tensors if name.startswith("token_decoder.")]
    if not names:
        return {"decoder": "projection"}
    return {
        "decoder": "autoregressive" if "token_decoder.start" in tensors else "two_pass",
        "decoder_layers": len({name.split(".")[2] for name in names if ".layers." in name}),
        "decoder_hidden": tensors["token_decoder.norm_final.weight"].shape[0],
    }
