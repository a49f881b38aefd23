"""The paper's studies that train variants of JPEG-DLM: Table 2, Figures 3 and 4a, and two tables of the appendix.

The paper ran them on OWT-128 at r = 0.5 and d = 512; other presets use widths in the same proportion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from jpeg_dlm.config import Config
from jpeg_dlm.evaluation.paper import paper_tables
from jpeg_dlm.methods.registry import for_method, method_class
from jpeg_dlm.studies.claims import ABOUT_ABLATIONS, ABOUT_JOINT, ABOUT_RATES, ABOUT_REGULARIZERS
from jpeg_dlm.studies.future_work import (
    ABOUT_CODECS,
    ABOUT_DECODERS,
    ABOUT_OBJECTIVES,
    ABOUT_REMEDIES,
    OBJECTIVE_OPTIONS,
    codecs,
    decoders,
    objectives,
    remedies,
)
from jpeg_dlm.studies.latent_rates import latent_lens, rate_facts, rate_label, with_latents
from jpeg_dlm.studies.small_budgets import recipes
from jpeg_dlm.studies.study import TrainingStudy, Variant, Variants
from jpeg_dlm.studies.variant_pictures import draw_joint, draw_options, draw_rates, draw_rows, draw_widths

WIDTHS = (256, 512, 768, 1024)  # (paper)
PAPER_WIDTH = 512  # (paper) in all other studies
CE_TIME_MIN = {"t=1": 1.0, "t in [0.5,1]": 0.5}  # (paper, Table 2)


def _paper(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ("gen_ppl", "entropy", "mauve") if key in row}


def _paper_base() -> dict[str, Any]:
    """Return the paper's figures for r = 0.5 and d = 512; for other rates and widths it has only pictures."""
    return _paper(paper_tables()["ablation"]["rows"][0])


def ablations(base: Config) -> Variants:
    """Table 2: separate networks, no JEP, no feature loss, other corruption, token loss at more times."""
    found = []
    for row in paper_tables()["ablation"]["rows"]:
        o = base.objective
        late = CE_TIME_MIN[row["ce_times"]] < 1  # then the mean over the rows at these times, 3% of all (assumed)
        objective = replace(
            o, sigma=row["sigma"], ce_time_min=CE_TIME_MIN[row["ce_times"]], ce_time_mean="late" if late else o.ce_time_mean,
            jep_weight=o.jep_weight if row["jep"] else 0.0, feat_weight=o.feat_weight if row["feat"] else 0.0,
        )  # fmt: skip
        model = replace(base.model, shared="sep. nets" not in row["variant"])
        found.append(Variant(row["variant"], replace(base, model=model, objective=objective), _paper(row)))
    return Variants(found)


def regularizers(base: Config) -> Variants:
    """Appendix: SIGReg, and the variance and covariance terms of VICReg, each with and without the other."""
    found = []
    for row in paper_tables()["regularizers"]["rows"]:
        off: dict[str, float] = {} if row["sigreg"] else {"sigreg_weight": 0.0, "sigreg_late": 0.0}
        off |= {} if row["vicreg"] else {"var_weight": 0.0, "cov_weight": 0.0}
        names = [name for name, on in (("SIGReg", row["sigreg"]), ("variance + covariance", row["vicreg"])) if on]
        label = " and ".join(names) or "no regularizer"
        found.append(Variant(label, replace(base, objective=replace(base.objective, **off)), _paper(row)))
    return Variants(found)


def rates(base: Config) -> Variants:
    """Figure 3a: from one latent per token to one per eight tokens."""
    lens, left_out = latent_lens(base)
    found = []
    for rate, latent_len in lens.items():
        config = with_latents(base, latent_len)
        paper = _paper_base() if rate == 0.5 else {}
        found.append(Variant(rate_label(latent_len, base.data.token_len), config, paper, rate_facts(config)))
    return Variants(found, left_out)


def widths(base: Config) -> Variants:
    """Figure 3b: narrower and wider latents, with an even width per head of the codec."""
    unit = 2 * base.model.codec_heads
    found: dict[int, Variant] = {}
    for paper_width in WIDTHS:
        width = max(unit, round(base.model.latent_dim * paper_width / PAPER_WIDTH / unit) * unit)
        width = base.model.latent_dim if paper_width == PAPER_WIDTH else width
        config = replace(base, model=replace(base.model, latent_dim=width))
        paper = _paper_base() if paper_width == PAPER_WIDTH else {}
        facts = {"width": width, "paper_width": paper_width}
        if width not in found or paper:
            found[width] = Variant(f"d = {width}", config, paper, facts)
    return Variants([found[width] for width in sorted(found)])


def _cosmos_paper() -> dict[float, dict[str, Any]]:
    layers = paper_tables()["cosmos_layers"]
    return {1.0: _paper(layers["rows"][0]), 0.5: _paper(layers["at_rate_0.5_layer_-1"])}


def joint_vs_two_stage(base: Config) -> Variants:
    """Figure 4a: JPEG-DLM and COSMOS at each rate, ELF as the reference without compression."""
    lens, left_out = latent_lens(base)
    paper = {"jpeg-dlm": {0.5: _paper_base()}, "cosmos": _cosmos_paper()}
    found = []
    for method, figures in paper.items():
        for rate, latent_len in lens.items():
            config = for_method(with_latents(base, latent_len), method)
            title = method_class(method).title
            label = f"{title}, {rate_label(latent_len, base.data.token_len)}"
            found.append(Variant(label, config, figures.get(rate, {}), rate_facts(config) | {"option": title}))
    elf = for_method(base, "elf")
    title = method_class("elf").title
    found.append(Variant(title, elf, {}, {"rate": 1.0, "latent_len": base.data.token_len, "option": title}))
    return Variants(found, left_out)


def _layers(base: Config) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """Yield the paper's rows, each with True if the encoder has that layer; pretrained encoders have 6 layers or more."""
    e = base.encoder
    for row in paper_tables()["cosmos_layers"]["rows"]:
        yield row, e.kind not in ("small", "random") or e.depth + 1 + row["layer"] >= 0


def encoder_layers(base: Config) -> Variants:
    """Appendix: COSMOS with one latent per token, on features of the last layers of the text encoder."""
    cosmos = for_method(with_latents(base, base.data.token_len), "cosmos")
    found, left_out = [], []
    for row, exists in _layers(base):
        layer = row["layer"]
        if not exists:
            left_out.append(f"Layer {layer} is left out: the text encoder has {base.encoder.depth} above its embeddings.")
            continue
        config = replace(cosmos, encoder=replace(cosmos.encoder, layer=layer))
        found.append(Variant(f"layer {layer}", config, _paper(row), {"layer": layer}))
    return Variants(found, left_out)


TRAINING: dict[str, TrainingStudy] = {
    "ablations": TrainingStudy(
        "what each part of the objective is worth", ablations, draw_rows,
        ("model.shared", "objective.sigma", "objective.ce_time_min", "objective.ce_time_mean"), ABOUT_ABLATIONS,
    ),
    "regularizers": TrainingStudy(
        "regularizers of the latents", regularizers, draw_rows, conjectures=ABOUT_REGULARIZERS
    ),
    "rates": TrainingStudy(
        "quality against the compression rate", rates, draw_rates, ("model.latent_len",), ABOUT_RATES
    ),
    "widths": TrainingStudy("quality against the width of a latent", widths, draw_widths),
    "joint-vs-two-stage": TrainingStudy(
        "joint against two-stage training", joint_vs_two_stage, draw_joint, ("model.latent_len",), ABOUT_JOINT,
    ),
    "encoder-layers": TrainingStudy(
        "COSMOS at r = 1 on features of several encoder layers", encoder_layers, draw_rows,
        ("model.latent_len", "encoder.layer"),
    ),
    "recipes": TrainingStudy("options that help small budgets, each changed alone", recipes, draw_rows),
    "codecs": TrainingStudy(
        "a codec of causal attention at each rate", codecs, draw_options,
        ("model.latent_len", "model.codec", "encoder.causal"), ABOUT_CODECS,
    ),
    "decoders": TrainingStudy(
        "contextual token decoders at each rate", decoders, draw_options, ("model.latent_len", "model.decoder"), ABOUT_DECODERS
    ),
    "objectives": TrainingStudy(
        "other joint objectives and features at each rate", objectives, draw_options,
        ("model.latent_len", *OBJECTIVE_OPTIONS), ABOUT_OBJECTIVES,
    ),
    "remedies": TrainingStudy(
        "remedies of the flow gradient, each alone", remedies, draw_rows, OBJECTIVE_OPTIONS, ABOUT_REMEDIES
    ),
}  # fmt: skip
