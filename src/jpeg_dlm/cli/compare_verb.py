"""jpeg-dlm compare"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jpeg_dlm.cli.options import GROUPS, document_options, parse_overrides
from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.cli.scorer_options import add_scorer_arguments, scorer_of
from jpeg_dlm.cli.values import whole
from jpeg_dlm.errors import UsageError
from jpeg_dlm.evaluation.protocols import PROTOCOLS, protocol
from jpeg_dlm.presets import PRESETS

if TYPE_CHECKING:
    from jpeg_dlm.scorers.scoring import Scorer


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--preset", choices=tuple(PRESETS), default="tiny", metavar="NAME", help="base values of all options")
    parser.add_argument("--methods", default="all", metavar="NAMES", help="all, or names separated by commas")
    parser.add_argument("--data", help="text file, folder, .jsonl, prepared folder, named corpus or hf:NAME")
    parser.add_argument("--budget", help="training budget of each system: 2000steps, 5Mtokens or 10min (default: the preset's)")
    parser.add_argument(
        "--tokens",
        metavar="N,N,...",
        help="instead of --budget: score each training after several budgets, such as 1M,2M,4M tokens",
    )
    parser.add_argument(
        "--train-seeds", type=whole(1), default=1, help="trainings per system; if several, deviations are over them"
    )
    parser.add_argument("--so-far", action="store_true", help="score what is trained by now, without training more")
    parser.add_argument("--train-only", action="store_true", help="train without scoring, to share the work of a command")
    parser.add_argument(
        "--tasks", metavar="NAMES",
        help="also measure infill, continue or both: templates filled in, prompts continued, made of held-out text",
    )  # fmt: skip
    parser.add_argument("--protocol", choices=PROTOCOLS, default="default", metavar="NAME", help="as for evaluate")
    parser.add_argument("-n", type=whole(1), default=256, help="texts per seed")
    parser.add_argument("--seeds", type=whole(1), default=3, help="number of sampling seeds")
    add_scorer_arguments(parser)
    parser.add_argument("--batch", type=whole(1), default=16, help="batch size when speed is measured")
    parser.add_argument("--repeats", type=whole(1), default=5, help="rounds when speed is measured")
    parser.add_argument("--threads", type=whole(1), help="CPU threads of PyTorch")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    parser.add_argument("--out", type=Path, required=True, help="folder for runs and results; repeat the command to continue")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    document_options(parser, GROUPS)


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    import torch

    from jpeg_dlm.cli.show import show
    from jpeg_dlm.evaluation.evaluate import EvaluationRequest
    from jpeg_dlm.machine.collectives import main_first
    from jpeg_dlm.machine.console import Console
    from jpeg_dlm.machine.dist import setup, teardown
    from jpeg_dlm.results.table import write_result
    from jpeg_dlm.studies import compare
    from jpeg_dlm.studies.budget import parse_budget, parse_tokens
    from jpeg_dlm.studies.compare_pictures import draw_comparison, draw_curves
    from jpeg_dlm.studies.compare_report import compare_tables
    from jpeg_dlm.studies.compare_tasks import task_names
    from jpeg_dlm.studies.study import read_base
    from jpeg_dlm.studies.workshop import Workshop

    if args.threads:
        torch.set_num_threads(args.threads)
    if args.tokens and args.budget:
        raise UsageError("Give --tokens or --budget, not both.")
    ranks = setup(args.device)
    base, shared = read_base(args.preset, args.data, parse_overrides(rest), ranks.world)
    budgets = parse_tokens(args.tokens) if args.tokens else (parse_budget(args.budget),) if args.budget else ()
    asked = compare.Comparison(
        base, compare.method_names(args.methods), budgets, shared, args.batch, args.repeats, args.train_seeds,
        task_names(args.tasks or ""),
    )  # fmt: skip
    request = EvaluationRequest(protocol(args.protocol), tuple(range(args.seeds)), args.n, mauve=args.mauve)
    workshop = Workshop(args.out, ranks, Console(args.quiet or not ranks.is_main), trains=not args.so_far)
    rows = compare.plan(asked, workshop)
    if args.so_far:
        rows = compare.so_far(rows, workshop)
    else:
        compare.train(rows, workshop, wait=not args.train_only)
    if args.train_only:
        teardown()
        return 0

    def scorer() -> Scorer:
        return main_first(lambda: scorer_of(args, str(ranks.device), workshop.console))

    result = compare.evaluate(asked, rows, workshop, scorer, request)
    if ranks.is_main:
        result["command"] = args.command
        tables = compare_tables(result, base.preset if base.preset == "owt1024" else "lm1b")
        show(tables)
        write_result(args.out / "compare", result, tables)
        draw_comparison(result, args.out / "compare.png")
        draw_curves(result, args.out / "compare-curves.png")
        workshop.console.say(f"Wrote {args.out / 'compare.json'}, compare.md and the pictures compare*.png.")
    teardown()
    return 1 if any("error" in row for row in result["rows"]) else 0
