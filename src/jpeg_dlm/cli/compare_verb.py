"""jpeg-dlm compare"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from jpeg_dlm.cli.options import GROUPS, document_options, parse_overrides
from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.cli.values import scorer, whole
from jpeg_dlm.evaluation.protocols import PROTOCOLS, protocol
from jpeg_dlm.presets import PRESETS


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--preset", choices=tuple(PRESETS), default="tiny", metavar="NAME", help="base values of all options")
    parser.add_argument("--methods", default="all", metavar="NAMES", help="all, or names separated by commas")
    parser.add_argument("--data", help="text file, folder, .jsonl, prepared folder, named corpus or hf:NAME")
    parser.add_argument("--budget", help="training budget of each system: 2000steps, 5Mtokens or 10min (default: the preset's)")
    parser.add_argument("--protocol", choices=PROTOCOLS, default="default", metavar="NAME", help="as for evaluate")
    parser.add_argument("-n", type=whole(1), default=256, help="texts per seed")
    parser.add_argument("--seeds", type=whole(1), default=3, help="number of seeds")
    parser.add_argument("--scorer", type=scorer, default="smollm2", metavar="NAME", help="as for evaluate")
    parser.add_argument("--mauve", choices=("auto", "on", "off"), default="auto", help="auto: if available")
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
    from jpeg_dlm.machine.console import Console
    from jpeg_dlm.machine.dist import read_ranks
    from jpeg_dlm.results.table import write_result
    from jpeg_dlm.scorers.scoring import build_scorer
    from jpeg_dlm.studies.budget import parse_budget
    from jpeg_dlm.studies.compare import Comparison, compare, method_names
    from jpeg_dlm.studies.compare_report import compare_table, draw_comparison
    from jpeg_dlm.studies.study import read_base
    from jpeg_dlm.studies.workshop import Workshop

    if args.threads:
        torch.set_num_threads(args.threads)
    base, shared = read_base(args.preset, args.data, parse_overrides(rest))
    budget = parse_budget(args.budget) if args.budget else None
    asked = Comparison(base, method_names(args.methods), budget, shared, args.batch, args.repeats)
    request = EvaluationRequest(protocol(args.protocol), tuple(range(args.seeds)), args.n, mauve=args.mauve)
    workshop = Workshop(args.out, read_ranks(args.device, {}), Console(args.quiet))
    result = compare(asked, workshop, lambda: build_scorer(args.scorer, console=workshop.console), request)
    result["command"] = args.command
    tables = [compare_table(result, base.preset if base.preset == "owt1024" else "lm1b")]
    show(tables)
    write_result(args.out / "compare", result, tables)
    draw_comparison(result, args.out / "compare.png")
    workshop.console.say(f"Wrote {args.out / 'compare.json'}, compare.md and compare.png.")
    return 1 if any("error" in row for row in result["rows"]) else 0
