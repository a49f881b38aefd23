"""Tasks beside free writing: held-out prompts that are continued, and templates of held-out text that are filled in."""

from __future__ import annotations

from functools import partial
from typing import Any

from jpeg_dlm.evaluation.continuation import continuation
from jpeg_dlm.evaluation.evaluate import Evaluation
from jpeg_dlm.evaluation.infill import infill
from jpeg_dlm.evaluation.sources import ModelSource


def task_results(task: str, source: ModelSource, evaluation: Evaluation, scale: float = 1.0) -> list[dict[str, Any]]:
    """Return the results of 'continue' or 'infill' for every sampler and seed of a request; `scale` is over the context."""
    request, n = evaluation.request, evaluation.request.n or evaluation.protocol.n
    do = infill if task == "infill" else partial(continuation, mauve=request.mauve, scale=scale)
    return [
        do(source, evaluation.scorer, n, seed, sampler, evaluation.parts, evaluation.console)
        for sampler in request.variants(source.model.config.sampler)
        for seed in request.seeds
    ]
