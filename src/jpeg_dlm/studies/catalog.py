"""The studies by name, with their input and summary; importing this module does not import torch, so help is fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class StudyInfo:
    """`takes`: 'training' trains variants of a preset; 'models' analyzes trained models; 'sizes' needs neither."""

    takes: Literal["training", "models", "sizes"]
    summary: str


STUDIES: dict[str, StudyInfo] = {
    "ablations": StudyInfo("training", "effect of each part of the objective (paper, Table 2)"),
    "regularizers": StudyInfo("training", "SIGReg, variance and covariance terms, alone and together (paper, appendix)"),
    "rates": StudyInfo("training", "quality against the compression rate r (paper, Figure 3)"),
    "widths": StudyInfo("training", "quality against the width of a latent (paper, Figure 3)"),
    "joint-vs-two-stage": StudyInfo("training", "JPEG-DLM against COSMOS at each rate, ELF as reference (paper, Figure 4a)"),
    "encoder-layers": StudyInfo("training", "COSMOS on features of the last three encoder layers (paper, appendix)"),
    "recipes": StudyInfo("training", "options that help small budgets, each changed alone (not in the paper)"),
    "codecs": StudyInfo("training", "causal codec beside the paper's, r = 1/2, 1/4, 1/8 (paper, future work)"),
    "decoders": StudyInfo("training", "contextual decoders beside the projection, r = 1/2, 1/4, 1/8 (paper, future work)"),
    "objectives": StudyInfo("training", "flow gradient into the compressor, other features, same rates (paper, future work)"),
    "remedies": StudyInfo("training", "remedies of the flow gradient, each alone (paper, future work)"),
    "correlation": StudyInfo("models", "correlation between latent positions across texts (paper, Figure 4b)"),
    "interpolation": StudyInfo("models", "decoding between the latents of two texts, with and without noise (paper, Figure 5)"),
    "steps": StudyInfo("models", "quality against solver steps (paper, appendix)"),
    "lengths": StudyInfo("models", "lengths of generated and real text, and their effect on MAUVE (paper, appendix)"),
    "decodability": StudyInfo("models", "token accuracy of noisy latents, and the noise at which decoding breaks"),
    "editing": StudyInfo("models", "tokens that a text keeps when its latents get noise and are written anew"),
    "geometry": StudyInfo("models", "spectrum, effective rank and isotropy of the latents, at the end and over training"),
    "diagnose": StudyInfo("models", "denoiser against the best linear one, codec and samples, to explain text quality"),
    "cost": StudyInfo("sizes", "parameters, operations, memory and time as r falls and texts grow"),
}
