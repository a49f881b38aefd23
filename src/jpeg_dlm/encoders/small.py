"""The text encoder that this project trains itself: a small transformer, and its two files on disk.

Shapes: B batch, L tokens, F feature width, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.errors import CheckpointError, UsageError, reason_of
from jpeg_dlm.files import check_listed, load_tensors, write_atomic, write_sealed
from jpeg_dlm.nn.attention import attend
from jpeg_dlm.nn.spans import visible
from jpeg_dlm.rng import derive_seed
from jpeg_dlm.strict_json import parse_json

WEIGHTS_FILE = "encoder.safetensors"
CONFIG_FILE = "encoder.json"
DESCRIPTION_BYTES = 1 << 16  # largest encoder.json that is read; it usually has 200 bytes
ROPE_BASE = 10_000.0


def _rotary_tables(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rotary cos and sin of shape (L, head_dim / 2)."""
    frequencies = ROPE_BASE ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to the last axis, pairing its first and second halves."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class _Block(nn.Module):
    """x += Attention(norm(x)); x += SwiGLU(norm(x)), bias-free."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.RMSNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.RMSNorm(width, eps=1e-6)
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x_BLF: Tensor, rotary: tuple[Tensor, Tensor], keys: Tensor | None) -> Tensor:
        B, L, width = x_BLF.shape
        qkv = self.qkv(self.norm_attention(x_BLF)).view(B, L, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = attend(_rotate(q, *rotary), _rotate(k, *rotary), v, attn_mask=keys)
        x_BLF = x_BLF + self.out(mixed.transpose(1, 2).reshape(B, L, width))
        gate, up = self.gate_up(self.norm_mlp(x_BLF)).chunk(2, dim=-1)
        return x_BLF + self.down(F.silu(gate) * up)


class SmallEncoder(nn.Module):
    """Pre-norm transformer with rotary positions and an output head tied to the embedding; bidirectional unless `causal`.

    The embedding has one more row than the vocabulary: `mask_id`, so masked training needs no mask token in the tokenizer.
    """

    feature_mean: Tensor
    feature_std: Tensor

    def __init__(self, vocab_size: int, feature_dim: int, depth: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        if heads < 1 or feature_dim % (2 * heads):
            raise UsageError(f"encoder.feature_dim {feature_dim} must be a multiple of 2 * encoder.heads ({heads}).")
        if depth < 1 or vocab_size < 1:
            raise UsageError("encoder.depth and data.vocab_size must be at least 1.")
        self.vocab_size, self.feature_dim, self.depth, self.heads = vocab_size, feature_dim, depth, heads
        self.mask_id, self.causal = vocab_size, causal
        inner = 8 * math.ceil(feature_dim / 3)  # SwiGLU: two thirds of 4 F, rounded up to a multiple of 8
        self.embedding = nn.Embedding(vocab_size + 1, feature_dim)
        self.blocks = nn.ModuleList(_Block(feature_dim, heads, inner) for _ in range(depth))
        self.final_norm = nn.RMSNorm(feature_dim, eps=1e-6)
        self.register_buffer("feature_mean", torch.zeros(feature_dim))
        self.register_buffer("feature_std", torch.ones(feature_dim))

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

    def hidden(self, tokens_BL: Tensor, mask_BL: Tensor | None = None, layer: int = -1) -> Tensor:
        """Return features h_BLF with gradients; `mask_BL` is True at real tokens, layer -1 is the last after the final norm."""
        return self.states(tokens_BL, mask_BL, (layer,))[0]

    def states(self, tokens_BL: Tensor, mask_BL: Tensor | None, layers: Sequence[int]) -> list[Tensor]:
        """Return the features of several layers, from one pass."""
        keys = self._keys(mask_BL, tokens_BL.shape[1], tokens_BL.device)
        wanted = [self.layer_index(layer) for layer in layers]
        # Embedding rows have norm about 1, which suits the tied head; scale them to unit variance.
        x_BLF = self.embedding(tokens_BL) * self.feature_dim**0.5
        rotary = _rotary_tables(tokens_BL.shape[1], self.feature_dim // self.heads, tokens_BL.device)
        found = {0: x_BLF}
        for index, block in enumerate(list(self.blocks)[: max(wanted)], start=1):
            x_BLF = block(x_BLF, rotary, keys)
            found |= {index: x_BLF} if index in wanted else {}
        return [self.final_norm(found[index]) if index == self.depth else found[index] for index in wanted]

    def _keys(self, mask_BL: Tensor | None, length: int, device: torch.device) -> Tensor | None:
        """Return the attention mask; a softmax over no keys would be NaN, so padding may attend to padding."""
        if self.causal:
            places_L = torch.arange(length, device=device)
            past_LL = visible(places_L, places_L)
            return past_LL if mask_BL is None else mask_BL[:, None, None, :] & past_LL | (places_L == places_L[:, None])
        return None if mask_BL is None else (mask_BL | ~mask_BL.any(dim=1, keepdim=True))[:, None, None, :]

    def layer_index(self, layer: int) -> int:
        """Return the number of blocks before hidden state `layer` (0 is the embedding, `depth` or -1 the last)."""
        index = layer if layer >= 0 else self.depth + 1 + layer
        if not 0 <= index <= self.depth:
            raise UsageError(
                f"encoder.layer {layer} does not exist: this encoder has hidden states 0 to {self.depth}, or -1 for the last."
            )
        return index

    def logits(self, h_BLF: Tensor) -> Tensor:
        """Return logits over the vocabulary, without the mask token, from the last hidden state (any leading shape)."""
        return F.linear(h_BLF, self.embedding.weight[: self.vocab_size])

    def set_feature_statistics(self, mean: Tensor, std: Tensor) -> None:
        """Store the per-channel mean and standard deviation with which a frozen encoder standardizes features."""
        check_statistics(mean, std, self.feature_dim)
        self.feature_mean.copy_(mean)
        self.feature_std.copy_(std)

    def forward(self, tokens_BL: Tensor, mask_BL: Tensor | None = None) -> Tensor:
        """Return the logits of every position."""
        return self.logits(self.hidden(tokens_BL, mask_BL))


def check_statistics(mean: Tensor, std: Tensor, feature_dim: int) -> None:
    """Raise `UsageError` for statistics of the wrong width, or that would make features infinite."""
    if mean.shape != (feature_dim,) or std.shape != (feature_dim,):
        shapes = f"{tuple(mean.shape)} and {tuple(std.shape)}"
        raise UsageError(f"Feature statistics must be two vectors of {feature_dim}, not {shapes}: measure them again.")
    if not (bool(torch.isfinite(mean).all()) and bool(torch.isfinite(std).all()) and bool((std > 0).all())):
        raise UsageError("Feature statistics must be finite with positive deviations: measure them on more rows.")


@dataclass(frozen=True)
class SmallEncoderInfo:
    """Content of `encoder.json`, which describes the weights next to it."""

    vocab_size: int
    feature_dim: int
    depth: int
    heads: int
    tokenizer_fingerprint: str = ""
    format: int = 1
    causal: bool = False


def save_small_encoder(folder: Path, encoder: SmallEncoder, tokenizer_fingerprint: str = "") -> Path:
    """Write weights, manifest and description to `folder`; the description is last, so a partial folder never loads."""
    from safetensors.torch import save

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = encoder.vocab_size, encoder.feature_dim, encoder.depth, encoder.heads
    info = asdict(SmallEncoderInfo(*sizes, tokenizer_fingerprint, causal=encoder.causal))
    if not encoder.causal:
        del info["causal"]  # earlier versions do not know it
    tensors = {name: tensor.detach().cpu().float().contiguous() for name, tensor in encoder.state_dict().items()}
    (folder / CONFIG_FILE).unlink(missing_ok=True)
    write_atomic(folder / WEIGHTS_FILE, save(tensors))
    write_sealed(folder, [WEIGHTS_FILE], CONFIG_FILE, json.dumps(info, indent=1) + "\n")
    return folder


def read_small_encoder_info(folder: Path) -> SmallEncoderInfo:
    """Read the description in `folder` and check every field."""
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(
            f"No trained encoder in '{folder}': train one with --train.encoder-steps 3000, "
            "or point --encoder.name at the folder that holds one."
        )
    try:
        with open(path, "rb") as file:
            values: Any = parse_json(file.read(DESCRIPTION_BYTES))
        info = SmallEncoderInfo(**values)
        sizes = (info.vocab_size, info.feature_dim, info.depth, info.heads, info.format)
        others = (type(info.tokenizer_fingerprint), type(info.causal))
        if {type(n) for n in sizes} != {int} or others != (str, bool):
            raise TypeError("a field has the wrong type")
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"'{path}' does not describe an encoder ({error}): train the encoder again.") from error
    if info.format != 1:
        raise CheckpointError(f"'{path}' has format {info.format}, this version reads 1: update jpeg-dlm.")
    return info


def load_small_encoder(folder: Path) -> SmallEncoder:
    """Load the encoder in `folder` in eval mode; raise `CheckpointError` if tensors are missing or unexpected."""
    info = read_small_encoder_info(folder)
    check_listed(Path(folder), CONFIG_FILE, WEIGHTS_FILE)
    path = Path(folder) / WEIGHTS_FILE
    tensors = load_tensors(path)
    try:
        if any(not t.is_floating_point() for t in tensors.values()) or info.depth > len(tensors):
            raise UsageError("some tensors are not floats, or there are more layers than tensors")
        if tensors["embedding.weight"].shape != (info.vocab_size + 1, info.feature_dim):
            raise UsageError("the embedding has another size")
        encoder = SmallEncoder(info.vocab_size, info.feature_dim, info.depth, info.heads, info.causal)
        encoder.load_state_dict(tensors, strict=True)
        check_statistics(encoder.feature_mean, encoder.feature_std, info.feature_dim)
    except (RuntimeError, KeyError, UsageError) as error:
        raise CheckpointError(
            f"'{path}' does not fit the {CONFIG_FILE} beside it ({reason_of(error)}): train the encoder again."
        ) from error
    return encoder.eval()
