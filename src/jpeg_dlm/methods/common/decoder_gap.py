"""Measure how far a contextual token decoder goes by its latents, and how sure it is of generated ones.

A decoder that ignored the latents would give a text the same probability with the latents of another text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from torch import Tensor

from jpeg_dlm.methods.base import Batch, Latents


def decoder_measures(
    parts: Iterable[tuple[Latents, Batch, Tensor]], is_text: Callable[[Tensor], Tensor]
) -> dict[str, float]:  # fmt: skip
    """Return the measures of a decoder over parts, each with latents of real text, that text, and generated latents.

    `decoder_nll` is -log p of the real tokens, `decoder_nll_other` with the latents of another text; `decoder_gap` is the
    difference, and `decoder_changed` the share of most probable tokens that change. `decoder_confidence` is log p of the
    decoder's own tokens, `decoder_confidence_generated` on generated latents, where `is_text` tells which tokens count.
    """
    total: defaultdict[str, float] = defaultdict(float)
    for latents, batch, generated_BND in parts:
        assert latents.logits is not None
        z, tokens_BL = latents.z_BND, batch.tokens_BL
        mask_BL = batch.real_BL
        own, other = (latents.logits(of, tokens_BL) for of in (z, z.roll(1, 0)))
        total["real"] += int(mask_BL.sum())
        total["nll"] -= float(log_p(own, tokens_BL)[mask_BL].sum())
        total["nll_other"] -= float(log_p(other, tokens_BL)[mask_BL].sum())
        total["changed"] += int((own.argmax(-1) != other.argmax(-1))[mask_BL].sum())
        total["confidence"] += float(log_p(latents.logits(z, found := latents.decode(z)), found)[mask_BL].sum())
        found = latents.decode(generated_BND)
        total["confidence_generated"] += float(log_p(latents.logits(generated_BND, found), found)[is_text(found)].sum())
        total["generated"] += int(is_text(found).sum())
    counts = {"confidence_generated": total.pop("generated")}
    real = total.pop("real")
    means = {name: value / max(1, counts.get(name, real)) for name, value in total.items()}
    means["gap"] = means["nll_other"] - means["nll"]
    return {f"decoder_{name}": value for name, value in means.items()}


def log_p(logits_BLV: Tensor, tokens_BL: Tensor) -> Tensor:
    """Return log p of tokens (B, L)."""
    return logits_BLV.float().log_softmax(-1).gather(-1, tokens_BL[..., None])[..., 0]
