"""Score generated text with real and word-shuffled text of the same length, by one scorer and one protocol."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from jpeg_dlm import __version__
from jpeg_dlm.evaluation import metrics, results
from jpeg_dlm.evaluation.cache import DiskCache
from jpeg_dlm.evaluation.frontier import curves_of
from jpeg_dlm.evaluation.protocols import Protocol
from jpeg_dlm.evaluation.results import LengthLimits, ModelInfo, ScoredRun, SystemResult, TextStats
from jpeg_dlm.evaluation.scorer import PAPER_SCORER_TOKENS, Scorer
from jpeg_dlm.evaluation.suite import suite_installed
from jpeg_dlm.evaluation.texts import ModelSource, Real, Source, SourceTexts
from jpeg_dlm.options import to_dict
from jpeg_dlm.util.console import Console
from jpeg_dlm.util.errors import MissingPackageError, counted, reason_of
from jpeg_dlm.util.rng import generator

FORMAT = 3  # of the partial results; those of another format are not reused
SHUFFLE_SEED = 0
UNCUT = 1 << 20  # most tokens counted when measuring the length of a text
MAUVE_TEXTS = 100  # of each kind at least: a cluster per ten texts, and fewer than ten clusters are too coarse
MAUVE_SHARE = 0.75  # paper: both budgets keep 75% of the nominal length
LONGEST = 0.95  # real texts of other lengths are cut where this share of the generated ones ends (assumed)
SHOWN = 16  # texts kept in the results


@dataclass(frozen=True)
class EvaluationRequest:
    """Settings of an evaluation; `sampler` has one or several values of options, those left out are the model's own."""

    protocol: Protocol
    seeds: tuple[int, ...] = (0,)
    n: int | None = None
    sampler: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    mauve: metrics.MauveMode = "auto"
    frontier: bool = False
    distances: bool = False  # for models too, not only for texts of files

    def options(self, sampler: Any) -> dict[str, Sequence[Any]]:
        """Return the values of every option that a sampler has; for a frontier, at least one has several."""
        options = {name: values for name, values in self.sampler.items() if hasattr(sampler, name)}
        swept = any(len(values) > 1 for values in options.values())
        return options | (getattr(sampler, "frontier", {}) if self.frontier and not swept else {})

    def variants(self, sampler: Any) -> list[dict[str, Any]]:
        """Return the options of every point of the sweep."""
        options = self.options(sampler)
        return [dict(zip(options, point, strict=True)) for point in itertools.product(*options.values())]


@dataclass(frozen=True)
class ComparedTexts:
    """The texts of all runs of an entry, for figures that take the features of several entries."""

    label: str
    source: Source
    runs: Sequence[SourceTexts]
    mauve: Sequence[Mapping[str, Any]]
    real: Real
    tokens: int  # of a text for its features


class Evaluation:
    """Evaluates sources by one scorer and one request; `cache` stores partial results."""

    def __init__(self, scorer: Scorer, request: EvaluationRequest, cache: DiskCache, console: Console) -> None:
        self.scorer, self.request, self.cache, self.console = scorer, request, cache, console
        self.protocol = request.protocol
        if request.mauve == "on" and not metrics.mauve_installed():
            raise MissingPackageError("mauve-text", "eval", "MAUVE")
        if request.distances and not suite_installed():
            raise MissingPackageError("scikit-learn", "eval", "--distances")
        self.conditions = {
            "format": FORMAT,
            "version": __version__,
            "protocol": asdict(self.protocol),
            "scorer": scorer.name,
            "scorer_hash": scorer.hash,
            "scorer_precision": scorer.precision,
        }
        self._features: dict[Any, Any] = {}
        self._budgets: dict[str, int] = {}
        self.compared: list[ComparedTexts] = []

    def result(self, entries: Sequence[SystemResult], tasks: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return entries and the rows of other tasks together with the conditions of the evaluation."""
        more = {"scorer_context": self.scorer.context, "mauve": self.request.mauve, "entries": entries}
        frontier = {"frontier": curves_of(entries, self.protocol.aggregate)} if self.request.frontier else {}
        return {**self.conditions, **more, **frontier, **(tasks or {})}

    def entries(self, source: Source) -> list[SystemResult]:
        """Return one entry for each point of the sweep."""
        variants = self.request.variants(source.model.config.sampler) if isinstance(source, ModelSource) else [{}]
        return [self.entry(source, variant) for variant in variants]

    def entry(self, source: Source, sampler: dict[str, Any]) -> SystemResult:
        """Evaluate all seeds of a source, and real text for comparison."""
        runs = source.runs(self.request.seeds)
        first = self.texts(source, runs[0], sampler)
        real = source.real(len(first.texts), self.protocol.text == "specials")
        real = replace(real, texts=self.cased(real.texts))
        limits = self.limits(source, first, real)
        baselines = self.real_stats(source, real, limits)
        texts = [first, *(self.texts(source, run, sampler) for run in runs[1:])]
        scored = [self.scored(source, run, sampler, own, real, limits) for run, own in zip(runs, texts, strict=True)]
        measures = results.measures_of(scored)
        generated, shuffled, true = measures["gen_ppl"]["mean"], baselines["shuffled"].gen_ppl, baselines["real"].gen_ppl
        entry = SystemResult(
            name=source.name,
            reference=real.origin,
            limits=limits,
            model=self.model_info(source, sampler, runs, len(first.texts)) if isinstance(source, ModelSource) else None,
            identity={k: v for k, v in source.identity(runs[0], sampler).items() if k != "seed"},
            measures=measures,
            stats={"generated": scored[0].stats, **baselines},
            log_ppl_position=results.log_ppl_position(generated, shuffled, true),
            entropy_gap=measures["entropy"]["mean"] - baselines["real"].entropy,
            degenerate=results.warnings(measures, baselines["real"]),
            notes=results.notes(scored, baselines["real"]),
            runs=scored,
        )
        if self.request.distances or (source.model is None and self.request.mauve != "off"):
            mauve = [run.mauve for run in scored]
            self.compared.append(ComparedTexts(entry.label, source, texts, mauve, real, limits.mauve_tokens))
        return entry

    def model_info(self, source: ModelSource, sampler: dict[str, Any], seeds: Sequence[int], n: int) -> ModelInfo:
        """Describe the model and the sampler of an entry of n texts."""
        config, options = source.model.config, source.model.sampler_options(**sampler)
        swept = self.request.options(config.sampler)
        return ModelInfo(
            method=config.method,
            title=source.model.method.title,
            preset=config.preset,
            config=to_dict(config),
            sampler=to_dict(options),
            sampler_label=", ".join([options.label(), *self.silent(source, sampler)]),
            swept={name: getattr(options, name) for name, values in swept.items() if len(values) > 1},
            evaluations=options.evaluations(config.data.token_len),
            rate=config.rate,
            seeds=seeds,
            reconstruction=self.reconstruction(source, 4 * n),
        )

    def silent(self, source: ModelSource, sampler: dict[str, Any]) -> list[str]:
        """Return the swept options of a point that the label of a sampler does not tell apart."""
        unnamed = []
        for name, values in self.request.options(source.model.config.sampler).items():
            labels = {source.model.sampler_options(**{**sampler, name: value}).label() for value in values}
            unnamed += [f"{name} {sampler[name]}"] if len(labels) < len(values) else []
        return unnamed

    def texts(self, source: Source, run: int, sampler: dict[str, Any]) -> SourceTexts:
        """Return the texts of one run; store those of a model, since sampling takes the most time."""
        n, specials = self.request.n or (self.protocol.n if source.model else None), self.protocol.text == "specials"
        if source.model is None:
            return self.cased(source.write(run, n, sampler, specials))

        def make() -> dict[str, Any]:
            self.console.say(f"{self.label(source, sampler)}: writing {counted(n or 0, 'text')} of seed {run} ...")
            return asdict(source.write(run, n, sampler, specials))

        depends = {"kind": "texts", "format": FORMAT, "version": __version__, "n": n, "specials": specials}
        depends |= source.identity(run, sampler)
        return self.cased(
            SourceTexts(**self.cache.get_or_compute(f"texts-{self.label(source, sampler)}-seed{run}", depends, make))
        )

    def cased(self, texts: SourceTexts) -> SourceTexts:
        """Convert texts to lower case if the protocol requires it."""
        return replace(texts, texts=[text.lower() for text in texts.texts]) if self.protocol.lower else texts

    def label(self, source: Source, sampler: Mapping[str, Any]) -> str:
        return " ".join([source.name, *(f"{name} {value}" for name, value in sampler.items())])

    def limits(self, source: Source, first: SourceTexts, real: Real) -> LengthLimits:
        """Derive the settings of all seeds from the first one."""
        token_len = source.model.config.data.token_len if source.model else None
        generated, reference = (sorted(self.lengths(texts)) or [0] for texts in (first, real.texts))
        budget = self.protocol.mauve_tokens or int(MAUVE_SHARE * min(map(statistics.median, (generated, reference))))
        longest = generated[math.ceil(LONGEST * len(generated)) - 1]
        max_tokens = max(2, self.protocol.max_tokens or token_len or PAPER_SCORER_TOKENS)
        whole = self.protocol.whole and source.model is None
        if whole:
            budget = max_tokens
        elif self.request.distances:  # features compare only if they are of as many tokens
            budget = self._budgets.setdefault(real.texts.sha256, budget)
        return LengthLimits(
            max_tokens=max_tokens,
            max_real_tokens=None if real.same_length or whole else max(2, longest),
            mauve_tokens=max(1, min(budget, self.scorer.context)),
            entropy_over_model_ids=self.protocol.entropy == "model" and source.model is not None,
            score_raw_ids=self.protocol.text == "ids" and ids_are_the_scorers(self.scorer, first),
        )

    def lengths(self, texts: SourceTexts) -> list[int]:
        return [len(self.scorer.encode(text, UNCUT)) for text in texts.texts if text.strip()]

    def scored(
        self, source: Source, run: int, sampler: dict[str, Any], texts: SourceTexts, real: Real, limits: LengthLimits
    ) -> ScoredRun:
        """Return figures, lengths and MAUVE of one run."""
        identity, label = source.identity(run, sampler), self.label(source, sampler)
        depends = self.conditions | {"kind": "scores", "limits": asdict(limits), **identity}
        depends |= {"texts_sha256": texts.sha256, "real_sha256": real.texts.sha256}
        depends |= {"mauve": self.request.mauve != "off" and metrics.mauve_installed()}

        def compute() -> dict[str, Any]:
            lengths = self.lengths(texts), self.lengths(real.texts)
            scored = ScoredRun(
                run=run,
                identity=identity,
                stats=self.text_stats(f"{label}, seed {run}", texts, limits, limits.max_tokens),
                lengths=metrics.length_overlap(*lengths) if all(lengths) else None,
                mauve=self.mauve(texts, real.texts, limits.mauve_tokens),
                throughput=texts.throughput,
                samples=texts.texts[:SHOWN],
                texts_sha256=texts.sha256,
            )
            return asdict(scored)

        content = self.cache.get_or_compute(f"scores-{label}-seed{run}", depends, compute)
        stats = TextStats(**content.pop("stats"))
        return ScoredRun(stats=stats, **content)

    def mauve(self, texts: SourceTexts, real: SourceTexts, tokens: int) -> dict[str, Any]:
        """Return MAUVE of the first `tokens` of texts, or in `skipped` why there is none, which stops nothing."""
        counts = [sum(bool(text.strip()) for text in each.texts) for each in (texts, real)]
        if self.request.mauve == "off":
            reason = "was not asked for"
        elif min(counts) < MAUVE_TEXTS:
            reason = f"needs at least {MAUVE_TEXTS} texts of both kinds, not {counts[0]} generated and {counts[1]} real"
        elif not metrics.mauve_installed():
            reason = "needs the package 'mauve-text': install it with  pip install 'jpeg-dlm[eval]'"
        else:
            features = self.features(texts, tokens), self.features(real, tokens)
            try:
                return metrics.mauve_score(*features, kmeans=self.protocol.kmeans) | {"tokens": tokens}
            except (ValueError, RuntimeError, AssertionError, np.linalg.LinAlgError) as error:
                reason = f"could not be computed ({reason_of(error)})"
        return {"skipped": f"MAUVE {reason}", "tokens": tokens}

    def real_stats(self, source: Source, real: Real, limits: LengthLimits) -> dict[str, TextStats]:
        """Score the real texts and their shuffled words like the generated ones."""
        limit = min(limits.max_tokens, limits.max_real_tokens or limits.max_tokens)
        tokenizer = source.model.tokenizer if source.model else None
        depends = self.conditions | {"kind": "real", "texts_sha256": real.texts.sha256, "limit": limit}
        depends |= {"own": limits.entropy_over_model_ids, "tokenizer": tokenizer and tokenizer.fingerprint}

        def compute() -> dict[str, Any]:
            g = generator(SHUFFLE_SEED, "shuffle")
            shuffled = [metrics.shuffle_words(text, g) for text in real.texts.texts]
            ids = [tokenizer.encode(text) for text in shuffled] if limits.entropy_over_model_ids and tokenizer else None
            sets = {"real": real.texts, "shuffled": SourceTexts(shuffled, ids)}
            return {k: asdict(self.text_stats(f"{k} text", texts, limits, limit, ids=False)) for k, texts in sets.items()}

        return {name: TextStats(**values) for name, values in self.cache.get_or_compute("real", depends, compute).items()}

    def text_stats(self, title: str, texts: SourceTexts, limits: LengthLimits, limit: int, ids: bool = True) -> TextStats:
        """Return perplexity with its 95% bootstrap interval over texts, entropy in nats, and signs of repetition."""
        kept = len(texts.texts)
        if self.protocol.batch_rule and kept >= self.protocol.batch_rule:
            kept -= kept % self.protocol.batch_rule
        raw = texts.ids[:kept] if ids and limits.score_raw_ids and texts.ids else None
        with self.console.progress(f"Scoring {title}", "texts") as progress:
            scores = self.scorer.nll(
                texts.texts[:kept], limit, self.protocol.bos, progress, self.protocol.scored, raw, self.protocol.stride
            )
        own = texts.ids[:kept] if limits.entropy_over_model_ids and texts.ids else None
        window = (limit if self.protocol.stride else min(limit, self.scorer.context)) - self.protocol.bos
        truncated = sum(length > window for length in self.lengths(SourceTexts(texts.texts[:kept])))
        tokens = [score.token_ids for score in scores]
        low, high = metrics.perplexity_interval(scores, self.protocol.aggregate)
        return TextStats(
            texts=len(scores),
            skipped=sum(not s.n_tokens for s in scores),
            truncated=truncated,
            dropped=len(texts.texts) - kept,
            tokens=sum(s.n_tokens for s in scores),
            gen_ppl=metrics.perplexity(scores, self.protocol.aggregate),
            gen_ppl_low=low,
            gen_ppl_high=high,
            entropy=metrics.unigram_entropy(tokens if own is None else own),
            entropy_ids="scorer" if own is None else "model",
            distinct_1=metrics.distinct_n(tokens, 1),
            distinct_2=metrics.distinct_n(tokens, 2),
            distinct_3=metrics.distinct_n(tokens, 3),
            distinct_texts=metrics.distinct_share(texts.texts[:kept]),
            repetition_4=metrics.repetition_rate(tokens),
            degenerate_share=metrics.degenerate_share(tokens),
            by_text=[
                (score.nll_sum, score.n_tokens, metrics.unigram_entropy([ids]))
                for score, ids in zip(scores, tokens if own is None else own, strict=True)
                if len(ids)
            ],
        )

    def features(self, texts: SourceTexts, budget: int) -> Any:
        key = (texts.sha256, budget)
        if key not in self._features:
            with self.console.progress("Features for MAUVE", "texts") as progress:
                self._features[key] = self.scorer.features(texts.texts, budget, progress).numpy()
        return self._features[key]

    def reconstruction(self, source: ModelSource, n: int) -> float | None:
        depends = {"kind": "reconstruction", "n": n, "version": __version__, "checkpoint_sha256": source.sha256}
        depends |= {"heldout": source.heldout.fingerprint if source.heldout else None}
        compute = lambda: {"share": source.reconstruction(n)}  # noqa: E731
        return self.cache.get_or_compute(f"codec-{source.name}", depends, compute)["share"]


def ids_are_the_scorers(scorer: Scorer, texts: SourceTexts) -> bool:
    """Return True if a model's ids mean the same to the scorer, so that they can be scored without going through text."""
    if not texts.ids:
        return False
    try:
        return all(scorer.decode(ids).split() == text.split() for text, ids in zip(texts.texts[:8], texts.ids, strict=False))
    except (OverflowError, IndexError, TypeError, ValueError):  # an id that the scorer does not have
        return False
