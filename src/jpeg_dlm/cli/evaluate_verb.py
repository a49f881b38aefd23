"""jpeg-dlm evaluate"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jpeg_dlm.cli.options import document_options, parse_overrides
from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.cli.scorer_options import add_scorer_arguments, scorer_of
from jpeg_dlm.cli.values import EVERY_SOLVER, SOLVERS_SAID, from_zero, several, some_of, whole
from jpeg_dlm.errors import UsageError
from jpeg_dlm.evaluation.protocols import PROTOCOLS, protocol

if TYPE_CHECKING:
    from jpeg_dlm.api import Model
    from jpeg_dlm.evaluation.entry import EvaluationResult
    from jpeg_dlm.evaluation.evaluate import Evaluation, EvaluationRequest
    from jpeg_dlm.evaluation.samples import SampleFile
    from jpeg_dlm.evaluation.sources import Source
    from jpeg_dlm.machine.console import Console
    from jpeg_dlm.machine.dist import Ranks
    from jpeg_dlm.results.resumable import Parts
    from jpeg_dlm.text.blocks import Blocks


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "sources", nargs="*", type=Path, metavar="CHECKPOINT_OR_SAMPLES",
        help="model folders, runs, checkpoints, bundled, or .txt and .jsonl files of texts (default: bundled)",
    )  # fmt: skip
    parser.add_argument(
        "--task", choices=("write", "continue", "infill"), default="write",
        help="instead of writing freely, continue held-out prompts or fill in templates made of held-out text",
    )  # fmt: skip
    parser.add_argument(
        "--length", type=whole(1), metavar="N",
        help="let a model with context write whole texts of up to N tokens, and compare them with whole documents",
    )  # fmt: skip
    parser.add_argument(
        "--context-scale", type=from_zero, default=1.0, metavar="S",
        help="with --length or --task continue: guidance over the context",
    )  # fmt: skip
    parser.add_argument("--protocol", choices=PROTOCOLS, default="default", metavar="NAME", help="evaluation protocol")
    parser.add_argument("-n", type=whole(2), help="texts per seed (default: 256, in the paper's protocols 1024; all of a file)")
    parser.add_argument("--seeds", type=whole(1), help="number of seeds (default: 1, in the paper's protocols 5)")
    parser.add_argument("--seed", type=whole(0), default=0, help="the first seed")
    parser.add_argument("--steps", type=several(whole(1)), metavar="N,N", help="sampling steps; a sweep if several")
    parser.add_argument("--solver", type=some_of(EVERY_SOLVER), metavar="NAMES", help=f"{SOLVERS_SAID}; a sweep if several")
    parser.add_argument(
        "--likelihood", action="store_true",
        help="perplexity of held-out text under the model itself; without --scorer, nothing is generated or scored",
    )  # fmt: skip
    parser.add_argument("--likelihood-draws", type=whole(1), default=8, help="random times per row, for methods with a bound")
    parser.add_argument(
        "--data", help="text, prepared folder or named corpus to compare with (default: the model's training corpus)"
    )
    parser.add_argument("--reference", type=Path, help="real texts to compare with instead: .txt or .jsonl")
    add_scorer_arguments(
        parser, None,
        "smollm2 (downloaded; the default), stories15m, hf:gpt2-large (the paper's), hf:FOLDER, gguf:FILE, ar:CHECKPOINT",
    )  # fmt: skip
    parser.add_argument("--batch", type=whole(1), default=64, help="texts sampled at once")
    parser.add_argument("--out", type=Path, help="folder for results, pictures, and partial results to continue from")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    document_options(parser, ("sampler",))


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    from jpeg_dlm.machine.collectives import on_main
    from jpeg_dlm.machine.dist import setup, teardown
    from jpeg_dlm.training.lock import lock_together

    asked = _asked(args, parse_overrides(rest))
    ranks = setup(args.device)
    # A second evaluation at the same time would mix up the partial results.
    with lock_together(args.out) if args.out else contextlib.nullcontext():
        if args.out:
            on_main(partial(_claim, args.out, asked))
        _evaluate(args, asked, ranks)
    teardown()
    return 0


def _evaluate(args: argparse.Namespace, asked: dict[str, Any], ranks: Ranks) -> None:
    from jpeg_dlm import __version__
    from jpeg_dlm.cli.show import show
    from jpeg_dlm.evaluation.entry import EvaluationResult
    from jpeg_dlm.evaluation.entry_tables import evaluation_tables
    from jpeg_dlm.evaluation.evaluate import Evaluation, EvaluationRequest
    from jpeg_dlm.evaluation.sources import ModelSource
    from jpeg_dlm.evaluation.tasks import task_results
    from jpeg_dlm.machine.collectives import main_first
    from jpeg_dlm.machine.console import Console
    from jpeg_dlm.results.plain import plain
    from jpeg_dlm.results.resumable import Parts
    from jpeg_dlm.results.table import write_result

    console, parts = Console(args.quiet or not ranks.is_main), Parts(args.out / "parts" if args.out else None)
    device = str(ranks.device)
    request = EvaluationRequest(
        protocol(args.protocol), tuple(asked["seeds"]), args.n, tuple(asked["steps"]), tuple(asked["solvers"]),
        asked["sampler"], args.mauve,
    )  # fmt: skip
    evaluation: Evaluation | None = None
    entries, tasks = [], {name: [] for name in ("likelihood", "continue", "infill")}
    for source in _sources(args, request, device, console):
        if args.likelihood and source.model:
            tasks["likelihood"].append(_likelihood(source, args, parts, console))
        if asked["scorer"]:
            if evaluation is None:  # only now, so that errors of a source come before the download of a scorer
                scorer = main_first(lambda: scorer_of(args, device, console, asked["scorer"]))
                evaluation = Evaluation(scorer, request, parts, console)
            if args.task == "write":
                entries += evaluation.entries(source)
            elif isinstance(source, ModelSource):  # `_sources` refused the others
                tasks[args.task] += task_results(args.task, source, evaluation, args.context_scale)
    tasks = {name: rows for name, rows in tasks.items() if rows or (name == "likelihood" and args.likelihood)}
    result = evaluation.result(entries, tasks) if evaluation else EvaluationResult({"version": __version__}, [], tasks)
    if not ranks.is_main:
        return
    tables = evaluation_tables(result)
    show(tables)
    if args.out:
        write_result(args.out / "results", plain(result) | {"request": asked}, tables)
        _draw(args.out, result, console)


def _likelihood(source: Any, args: argparse.Namespace, parts: Parts, console: Console) -> dict[str, Any]:
    """Return the likelihood of a model's held-out text and the model's identity, or the reason why there is none."""
    from jpeg_dlm import __version__
    from jpeg_dlm.evaluation.likelihood import has_likelihood, heldout_likelihood

    method = source.model.method
    about = {
        "name": source.name, "method": source.model.config.method, "title": method.title,
        "checkpoint_sha256": source.sha256, "tokenizer": source.model.tokenizer.fingerprint,
    }  # fmt: skip
    if not has_likelihood(method):
        return about | {"kind": None, "reason": f"{method.title} gives no likelihood: score its text instead."}

    def make() -> dict[str, Any]:
        with console.progress(f"Likelihood under {source.name}", "rows") as progress:
            return heldout_likelihood(source, args.n, args.likelihood_draws, args.seed, progress)

    depends = about | {"kind": "likelihood", "version": __version__, "n": args.n, "draws": args.likelihood_draws}
    depends |= {"seed": args.seed, "batch": args.batch, "heldout": source.heldout.fingerprint if source.heldout else None}
    return about | parts.get_or_make(f"likelihood-{source.name}", depends, make)


def _asked(args: argparse.Namespace, extra: dict[str, Any]) -> dict[str, Any]:
    """Return the request as plain values for `request.json`."""
    count = args.seeds if args.seeds is not None else protocol(args.protocol).seeds
    return {
        "sources": [str(p) for p in args.sources], "protocol": args.protocol, "n": args.n,
        "seeds": list(range(args.seed, args.seed + count)), "steps": args.steps or [],
        "solvers": args.solver or [],
        "sampler": {name.removeprefix("sampler.").replace("-", "_"): value for name, value in extra.items()},
        "scorer": args.scorer or (None if args.likelihood else "smollm2"),
        **({"scorer_precision": args.scorer_precision} if args.scorer_precision != "auto" else {}),
        "data": args.data, "reference": str(args.reference) if args.reference else None,
        **({"likelihood_draws": args.likelihood_draws} if args.likelihood else {}),
        **({"task": args.task} if args.task != "write" else {}),
        **({"length": args.length} if args.length else {}),
        **({"context_scale": args.context_scale} if args.task == "continue" or args.length else {}),
    }  # fmt: skip


def _claim(out: Path, asked: dict[str, Any]) -> None:
    """Claim a folder for one request: continue or repeat the same one, but reject any other."""
    from jpeg_dlm.files import write_atomic

    path = out / "request.json"
    begun = (out / "results.json").exists() or (out / "parts").is_dir()
    if begun:
        try:
            same = json.loads(path.read_text("utf-8")) == asked
        except (OSError, ValueError):
            same = False
        if not same:
            raise UsageError(
                f"'{out}' already holds results of another evaluation: name another folder, nothing was overwritten."
            )
    write_atomic(path, json.dumps(asked, indent=1) + "\n")


def _sources(args: argparse.Namespace, request: EvaluationRequest, device: str, console: Console) -> Iterator[Source]:
    """Return all sample files, read first, so that errors come early, and models, loaded one by one."""
    from jpeg_dlm.evaluation.samples import REAL, is_samples, read_samples
    from jpeg_dlm.evaluation.sources import file_sources

    files = [path for path in args.sources if is_samples(path)]
    models = [path for path in args.sources if not is_samples(path)] if args.sources else [None]
    if files and not models and args.likelihood:
        raise UsageError("--likelihood needs a model, not only sample files: name a checkpoint.")
    if files and args.task != "write":
        raise UsageError(f"--task {args.task} needs models, not sample files: name checkpoints.")
    if args.length and (files or args.task != "write"):
        raise UsageError("--length is for models that write freely: leave it out, or name checkpoints and no other task.")
    found = file_sources(files, args.reference)
    for source in found:
        source.real(1)  # raises an error if there are no real texts to compare with
    reference = read_samples(args.reference, REAL) if args.reference else None
    return itertools.chain(found, _models(models, reference, args, request, device, console))


def _models(
    paths: Sequence[Path | None], reference: SampleFile | None, args: argparse.Namespace, request: EvaluationRequest,
    device: str, console: Console,
) -> Iterator[Source]:  # fmt: skip
    from jpeg_dlm.api import load
    from jpeg_dlm.evaluation.heldout import names_of
    from jpeg_dlm.evaluation.sources import ModelSource
    from jpeg_dlm.evaluation.whole_texts import WholeTexts

    for path, label in zip(paths, names_of(paths), strict=True):
        model = load(path, device)
        _check_sampler(model, label, request, console)
        source = ModelSource(model, label, args.batch, _heldout(model, args, reference, console), reference)
        yield WholeTexts(source, args.length, args.context_scale) if args.length else source


def _check_sampler(model: Model, label: str, request: EvaluationRequest, console: Console) -> None:
    """Reject wrong sampler options early."""
    for variant in request.variants(model.config.sampler):
        model.sampler_options(**variant)
    for option, asked in (("steps", request.steps), ("solver", request.solvers)):
        if asked and not hasattr(model.config.sampler, option):
            console.say(f"{label} has no --{option}: it is evaluated without it.")


def _heldout(model: Model, args: argparse.Namespace, reference: SampleFile | None, console: Console) -> Blocks | None:
    """Return held-out text packed like the model's training text; with a reference file, only if it is prepared."""
    from jpeg_dlm.evaluation.heldout import heldout_blocks, is_prepared
    from jpeg_dlm.evaluation.likelihood import has_likelihood

    if args.likelihood and not args.scorer and not has_likelihood(model.method):
        return None  # nothing will be measured
    if reference is not None and not is_prepared(Path(args.data or model.config.data.source)):
        return None
    return heldout_blocks(model, args.data, console)


def _draw(out: Path, result: EvaluationResult, console: Console) -> None:
    from jpeg_dlm.evaluation.entry import of_models
    from jpeg_dlm.evaluation.entry_pictures import draw_lengths, draw_sweep

    drawn = [(lengths, entry.label) for entry in result.entries if (lengths := entry.runs[0].lengths)]
    for i, (lengths, label) in enumerate(drawn):
        draw_lengths(lengths, label, out / ("lengths.png" if len(drawn) == 1 else f"lengths-{i + 1}.png"))
    if len({(model.sampler_label, model.evaluations) for _, model in of_models(result.entries)}) > 1:
        draw_sweep(result.entries, result.conditions["scorer"], out / "sweep.png")
    console.say(f"Wrote {out / 'results.json'}, results.md{' and pictures' if drawn else ''}.")
