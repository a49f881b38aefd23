"""Targets that a model writes for held-out sources, judged against all their references.

BLEU and chrF are sacrebleu's, ROUGE-L is rouge-score's. As a control, the same outputs are also scored against the references
of another source: what a model gains without reading its source.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import Any

import numpy as np

from jpeg_dlm import __version__
from jpeg_dlm.evaluation.brier import brier_lm
from jpeg_dlm.evaluation.cache import DiskCache
from jpeg_dlm.evaluation.texts import ModelSource, batches
from jpeg_dlm.util.console import Console
from jpeg_dlm.util.distributed import shared
from jpeg_dlm.util.errors import DataError, MissingPackageError, counted
from jpeg_dlm.util.rng import derive_seed

SHOWN = 8  # pairs kept in the results, unselected
RESAMPLES = 1000  # of the bootstrap over sources (assumed)


def heldout_pairs(source: ModelSource, n: int) -> list[dict[str, Any]]:
    """Return n held-out sources with their references, evenly spread over the file."""
    with open(source.blocks.folder / "heldout.jsonl", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    if not records or "references" not in records[0]:
        raise DataError(f"The held-out text of '{source.name}' has no sources: name pairs with --data.")
    count = min(n, len(records))
    return [records[i * len(records) // count] for i in range(count)]


def pair_scores(
    source: ModelSource,
    cache: DiskCache,
    console: Console,
    n: int,
    seeds: Sequence[int],
    sampler: dict[str, Any],
    candidates: int = 1,
) -> dict[str, Any]:
    """Write a target of each of n held-out sources with every seed, and score them."""
    pairs, options = heldout_pairs(source, n), source.model.sampler_options(**sampler)
    evaluations = candidates * options.evaluations(source.model.config.data.token_len)
    about = source.about(sampler, len(pairs), candidates=candidates) | {"evaluations": evaluations}

    def write(seed: int) -> dict[str, Any]:
        def targets(rows: range) -> tuple[list[str], float]:
            sources, began = [pair["source"] for pair in pairs[rows.start : rows.stop]], time.perf_counter()
            place = {"seed": seed, "first": rows.start * candidates, "batch": source.batch}
            texts = source.model.generate(1, source=sources, candidates=candidates, **place, **sampler)
            return texts, time.perf_counter() - began

        console.say(f"{source.name}: writing targets of {counted(len(pairs), 'source')} with seed {seed} ...")
        parts, seconds = zip(*shared(batches(len(pairs), source.batch), targets), strict=True)
        return {"texts": [text for part in parts for text in part], "seconds": sum(seconds)}

    runs = []
    for seed in seeds:
        depends = about | {"kind": "pairs", "version": __version__} | source.identity(seed, sampler)
        runs.append(cache.get_or_compute(f"pairs-{source.name}-seed{seed}", depends, partial(write, seed)))
    texts = [run["texts"] for run in runs]
    ids = [[source.model.tokenizer.encode(text) for text in of_seed] for of_seed in texts]
    real = [[source.model.tokenizer.encode(text) for text in pair["references"]] for pair in pairs]
    shown = islice(zip(pairs, texts[0], strict=True), SHOWN)
    return {
        **about,
        "seeds": list(seeds),
        **scores(texts, [pair["references"] for pair in pairs]),
        **(brier_lm(ids[0], ids[1], real) if len(ids) > 1 else {}),
        "texts_per_second": len(pairs) * len(runs) / sum(run["seconds"] for run in runs),
        "samples": [{"source": pair["source"], "written": text, "references": pair["references"]} for pair, text in shown],
    }


def scores(texts: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the figures of one list of outputs for each seed: means over seeds, and the interval of BLEU over sources."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
        from sacrebleu import BLEU, CHRF
    except ImportError as error:
        raise MissingPackageError("sacrebleu and rouge-score", "eval", "The evaluation of pairs") from error
    far = max(1, len(references) // 2)  # sources near to each other may be alike
    others = [*references[far:], *references[:far]]
    rouge = RougeScorer(["rougeL"], use_stemmer=True)
    streams, other_streams = _streams(references), _streams(others)

    def mean(score: Callable[[Sequence[str]], float]) -> float:
        return float(np.mean([score(outputs) for outputs in texts]))

    def exact(outputs: Sequence[str]) -> float:
        return float(np.mean([text in refs for text, refs in zip(outputs, references, strict=True)]))

    def rouge_l(outputs: Sequence[str]) -> float:
        pairs = zip(outputs, references, strict=True)
        return 100 * float(np.mean([max(rouge.score(ref, text)["rougeL"].fmeasure for ref in refs) for text, refs in pairs]))

    low, high = bleu_interval(texts, references)
    figures = {
        "bleu": mean(lambda outputs: BLEU().corpus_score(outputs, streams).score),
        "bleu_low": low,
        "bleu_high": high,
        "chrf": mean(lambda outputs: CHRF().corpus_score(outputs, streams).score),
        "rouge_l": mean(rouge_l),
        "exact": mean(exact),
        "bleu_other_references": mean(lambda outputs: BLEU().corpus_score(outputs, other_streams).score),
    }
    if len(texts) > 1:  # how alike the outputs of two seeds are
        figures["self_bleu"] = float(np.mean([BLEU().corpus_score(a, [b]).score for a, b in pairwise(texts)]))
    return figures


def _streams(references: Sequence[Sequence[str]]) -> list[Any]:
    """Return references as sacrebleu takes them: the first of every source, the second or None, and so on."""
    return [[refs[i] if i < len(refs) else None for refs in references] for i in range(max(map(len, references)))]


def bleu_interval(texts: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> tuple[float, float]:
    """Return the 95% bootstrap interval, over sources, of the mean BLEU of all seeds; n-grams are counted once."""
    from sacrebleu import BLEU

    bleu, streams = BLEU(), _streams(references)
    counts = [np.array(bleu._extract_corpus_statistics(list(outputs), streams)) for outputs in texts]
    g = np.random.default_rng(derive_seed(0, "bleu"))
    draws = g.integers(len(references), size=(RESAMPLES, len(references)))
    score = lambda rows: bleu._compute_score_from_stats(rows.sum(0).tolist()).score  # noqa: E731
    low, high = np.percentile([np.mean([score(of_seed[rows]) for of_seed in counts]) for rows in draws], [2.5, 97.5])
    return float(low), float(high)
