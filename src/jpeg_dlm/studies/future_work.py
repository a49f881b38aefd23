"""The paper's future work, each option beside the paper's form at r = 1/2, 1/4 and 1/8, and what the paper conjectures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jpeg_dlm.config import Config
from jpeg_dlm.config_io import override
from jpeg_dlm.studies.conjectures import Conjecture, better_text
from jpeg_dlm.studies.latent_rates import latent_lens, rate_facts, rate_label, with_latents
from jpeg_dlm.studies.study import Variant, Variants

STRONG_RATES = (0.5, 0.25, 0.125)
PAPER = "as in the paper"

CAUSAL_FEATURES = {"encoder.causal": True}
CODECS: dict[str, dict[str, Any]] = {
    PAPER: {},
    "causal encoder": CAUSAL_FEATURES,  # which a causal codec needs: tells the two apart
    "causal codec": CAUSAL_FEATURES | {"model.codec": "causal"},
}
DECODERS: dict[str, dict[str, Any]] = {
    PAPER: {},
    "autoregressive decoder": {"model.decoder": "autoregressive"},
    "two-pass decoder": {"model.decoder": "two_pass"},
}
REACHED = {"objective.flow_to_compressor": 1.0}
REMEDIES: dict[str, dict[str, Any]] = {  # each with the plain gradient
    "warm-up": {"objective.flow_to_compressor_warmup": 0.5},
    "stop-gradient on the target": {"objective.flow_to_compressor_side": "input"},
    "values of the target": {"objective.flow_to_compressor_values": "target"},
    "batch statistics": {"objective.flow_to_compressor_norm": "batch"},
    "no token loss in the codec": {"objective.ce_to_codec": False},
    "noise before the decoder": {"objective.decoder_noise": 0.5},  # assumed: sigma corrupts this codec already
    "adaptive times": {"objective.time_adaptive": True},
}
SINGLE_REMEDIES = {f"flow gradient, {name}": REACHED | change for name, change in REMEDIES.items()}
TOGETHER = "flow gradient, LDLM's remedies"
LDLM = ("warm-up", "no token loss in the codec", "noise before the decoder", "adaptive times")
EMBEDDED, LAYERS = "no encoder", "mean of the last layers"
NO_ENCODER = {"encoder.kind": "none", "data.cache_features": False}
OBJECTIVE_OPTIONS = ("encoder.kind", "encoder.layers", *(name for change in (REACHED, *REMEDIES.values()) for name in change))


def objective_options(base: Config) -> dict[str, dict[str, Any]]:
    """Return the options of `study objectives`: the flow gradient, with LDLM's remedies, and other features."""
    e = base.encoder
    layers = min(3, e.depth + 1) if e.kind in ("small", "random") else 3
    together = REACHED | {name: value for remedy in LDLM for name, value in REMEDIES[remedy].items()}
    return {
        PAPER: {},
        "flow gradient": REACHED,
        TOGETHER: together,
        EMBEDDED: NO_ENCODER,
        LAYERS: {"encoder.layers": tuple(range(-layers, 0))},
    }


def at_each_rate(base: Config, options: Mapping[str, Mapping[str, Any]], rates: Sequence[float] = STRONG_RATES) -> Variants:
    """Return every option at every rate."""
    lens, left_out = latent_lens(base, rates)
    found = []
    for latent_len in lens.values():
        for option, change in options.items():
            config = override(with_latents(base, latent_len), change)
            label = f"{option}, {rate_label(latent_len, base.data.token_len)}"
            found.append(Variant(label, config, {}, rate_facts(config) | {"option": option}))
    return Variants(found, left_out)


def codecs(base: Config) -> Variants:
    """Return the causal codec beside the paper's; pretrained encoders attend in both directions, so they have none."""
    if base.encoder.kind in ("hf", "flan-t5-small"):
        sentence = f"The causal codec is left out: '{base.encoder.kind}' sees later tokens; use --encoder.kind small."
        found = at_each_rate(base, {PAPER: {}})
        return replace(found, left_out=[*found.left_out, sentence])
    return at_each_rate(base, CODECS)


def decoders(base: Config) -> Variants:
    """Return contextual decoders beside the position-wise projection."""
    return at_each_rate(base, DECODERS)


def objectives(base: Config) -> Variants:
    """Return other joint objectives, and features without a pretrained encoder or from several of its layers."""
    return at_each_rate(base, objective_options(base))


def remedies(base: Config) -> Variants:
    """Return the flow gradient with each remedy alone, at the rate of the base."""
    return at_each_rate(
        base, {PAPER: {}, "flow gradient": REACHED, **SINGLE_REMEDIES}, (base.model.latent_len / base.data.token_len,)
    )


CAUSAL = "Causal encoding helps to retain positional structure as latent length decreases"
ABOUT_CODECS = (
    *(Conjecture(CAUSAL, "causal codec", other, "reconstruction", more=True) for other in (PAPER, "causal encoder")),
    *better_text("causal codec", PAPER, CAUSAL),
)
ABOUT_DECODERS = tuple(
    conjecture
    for option in list(DECODERS)[1:]
    for conjecture in (
        Conjecture("A contextual decoder improves decoding under stronger compression", option, PAPER, "reconstruction", True),
        *better_text(option, PAPER, "A contextual decoder improves text under stronger compression"),
    )
)
COLLAPSE = tuple(
    Conjecture("Flow gradients in the compressor lead to collapse", "flow gradient", PAPER, measure, more=False)
    for measure in ("latent_text", "latent_rank")
)
STABLE = "A stabilized flow gradient improves text"
ABOUT_OBJECTIVES = (
    *COLLAPSE,
    *better_text(TOGETHER, PAPER, STABLE),
    # The rest is not of the paper.
    Conjecture("A pretrained encoder keeps more of the text", PAPER, EMBEDDED, "reconstruction", more=True),
    *better_text(PAPER, EMBEDDED, "A pretrained encoder improves text"),
    Conjecture("Features of several layers keep more of the text", LAYERS, PAPER, "reconstruction", more=True),
    *better_text(LAYERS, PAPER, "Features of several layers improve text"),
)
ABOUT_REMEDIES = (*COLLAPSE, *(conjecture for option in SINGLE_REMEDIES for conjecture in better_text(option, PAPER, STABLE)))
