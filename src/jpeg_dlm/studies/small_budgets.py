"""Options that help JPEG-DLM on a small budget (beyond the paper): a preset with each of them switched off or changed."""

from __future__ import annotations

from typing import Any

from jpeg_dlm.config import Config
from jpeg_dlm.config_io import override
from jpeg_dlm.studies.study import Variant, Variants

PAPER_TIMES = {"objective.time_mean": -1.5, "objective.time_std": 0.8, "objective.time_uniform": 0.0}  # (paper)
PAPER_SIGREG = 0.1  # (paper)


def recipes(base: Config) -> Variants:
    """Return the preset, then the preset with one option changed in each row, and last with all options as in the paper."""
    m, t = base.model, base.train
    back: dict[str, dict[str, Any]] = {
        "no skip in the denoise head": {"model.denoise_skip": False},
        "no residual in the decode head": {"model.decode_residual": False},
        "position tables at D^-0.5": {"model.position_scale": 0.0},
        "one noise draw per row": {"objective.flow_draws": 1},
        "the paper's times": PAPER_TIMES,
        "SIGReg at the paper's weight throughout": {"objective.sigreg_weight": PAPER_SIGREG, "objective.sigreg_late": 0.0},
        "codec at a third of the rate": {"train.codec_lr": t.lr / 3},
    }
    forth: dict[str, dict[str, Any]] = {
        "SIGReg at its first weight throughout": {"objective.sigreg_late": 0.0},
        "no uniform times": {"objective.time_uniform": 0.0},
        "twice as many noise draws": {"objective.flow_draws": 2 * base.objective.flow_draws},
        "flow loss weighted by the linear residual": {"objective.flow_weighting": "residual"},
        "latents twice as wide": {"model.latent_dim": 2 * m.latent_dim},
        "twice as many latents": {"model.latent_len": min(2 * m.latent_len, base.data.token_len)},
        "Muon": {"train.optimizer": "muon"},
        "rows twice as many per step": {"train.batch": 2 * t.batch},
    }
    together = {option: value for change in back.values() for option, value in change.items()}
    found: list[Variant] = []
    for label, change in {"the preset": {}, **back, **forth, "all of the first seven": together}.items():
        config = override(base, change)
        if all(config != other.config for other in found):  # a preset may have some of them already
            found.append(Variant(label, config))
    return Variants(found)
