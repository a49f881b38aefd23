"""Sampling targets of sources, whether a method reads them beside the row or as tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jpeg_dlm.flow.sampler import TextSampler, Watch
from jpeg_dlm.methods.base import FREE, Batch, Method
from jpeg_dlm.util.errors import MissingPackageError
from jpeg_dlm.util.rng import RowNoise


def sample(
    writer: TextSampler,
    sampler: Any,
    noise: RowNoise,
    watch: Watch | None = None,
    fixed_BL: Tensor | None = None,
    source: Batch | None = None,
    **more: Any,
) -> Tensor:
    """Write token ids (B, L): targets of `source` if it is given."""
    if source is None:
        return writer.sample(sampler, noise, watch, fixed_BL, **more)
    if not isinstance(writer, Method) or writer.sources == "beside":  # exported networks are those of JPEG-DLM
        return writer.sample(sampler, noise, watch, fixed_BL, source=source, **more)
    size = writer.config.data.token_len
    free_BL = torch.full((len(noise.rows), size), FREE, device=noise.device) if fixed_BL is None else fixed_BL
    see = watch and (lambda step, steps, t, tokens: watch(step, steps, t, lambda: tokens()[:, -size:]))
    return writer.sample(sampler, noise, see, torch.cat([source.tokens_BL, free_BL], 1), **more)[:, -size:]


def most_agreed(texts: Sequence[str], candidates: int) -> list[str]:
    """Return of every so many texts the one with the highest chrF against all of them: the least Bayes risk."""
    if candidates == 1:
        return list(texts)
    try:
        from sacrebleu import sentence_chrf
    except ImportError as error:
        raise MissingPackageError("sacrebleu", "eval", "The choice among candidates") from error
    groups = [texts[i : i + candidates] for i in range(0, len(texts), candidates)]
    return [max(group, key=lambda text: sum(sentence_chrf(text, [other]).score for other in group)) for group in groups]
