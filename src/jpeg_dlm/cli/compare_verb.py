"""jpeg-dlm compare"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from jpeg_dlm.cli.options import parse_overrides
from jpeg_dlm.errors import UsageError
from jpeg_dlm.evaluation.protocols import PROTOCOLS, protocol
from jpeg_dlm.presets import PRESETS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="tiny", help=f"one of {', '.join(PRESETS)} (default: tiny)")
    parser.add_argument("--methods", default="all", help="all (default), or names separated by commas")
    parser.add_argument("--data", help="text file, folder, .jsonl, prepared folder, named corpus or hf:NAME")
    parser.add_argument(
        "--budget", help="what each may spend in training: 2000steps, 5Mtokens or 10min (default: the preset's)"
    )
    parser.add_argument("--protocol", default="default", help=f"one of {', '.join(PROTOCOLS)} (default: default)")
    parser.add_argument("-n", type=int, default=256, help="texts per seed (default: 256)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--scorer", default="smollm2", help="as for evaluate (default: smollm2)")
    parser.add_argument("--mauve", choices=("auto", "on", "off"), default="auto", help="default: auto, if it can be had")
    parser.add_argument("--batch", type=int, default=16, help="texts at once when speed is measured (default: 16)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds when speed is measured (default: 5)")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    parser.add_argument("--out", type=Path, required=True, help="folder for runs and results; the same command goes on in it")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    if min(args.n, args.seeds, args.batch, args.repeats, args.threads or 1) < 1:
        raise UsageError("-n, --seeds, --batch, --repeats and --threads must be at least 1.")

    import torch

    from jpeg_dlm.evaluation.evaluate import Request
    from jpeg_dlm.evaluation.scoring import build_scorer
    from jpeg_dlm.files import write_atomic
    from jpeg_dlm.studies.budget import parse_budget
    from jpeg_dlm.studies.compare import Comparison, compare, method_names
    from jpeg_dlm.studies.compare_report import compare_table, draw_comparison
    from jpeg_dlm.studies.study import read_base
    from jpeg_dlm.studies.workshop import Workshop
    from jpeg_dlm.training.console import Console
    from jpeg_dlm.training.dist import read_ranks

    if args.threads:
        torch.set_num_threads(args.threads)
    base, shared = read_base(args.preset, args.data, parse_overrides(rest))
    budget = parse_budget(args.budget) if args.budget else None
    asked = Comparison(base, method_names(args.methods), budget, shared, args.batch, args.repeats)
    request = Request(protocol(args.protocol), tuple(range(args.seeds)), args.n, mauve=args.mauve)
    workshop = Workshop(args.out, read_ranks(args.device, {}), Console(args.quiet))
    result = compare(asked, workshop, lambda: build_scorer(args.scorer), request)
    result["command"] = args.command
    text = compare_table(result, base.preset if base.preset == "owt1024" else "lm1b")
    print(text)
    write_atomic(args.out / "compare.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    write_atomic(args.out / "compare.md", text + "\n")
    draw_comparison(result, args.out / "compare.png")
    workshop.console.say(f"Wrote {args.out / 'compare.json'}, compare.md and compare.png.")
    return 1 if any("error" in row for row in result["rows"]) else 0
