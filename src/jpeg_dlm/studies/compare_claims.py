"""Whether JPEG-DLM writes better text than the other systems of a comparison (Table 1), judged over trainings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from jpeg_dlm.results.table import Table
from jpeg_dlm.studies.compare import ScoredPoint
from jpeg_dlm.studies.conjectures import better_text, conjecture_table, judge

OURS = "JPEG-DLM"


def claims_table(scored: Sequence[Mapping[str, Any]]) -> Table | None:
    """Return the verdicts after the last budget; None without JPEG-DLM, without others, or with one training each."""
    titles = [row["title"] for row in scored]
    others = [title for title in titles if title != OURS]
    if OURS not in titles or not others or max(len(row["points"][-1].runs) for row in scored) < 2:
        return None
    pairs = (better_text(OURS, other, f"{OURS} writes better text than {other}") for other in others)
    return conjecture_table(judge(list(chain.from_iterable(pairs)), [_as_variant(row) for row in scored]))


def _as_variant(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trainings of a system as those of a variant of a study."""
    point: ScoredPoint = row["points"][-1]
    measures = {name: point.scores.measures[name]["values"] for name in ("gen_ppl", "mauve") if name in point.scores.measures}
    each = [{name: values[i] for name, values in measures.items()} for i in range(len(point.runs))]
    runs = [{"measures": values, "reconstruction": None, "latents": {}} for values in each]
    return {"label": row["title"], "facts": {}, "degenerate": point.scores.degenerate, "runs": runs}
