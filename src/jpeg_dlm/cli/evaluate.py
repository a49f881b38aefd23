"""jpeg-dlm evaluate, and the options that choose a scorer for every verb that scores text."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from jpeg_dlm.cli.options import add_options, overrides
from jpeg_dlm.cli.parser import Parser, from_zero, scorer, several, whole, words
from jpeg_dlm.evaluation.protocols import PROTOCOLS
from jpeg_dlm.util.errors import UsageError

if TYPE_CHECKING:
    from jpeg_dlm.evaluation.run import EvaluationJob
    from jpeg_dlm.evaluation.scorer import Scorer
    from jpeg_dlm.util.console import Console

SOURCES = "model folders, runs, checkpoints, bundled, or .txt and .jsonl files of texts (default: bundled)"
TASK = (
    "instead of writing freely, continue held-out prompts, fill in templates made of held-out text, or write targets of sources"
)
CANDIDATES = "with --task pairs: targets of a source, of which the one that agrees most with the others is kept"
LIKELIHOOD = (
    "perplexity under the model itself of all of a text, or one of ag-news, arxiv, lambada, lm1b, ptb, pubmed, wikitext2 and "
    "wikitext103 (without TEXT: of held-out text); without --scorer, nothing is generated or scored"
)
HELDOUT = "held-out text"  # as in evaluation.likelihood, which imports torch
DISTANCES = "more figures of distance from real text, and a test; texts of files have them anyway unless --mauve is off"
CONTROLS = "--distances, and samplers without a model that lower single figures: chains over words, collages, repetition"
FRONTIER = "sweep each system from fluent to diverse; compare at the entropy of real text"
DATA = "text, prepared folder or named corpus to compare with (default: the model's training corpus)"
SCORERS = "smollm2 (downloaded; the default), hf:gpt2-large (the paper's), hf:FOLDER, gguf:FILE"
PRECISION = "fp32, bf16 or auto: bf16 on a GPU alone; it takes half the time on a CPU that has its instructions"


def add_scorer_arguments(parser: Parser, default: str | None = "smollm2", help: str = "as for evaluate") -> None:
    add = parser.add_argument
    add("--scorer", type=scorer, default=default, metavar="NAME", help=help)
    add("--scorer-precision", choices=("auto", "fp32", "bf16"), default="auto", metavar="TYPE", help=PRECISION)
    add("--mauve", choices=("auto", "on", "off"), default="auto", help="auto: if available")


def scorer_of(args: argparse.Namespace, device: str, console: Console) -> Scorer:
    """Build the scorer that the options name."""
    from jpeg_dlm.evaluation.scorer import build_scorer

    return build_scorer(args.scorer, device, console, args.scorer_precision)


def numbers(text: str) -> str:
    """Return a list of whole numbers as it was written, after refusing others."""
    several(whole(1))(text)
    return text


def add_evaluate_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("sources", nargs="*", type=Path, metavar="CHECKPOINT_OR_SAMPLES", help=SOURCES)
    add("--task", choices=("write", "continue", "infill", "pairs"), default="write", help=TASK)
    add("--pairs", dest="task", action="store_const", const="pairs", help="--task pairs: BLEU and others; needs no scorer")
    add("--candidates", type=whole(1), default=1, metavar="N", help=CANDIDATES)
    add("--context-scale", type=from_zero, default=1.0, metavar="S", help="with --task continue: guidance by the context")
    add("--protocol", choices=PROTOCOLS, default="default", metavar="NAME", help="evaluation protocol")
    add("-n", type=whole(2), help="texts per seed (default: 256, in the paper's protocols 1024; all of a file)")
    add("--seeds", type=whole(1), help="number of seeds (default: 1, in the paper's protocols 5)")
    add("--seed", type=whole(0), default=0, help="the first seed")
    for option, metavar, kind in (("steps", "N,N", numbers), ("solver", "NAMES", str)):
        text = f"short for --sampler.{option}; several values are a sweep, as of every option of the sampler"
        add(f"--{option}", dest=f"sampler.{option}", type=kind, default=argparse.SUPPRESS, metavar=metavar, help=text)
    add("--frontier", action="store_true", help=FRONTIER)
    add("--likelihood", nargs="?", const=HELDOUT, metavar="TEXT", help=LIKELIHOOD)
    add("--likelihood-draws", type=whole(1), default=8, help="random times per row, for methods with a bound")
    add("--data", help=DATA)
    add("--reference", type=Path, help="real texts to compare with instead: .txt or .jsonl")
    add_scorer_arguments(parser, None, SCORERS)
    add("--distances", action="store_true", help=DISTANCES)
    add("--controls", action="store_true", help=CONTROLS)
    add("--batch", type=whole(1), default=64, help="texts sampled at once")
    add("--out", type=Path, help="folder for results, pictures, and partial results to continue from")
    add("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    add("--quiet", action="store_true", help="no progress")
    add_options(parser, ("sampler",))


def add_lm_eval_arguments(parser: Parser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="WORDS", help="of its own command line, such as ls tasks; docs/evaluation.md"
    )


def job_of(args: argparse.Namespace) -> EvaluationJob:
    """Return what the command line asks for."""
    from jpeg_dlm.evaluation.evaluate import EvaluationRequest
    from jpeg_dlm.evaluation.run import EvaluationJob

    if args.likelihood and any((Path(args.likelihood) / name).exists() for name in ("checkpoints", "model.safetensors")):
        raise UsageError(f"'{args.likelihood}' is a model, not a text: name models before --likelihood.")
    rules = PROTOCOLS[args.protocol]
    seeds = tuple(range(args.seed, args.seed + (args.seeds or rules.seeds)))
    sampler = {name: words(text) for name, text in overrides(args, "sampler").items()}
    distances = args.distances or args.controls
    request = EvaluationRequest(rules, seeds, args.n, sampler, args.mauve, args.frontier, distances)
    scorer = args.scorer or (None if args.likelihood or args.task == "pairs" else "smollm2")
    same = {field.name: getattr(args, field.name) for field in fields(EvaluationJob) if field.name not in ("request", "scorer")}
    return EvaluationJob(request=request, scorer=scorer, **same)


def run_evaluate(args: argparse.Namespace) -> None:
    from jpeg_dlm.cli.show import show
    from jpeg_dlm.evaluation.cache import DiskCache
    from jpeg_dlm.evaluation.run import claim_folder, draw_pictures, run_job
    from jpeg_dlm.evaluation.table import to_json, write_result
    from jpeg_dlm.evaluation.tables import evaluation_tables
    from jpeg_dlm.training.lock import lock_together
    from jpeg_dlm.util.console import Console
    from jpeg_dlm.util.distributed import on_main, setup, teardown

    job, ranks = job_of(args), setup(args.device)
    console = Console(args.quiet or not ranks.is_main)
    # A second evaluation at the same time would mix up the partial results.
    with lock_together(args.out) if args.out else contextlib.nullcontext():
        if args.out:
            on_main(lambda: claim_folder(args.out, job))
        cache = DiskCache(args.out / "parts" if args.out else None)
        result = run_job(job, cache, str(ranks.device), console)
        if ranks.is_main:
            tables = evaluation_tables(result)
            show(tables)
            if args.out:
                content = to_json(result) | {"command": args.command, "request": job.as_json()}
                paths = [*write_result(args.out / "results", content, tables), *draw_pictures(args.out, result)]
                console.say(f"Wrote {', '.join(path.name for path in paths)} in {args.out}.")
    teardown()
