"""The average of two models' weights, such as those before and after fine-tuning (WiSE-FT, arXiv:2109.01903)."""

from __future__ import annotations

import torch

from jpeg_dlm.errors import UsageError
from jpeg_dlm.folders.model_folder import ModelParts


@torch.no_grad()
def blend(parts: ModelParts, other: ModelParts, share: float) -> None:
    """Replace the weights of a model by (1 - share) of them plus `share` of another's, which must have the same layout."""
    mine, theirs = parts.method.export_state(), other.method.export_state()
    names = f"'{other.origin}' and '{parts.origin}'"
    same = parts.config.method == other.config.method and mine.keys() == theirs.keys()
    if not same or any(mine[name].shape != theirs[name].shape for name in mine):
        raise UsageError(f"{names} differ in method or sizes: blend two models of one layout.")
    if parts.read_tokenizer().fingerprint != other.read_tokenizer().fingerprint:
        raise UsageError(f"{names} differ in their tokenizers: blend two models with one.")
    mixed = {name: torch.lerp(t, theirs[name], share) if t.is_floating_point() else t for name, t in mine.items()}
    parts.method.import_state(mixed, names)
