"""Measures every speed figure of this project, writes Markdown and pictures, and compares the ratios with a record.

python benchmarks/run.py                        # all of them, in under half an hour on two cores: make bench
python benchmarks/run.py sampling training      # some
python benchmarks/run.py --short --out DIR      # smaller sizes and fewer rounds
python benchmarks/run.py --record               # record these ratios for comparison with later runs

Figures are ratios of measurements made side by side. A lower ratio is a warning, never an error: seconds and even ratios
depend on the machine, so they are compared with the record of the same CPU only.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from jpeg_dlm.cli.main import keep_freed_memory
from jpeg_dlm.util.distributed import cpu_name
from jpeg_dlm.util.files import write_atomic
from jpeg_dlm.util.pictures import LINE_COLORS, dress, new_figure, save_png

BENCHMARKS = ("attention", "sampling", "systems", "translation", "training", "service", "long_text")
RECORD = Path(__file__).parent / "ratios.json"
FELL = 0.8  # warn if a ratio is below this share of the recorded one (assumed: rounds differ by up to a tenth)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--short", action="store_true", help="smaller sizes, fewer rounds")
    parser.add_argument("--out", type=Path, default=Path("bench"), help="folder for tables and pictures (default: bench)")
    parser.add_argument("--record", action="store_true", help=f"write the ratios to {RECORD.name}")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"there is no benchmark '{unknown[0]}': choose some of {', '.join(BENCHMARKS)}")
    if len(args.names) == 1:
        one(args.names[0], args.short, args.out)
    else:
        all_of(args.names or BENCHMARKS, args.short, args.out)
    ratios = {name: result["ratios"] for name, result in results(args.out).items()}
    if args.record:
        record(ratios, RECORD)
    before = records(RECORD).get(processor())
    if before is None:
        print(f"No record of this CPU ({processor()}) to compare with: make one with --record.", file=sys.stderr)
    for warning in fallen(ratios, before["ratios"] if before else {}):
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def one(name: str, short: bool, out: Path) -> None:
    """Run one benchmark in this process; write its JSON, Markdown and picture."""
    keep_freed_memory()  # as `jpeg-dlm` does
    module = importlib.import_module(name)
    began = time.perf_counter()
    result = module.measure(short)
    result |= {"machine": machine(), "short": short, "seconds": time.perf_counter() - began}
    out.mkdir(parents=True, exist_ok=True)
    draw_ratios(result, out / f"{name}.png")
    write_atomic(out / f"{name}.md", f"## {result['title']}\n\n{result['markdown'].strip()}\n\n![{name}]({name}.png)\n")
    write_atomic(out / f"{name}.json", json.dumps(result, indent=1, default=str) + "\n")
    print(result["markdown"])


def all_of(names: tuple[str, ...] | list[str], short: bool, out: Path) -> None:
    """Run each benchmark in its own process, isolated from the others; write one page with all results."""
    for number, name in enumerate(names, 1):
        began = time.perf_counter()
        print(f"[{number}/{len(names)}] {name} ...", file=sys.stderr, flush=True)
        words = [sys.executable, __file__, name, "--out", str(out), *(["--short"] if short else [])]
        code = subprocess.run(words, check=False).returncode  # noqa: S603 - this file with checked names
        spent = (time.perf_counter() - began) / 60
        print(f"[{number}/{len(names)}] {name}: {spent:.1f} min{' FAILED' if code else ''}", file=sys.stderr, flush=True)
    pages = [(out / f"{name}.md").read_text() for name in names if (out / f"{name}.md").exists()]
    write_atomic(out / "index.md", f"# Benchmarks\n\n{machine()}\n\n" + "\n".join(pages))


def results(out: Path) -> dict[str, dict[str, Any]]:
    """Read the results in a folder."""
    return {p.stem: json.loads(p.read_text()) for p in sorted(out.glob("*.json")) if p.stem in BENCHMARKS}


def machine() -> str:
    """Describe the environment of the measurements."""
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


# ---------------------------------------------------------------- comparison with the record


def processor() -> str:
    """Return the name of the CPU, its threads and usable instructions: ratios of other CPUs are not comparable."""
    return f"{cpu_name()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def records(path: Path) -> dict[str, Any]:
    """Read the recorded ratios, by CPU."""
    return json.loads(path.read_text()) if path.exists() else {}


def record(ratios: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Record these ratios for this CPU; keep those of benchmarks that were not run and of other CPUs."""
    known = records(path)
    kept = known.get(processor(), {"ratios": {}})["ratios"]
    known[processor()] = {"machine": machine(), "ratios": {**kept, **ratios}}
    write_atomic(path, json.dumps(known, indent=1, sort_keys=True) + "\n")


def fallen(now: Mapping[str, Mapping[str, float]], before: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a sentence for every ratio that is well below the recorded one."""
    return [
        f"{name}, {figure}: {value:.2f}x, on record is {before[name][figure]:.2f}x."
        for name, figures in now.items()
        for figure, value in figures.items()
        if figure in before.get(name, {}) and value < FELL * before[name][figure]
    ]


def draw_ratios(result: Mapping[str, Any], path: Path) -> Path:
    """Draw the ratios as bars."""
    names = list(result["ratios"])
    figure, (axes,) = new_figure(1, result["title"])
    figure.set_figheight(max(figure.get_figheight(), 0.8 + 0.18 * len(names)))  # a line for each name
    axes.barh(range(len(names)), [result["ratios"][name] for name in names], color=LINE_COLORS[0])
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="black", lw=0.8)
    dress(axes, "", "", "ratio to the reference of its table")
    return save_png(figure, path)


if __name__ == "__main__":
    raise SystemExit(main())
