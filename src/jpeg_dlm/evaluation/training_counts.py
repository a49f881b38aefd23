"""Multiply-accumulates of a training step of every system, by formula: what a day of a machine buys.

A part of the network with gradient costs its forward pass once more for the gradient of its inputs and once more for that
of its weights. Random choices of a step (self-conditioning, modes, masks) count with their probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from jpeg_dlm.config import Config, EncoderConfig
from jpeg_dlm.errors import UsageError
from jpeg_dlm.evaluation.counts import (
    ar_reads,
    attention_macs,
    compressor_macs,
    decompressor_macs,
    dit_macs,
    elf_logits_macs,
    elf_macs,
    network_ids,
    projection_macs,
    query_macs,
    transformer_macs,
)


@dataclass(frozen=True)
class Step:
    """Operations of one row by what they are for."""

    forward: float  # with gradient, without the logits
    logits: float  # forward part of what may be done again in chunks
    frozen: float = 0.0  # networks without gradient, such as a target or a first guess
    inputs: float = 0.0  # forward part of what has a gradient for its weights alone


# ---------------------------------------------------------------- the systems


def _shared_queries(config: Config, positions: int) -> float:
    """Products of a first layer with learned queries: ours does them once a batch, which is next to nothing a row."""
    return 3 * positions * config.model.latent_dim**2


def _codec_encoding(config: Config) -> float:
    return compressor_macs(config) - _shared_queries(config, config.model.latent_len)


def _codec_decoding(config: Config) -> float:
    """The decompressor as ours runs it: the base query's network once a batch as well."""
    m, tokens = config.model, config.data.token_len
    return decompressor_macs(config, m.latent_len) - tokens * query_macs(config) - _shared_queries(config, tokens)


def _jpeg_dlm(config: Config) -> Step:
    m, o, t = config.model, config.objective, config.train
    dit, decoding, logits = dit_macs(config, m.latent_len), _codec_decoding(config), projection_macs(config)
    decodings = 1 if o.ce_time_min >= 1 else 2
    rows = t.batch * t.accumulation * t.devices
    vectors = min(m.latent_len, max(1, o.reg_max_rows // rows)) if o.reg_max_rows > 0 else m.latent_len  # of a row
    slices = o.sigreg_slices if o.sigreg_weight else 0
    regularizers = vectors * m.latent_dim * (m.latent_dim + slices)
    return Step(
        forward=_codec_encoding(config) + (1 + o.flow_draws) * dit + decodings * decoding + regularizers,
        logits=decodings * logits,
        # The target, and the first pass of self-conditioning; the second is the trained one where nothing is dropped.
        frozen=_codec_encoding(config) + (2 if m.dropout else 1) * o.sc_prob * o.flow_draws * dit,
    )


def _elf(config: Config) -> Step:
    o, network = config.objective, elf_macs(config)
    guesses = 2 * o.sc_prob * (1 - o.decode_prob)
    return Step(network, o.decode_prob * elf_logits_macs(config), frozen=guesses * network)


def _cosmos(config: Config) -> Step:
    m, o, n = config.model, config.objective, config.model.latent_len
    block = n * (4 * m.hidden**2 + 3 * m.hidden * int(m.hidden * m.mlp_ratio)) + attention_macs(n, n, m.hidden)
    conditions = m.hidden**2 + n * m.latent_dim * m.hidden  # of time and of the prediction before, in every layer
    ends = 0 if m.latent_dim == m.hidden else 2 * n * m.latent_dim * m.hidden
    network = m.depth * (block + conditions) + ends + 4 * m.hidden**2
    return Step(network, 0, frozen=_codec_encoding(config) + o.sc_prob * network)


def _cosmos_codec(config: Config) -> Step:
    return Step(_codec_encoding(config) + _codec_decoding(config), projection_macs(config))


def _tokens(config: Config, positions: int) -> float:
    """The shared transformer without its head, over positions of a row."""
    m = config.model
    return positions * transformer_macs(config) + m.depth * attention_macs(positions, positions, m.hidden)


def _vocabulary(config: Config) -> float:
    """A product of every token with the whole vocabulary."""
    return config.data.token_len * config.model.hidden * network_ids(config)


def _ar(config: Config) -> Step:
    positions = ar_reads(config)
    return Step(_tokens(config, positions), _vocabulary(config) * positions / config.data.token_len)


def _conditioned(config: Config) -> float:
    """The shared transformer with its noise level."""
    m = config.model
    level = m.freq_dim * m.cond_dim + m.cond_dim**2 + m.cond_dim * m.hidden * (6 * m.depth + 2)
    return _tokens(config, config.data.token_len) + level


def _absorbing(config: Config) -> Step:
    """Only masked positions need logits, on average half of them."""
    return Step(_conditioned(config), _vocabulary(config) / 2)


def _duo(config: Config) -> Step:
    """In its curriculum the network reads a distribution over tokens."""
    o, steps = config.objective, config.train.steps
    share = 0.0 if o.curriculum != "simple" else min(1.0, o.curriculum_steps / max(1, steps)) if o.curriculum_steps else 0.5
    return Step(_conditioned(config), _vocabulary(config), inputs=share * _vocabulary(config))


def _flm(config: Config) -> Step:
    if config.objective.flow_map:
        raise UsageError("The operations of FLM's flow map are not counted: plan without --objective.flow-map.")
    return Step(_conditioned(config), _vocabulary(config), inputs=_vocabulary(config))


def _langflow(config: Config) -> Step:
    """Logits are of the head and of a skip through the embeddings; a first guess also averages the embeddings."""
    hidden = config.model.hidden
    network = _conditioned(config) + config.data.token_len * 2 * hidden**2
    guess = network + 3 * _vocabulary(config)
    return Step(network, 2 * _vocabulary(config), frozen=config.objective.sc_prob * guess)


STEPS: dict[str, Callable[[Config], Step]] = {
    "jpeg-dlm": _jpeg_dlm, "ar": _ar, "mdlm": _absorbing, "sedd": _absorbing, "duo": _duo, "elf": _elf,
    "langflow": _langflow, "flm": _flm, "cosmos": _cosmos, "cosmos-codec": _cosmos_codec,
}  # fmt: skip
USES_ENCODER = ("jpeg-dlm", "elf", "cosmos", "cosmos-codec")


# ---------------------------------------------------------------- the frozen encoder


@dataclass(frozen=True)
class EncoderSize:
    """A transformer encoder; `inner` is the width inside its feed-forward network, which has so many `matrices`."""

    layers: int
    width: int
    attention: int
    inner: int
    matrices: int
    vocabulary: int

    def parameters(self) -> int:
        """Matrices and embedding; norms and position biases are next to nothing."""
        layer = 4 * self.width * self.attention + self.matrices * self.width * self.inner
        return self.layers * layer + self.vocabulary * self.width

    def macs(self, tokens: int) -> int:
        layer = 4 * self.width * self.attention + self.matrices * self.width * self.inner
        return self.layers * (tokens * layer + attention_macs(tokens, tokens, self.attention))


T5_SIZES = {  # their published configurations
    "t5-small": EncoderSize(6, 512, 512, 2048, 2, 32_128),
    "flan-t5-small": EncoderSize(8, 512, 384, 1024, 3, 32_128),
}


def encoder_size(encoder: EncoderConfig, vocab_size: int) -> EncoderSize | None:
    """The size of a frozen encoder; None for one of another name, whose size is known only to its files."""
    if encoder.kind in ("small", "random"):
        inner = 8 * math.ceil(encoder.feature_dim / 3)
        return EncoderSize(encoder.depth, encoder.feature_dim, encoder.feature_dim, inner, 3, vocab_size + 1)
    return T5_SIZES.get(encoder.name.rsplit("/", 1)[-1] if encoder.kind == "hf" else encoder.kind)


# ---------------------------------------------------------------- all of it


def training_macs(config: Config, recompute: bool = False) -> dict[str, float]:
    """Operations of one row in one step by part, and `total`; `recompute` runs layers again in backward."""
    if config.method not in STEPS:
        raise UsageError(f"There is no plan for '{config.method}': choose one of {', '.join(STEPS)}.")
    step, batch, tokens = STEPS[config.method](config), config.train.batch, config.data.token_len
    encoder = encoder_size(config.encoder, config.data.vocab_size) if config.method in USES_ENCODER else None
    # JPEG-DLM makes its gradients with the loss, chunk by chunk; the others compute a chunk's logits again in backward.
    logits_again = config.method != "jpeg-dlm" and 0 < getattr(config.objective, "ce_chunk", 0) < batch * tokens
    parts = {
        "encoder": 0.0 if encoder is None or config.data.cache_features else float(encoder.macs(tokens)),
        "frozen": step.frozen,
        "forward": step.forward + step.logits + step.inputs,
        "backward": 2 * (step.forward + step.logits) + step.inputs,
        "again": (step.logits if logits_again else 0.0) + (step.forward if recompute else 0.0),
    }
    return parts | {"total": sum(parts.values())}
