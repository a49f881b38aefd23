"""jpeg-dlm benchmark"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jpeg_dlm.cli.options import document_options, parse_overrides
from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.cli.values import EVERY_SOLVER, SOLVERS_SAID, several, some_of, whole
from jpeg_dlm.errors import UsageError
from jpeg_dlm.methods.registry import names
from jpeg_dlm.presets import PRESETS

if TYPE_CHECKING:
    from jpeg_dlm.config import Config
    from jpeg_dlm.evaluation.throughput import Subject
    from jpeg_dlm.flow.latent_sampler import Writer
    from jpeg_dlm.machine.console import Console
    from jpeg_dlm.methods.base import Method

CACHED = "-kv"  # after the name of a system: with its KV cache


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "checkpoints", nargs="*", type=Path, help="model folders, runs or checkpoints (default: the bundled one)"
    )
    parser.add_argument(
        "--methods", metavar="NAMES",
        help="also measure systems with random weights (equally fast) at the preset's sizes; all, or some of "
        f"{','.join(names('system'))} (ar is without KV cache, ar{CACHED} with it)",
    )  # fmt: skip
    parser.add_argument(
        "--preset", action="append", choices=tuple(PRESETS), default=[], metavar="NAME",
        help="sizes of --methods (default: lm1b), or of jpeg-dlm without --methods; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=several(whole(1)), metavar="N,N", help="sampling steps, one or several (default: the model's own)"
    )
    parser.add_argument(
        "--solver",
        type=some_of(EVERY_SOLVER),
        metavar="NAMES",
        help=f"{SOLVERS_SAID} (default: the model's own)",
    )
    parser.add_argument("--batch", type=whole(1), default=16, help="texts at once (paper: 64 on LM1B, 16 on OWT-1024)")
    parser.add_argument("--repeats", type=whole(1), default=5, help="measured rounds")
    parser.add_argument("--warmup", type=whole(0), default=1, help="unmeasured rounds before them")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast (default: fp32, the paper's)")
    parser.add_argument("--threads", type=whole(1), help="CPU threads of PyTorch")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    parser.add_argument("--out", type=Path, help="folder for benchmark.json and benchmark.md")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    document_options(parser, ("sampler",))


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    sampler = parse_overrides(rest)
    if args.out and (args.out / "benchmark.json").exists():
        raise UsageError(f"'{args.out}' already holds results: name another folder, nothing was overwritten.")
    methods = contestants(args.methods)

    import torch

    from jpeg_dlm.cli.show import show
    from jpeg_dlm.evaluation.throughput import measure, throughput_table
    from jpeg_dlm.machine.console import Console
    from jpeg_dlm.results.table import write_result

    console = Console(args.quiet)
    if args.threads:
        torch.set_num_threads(args.threads)
    subjects = _subjects(_models(args, methods), args, sampler, console)
    with console.progress(f"Measuring {len(subjects)} samplers", "batches") as progress:
        result = measure(subjects, args.batch, args.repeats, args.warmup, dtype=args.dtype, progress=progress)
    tables = [throughput_table(result)]
    show(tables)
    if args.out:
        write_result(args.out / "benchmark", result, tables, new=True)
    return 0


def contestants(asked: str | None) -> list[str]:
    """Return the systems that --methods selects; `all` also tries each with a KV cache, which most do not have."""
    known = [name + cached for name in names("system") for cached in ("", CACHED)]
    chosen = known if asked == "all" else [name.strip() for name in asked.split(",")] if asked else []
    for name in chosen:
        if name not in known:
            raise UsageError(f"Unknown method '{name}': choose all, or some of {','.join(names('system'))}.")
    return chosen


def _subjects(
    models: Sequence[tuple[str, Writer, Config, str]], args: argparse.Namespace, sampler: dict[str, Any], console: Console
) -> list[Subject]:
    """Combine every model with the requested steps and solvers that its sampler supports."""
    from jpeg_dlm.config import validate
    from jpeg_dlm.config_io import override
    from jpeg_dlm.evaluation.throughput import Subject

    asked = {name: value for name in ("steps", "solver") if (value := getattr(args, name))}
    subjects = []
    for name, method, config, origin in models:
        for option in asked:
            if not hasattr(config.sampler, option):
                console.say(f"{name} has no --{option}: it is measured without it.")
        sweep = {f"sampler.{option}": values for option, values in asked.items() if hasattr(config.sampler, option)}
        for values in itertools.product(*reversed(sweep.values())):  # steps vary within a solver
            changed = validate(override(config, sampler | dict(zip(reversed(sweep), values, strict=True))))
            subjects.append(Subject(name, method, changed.sampler, config.data.token_len, config.preset, origin))
    return subjects


def _models(args: argparse.Namespace, methods: Sequence[str]) -> list[tuple[str, Writer, Config, str]]:
    """Return (name, method, config, origin of the weights) of all checkpoints and randomly initialized systems."""
    from jpeg_dlm.api import load
    from jpeg_dlm.config_io import override
    from jpeg_dlm.machine.dist import read_ranks
    from jpeg_dlm.methods.base import Method
    from jpeg_dlm.methods.registry import build_method, for_method
    from jpeg_dlm.presets import preset

    checkpoints: list[Path | None] = list(args.checkpoints) or ([] if args.preset or methods else [None])
    found = []
    for path in checkpoints:
        model = load(path, args.device)
        found.append((path.resolve().name if path else "bundled", model.writer, model.config, str(path or "bundled")))
    device = read_ranks(args.device, {}).device
    presets = args.preset or (["lm1b"] if methods else [])
    built: dict[str, Method] = {}
    for size, name in itertools.product(presets, methods or ["jpeg-dlm"]):
        config = for_method(preset(size), name.removesuffix(CACHED))
        if hasattr(config.sampler, "kv_cache"):
            config = override(config, {"sampler.kv_cache": name.endswith(CACHED)})
        elif name.endswith(CACHED):
            if args.methods == "all":
                continue
            raise UsageError(f"{config.method} has no KV cache: leave out {CACHED}.")
        key = f"{config.method} {size}"
        if key not in built:  # with and without KV cache it is one model
            method = build_method(config).to(device)
            assert isinstance(method, Method)
            built[key] = method
        label = size if not methods else name if len(presets) == 1 else f"{name} {size}"
        found.append((label, built[key], config, "random weights"))
    return found
