"""The text encoder that this project trains itself: a small transformer, and its two files on disk.

Shapes: B batch, L tokens, F feature width, V vocabulary.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.nn.layers import SwiGluBlock, rotary_table
from jpeg_dlm.util.errors import CheckpointError, UsageError, reason_of
from jpeg_dlm.util.files import check_listed, load_json, load_tensors, write_atomic, write_sealed
from jpeg_dlm.util.rng import derive_seed

WEIGHTS_FILE = "encoder.safetensors"
CONFIG_FILE = "encoder.json"
SIZES = ("vocab_size", "feature_dim", "depth", "heads")  # fields of encoder.json
DESCRIPTION_BYTES = 1 << 16  # largest encoder.json that is read; it usually has 200 bytes


class FeatureStatistics(nn.Module):
    """Buffers of the per-channel mean and standard deviation with which a frozen encoder standardizes features."""

    feature_mean: Tensor
    feature_std: Tensor

    def __init__(self, feature_dim: int) -> None:
        super().__init__()
        self.feature_dim, self.has_statistics = feature_dim, False
        self.register_buffer("feature_mean", torch.zeros(feature_dim))
        self.register_buffer("feature_std", torch.ones(feature_dim))

    def set_feature_statistics(self, mean: Tensor, std: Tensor) -> None:
        """Store statistics; raise `UsageError` if they have another width or would make features infinite."""
        if mean.shape != (self.feature_dim,) or std.shape != (self.feature_dim,):
            shapes = f"{tuple(mean.shape)} and {tuple(std.shape)}"
            raise UsageError(f"Feature statistics must be two vectors of {self.feature_dim}, not {shapes}: measure them again.")
        if not (mean.isfinite().all() and std.isfinite().all() and (std > 0).all()):
            raise UsageError("Feature statistics must be finite with positive deviations: measure them on more rows.")
        self.feature_mean.copy_(mean)
        self.feature_std.copy_(std)
        self.has_statistics = True


class SmallEncoder(FeatureStatistics):
    """Pre-norm transformer with rotary positions and an output head tied to the embedding; bidirectional.

    The embedding has one more row than the vocabulary: `mask_id`, so masked training needs no mask token in the tokenizer.
    """

    def __init__(self, vocab_size: int, feature_dim: int, depth: int, heads: int) -> None:
        super().__init__(feature_dim)
        if heads < 1 or feature_dim % (2 * heads):
            raise UsageError(f"encoder.feature_dim {feature_dim} must be a multiple of 2 * encoder.heads ({heads}).")
        self.sizes = self.vocab_size, _, self.depth, self.heads = vocab_size, feature_dim, depth, heads
        self.mask_id = vocab_size
        inner = 8 * math.ceil(feature_dim / 3)  # SwiGLU: two thirds of 4 F, rounded up to a multiple of 8
        self.embedding = nn.Embedding(vocab_size + 1, feature_dim)
        self.blocks = nn.ModuleList(SwiGluBlock(feature_dim, heads, inner) for _ in range(depth))
        self.final_norm = nn.RMSNorm(feature_dim, eps=1e-6)

    def initialize(self, seed: int) -> SmallEncoder:
        """Initialize the weights from `seed` alone, independent of the global random state; return self."""
        g = torch.Generator().manual_seed(derive_seed(seed, "small-encoder"))
        residual = (2 * self.depth) ** -0.5  # keeps the residual stream near unit variance at any depth
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                nn.init.ones_(parameter)
                continue
            std = parameter.shape[-1] ** -0.5
            if name.endswith(("out.weight", "down.weight")):
                std *= residual
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=g) * std)
        return self

    def hidden(self, tokens_BL: Tensor, mask: Tensor | None = None, layer: int = -1) -> Tensor:
        """Return features h_BLF with gradients; layer -1 is the last after the final norm.

        `mask` (B, L) is True at real tokens, or (B, L, L) at the keys that each query sees.
        """
        # A softmax over no keys would be NaN, so in a row of padding alone padding attends to padding.
        keys = None
        if mask is not None:
            keys = (mask | ~mask.any(dim=-1, keepdim=True)).reshape(len(mask), 1, -1, mask.shape[-1])
        index = self.layer_index(layer)
        # Embedding rows have norm about 1, which suits the tied head; scale them to unit variance.
        x_BLF = self.embedding(tokens_BL) * self.feature_dim**0.5
        cos, sin = rotary_table(tokens_BL.shape[1], self.feature_dim // self.heads, tokens_BL.device)
        for block in self.blocks[:index]:
            x_BLF = block(x_BLF, cos, sin, keys)
        return self.final_norm(x_BLF) if index == self.depth else x_BLF

    def layer_index(self, layer: int) -> int:
        """Return the number of blocks before hidden state `layer` (0 is the embedding, `depth` or -1 the last)."""
        index = layer if layer >= 0 else self.depth + 1 + layer
        if not 0 <= index <= self.depth:
            raise UsageError(f"encoder.layer {layer} does not exist: this encoder has hidden states 0 to {self.depth}, or -1.")
        return index

    def logits(self, h_BLF: Tensor) -> Tensor:
        """Return logits over the vocabulary, without the mask token, from the last hidden state (any leading shape)."""
        return F.linear(h_BLF, self.embedding.weight[: self.vocab_size])


def save_small_encoder(folder: Path, encoder: SmallEncoder, tokenizer_fingerprint: str = "") -> None:
    """Write weights, manifest and description to `folder`; the description is last, so a partial folder never loads."""
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    info = dict(zip(SIZES, encoder.sizes, strict=True)) | {"tokenizer_fingerprint": tokenizer_fingerprint, "format": 1}
    tensors = {name: tensor.detach().cpu().float().contiguous() for name, tensor in encoder.state_dict().items()}
    (folder / CONFIG_FILE).unlink(missing_ok=True)
    write_atomic(folder / WEIGHTS_FILE, save(tensors))
    write_sealed(folder, [WEIGHTS_FILE], CONFIG_FILE, json.dumps(info, indent=1) + "\n")


def read_small_encoder_info(folder: Path) -> dict[str, Any]:
    """Read the description in `folder` and check every field."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(
            f"No trained encoder in '{folder}': train one with --train.encoder-steps 3000, "
            "or point --encoder.name at the folder that holds one."
        )
    info = load_json(path, DESCRIPTION_BYTES)
    types = {name: type(value) for name, value in info.items()}
    if types != dict.fromkeys((*SIZES, "format"), int) | {"tokenizer_fingerprint": str} or info["format"] != 1:
        raise CheckpointError(f"'{path}' does not describe an encoder of this version: train the encoder again.")
    return info


def load_small_encoder(folder: Path) -> SmallEncoder:
    """Load the encoder in `folder` in eval mode; raise `CheckpointError` if tensors are missing or unexpected."""
    info = read_small_encoder_info(folder)
    check_listed(folder, CONFIG_FILE, WEIGHTS_FILE)
    path = folder / WEIGHTS_FILE
    tensors, (vocab_size, feature_dim, depth, heads) = load_tensors(path), (info[name] for name in SIZES)
    try:
        if any(not t.is_floating_point() for t in tensors.values()) or depth > len(tensors):
            raise UsageError("some tensors are not floats, or there are more layers than tensors")
        if tensors["embedding.weight"].shape != (vocab_size + 1, feature_dim):
            raise UsageError("the embedding has another size")
        encoder = SmallEncoder(vocab_size, feature_dim, depth, heads)
        encoder.load_state_dict(tensors, strict=True)
        encoder.set_feature_statistics(encoder.feature_mean, encoder.feature_std)  # refuses unusable ones
    except (RuntimeError, KeyError, UsageError) as error:
        raise CheckpointError(
            f"'{path}' does not fit the {CONFIG_FILE} beside it ({reason_of(error)}): train the encoder again."
        ) from error
    return encoder.eval()
