"""jpeg-dlm study and compare, the study whose variants are systems"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jpeg_dlm.cli.evaluate import add_scorer_arguments, scorer_of
from jpeg_dlm.cli.options import add_options, overrides
from jpeg_dlm.cli.parser import Parser, systems, whole
from jpeg_dlm.config import GROUP_NAMES
from jpeg_dlm.evaluation.protocols import PROTOCOLS
from jpeg_dlm.presets import PRESETS
from jpeg_dlm.studies.catalog import STUDIES, Study, comparison
from jpeg_dlm.util.errors import UsageError

if TYPE_CHECKING:
    from jpeg_dlm.studies.analysis import StudyOutcome
    from jpeg_dlm.util.distributed import Ranks

TOKENS = "instead of --budget: score each training after several budgets, such as 1M,2M,4M tokens"


def add_study_arguments(parser: Parser) -> None:
    studies = parser.add_subparsers(dest="study", metavar="STUDY", required=True)
    for name, study in STUDIES.items():
        sub = studies.add_parser(name, help=study.summary, description=study.summary[0].upper() + study.summary[1:] + ".")
        sub.set_defaults(parser=sub, tokens=None, repeats=5)
        add = sub.add_argument
        add("--debug", action="store_true", help="show the traceback of an error")
        add("--batch", type=whole(1), default=64, help="texts at once")
        if study.variants:
            add("--only", default="", metavar="TEXT", help="only variants with this in their name: 'r = 0.25'")
            _add_training_arguments(sub)
        else:
            add("checkpoints", nargs="*", type=Path, metavar="MODEL", help="model folders, runs or bundled (default: bundled)")
            add("--data", help="text to analyze (default: the held-out part of the model's training corpus)")
            _add_common(sub, seeds=1)


def add_compare_arguments(parser: Parser) -> None:
    parser.add_argument("--methods", type=systems, default="all", metavar="NAMES", help="all, or names separated by commas")
    parser.add_argument("--tokens", metavar="N,N,...", help=TOKENS)
    parser.add_argument("--batch", type=whole(1), default=16, help="batch size when speed is measured")
    parser.add_argument("--repeats", type=whole(1), default=5, help="rounds when speed is measured")
    parser.set_defaults(only="")
    _add_training_arguments(parser)


def _add_training_arguments(parser: Parser) -> None:
    """Add what every study that trains takes."""
    parser.add_argument("--preset", choices=tuple(PRESETS), default="tiny", metavar="NAME", help="base values of all options")
    parser.add_argument("--data", help="text file, folder, .jsonl, prepared folder, named corpus or hf:NAME")
    parser.add_argument("--budget", help="of each training: 2000steps, 5Mtokens or 10min (default: the preset's steps)")
    train_seeds = "trainings of each variant; if several, deviations are over them"
    parser.add_argument("--train-seeds", type=whole(1), default=1, help=train_seeds)
    parser.add_argument("--train-only", action="store_true", help="train without scoring, to share the work of a command")
    parser.add_argument("--protocol", choices=PROTOCOLS, default="default", metavar="NAME", help="as for evaluate")
    parser.add_argument("--frontier", action="store_true", help="score and judge each model at the entropy of real text")
    _add_common(parser, seeds=3)
    add_options(parser, GROUP_NAMES, "tiny")


def _add_common(parser: Parser, seeds: int) -> None:
    parser.add_argument("-n", type=whole(1), default=256, help="texts per seed")
    parser.add_argument("--seeds", type=whole(1), default=seeds, help="number of sampling seeds")
    add_scorer_arguments(parser)
    parser.add_argument("--threads", type=whole(1), help="CPU threads of PyTorch")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    parser.add_argument("--out", type=Path, required=True, help="folder for runs and results; repeat the command to continue")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run_study(args: argparse.Namespace) -> int:
    from jpeg_dlm.util.distributed import setup

    study, ranks = STUDIES[args.study], setup(args.device)
    outcome = _run_training(args, args.study, study, ranks) if study.variants else _analyze(args, ranks)
    return _finish(args, outcome, f"study-{args.study}", ranks)


def run_compare(args: argparse.Namespace) -> int:
    from jpeg_dlm.studies.plan import titles
    from jpeg_dlm.studies.plots import draw_curves
    from jpeg_dlm.util.distributed import setup

    if args.tokens and args.budget:
        raise UsageError("Give --tokens or --budget, not both.")
    ranks = setup(args.device)
    outcome = _run_training(args, "compare", comparison(titles(args.methods)), ranks)
    if outcome and ranks.is_main:
        draw_curves(outcome.result, args.out / "compare-curves.png")
    return _finish(args, outcome, "compare", ranks)


def _run_training(args: argparse.Namespace, name: str, study: Study, ranks: Ranks) -> StudyOutcome | None:
    """Plan, train and score a study; None if it was only trained."""
    from jpeg_dlm.evaluation.evaluate import EvaluationRequest
    from jpeg_dlm.studies import plan, runner
    from jpeg_dlm.studies.analysis import StudyOutcome
    from jpeg_dlm.studies.plots import draw_study
    from jpeg_dlm.studies.tables import study_tables
    from jpeg_dlm.studies.training_cache import TrainingCache
    from jpeg_dlm.util.console import Console
    from jpeg_dlm.util.distributed import main_first

    budgets = plan.parse_tokens(args.tokens) if args.tokens else (plan.parse_budget(args.budget),) if args.budget else ()
    base, shared = plan.read_base(args.preset, args.data, overrides(args), ranks.world)
    plan.check_options(name, study, overrides(args))
    request = plan.StudyRequest(name, study, base, shared, budgets, args.train_seeds, args.only)
    seeds = tuple(range(args.seeds))
    evaluation = EvaluationRequest(PROTOCOLS[args.protocol], seeds, args.n, mauve=args.mauve, frontier=args.frontier)
    cache = TrainingCache(args.out, ranks, Console(args.quiet or not ranks.is_main))
    planned = plan.plan(request, cache)
    runner.announce(planned, cache, evaluation)
    runner.train(planned, cache, wait=not args.train_only)
    if args.train_only:
        return None
    scorer = partial(main_first, partial(scorer_of, args, str(ranks.device), cache.console))
    result = runner.evaluate(planned, cache, scorer, evaluation, args.batch, args.repeats)
    return StudyOutcome(result, study_tables(result), lambda path: draw_study(result, study.x, path))


def _analyze(args: argparse.Namespace, ranks: Ranks) -> StudyOutcome:
    from jpeg_dlm.evaluation.cache import DiskCache
    from jpeg_dlm.evaluation.texts import model_sources
    from jpeg_dlm.studies.analysis import ANALYSES, AnalysisRequest
    from jpeg_dlm.util.console import Console
    from jpeg_dlm.util.distributed import main_first

    console, device = Console(args.quiet or not ranks.is_main), str(ranks.device)
    scorer, seeds = partial(main_first, partial(scorer_of, args, device, console)), tuple(range(args.seeds))
    request = AnalysisRequest(args.n, seeds, scorer, DiskCache(args.out / "parts"), console, args.mauve)
    sources = model_sources(args.checkpoints or [None], device, args.batch, args.data, console)
    return ANALYSES[args.study](sources, request)


def _finish(args: argparse.Namespace, outcome: StudyOutcome | None, name: str, ranks: Ranks) -> int:
    """Show and write the outcome; the exit code tells whether a variant failed."""
    from jpeg_dlm.cli.show import show
    from jpeg_dlm.util.distributed import teardown

    if outcome and ranks.is_main:
        outcome.result["command"] = args.command
        show(outcome.tables)
        written = outcome.write(args.out / name)
        if not args.quiet:
            print(f"Wrote {', '.join(str(path) for path in written)}.")
    teardown()
    return 1 if outcome and outcome.result.get("errors") else 0
