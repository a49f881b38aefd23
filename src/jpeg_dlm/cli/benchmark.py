"""jpeg-dlm benchmark"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jpeg_dlm.cli.options import add_options, overrides
from jpeg_dlm.cli.parser import Parser, several, systems, whole
from jpeg_dlm.methods.registry import names
from jpeg_dlm.presets import PRESETS
from jpeg_dlm.util.errors import UsageError

if TYPE_CHECKING:
    from jpeg_dlm.evaluation.throughput import Subject

CACHED = "-kv"  # after the name of a system: with its KV cache
METHODS = "also measure systems with random weights (equally fast) at the preset's sizes, without and with a KV cache; all, or "


def add_benchmark_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("checkpoints", nargs="*", type=Path, help="model folders, runs or checkpoints (default: the bundled one)")
    add("--methods", type=systems, default=[], metavar="NAMES", help=f"{METHODS}some of {','.join(names('system'))}")
    add("--preset", choices=tuple(PRESETS), metavar="NAME", help="sizes of --methods (default: lm1b)")
    add("--steps", type=several(whole(1)), metavar="N,N", help="sampling steps, one or several (default: the model's own)")
    add("--batch", type=whole(1), default=16, help="texts at once (paper: 64 on LM1B, 16 on OWT-1024)")
    add("--repeats", type=whole(1), default=5, help="measured rounds")
    add("--warmup", type=whole(0), default=1, help="unmeasured rounds before them")
    add("--threads", type=whole(1), help="CPU threads of PyTorch")
    add("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    add("--out", type=Path, help="folder for benchmark.json and benchmark.md")
    add("--quiet", action="store_true", help="no progress")
    add_options(parser, ("sampler",))


def run_benchmark(args: argparse.Namespace) -> None:
    if args.out and (args.out / "benchmark.json").exists():
        raise UsageError(f"'{args.out}' already holds results: name another folder, nothing was overwritten.")
    methods = args.methods or (["jpeg-dlm"] if args.preset else [])

    from jpeg_dlm.cli.show import show
    from jpeg_dlm.config import validate
    from jpeg_dlm.evaluation.table import write_result
    from jpeg_dlm.evaluation.throughput import measure, throughput_table
    from jpeg_dlm.options import override
    from jpeg_dlm.util.console import Console

    console, subjects = Console(args.quiet), []
    for subject in _subjects(args, methods):
        has_steps = hasattr(subject.config.sampler, "steps")
        if args.steps and not has_steps:
            console.say(f"{subject.name} has no --steps: it is measured without it.")
        for steps in args.steps if args.steps and has_steps else [None]:
            changes = overrides(args) | ({"sampler.steps": steps} if steps else {})
            subjects.append(replace(subject, config=validate(override(subject.config, changes))))
    with console.progress(f"Measuring {len(subjects)} samplers", "batches") as progress:
        result = measure(subjects, args.batch, args.repeats, args.warmup, progress=progress)
    tables = [throughput_table(result)]
    show(tables)
    if args.out:
        write_result(args.out / "benchmark", result, tables, new=True)


def _subjects(args: argparse.Namespace, methods: Sequence[str]) -> Iterator[Subject]:
    """Yield the models of checkpoints, the bundled one if nothing else is named, and systems with random weights.

    A system that may have a KV cache is measured without and with it.
    """
    from jpeg_dlm.api import load
    from jpeg_dlm.encoders.frozen import build_encoder
    from jpeg_dlm.evaluation.throughput import Subject, any_sources
    from jpeg_dlm.methods.registry import build_method, for_method, method_class
    from jpeg_dlm.options import override
    from jpeg_dlm.presets import preset
    from jpeg_dlm.util.distributed import read_ranks

    for path in args.checkpoints or ([] if methods else [None]):
        model = load(path, args.device)
        name = path.resolve().name if path else "bundled"
        if model.config.data.source_len and model.parts.trained:
            model.complete_method()  # its encoder reads the sources
        source = any_sources(model.config, args.batch, model.parts.writer.device)
        yield Subject(name, model.parts.writer, model.config, str(path or "bundled"), source)
    for name in methods:
        config = for_method(preset(args.preset or "lm1b"), name)
        random = replace(config.encoder, kind="random") if config.data.source_len and method_class(name).uses_encoder else None
        encoder = build_encoder(random, config.data.vocab_size) if random else None
        method: Any = build_method(config, encoder).to(read_ranks(args.device, {}).device)
        for cached in (False, True) if hasattr(config.sampler, "kv_cache") else (None,):
            changed = config if cached is None else override(config, {"sampler.kv_cache": cached})
            source = any_sources(config, args.batch, method.device)
            yield Subject(name + (CACHED if cached else ""), method, changed, "random weights", source)
