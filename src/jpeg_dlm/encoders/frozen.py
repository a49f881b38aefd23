"""Frozen text encoders E, trained here or pretrained elsewhere: token ids in, standardized features h out.

Shapes: B batch, L tokens, F feature width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from jpeg_dlm.config import EncoderConfig
from jpeg_dlm.encoders.small import CONFIG_FILE, FeatureStatistics, SmallEncoder, load_small_encoder
from jpeg_dlm.util.errors import AssetError, DataError, UsageError, reason_of
from jpeg_dlm.util.files import check_listed, write_sealed

STATISTICS_FILE = "feature_statistics.safetensors"
FIXED_STD = 0.2  # deviation of the features of T5-small, for scale 'fixed' (ELF)
STD_FLOOR = 1e-5  # avoids division by zero for constant channels
# Encoder-decoder families whose encoder can be loaded without the decoder.
ENCODER_CLASSES = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}

T = TypeVar("T")


def tensors_sha256(tensors: Mapping[str, Tensor], *extra: str) -> str:
    """Return the sha256 of the names, types, shapes and bytes of the tensors, sorted by name."""
    digest = hashlib.sha256("\0".join(extra).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def features_fingerprint(mean: Tensor, std: Tensor, weights: str, scale: str) -> str:
    """Return a sha256 of all inputs of standardized features: statistics, weight fingerprint and scale."""
    return tensors_sha256({"mean": mean, "std": std}, weights, scale)


class FrozenEncoder(FeatureStatistics):
    """A feature extractor that is never trained: a `SmallEncoder`, or a model of transformers."""

    def __init__(self, model: nn.Module, feature_dim: int, config: EncoderConfig) -> None:
        super().__init__(feature_dim)
        self.model, self.layer, self.scale = model, config.layer, config.scale
        self.feature_std.fill_(FIXED_STD if config.scale == "fixed" else 1.0)
        self.has_statistics = config.scale != "per_channel"
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> FrozenEncoder:
        """Stay in eval mode: dropout in a frozen encoder would make features random."""
        return super().train(False)

    def raw_features(self, tokens_BL: Tensor, mask: Tensor | None) -> Tensor:
        """Return the hidden states of the configured layer, before standardization; see `forward` for the mask."""
        if isinstance(self.model, SmallEncoder):
            return self.model.hidden(tokens_BL, mask, self.layer)
        inner, attention = self.layer != -1, None if mask is None else mask.long()
        if mask is not None and mask.ndim == 3:  # transformers takes such masks as what is added to attention scores
            attention = torch.where(mask, 0.0, torch.finfo(torch.float32).min)[:, None]
        output = self.model(input_ids=tokens_BL, attention_mask=attention, output_hidden_states=inner, return_dict=True)
        return output.hidden_states[self.layer] if inner else output.last_hidden_state

    @torch.no_grad()
    def forward(self, tokens_BL: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return standardized fp32 features h_BLF.

        `mask` (B, L) is True at real tokens, and only these are attended to, or (B, L, L) at the keys that each query sees.
        """
        if not self.has_statistics:
            raise UsageError(
                "encoder.scale 'per_channel' has no feature statistics: measure them with measure_statistics(), "
                "or choose --encoder.scale fixed."
            )
        h_BLF = self.raw_features(tokens_BL, mask).float()
        return h_BLF if self.scale == "none" else (h_BLF - self.feature_mean) / self.feature_std

    @cached_property
    def weights_fingerprint(self) -> str:
        """sha256 of the weights and the layer; identifies raw features."""
        return tensors_sha256(self.model.state_dict(), f"layer {self.layer}")

    @property
    def fingerprint(self) -> str:
        """sha256 of weights, layer, scale and statistics; identifies the features that `forward` returns."""
        return features_fingerprint(self.feature_mean, self.feature_std, self.weights_fingerprint, self.scale)


# ---------------------------------------------------------------- building


def build_encoder(config: EncoderConfig, vocab_size: int, seed: int = 0, folder: Path | None = None) -> FrozenEncoder:
    """Build the frozen encoder of `config`; `folder` holds a trained 'small' encoder, or the statistics of other kinds."""
    places = [place for place in (folder, Path(config.name) if config.name else None) if place is not None]
    if config.kind == "hf":
        encoder = _pretrained_encoder(config, vocab_size)
        if config.scale == "per_channel":
            any(load_statistics(place, encoder) for place in places)
        return encoder
    if config.kind == "random":
        return freeze(SmallEncoder(vocab_size, config.feature_dim, config.depth, config.heads).initialize(seed), config)
    if not places:
        raise UsageError(
            "encoder.kind 'small' needs a trained encoder: give its folder with --encoder.name, "
            "or train one with --train.encoder-steps 3000."
        )
    model = load_small_encoder(next((place for place in places if (place / CONFIG_FILE).is_file()), places[0]))
    needed = (vocab_size, config.feature_dim, config.depth, config.heads)
    if needed != model.sizes:
        raise UsageError(
            f"The trained encoder has (vocabulary, feature_dim, depth, heads) {model.sizes}, but the config has {needed}: "
            "change the config or train another encoder."
        )
    return freeze(model, config)


def freeze(model: SmallEncoder, config: EncoderConfig) -> FrozenEncoder:
    """Return a small encoder, trained or random, behind the frozen interface, with its own statistics."""
    model.layer_index(config.layer)  # raises for a layer that does not exist
    encoder = FrozenEncoder(model, model.feature_dim, config)
    if config.scale == "per_channel":
        encoder.set_feature_statistics(model.feature_mean, model.feature_std)
    return encoder


def load_pretrained(load: Callable[[dict[str, Any]], T], name: str, revision: str, what: str, remedy: str) -> T:
    """Call `load(options of from_pretrained)`, which looks in a folder, the local cache or the hub; no code of it is run."""
    options = {"trust_remote_code": False} | ({"revision": revision} if revision and not Path(name).is_dir() else {})
    try:
        return load(options)
    except Exception as error:  # the many backends of the loader raise any kind of error
        raise AssetError(f"Cannot load {what} '{name}' ({reason_of(error)}): {remedy}") from error


def _pretrained_encoder(config: EncoderConfig, vocab_size: int) -> FrozenEncoder:
    """Load a T5 or BERT-like encoder of transformers from a folder (offline), the local cache or the hub."""
    name = config.name
    if not name:
        raise UsageError("encoder.kind 'hf' needs a model: give --encoder.name with a hub name such as t5-small, or a folder.")
    import transformers

    def load(options: dict[str, Any]) -> nn.Module:
        family = transformers.AutoConfig.from_pretrained(name, **options)
        encoder_class = ENCODER_CLASSES.get(family.model_type, "AutoModel")
        model = getattr(transformers, encoder_class).from_pretrained(name, **options)
        has_decoder = encoder_class == "AutoModel" and getattr(family, "is_encoder_decoder", False)
        return model.get_encoder() if has_decoder else model

    remedy = "point --encoder.name at a local folder with config.json and model.safetensors."
    model = load_pretrained(load, name, config.revision, "the encoder", remedy)
    sizes: Any = model.config
    width, layers, ids = int(sizes.hidden_size), int(sizes.num_hidden_layers), int(sizes.vocab_size)
    if not -layers - 1 <= config.layer <= layers:
        raise UsageError(f"encoder.layer {config.layer} does not exist: {name} has hidden states 0 to {layers}, or -1.")
    if width != config.feature_dim:
        raise UsageError(f"{name} has features of width {width}, not {config.feature_dim}: use --encoder.feature-dim {width}.")
    if vocab_size > ids:
        raise UsageError(f"{name} has {ids} tokens, but the data has {vocab_size}: prepare the data with its own tokenizer.")
    return FrozenEncoder(model.float(), width, config)


# ---------------------------------------------------------------- feature statistics


@torch.no_grad()
def measure_statistics(encoder: FrozenEncoder, batches: Iterable[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor]:
    """Return the per-channel mean and standard deviation of raw features over real tokens, accumulated in float64."""
    total = torch.zeros(encoder.feature_dim, dtype=torch.float64)
    squares = torch.zeros_like(total)
    count = 0
    for tokens_BL, mask_BL in batches:
        h_BLF = encoder.raw_features(tokens_BL, mask_BL)
        rows = h_BLF.flatten(0, 1) if mask_BL is None else h_BLF[mask_BL]
        rows = (rows.cpu() if rows.device.type == "mps" else rows).double()  # Apple's GPUs have no float64
        total += rows.sum(0).cpu()
        squares += rows.square().sum(0).cpu()
        count += len(rows)
    if count < 2:
        raise DataError("Feature statistics need at least two tokens: give more text.")
    mean = total / count
    std = (squares / count - mean.square()).clamp_min(0).sqrt().clamp_min(STD_FLOOR)
    return mean.float(), std.float()


def save_statistics(folder: Path, encoder: FrozenEncoder) -> None:
    """Write an encoder's statistics and the fingerprint of its weights to `folder`."""
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"mean": encoder.feature_mean.cpu(), "std": encoder.feature_std.cpu()}
    write_sealed(folder, [], STATISTICS_FILE, save(tensors, metadata={"weights": encoder.weights_fingerprint}))


def load_statistics(folder: Path, encoder: FrozenEncoder) -> bool:
    """Load the statistics in `folder` into `encoder`; return False when there are none."""
    path = folder / STATISTICS_FILE
    if not path.is_file():
        return False
    weights, mean, std = read_statistics(path)
    if weights != encoder.weights_fingerprint:
        raise DataError(f"'{path}' was measured with another encoder or layer: delete it and measure the statistics again.")
    encoder.set_feature_statistics(mean, std)
    return True


def read_statistics(path: Path) -> tuple[str, Tensor, Tensor]:
    """Read statistics: the fingerprint of the weights they were measured with, the mean and the standard deviation."""
    from safetensors import SafetensorError, safe_open

    check_listed(path.parent, path.name, remedy="delete the folder and measure the statistics again")
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("weights", ""), file.get_tensor("mean").float(), file.get_tensor("std").float()
    except (OSError, SafetensorError, ValueError, RuntimeError, AttributeError) as error:
        raise DataError(f"Cannot read '{path}' ({error}): delete it and measure the statistics again.") from error
