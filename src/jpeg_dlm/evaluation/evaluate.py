"""Score generated text with real and word-shuffled text of the same length, by one scorer and one protocol."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from jpeg_dlm import __version__
from jpeg_dlm.config_io import to_dict
from jpeg_dlm.errors import MissingPackageError
from jpeg_dlm.evaluation.entry import EvaluationEntry, EvaluationResult, Frame, ModelFacts, ScoredRun
from jpeg_dlm.evaluation.figures import TextFigures, figures, ids_are_the_scorers, mauve_or_reason
from jpeg_dlm.evaluation.length_overlap import length_overlap
from jpeg_dlm.evaluation.protocols import Protocol
from jpeg_dlm.evaluation.sources import ModelSource, Real, Source, SourceTexts
from jpeg_dlm.evaluation.summary import measures_of, notes, warnings, way
from jpeg_dlm.machine.console import Console
from jpeg_dlm.results.resumable import Parts
from jpeg_dlm.rng import generator
from jpeg_dlm.scorers.mauve_score import mauve_installed
from jpeg_dlm.scorers.scoring import PAPER_SCORER_TOKENS, Scorer
from jpeg_dlm.text.text_metrics import shuffle_words
from jpeg_dlm.wording import counted

FORMAT = 1  # of the partial results; those of another format are not reused
SHUFFLE_SEED = 0
UNCUT = 1 << 20  # most tokens counted when measuring the length of a text
MAUVE_SHARE = 0.75  # paper: both budgets keep 75% of the nominal length
LONGEST = 0.95  # real texts of other lengths are cut where this share of the generated ones ends (assumed)
SHOWN = 16  # texts kept in the results


@dataclass(frozen=True)
class EvaluationRequest:
    """Settings of an evaluation; empty steps and solvers mean the model's own."""

    protocol: Protocol
    seeds: tuple[int, ...] = (0,)
    n: int | None = None
    steps: tuple[int, ...] = ()
    solvers: tuple[str, ...] = ()
    sampler: Mapping[str, Any] = field(default_factory=dict)
    mauve: Literal["auto", "on", "off"] = "auto"

    def variants(self, sampler: Any) -> list[dict[str, Any]]:
        """Return the options of every point of the sweep, leaving out steps or solver if the sampler has none."""
        steps = [{"steps": k} for k in self.steps if hasattr(sampler, "steps")] or [{}]
        solvers = [{"solver": name} for name in self.solvers if hasattr(sampler, "solver")] or [{}]
        return [{**self.sampler, **solver, **k} for solver, k in itertools.product(solvers, steps)]


class Evaluation:
    """Evaluates sources by one scorer and one request; `parts` stores partial results."""

    def __init__(self, scorer: Scorer, request: EvaluationRequest, parts: Parts, console: Console) -> None:
        self.scorer, self.request, self.parts, self.console = scorer, request, parts, console
        self.protocol = request.protocol
        if request.mauve == "on" and not mauve_installed():
            raise MissingPackageError("mauve-text", "eval", "MAUVE")
        self.conditions = {
            "format": FORMAT,
            "version": __version__,
            "protocol": asdict(self.protocol),
            "scorer": scorer.name,
            "scorer_hash": scorer.hash,
            "scorer_precision": scorer.precision,
        }
        self._features: dict[Any, Any] = {}

    def result(self, entries: Sequence[EvaluationEntry], tasks: Mapping[str, Any] | None = None) -> EvaluationResult:
        """Return entries and the rows of other tasks together with the conditions of the evaluation."""
        more = {"scorer_context": self.scorer.context, "mauve": self.request.mauve}
        return EvaluationResult(self.conditions | more, entries, tasks or {})

    def entries(self, source: Source) -> list[EvaluationEntry]:
        """Return one entry for each point of the sweep."""
        variants = self.request.variants(source.model.config.sampler) if source.model else [{}]
        return [self.entry(source, variant) for variant in variants]

    # ------------------------------------------------------------ one system with one sampler

    def entry(self, source: Source, sampler: dict[str, Any]) -> EvaluationEntry:
        """Evaluate all seeds of a source, and real text for comparison."""
        runs = source.runs(self.request.seeds)
        first = self.texts(source, runs[0], sampler)
        real = source.real(len(first.texts), self.protocol.text == "specials")
        real = replace(real, texts=self.cased(real.texts))
        frame = self.frame(source, first, real)
        beside = self.real_figures(source, real, frame)
        parts = [self.scored(source, run, sampler, first if run == runs[0] else None, real, frame) for run in runs]
        measures = measures_of(parts)
        return EvaluationEntry(
            name=source.name,
            reference=real.origin,
            frame=frame,
            model=self.facts(source, sampler, runs, len(first.texts)) if isinstance(source, ModelSource) else None,
            identity={k: v for k, v in source.identity(runs[0], sampler).items() if k != "seed"},
            measures=measures,
            figures={"generated": parts[0].figures, **beside},
            way_from_shuffled_to_real=way(measures["gen_ppl"]["mean"], beside["shuffled"].gen_ppl, beside["real"].gen_ppl),
            entropy_gap=measures["entropy"]["mean"] - beside["real"].entropy,
            degenerate=warnings(measures, beside["real"]),
            notes=notes(parts, beside["real"]),
            runs=parts,
        )

    def facts(self, source: ModelSource, sampler: dict[str, Any], seeds: Sequence[int], n: int) -> ModelFacts:
        """Describe the model and the sampler of an entry of n texts."""
        config, options = source.model.config, source.options(sampler)
        return ModelFacts(
            method=config.method, title=source.model.method.title, preset=config.preset, config=to_dict(config),
            sampler=to_dict(options), sampler_label=options.label(), evaluations=source.evaluations(sampler),
            rate=config.rate, seeds=seeds, reconstruction=self.reconstruction(source, 4 * n),
        )  # fmt: skip

    def n(self, source: Source) -> int | None:
        return self.request.n or (self.protocol.n if source.model else None)

    def texts(self, source: Source, run: int, sampler: dict[str, Any]) -> SourceTexts:
        """Return the texts of one run; store those of a model, since sampling takes the most time."""
        n, specials = self.n(source), self.protocol.text == "specials"
        if source.model is None:
            return self.cased(source.write(run, n, sampler, specials))

        def make() -> dict[str, Any]:
            self.console.say(f"{self.label(source, sampler)}: writing {counted(n or 0, 'text')} of seed {run} ...")
            return asdict(source.write(run, n, sampler, specials))

        depends = {"kind": "texts", "format": FORMAT, "version": __version__, "n": n, "specials": specials}
        depends |= source.identity(run, sampler)
        return self.cased(
            SourceTexts(**self.parts.get_or_make(f"texts-{self.label(source, sampler)}-seed{run}", depends, make))
        )

    def cased(self, texts: SourceTexts) -> SourceTexts:
        """Convert texts to lower case if the protocol requires it."""
        return replace(texts, texts=[text.lower() for text in texts.texts]) if self.protocol.lower else texts

    def label(self, source: Source, sampler: Mapping[str, Any]) -> str:
        return "-".join([source.name, *(str(sampler[k]) for k in ("solver", "steps") if k in sampler)])

    def frame(self, source: Source, first: SourceTexts, real: Real) -> Frame:
        """Derive the settings of all seeds from the first one."""
        token_len = source.model.config.data.token_len if source.model else None
        generated, reference = self.median_length(first), self.median_length(real.texts)
        budget = self.protocol.mauve_tokens or int(MAUVE_SHARE * min(generated, reference))
        return Frame(
            limit=max(2, self.protocol.max_tokens or token_len or PAPER_SCORER_TOKENS),
            cut=None if real.same_length else max(2, self.longest(first)),
            budget=max(1, min(budget, self.scorer.context)),
            own_entropy=self.protocol.entropy == "model" and source.model is not None,
            ids=self.protocol.text == "ids" and ids_are_the_scorers(self.scorer, first),
        )

    def lengths(self, texts: SourceTexts) -> list[int]:
        return [len(self.scorer.encode(text, UNCUT)) for text in texts.texts if text.strip()]

    def median_length(self, texts: SourceTexts) -> float:
        return statistics.median(self.lengths(texts) or [0])

    def longest(self, texts: SourceTexts) -> int:
        """Return the length that `LONGEST` of the texts do not exceed, so that texts of varied length are hardly cut."""
        lengths = sorted(self.lengths(texts)) or [0]
        return lengths[math.ceil(LONGEST * len(lengths)) - 1]

    # ------------------------------------------------------------ scoring

    def scored(
        self, source: Source, run: int, sampler: dict[str, Any], texts: SourceTexts | None, real: Real, frame: Frame
    ) -> ScoredRun:
        """Return figures, lengths and MAUVE of one run."""
        texts = texts or self.texts(source, run, sampler)
        asked = self.request.mauve != "off" and mauve_installed()
        depends = self.conditions | {
            "kind": "scores", "texts_sha256": texts.sha256, "real_sha256": real.texts.sha256, "frame": asdict(frame),
            "mauve": asked, **source.identity(run, sampler),
        }  # fmt: skip

        def make() -> dict[str, Any]:
            generated_lengths, real_lengths = self.lengths(texts), self.lengths(real.texts)
            return asdict(ScoredRun(
                run=run,
                identity=source.identity(run, sampler),
                figures=self.figures(f"{self.label(source, sampler)}, seed {run}", texts, frame, frame.limit),
                lengths=length_overlap(generated_lengths, real_lengths) if generated_lengths and real_lengths else None,
                mauve=mauve_or_reason(
                    self.request.mauve, len(generated_lengths), len(real_lengths),
                    lambda: (self.features(texts, frame.budget), self.features(real.texts, frame.budget)),
                    self.protocol.kmeans,
                ) | {"tokens": frame.budget},
                throughput=throughput(texts),
                cut_lines=texts.cut_lines,
                samples=texts.texts[:SHOWN],
                texts_sha256=texts.sha256,
            ))  # fmt: skip

        found = self.parts.get_or_make(f"scores-{self.label(source, sampler)}-seed{run}", depends, make)
        found["figures"] = TextFigures(**found["figures"])
        return ScoredRun(**found)

    def real_figures(self, source: Source, real: Real, frame: Frame) -> dict[str, TextFigures]:
        """Score the real texts and their shuffled words like the generated ones."""
        limit = min(frame.limit, frame.cut or frame.limit)
        depends = self.conditions | {
            "kind": "real", "texts_sha256": real.texts.sha256, "limit": limit, "own": frame.own_entropy,
            "tokenizer": source.model.tokenizer.fingerprint if source.model else None,
        }  # fmt: skip

        def make() -> dict[str, Any]:
            g = generator(SHUFFLE_SEED, "shuffle")
            mixed = [shuffle_words(text, g) for text in real.texts.texts]
            own = [source.model.tokenizer.encode(text) for text in mixed] if frame.own_entropy and source.model else None
            return {
                "real": asdict(self.figures("real text", real.texts, frame, limit, ids=False)),
                "shuffled": asdict(self.figures("shuffled text", SourceTexts(mixed, own), frame, limit, ids=False)),
            }

        return {name: TextFigures(**values) for name, values in self.parts.get_or_make("real", depends, make).items()}

    def figures(self, title: str, texts: SourceTexts, frame: Frame, limit: int, ids: bool = True) -> TextFigures:
        kept = len(texts.texts)
        if self.protocol.batch_rule and kept >= self.protocol.batch_rule:
            kept -= kept % self.protocol.batch_rule
        raw = texts.ids[:kept] if ids and frame.ids and texts.ids else None
        with self.console.progress(f"Scoring {title}", "texts") as progress:
            scores = self.scorer.nll(
                texts.texts[:kept], limit, self.protocol.bos, progress, self.protocol.scored, raw, self.protocol.stride
            )  # fmt: skip
        own = texts.ids[:kept] if frame.own_entropy and texts.ids else None
        window = (limit if self.protocol.stride else min(limit, self.scorer.context)) - self.protocol.bos
        truncated = sum(length > window for length in self.lengths(SourceTexts(texts.texts[:kept])))
        return figures(scores, self.protocol.aggregate, own, truncated, len(texts.texts) - kept)

    def features(self, texts: SourceTexts, budget: int) -> Any:
        key = (texts.sha256, budget)
        if key not in self._features:
            with self.console.progress("Features for MAUVE", "texts") as progress:
                self._features[key] = self.scorer.features(texts.texts, budget, progress).numpy()
        return self._features[key]

    def reconstruction(self, source: ModelSource, n: int) -> float | None:
        depends = {"kind": "reconstruction", "n": n, "version": __version__, "checkpoint_sha256": source.sha256}
        depends |= {"heldout": source.heldout.fingerprint if source.heldout else None}
        found = self.parts.get_or_make(f"codec-{source.name}", depends, lambda: {"share": source.reconstruction(n)})
        return found["share"]


def throughput(texts: SourceTexts) -> dict[str, Any] | None:
    """Return texts and tokens per second of sampling; `jpeg-dlm benchmark` measures them by the paper's rule instead."""
    if not texts.seconds:
        return None
    tokens = sum(map(len, texts.ids or []))
    return {
        "seconds": texts.seconds,
        "texts_per_second": len(texts.texts) / texts.seconds,
        "tokens_per_second": tokens / texts.seconds,
    }
