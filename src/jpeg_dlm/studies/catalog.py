"""All studies as data: their variants, the paper's rows and claims. Importing this module does not import torch.

The paper ran its studies on OWT-128 at r = 0.5 and d = 512; other presets use widths in the same proportion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jpeg_dlm.config import Config

OURS = "JPEG-DLM"
RATES = (1.0, 0.5, 0.25, 0.125)  # (paper)
PaperRow = tuple[str, int | str]  # a table of `paper.json`, and the number or name of its row
BASE_ROW: PaperRow = ("ablation", 0)  # r = 0.5 and d = 512; of other rates and widths the paper has only pictures


@dataclass(frozen=True)
class Variant:
    """A configuration to train: the base config with options changed, for a method and a compression rate."""

    label: str  # may name options of the config, as in "d = {model.latent_dim}"
    changes: Mapping[str, Any] = field(default_factory=dict)  # option to its value, or to a function of the base config
    method: str = "jpeg-dlm"
    rate: float | None = None  # None: as many latents as the base has
    paper: PaperRow | None = None


@dataclass(frozen=True)
class Claim:
    """A sentence that holds if one variant has more, or less, of a measure than another."""

    text: str
    label: str
    against: str
    measure: str
    more: bool


def better_text(text: str, *pairs: tuple[str, str]) -> tuple[Claim, ...]:
    """Claim of pairs (label, against) that the first writes better text than the second, by both measures of it."""
    measures = (("gen_ppl", False), ("mauve", True))
    return tuple(Claim(text, *pair, measure, more) for pair in pairs for measure, more in measures)


@dataclass(frozen=True)
class Study:
    """A question: variants to train, or without any an analysis of trained models (`analysis.py`)."""

    summary: str
    title: str = ""
    variants: tuple[Variant, ...] = ()
    claims: tuple[Claim, ...] = ()
    x: str = ""  # what the picture has on its axis: the rate or the width; otherwise each variant is a row

    @property
    def sets(self) -> frozenset[str]:
        """The options that every variant sets, so that the user cannot."""
        each = [{name for name, value in v.changes.items() if not callable(value)} for v in self.variants]
        rates = {"model.latent_len"} if any(v.rate for v in self.variants) else set()
        return frozenset(set.intersection(*each) | rates) if each else frozenset()


# ---------------------------------------------------------------- variants

CLEAN = {"model.shared": True, "objective.sigma": 1.0, "objective.ce_time_min": 1.0}  # (paper, Table 2)
SIGMA = "Corruption of sigma = 1 improves text"
ABLATIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {  # what the base is claimed to gain, and what is changed
    "Base": ("", {}),
    "sep. nets": ("One network for both branches improves text", {"model.shared": False}),
    "w/o jep": ("Joint-embedding prediction improves text", {"objective.jep_weight": 0.0}),
    "w/o jep + sep. nets": ("Both together improve text", {"model.shared": False, "objective.jep_weight": 0.0}),
    "w/o feat": ("The feature loss improves text", {"objective.feat_weight": 0.0}),
    "sigma=0.5": (SIGMA, {"objective.sigma": 0.5}),
    "sigma=1.5": (SIGMA, {"objective.sigma": 1.5}),
    "ce at t in [0.5,1]": ("The token loss on clean latents alone improves text", {"objective.ce_time_min": 0.5}),
}
NO_SIGREG = {"objective.sigreg_weight": 0.0, "objective.sigreg_late": 0.0}
NO_VICREG = {"objective.var_weight": 0.0, "objective.cov_weight": 0.0}
BOTH = "SIGReg and variance + covariance"
REGULARIZERS: Mapping[str, Mapping[str, Any]] = {
    "no regularizer": NO_SIGREG | NO_VICREG,
    "SIGReg": NO_VICREG,
    "variance + covariance": NO_SIGREG,
    BOTH: {},
}


def _scaled_width(paper_width: int) -> Callable[[Config], int]:
    """Return the width of a latent in proportion to the paper's 512, with an even width for each head of the codec."""

    def width(base: Config) -> int:
        unit = 2 * base.model.codec_heads
        scaled = max(unit, round(base.model.latent_dim * paper_width / 512 / unit) * unit)
        return base.model.latent_dim if paper_width == 512 else scaled

    return width


def _at_rates(method: str, prefix: str, paper: Mapping[float, PaperRow]) -> tuple[Variant, ...]:
    return tuple(Variant(f"{prefix}r = {rate:g}", {}, method, rate, paper.get(rate)) for rate in RATES)


COSMOS_ROWS: Mapping[float, PaperRow] = {1.0: ("cosmos_layers", 0), 0.5: ("cosmos_layers", "at_rate_0.5_layer_-1")}

STUDIES: dict[str, Study] = {
    "ablations": Study(
        "effect of each part of the objective (paper, Table 2)",
        "what each part of the objective is worth",
        tuple(Variant(name, CLEAN | change, paper=("ablation", i)) for i, (name, (_, change)) in enumerate(ABLATIONS.items())),
        tuple(c for name, (claim, _) in ABLATIONS.items() if claim for c in better_text(claim, ("Base", name))),
    ),
    "regularizers": Study(
        "SIGReg, variance and covariance terms, alone and together (paper, appendix)",
        "regularizers of the latents",
        tuple(Variant(name, change, paper=("regularizers", i)) for i, (name, change) in enumerate(REGULARIZERS.items())),
        better_text("All regularizers together improve text", *((BOTH, alone) for alone in list(REGULARIZERS)[:3])),
    ),
    "rates": Study(
        "quality against the compression rate r (paper, Figure 3)",
        "quality against the compression rate",
        _at_rates("jpeg-dlm", "", {0.5: BASE_ROW}),
        better_text("Text is better under weaker compression", *((f"r = {a:g}", f"r = {b:g}") for a, b in pairwise(RATES))),
        x="rate",
    ),
    "widths": Study(
        "quality against the width of a latent (paper, Figure 3)",
        "quality against the width of a latent",
        tuple(
            Variant("d = {model.latent_dim}", {"model.latent_dim": _scaled_width(d)}, paper=BASE_ROW if d == 512 else None)
            for d in (256, 512, 768, 1024)  # (paper)
        ),
        x="width",
    ),
    "joint-vs-two-stage": Study(
        "JPEG-DLM against COSMOS at each rate, ELF as reference (paper, Figure 4a)",
        "joint against two-stage training",
        (
            *_at_rates("jpeg-dlm", f"{OURS}, ", {0.5: BASE_ROW}),
            *_at_rates("cosmos", "COSMOS, ", COSMOS_ROWS),
            Variant("ELF", method="elf"),
        ),
        better_text(
            "Joint training improves text",
            *((f"{OURS}, r = {rate:g}", f"COSMOS, r = {rate:g}") for rate in RATES),
            (f"{OURS}, r = 1", "ELF"),
        ),
        x="rate",
    ),
    "encoder-layers": Study(
        "COSMOS on features of the last three encoder layers (paper, appendix)",
        "COSMOS at r = 1 on features of several encoder layers",
        tuple(
            Variant(f"layer {layer}", {"encoder.layer": layer}, "cosmos", 1.0, ("cosmos_layers", i))
            for i, layer in enumerate((-1, -2, -3))
        ),
    ),
    "correlation": Study("correlation between latent positions across texts (paper, Figure 4b)"),
    "interpolation": Study("decoding between the latents of two texts, with and without noise (paper, Figure 5)"),
    "steps": Study("quality against solver steps (paper, appendix)"),
}


def comparison(systems: Mapping[str, str]) -> Study:
    """Return the study whose variants are systems, given by name and title (paper, Table 1)."""
    others = [title for title in systems.values() if title != OURS] if OURS in systems.values() else []
    return Study(
        "train all systems on the same text with an equal budget (paper, Table 1)",
        "all systems",
        tuple(Variant(title, method=name, paper=("main", title)) for name, title in systems.items()),
        better_text(f"{OURS} writes better text", *((OURS, title) for title in others)),
        x="speed",
    )
