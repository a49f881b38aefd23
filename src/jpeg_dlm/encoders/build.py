"""Build the frozen encoder of an EncoderConfig."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from jpeg_dlm.config import EncoderConfig
from jpeg_dlm.encoders.frozen import FrozenEncoder, load_statistics
from jpeg_dlm.encoders.small import CONFIG_FILE, SmallEncoder, load_small_encoder
from jpeg_dlm.errors import UsageError


class FrozenSmallEncoder(FrozenEncoder):
    """A `SmallEncoder`, trained or random, behind the frozen interface."""

    model: SmallEncoder

    def __init__(self, model: SmallEncoder, name: str, config: EncoderConfig) -> None:
        for layer in (config.layer, *config.layers):
            model.layer_index(layer)  # raises for a layer that does not exist
        super().__init__(model, name, model.feature_dim, config)
        if config.scale == "per_channel":
            self.set_feature_statistics(model.feature_mean, model.feature_std)

    def raw_features(self, tokens_BL: Tensor, mask_BL: Tensor | None) -> Tensor:
        return self.mixed(self.model.states(tokens_BL, mask_BL, self.layers or (self.layer,)))

    @property
    def conditions(self) -> str:
        return super().conditions + (", causal" if self.model.causal else "")


def build_encoder(config: EncoderConfig, vocab_size: int, seed: int = 0, folder: Path | None = None) -> FrozenEncoder:
    """Build the frozen encoder of `config`; `folder` holds a trained 'small' encoder, or the statistics of other kinds."""
    if config.kind == "none":
        raise UsageError("Only jpeg-dlm learns its own features: choose another encoder than 'none' for this method.")
    if config.kind == "random":
        model = SmallEncoder(vocab_size, config.feature_dim, config.depth, config.heads, config.causal).initialize(seed)
        return FrozenSmallEncoder(model, f"random (untrained, F={config.feature_dim}, depth {config.depth})", config)
    if config.kind == "small":
        return _build_small(config, vocab_size, folder)
    if config.kind == "hf":
        from jpeg_dlm.encoders.hf import load_transformers_encoder

        encoder = load_transformers_encoder(config)
    else:
        from jpeg_dlm.encoders.flan_t5 import load_flan_t5_small

        encoder = load_flan_t5_small(config)
    if encoder.feature_dim != config.feature_dim:
        raise UsageError(
            f"{encoder.name} has features of width {encoder.feature_dim}, not {config.feature_dim}: "
            f"use --encoder.feature-dim {encoder.feature_dim}."
        )
    if vocab_size > encoder.vocab_size:
        raise UsageError(
            f"{encoder.name} has {encoder.vocab_size} tokens, but the data has {vocab_size}: "
            "prepare the data with the encoder's own tokenizer."
        )
    if config.scale == "per_channel":
        places = [folder, Path(config.name) if config.name else None]
        any(load_statistics(place, encoder) for place in places if place is not None)
    return encoder


def _build_small(config: EncoderConfig, vocab_size: int, folder: Path | None) -> FrozenEncoder:
    places = [place for place in (folder, Path(config.name) if config.name else None) if place is not None]
    if not places:
        raise UsageError(
            "encoder.kind 'small' needs a trained encoder: give its folder with --encoder.name, "
            "or train one with --train.encoder-steps 3000."
        )
    model = load_small_encoder(next((place for place in places if (place / CONFIG_FILE).is_file()), places[0]))
    wanted = (vocab_size, config.feature_dim, config.depth, config.heads, config.causal)
    found = (model.vocab_size, model.feature_dim, model.depth, model.heads, model.causal)
    if wanted != found:
        raise UsageError(
            f"The trained encoder has (vocabulary, feature_dim, depth, heads, causal) {found}, but the config has {wanted}: "
            "change the config or train another encoder."
        )
    return FrozenSmallEncoder(model, f"small (trained here, F={model.feature_dim}, depth {model.depth})", config)
