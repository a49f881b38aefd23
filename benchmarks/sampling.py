"""Sampling at the paper's sizes: the released network as plain operations, the engine in every mode, ONNX and OpenVINO.

python benchmarks/sampling.py            # LM1B at batch 1, 8, 64 and OWT-1024 at batch 1, 2: minutes on two cores
python benchmarks/sampling.py --short    # LM1B at batch 1
python benchmarks/sampling.py --compile
python benchmarks/sampling.py --blocks 2 # evaluations alone, with 2 blocks instead of 12: a sixth of the time

A text takes 32 denoise evaluations and one decoding; one of each is timed, and the time of a text is their weighted sum. All
contestants have the same random weights and take turns in two processes: the released network with the default allocator,
and all of them, including the released network, with freed memory kept, as in `jpeg-dlm generate`. Operations of all
contestants are counted by the formula of the released code, so work that is saved counts as done.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from peak import peak
from released import Released
from torch import Tensor
from workers import Request, Workers, clock

from jpeg_dlm.accounting.info import sampling_macs
from jpeg_dlm.cli.allocator import keep_freed_memory
from jpeg_dlm.config import Config
from jpeg_dlm.config_io import override
from jpeg_dlm.export.folder import FORMATS, written_and_opened
from jpeg_dlm.export.interface import DECODE, DENOISE, exported_sampler
from jpeg_dlm.flow.latent_sampler import LatentSampler
from jpeg_dlm.machine.console import Console
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.presets import preset
from jpeg_dlm.results.pictures import INK, LINE_COLORS, dress, new_figure, save_png
from jpeg_dlm.results.table import markdown_table
from jpeg_dlm.sampling.engine import accelerated
from jpeg_dlm.sampling.linear import DTYPES, Dtype, computes_in_bf16

Setups = Mapping[str, Mapping[int, int]]
SETUPS: Setups = {"lm1b": {1: 5, 8: 3, 64: 1}, "owt1024": {1: 2, 2: 1}}  # rounds by preset and batch
SHORT: Setups = {"lm1b": {1: 3}}
AS_IT_IS, MEMORY_KEPT = "as it is", "memory kept"  # allocators
REFERENCE, KEPT = "released, plain eager", f"released, {MEMORY_KEPT}"
ENGINES: dict[str, tuple[Dtype, bool]] = {f"engine {dtype}": (dtype, False) for dtype in DTYPES}
COMPILED: dict[str, tuple[Dtype, bool]] = {f"engine {dtype}, compiled": (dtype, True) for dtype in ("fp32", "int8")}
RUNTIMES = {f"{form.runtime} fp32": kind for kind, form in FORMATS.items()}
CLEARLY = 1.05  # least speedup for recommending a runtime (assumed)
TIME = 0.2  # t of the timed evaluation; the cost does not depend on it


def measure(
    short: bool = False,
    compiled: bool = False,
    setups: Setups | None = None,
    changes: Mapping[str, Any] | None = None,
    blocks: int | None = None,
) -> dict:
    """Measure all samplers; `changes` override options of the presets, and `blocks` times evaluations of so many alone."""
    changes = {**(changes or {}), **({"model.depth": blocks} if blocks else {})}
    samplers = [REFERENCE, KEPT, *ENGINES, *(COMPILED if compiled else ()), *RUNTIMES]
    if not computes_in_bf16(torch.device("cpu")):  # otherwise fp32 with rounded weights, which takes the same time
        samplers.remove("engine bf16")
    rows, console = [], Console()
    for name, batches in (setups or (SHORT if short else SETUPS)).items():
        config = override(preset(name), changes)
        allocators = {sampler: AS_IT_IS if sampler == REFERENCE else MEMORY_KEPT for sampler in samplers}
        words = {sampler: (name, allocator, json.dumps(changes)) for sampler, allocator in allocators.items()}
        with Workers("sampling", words) as workers:
            for batch, rounds in batches.items():
                console.say(f"Measuring {name}, batch {batch} ...")
                rows += setup_rows(workers, config, batch, rounds, decoding=blocks is None)
    note = "The peak is that of matrix products, measured with each set-up. Tokens are those after one denoise evaluation."
    heading = ["set-up", "sampler", "texts/s", "ratio", "GFLOP/s", "of the peak", "same tokens"]
    return {
        "title": "Sampling at the paper's sizes, 32 steps",
        "markdown": f"{note}\n\n{markdown_table(heading, map(cells, rows))}\n\n{recommendation(rows)}\n",
        "rows": rows,
        "ratios": {f"{r['setup']}, {r['sampler']}": r["ratio"] for r in rows if r["sampler"] != REFERENCE},
    }


def cells(row: dict) -> list[str]:
    return [
        row["setup"], row["sampler"], f"{row['texts_per_s']:.3g}", f"{row['ratio']:.2f}x", f"{row['gflops']:.0f}",
        f"{row['of_peak']:.0%}", f"{row['agreement']:.1%}",
    ]  # fmt: skip


def setup_rows(workers: Workers, config: Config, batch: int, rounds: int, decoding: bool = True) -> list[dict]:
    tokens = workers.ask({"batch": batch, "what": "tokens"})  # also compiles
    evaluation = workers.medians({"batch": batch, "what": "evaluate"}, rounds)
    peaks = {dtype: peak(dtype) for dtype in DTYPES}
    steps, macs = config.sampler.steps, sampling_macs(config)
    decode = workers.medians({"batch": batch, "what": "decode"}, 1) if decoding else {}  # a thirtieth of the whole
    flops = 2 * batch * (macs["total"] if decoding else steps * macs["dit"] / macs["evaluations"])
    rows = []
    for name in workers.contestants:
        seconds = steps * evaluation[name] + decode.get(name, 0.0)
        same = torch.tensor(tokens[name]) == torch.tensor(tokens[REFERENCE])
        rows.append({
            "setup": f"{config.preset}, batch {batch}",
            "sampler": name,
            "texts_per_s": batch / seconds,
            "ratio": rows[0]["seconds"] / seconds if rows else 1.0,
            "gflops": flops / seconds / 1e9,
            "of_peak": flops / seconds / 1e9 / peaks[dtype_of(name)],
            "agreement": same.float().mean().item(),
            "seconds": seconds,
        })  # fmt: skip
    return rows


def dtype_of(sampler: str) -> Dtype:
    return (ENGINES | COMPILED).get(sampler, ("fp32", False))[0]


def recommended_runtime(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the fastest runtime if it is clearly faster than torch's engine over all setups, else None."""
    speed = {(r["setup"], r["sampler"]): r["texts_per_s"] for r in rows}
    setups = dict.fromkeys(r["setup"] for r in rows)
    gain = {name: geometric_mean(speed[setup, name] / speed[setup, "engine fp32"] for setup in setups) for name in RUNTIMES}
    best = max(gain, key=lambda name: gain[name])
    return best if gain[best] >= CLEARLY else None


def recommendation(rows: Sequence[Mapping[str, Any]]) -> str:
    best = recommended_runtime(rows)
    if best is None:
        return f"No exported form is {CLEARLY}x as fast as torch's engine over all set-ups: stay with torch."
    return f"On this CPU {best} is faster than torch: generate takes it after  jpeg-dlm export MODEL --format {RUNTIMES[best]}"


def draw(result: Mapping[str, Any], path: Path) -> Path:
    """Draw speed and share of the peak: a group of bars for each setup, a color for each sampler."""
    rows = result["rows"]
    setups, samplers = (list(dict.fromkeys(row[key] for row in rows)) for key in ("setup", "sampler"))
    figure, panels = new_figure(2, result["title"])
    width = 0.84 / len(samplers)
    for axes, key, text in zip(
        panels, ("ratio", "of_peak"), ("ratio to the released network", "share of the peak"), strict=True
    ):
        for i, sampler in enumerate(samplers):
            heights = [row[key] for row in rows if row["sampler"] == sampler]
            places = [place + (i - (len(samplers) - 1) / 2) * width for place in range(len(setups))]
            axes.bar(places, heights, width, color=LINE_COLORS[i % len(LINE_COLORS)], label=sampler)
        dress(axes, text, text, "")
        axes.set_xticks(range(len(setups)), [setup.replace(", ", "\n") for setup in setups])
    panels[1].legend(fontsize=6.5, frameon=False, labelcolor=INK, ncols=2)
    panels[1].set_ylim(0, 1.5 * max(row["of_peak"] for row in rows))  # room for the legend
    return save_png(figure, path)


# ---------------------------------------------------------------- contestants


@dataclass(frozen=True)
class Contestant:
    """A sampler as two functions: one denoise evaluation with self-conditioning, and decoding of latents to tokens."""

    evaluate: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]


def serve(name: str, allocator: str, changes: str) -> Callable[[Request], Any]:
    """Return the function of a worker, which times an operation or returns tokens."""
    if allocator == MEMORY_KEPT:
        keep_freed_memory()
    torch.manual_seed(0)  # both processes have the same weights
    method = trained_like(JpegDlm(override(preset(name), json.loads(changes))).eval())
    m, built = method.config.model, {}

    def act(request: Request) -> Any:
        sampler = request["contestant"]
        contestant = built[sampler] = built.get(sampler) or contestant_of(method, sampler)
        z = torch.randn(request["batch"], m.latent_len, m.latent_dim, generator=torch.Generator().manual_seed(0))
        if request["what"] == "tokens":
            return contestant.decode(contestant.evaluate(z)).tolist()
        began = clock()
        getattr(contestant, request["what"])(z)
        return clock() - began

    return act


def contestant_of(method: JpegDlm, sampler: str) -> Contestant:
    m, w = method.config.model, method.config.sampler.w
    if sampler in (REFERENCE, KEPT):
        released = Released(method.export_state(), m.heads, m.codec_heads)
        return Contestant(lambda z: released.evaluate(z, TIME, z, w), lambda z: released.tokens(z, w))
    if sampler in RUNTIMES:
        writer = in_runtime(method, RUNTIMES[sampler])
    else:
        writer = accelerated(method, *(ENGINES | COMPILED)[sampler])
    denoise = writer.denoiser([TIME], w)
    return Contestant(lambda z: denoise(z, TIME, z), lambda z: writer.tokens(z, w))


def in_runtime(method: JpegDlm, kind: str) -> LatentSampler:
    with tempfile.TemporaryDirectory() as scratch:  # deleted files stay available to a runtime that maps them
        networks = [written_and_opened(name, method, kind, Path(scratch)) for name in (DENOISE, DECODE)]
    return exported_sampler(method.config, *networks)


@torch.no_grad()
def trained_like(method: JpegDlm) -> JpegDlm:
    """Add small noise to every weight: new heads are zero, so all contestants would trivially agree."""
    g = torch.Generator().manual_seed(0)
    for p in method.parameters():
        p.add_(0.02 * torch.randn(p.shape, generator=g))
    return method


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="LM1B at batch 1, one round")
    parser.add_argument("--compile", action="store_true", help="also compiled, which takes minutes to start at every size")
    parser.add_argument("--blocks", type=int, metavar="N", help="time evaluations alone, of a DiT with N blocks")
    args = parser.parse_args()
    print(measure(args.short, args.compile, blocks=args.blocks)["markdown"])


if __name__ == "__main__":
    main()
