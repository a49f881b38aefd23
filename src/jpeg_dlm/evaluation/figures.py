"""The numbers of one set of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jpeg_dlm.errors import reason_of
from jpeg_dlm.evaluation.sources import SourceTexts
from jpeg_dlm.scorers.mauve_score import KMeans, mauve_installed, mauve_score, too_few
from jpeg_dlm.scorers.scoring import Scorer
from jpeg_dlm.text.text_metrics import (
    Aggregate,
    TextScore,
    degenerate_share,
    distinct_n,
    perplexity,
    perplexity_interval,
    repetition_rate,
    unigram_entropy,
)


@dataclass(frozen=True)
class TextFigures:
    """The scores of one set of texts."""

    texts: int
    skipped: int  # blank, or too short to be scored
    truncated: int  # longer than what is scored of a text
    dropped: int  # beyond the last full batch, where the protocol says so
    tokens: int  # scored
    gen_ppl: float
    gen_ppl_low: float
    gen_ppl_high: float
    entropy: float
    entropy_ids: str  # whose tokens the entropy is over
    distinct_1: float
    distinct_2: float
    distinct_3: float
    repetition_4: float
    degenerate_share: float


def figures(
    scores: list[TextScore],
    aggregate: Aggregate = "corpus",
    own_ids: Sequence[Sequence[int]] | None = None,
    truncated: int = 0,
    dropped: int = 0,
) -> TextFigures:
    """Perplexity with its 95% bootstrap interval over texts, entropy in nats, and signs of repetition."""
    ids = [score.token_ids for score in scores]
    low, high = perplexity_interval(scores, aggregate)
    return TextFigures(
        texts=len(scores), skipped=sum(s.skipped for s in scores), truncated=truncated, dropped=dropped,
        tokens=sum(s.n_tokens for s in scores), gen_ppl=perplexity(scores, aggregate), gen_ppl_low=low, gen_ppl_high=high,
        entropy=unigram_entropy(ids if own_ids is None else own_ids), entropy_ids="scorer" if own_ids is None else "model",
        distinct_1=distinct_n(ids, 1), distinct_2=distinct_n(ids, 2), distinct_3=distinct_n(ids, 3),
        repetition_4=repetition_rate(ids), degenerate_share=degenerate_share(ids),
    )  # fmt: skip


def ids_are_the_scorers(scorer: Scorer, texts: SourceTexts) -> bool:
    """Return True if a model's ids mean the same to the scorer, so that they can be scored without going through text."""
    if not texts.ids:
        return False
    try:
        return all(scorer.decode(ids).split() == text.split() for text, ids in zip(texts.texts[:8], texts.ids, strict=False))
    except (OverflowError, IndexError, TypeError, ValueError):  # an id that the scorer does not have
        return False


def mauve_or_reason(
    asked: str, generated: int, real: int, features: Callable[[], tuple[np.ndarray, np.ndarray]], kmeans: KMeans = "mean"
) -> dict[str, Any]:
    """MAUVE, or in `skipped` why there is none: it is one figure of several, so its absence stops nothing."""
    if asked == "off":
        return {"skipped": "MAUVE was not asked for"}
    reason = too_few(generated, real)
    if reason is None and not mauve_installed():
        reason = "MAUVE needs the package 'mauve-text': install it with  pip install 'jpeg-dlm[eval]'"
    if reason:
        return {"skipped": reason}
    try:
        return mauve_score(*features(), kmeans=kmeans)
    except (ValueError, RuntimeError, AssertionError, np.linalg.LinAlgError) as error:
        return {"skipped": f"MAUVE could not be computed ({reason_of(error)})"}
