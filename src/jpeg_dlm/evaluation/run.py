"""An evaluation as one job: which texts, which scorer, which tasks; a folder continues the same job and refuses another."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jpeg_dlm import __version__
from jpeg_dlm.api import load
from jpeg_dlm.evaluation import texts
from jpeg_dlm.evaluation.cache import DiskCache
from jpeg_dlm.evaluation.controls import CONTROLS, Control
from jpeg_dlm.evaluation.evaluate import Evaluation, EvaluationRequest
from jpeg_dlm.evaluation.likelihood import DRAWS, HELDOUT, has_likelihood, likelihood_row
from jpeg_dlm.evaluation.pairs import pair_scores
from jpeg_dlm.evaluation.plots import draw_controls, draw_frontier, draw_lengths, draw_sweep
from jpeg_dlm.evaluation.results import of_models
from jpeg_dlm.evaluation.scorer import build_scorer
from jpeg_dlm.evaluation.suite import distance_results
from jpeg_dlm.evaluation.table import to_json
from jpeg_dlm.evaluation.tasks import task_results
from jpeg_dlm.evaluation.texts import ModelSource, Source, TextBaseline
from jpeg_dlm.util.console import Console
from jpeg_dlm.util.distributed import main_first
from jpeg_dlm.util.errors import UsageError
from jpeg_dlm.util.files import write_atomic


@dataclass(frozen=True)
class EvaluationJob:
    """Everything that the results of an evaluation depend on; no sources mean the bundled model."""

    request: EvaluationRequest
    sources: Sequence[Path] = ()
    scorer: str | None = "smollm2"  # None: likelihood or pairs alone
    scorer_precision: str = "auto"
    task: Literal["write", "continue", "infill", "pairs"] = "write"
    context_scale: float = 1.0
    candidates: int = 1
    controls: bool = False
    likelihood: str | None = None  # the text, or HELDOUT
    likelihood_draws: int = DRAWS
    data: str | None = None
    reference: Path | None = None
    batch: int = 64

    def as_json(self) -> dict[str, object]:
        return json.loads(json.dumps(to_json(self), default=str))


def claim_folder(out: Path, job: EvaluationJob) -> None:
    """Claim a folder for one job: continue or repeat the same one, but reject any other."""
    path = out / "request.json"
    if (out / "results.json").exists() or (out / "parts").is_dir():
        try:
            same = json.loads(path.read_text("utf-8")) == job.as_json()
        except (OSError, ValueError):
            same = False
        if not same:
            raise UsageError(f"'{out}' holds results of another evaluation: name another folder, nothing was overwritten.")
    write_atomic(path, json.dumps(job.as_json(), indent=1) + "\n")


def run_job(job: EvaluationJob, cache: DiskCache, device: str, console: Console) -> dict[str, Any]:
    """Evaluate every source of a job, by the scorer and by the models themselves."""
    evaluation: Evaluation | None = None
    entries, first, tasks = [], None, {name: [] for name in ("likelihood", "continue", "infill", "pairs")}
    for source in job_sources(job, device, console):
        if job.likelihood and isinstance(source, ModelSource):
            seed, draws = job.request.seeds[0], job.likelihood_draws
            tasks["likelihood"].append(likelihood_row(source, cache, console, job.request.n, draws, seed, job.likelihood))
        if job.task == "pairs" and isinstance(source, ModelSource):
            n, variants = job.request.n or job.request.protocol.n, job.request.variants(source.model.config.sampler)
            scores = partial(pair_scores, source, cache, console, n, job.request.seeds, candidates=job.candidates)
            tasks["pairs"] += [scores(sampler=sampler) for sampler in variants]
        elif job.scorer:
            if evaluation is None:  # only now, so that errors of a source come before the download of a scorer
                scorer = main_first(partial(build_scorer, job.scorer, device, console, job.scorer_precision))
                evaluation = Evaluation(scorer, job.request, cache, console)
            if job.task == "write":
                entries += evaluation.entries(source)
                first = first or (source if isinstance(source, ModelSource) else None)
            elif isinstance(source, ModelSource):  # `job_sources` refused the others
                tasks[job.task] += task_results(job.task, source, evaluation, job.context_scale)
    if evaluation and first and job.controls:
        controls = [TextBaseline("unigram", first), *(Control(kind, first) for kind in CONTROLS)]
        entries += [evaluation.entry(control, {}) for control in controls]
    tasks = {name: rows for name, rows in tasks.items() if rows or (name == "likelihood" and job.likelihood)}
    if evaluation is None:
        return {"version": __version__, "entries": [], **tasks}
    distances = distance_results(evaluation)
    return evaluation.result(entries, tasks | ({"distances": distances} if distances else {}))


def job_sources(job: EvaluationJob, device: str, console: Console) -> Iterator[Source]:
    """Return all sample files, read first, so that errors come early, and models, loaded one by one."""
    files = [path for path in job.sources if texts.is_samples(path)]
    models = [path for path in job.sources if not texts.is_samples(path)] if job.sources else [None]
    if files and not models and job.likelihood:
        raise UsageError("--likelihood needs a model, not only sample files: name a checkpoint.")
    if job.controls and (job.task != "write" or not models):
        raise UsageError("--controls are made of the training text of a model that writes freely: name a checkpoint.")
    if job.request.frontier and (job.task != "write" or not job.scorer):
        raise UsageError("--frontier scores texts that are written freely: leave out --task, or name a --scorer.")
    if files and job.task != "write":
        raise UsageError(f"--task {job.task} needs models, not sample files: name checkpoints.")
    of_files = texts.file_sources(files, job.reference)
    for source in of_files:
        source.real(1)  # raises an error if there are no real texts to compare with
    return itertools.chain(of_files, _model_sources(models, job, device, console))


def _model_sources(paths: Sequence[Path | None], job: EvaluationJob, device: str, console: Console) -> Iterator[Source]:
    reference = texts.read_samples(job.reference, texts.REAL) if job.reference else None
    for path, label in zip(paths, texts.names_of(paths), strict=True):
        model = load(path, device)
        pairs = model.config.data.source_len > 0
        if job.task == "pairs" and not pairs:
            raise UsageError(f"'{label}' reads no sources: --task pairs needs models that were trained with --data.source-len.")
        for variant in job.request.variants(model.config.sampler):
            model.sampler_options(**variant)  # rejects wrong options early
        for option in job.request.sampler:
            if not hasattr(model.config.sampler, option):
                console.say(f"{label} has no --sampler.{option}: it is evaluated without it.")
        unmeasured = job.likelihood and not job.scorer and (job.likelihood != HELDOUT or not has_likelihood(model.method))
        unprepared = not texts.is_prepared(Path(job.data or model.config.data.source))
        heldout = (
            None if unmeasured or (reference and unprepared and not pairs) else texts.heldout_blocks(model, job.data, console)
        )
        yield ModelSource(model, label, job.batch, heldout, reference)


def draw_pictures(out: Path, result: Mapping[str, Any]) -> list[Path]:
    """Draw the frontiers, or the lengths of each system and, if samplers differ, quality against cost."""
    entries, paths = result["entries"], []
    if result.get("frontier"):
        return [draw_frontier(result["frontier"], result["scorer"], out / "frontier.png")]
    if lengths := {entry.label: entry.runs[0].lengths for entry in entries if entry.runs[0].lengths}:
        paths.append(draw_lengths(lengths, result["scorer"], out / "lengths.png"))
    if len({(model.sampler.get("solver"), model.evaluations) for _, model in of_models(entries)}) > 1:
        paths.append(draw_sweep(entries, result["scorer"], out / "sweep.png"))
    if any(entry.name in CONTROLS.values() for entry in entries) and result["distances"]["rows"]:
        paths.append(draw_controls(result, out / "controls.png"))
    return paths
