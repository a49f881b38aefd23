"""jpeg-dlm doctor"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from jpeg_dlm import __version__
from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.cli.values import some_of
from jpeg_dlm.errors import UsageError

OPTIONAL = {
    "datasets": "data", "mauve-text": "eval", "onnx": "export", "openvino": "export", "tensorboard": "track",
    "wandb": "wandb", "trackio": "trackio", "starlette": "serve", "uvicorn": "serve", "prometheus-client": "serve",
}  # fmt: skip
CORE = (
    "torch", "numpy", "safetensors", "tokenizers", "transformers", "sentencepiece", "huggingface_hub", "gguf", "rich",
    "matplotlib",
)  # fmt: skip


CHECKS = ("gradients", "processes", "sharding", "compile", "parity", "throughput", "training")  # of cli/selftest.py
REPORT = Path("jpeg-dlm-selftest.md")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--selftest", action="store_true", help="train, sample and measure small models here, in minutes")
    parser.add_argument("--only", type=some_of(CHECKS), metavar="NAMES", help=f"with --selftest: some of {','.join(CHECKS)}")
    parser.add_argument(
        "--out", type=Path, metavar="FILE",
        help=f"with --selftest: file for the result, to paste into an issue; an older one is replaced (default: {REPORT})",
    )  # fmt: skip


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    if args.selftest:
        return selftest(args.only or CHECKS, args.out or REPORT)
    stray = next((name for name in ("only", "out") if getattr(args, name)), None)
    if stray:
        raise UsageError(f"--{stray} belongs to the self-test: add --selftest.")

    from jpeg_dlm.fetch.assets import ASSETS
    from jpeg_dlm.folders.model_folder import PACKAGED, bundled_folder
    from jpeg_dlm.machine.cache import cache_dir

    print(machine_line())
    for name in CORE:
        print(f"  {name:<18} {_version(name) or 'MISSING: pip install jpeg-dlm'}")
    for name, extra in OPTIONAL.items():
        missing = f"not installed: pip install 'jpeg-dlm[{extra}]'"
        print(f"  {name:<18} {_version(name) or missing}")
    print(gpu_line())
    print(cpu_line())
    whole = all((bundled_folder(name) / "manifest.json").is_file() for name in PACKAGED)
    for line in form_lines() if whole else ():
        print(line)
    cache = cache_dir()
    disk = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    print(f"Cache: {cache} ({shutil.disk_usage(disk).free / 1e9:.0f} GB free)")
    for name, asset in ASSETS.items():
        there = (cache / asset.cached_name).exists()
        print(f"  {name:<18} {'cached' if there else f'{asset.megabytes} MB, fetched when first needed'}")
    if not whole:
        print("Bundled models: MISSING: reinstall jpeg-dlm")
    return 0


def selftest(checks: Sequence[str], out: Path) -> int:
    """Run the checks, show and write their table with the facts of this machine, and return 1 if one failed."""
    from jpeg_dlm.cli.selftest import anonymous, run_checks
    from jpeg_dlm.cli.show import show
    from jpeg_dlm.files import write_atomic
    from jpeg_dlm.machine.console import Console
    from jpeg_dlm.results.table import Table, markdown

    console = Console()
    verdicts = run_checks(checks, console)
    packages = ", ".join(f"{name} {version}" for name in (*CORE, *OPTIONAL) if (version := _version(name)))
    table = Table(
        f"jpeg-dlm {__version__} self-test",
        ("check", "result", "detail", "seconds"),
        tuple((v.check, v.result, v.detail, f"{v.seconds:.0f}") for v in verdicts),
        tuple(map(anonymous, (machine_line(), packages, gpu_line(), cpu_line()))),
    )
    write_atomic(out, markdown([table]) + "\n")  # before the output, which a closed pipe may end
    show([table])
    console.say(f"Wrote {out}.")
    return 1 if any(v.result == "failed" for v in verdicts) else 0


def machine_line() -> str:
    return f"Python {platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"


def gpu_line() -> str:
    """Describe the GPUs and the CUDA of torch."""
    import torch

    if not torch.cuda.is_available():
        return "GPU: none; everything runs on the CPU"
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    return f"GPU: {torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {memory:.0f} GiB, CUDA {torch.version.cuda}"


def cpu_line() -> str:
    """Describe the CPU, the speedup of its reduced types, and the limit on its instructions if there is one."""
    from jpeg_dlm.machine.cpu import cpu_facts, instruction_limit
    from jpeg_dlm.sampling.speeds import speeds, training_precision

    try:
        found = speeds()
    except UsageError as error:
        return f"CPU: {cpu_facts()[0]}. {error}"
    ratios = ", ".join(f"{dtype} {found[dtype] / found['fp32']:.2f}x" for dtype in ("bf16", "int8"))
    limit = f"; instructions limited to {instruction_limit()}" if instruction_limit() else ""
    return (
        f"CPU: {cpu_facts()[0]}; products against fp32: {ratios} (measured), so --train.precision auto is "
        f"{training_precision('auto', 'cpu')}{limit}"
    )


def form_lines() -> list[str]:
    """Describe the speed of every form that was measured on this machine, the bundled model's first."""
    from jpeg_dlm.export.fastest import MEASURED, PLAIN, TOOK, available_forms, ranked, shape_of
    from jpeg_dlm.folders.model_folder import bundled_folder, read_model
    from jpeg_dlm.machine.cpu import findings

    parts = read_model(bundled_folder())
    auto, exact = (ranked(parts.config, available_forms(parts, reduced))[0].name for reduced in (True, False))
    lines = [f"Bundled model: generate takes {exact}, generate --dtype auto takes {auto}"]
    shapes = {name.removeprefix(MEASURED): found for name, found in findings().items() if name.startswith(MEASURED)}
    for shape in sorted(shapes, key=lambda shape: shape != shape_of(parts.config)):
        took = shapes[shape].pop(TOOK, None)
        seconds = {form: value for form, value in shapes[shape].items() if isinstance(value, float)}
        base = seconds.get(PLAIN.name)
        known = [f"{form} {base / value:.2f}x" if base else form for form, value in seconds.items()]
        failed = [f"{form} does not run" for form in shapes[shape] if form not in seconds]
        lines.append(f"  {shape}: {', '.join(known + failed)} (measured{f' in {took:.1f} s' if took else ''})")
    return lines


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
