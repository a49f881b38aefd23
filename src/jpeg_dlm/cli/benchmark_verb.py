"""jpeg-dlm benchmark"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jpeg_dlm.cli.options import parse_overrides
from jpeg_dlm.errors import UsageError
from jpeg_dlm.presets import PRESETS

if TYPE_CHECKING:
    from jpeg_dlm.config import Config
    from jpeg_dlm.methods.base import Method


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoints", nargs="*", type=Path, help="model folders, runs or checkpoints (default: the bundled one)"
    )
    parser.add_argument(
        "--preset", action="append", default=[], metavar="NAME",
        help=f"also a preset with random weights, which are as fast; may be given again: {', '.join(PRESETS)}",
    )  # fmt: skip
    parser.add_argument("--steps", help="solver steps, one number or several such as 8,32 (default: the model's own)")
    parser.add_argument("--solver", help="euler, heun or multistep, or several (default: the model's own)")
    parser.add_argument("--batch", type=int, default=16, help="texts at once (paper: 64 on LM1B, 16 on OWT-1024; default: 16)")
    parser.add_argument("--repeats", type=int, default=5, help="measured rounds (default: 5)")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before them that do not count (default: 1)")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    parser.add_argument("--out", type=Path, help="folder for benchmark.json and benchmark.md")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    sampler = {name: value for name, value in parse_overrides(rest).items()}
    if any(not name.startswith("sampler.") for name in sampler):
        raise UsageError("Only --sampler.* options can be changed in a benchmark.")
    if min(args.batch, args.repeats, args.threads or 1) < 1 or args.warmup < 0:
        raise UsageError("--batch, --repeats and --threads must be at least 1, --warmup at least 0.")
    if args.out and (args.out / "benchmark.json").exists():
        raise UsageError(f"'{args.out}' already holds results: name another folder, nothing was overwritten.")

    import torch

    from jpeg_dlm.evaluation.throughput import measure, throughput_table
    from jpeg_dlm.files import write_atomic

    if args.threads:
        torch.set_num_threads(args.threads)
    result = measure(_subjects(args, sampler), args.batch, args.repeats, args.warmup)
    print(throughput_table(result))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        write_atomic(args.out / "benchmark.json", json.dumps(result, indent=1) + "\n")
        write_atomic(args.out / "benchmark.md", throughput_table(result) + "\n")
    return 0


def _subjects(args: argparse.Namespace, sampler: dict[str, Any]) -> list[Any]:
    """Every checkpoint and preset with every asked number of steps and solver."""
    from jpeg_dlm.config import override
    from jpeg_dlm.evaluation.throughput import Subject

    steps = args.steps.split(",") if args.steps else [None]
    solvers = args.solver.split(",") if args.solver else [None]
    subjects = []
    for name, method, config, origin in _models(args):
        for solver in solvers:
            for k in steps:
                chosen = {"sampler.steps": k, "sampler.solver": solver}
                changed = override(config, sampler | {key: value for key, value in chosen.items() if value is not None})
                if changed.sampler.steps < 1:
                    raise UsageError("--steps must be at least 1.")
                subjects.append(Subject(name, method, changed.sampler, config.data.token_len, config.preset, origin))
    return subjects


def _models(args: argparse.Namespace) -> list[tuple[str, Method, Config, str]]:
    from jpeg_dlm.api import load
    from jpeg_dlm.methods.registry import build_method
    from jpeg_dlm.presets import preset
    from jpeg_dlm.training.dist import read_ranks

    checkpoints: list[Path | None] = list(args.checkpoints) or ([] if args.preset else [None])
    found = []
    for path in checkpoints:
        model = load(path, args.device)
        found.append((path.resolve().name if path else "bundled", model.method, model.config, str(path or "bundled")))
    device = read_ranks(args.device, {}).device
    for name in args.preset:
        config = preset(name)
        found.append((name, build_method(config).to(device), config, "random weights"))
    return found
