"""Sampling at the paper's sizes: the released network as plain operations, and the engine in every mode.

python benchmarks/sampling.py            # LM1B at batch 1, 8, 64 and OWT-1024 at batch 1, 2: minutes on two cores
python benchmarks/sampling.py --short    # LM1B at batch 1
python benchmarks/sampling.py --compile

A text takes 32 denoise evaluations and one decoding; one of each is timed, and a text's time is their sum in these
proportions. All contestants have the same random weights and take turns, each in a process of its own: the released network
with the allocator as it is and once more with memory that is kept, which is how `jpeg-dlm generate` runs the engine.
Operations are counted for all by the same formula, that of the released code, so work that is saved counts as done.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peak import peak
from released import Released
from torch import Tensor
from workers import Request, Workers

from jpeg_dlm.allocator import keep_freed_memory
from jpeg_dlm.config import Config
from jpeg_dlm.config_io import override
from jpeg_dlm.evaluation.counts import sampling_macs
from jpeg_dlm.evaluation.report import markdown_table
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.presets import preset
from jpeg_dlm.sampling.engine import Engine
from jpeg_dlm.sampling.linear import DTYPES, Dtype
from jpeg_dlm.training.console import Console

Setups = Mapping[str, Mapping[int, int]]
SETUPS: Setups = {"lm1b": {1: 9, 8: 5, 64: 3}, "owt1024": {1: 3, 2: 3}}  # rounds by preset and batch
SHORT: Setups = {"lm1b": {1: 3}}
REFERENCE, KEPT = "released, plain eager", "released, memory kept"
ENGINES: dict[str, tuple[Dtype, bool]] = {f"engine {dtype}": (dtype, False) for dtype in DTYPES}
COMPILED: dict[str, tuple[Dtype, bool]] = {f"engine {dtype}, compiled": (dtype, True) for dtype in ("fp32", "int8")}
TIME = 0.2  # at which the timed evaluation is: its cost is the same at any


def measure(
    short: bool = False, compiled: bool = False, setups: Setups | None = None, changes: Mapping[str, Any] | None = None
) -> dict:
    """`changes` are options of the presets."""
    peaks = {dtype: peak(dtype) for dtype in DTYPES}
    rows, console = [], Console()
    for name, batches in (setups or (SHORT if short else SETUPS)).items():
        config = override(preset(name), changes or {})
        words = {
            sampler: (name, sampler, json.dumps(changes or {}))
            for sampler in (REFERENCE, KEPT, *ENGINES, *(COMPILED if compiled else ()))
        }
        with Workers("sampling", words) as workers:
            for batch, rounds in batches.items():
                console.say(f"Measuring {name}, batch {batch} ...")
                rows += setup_rows(workers, config, batch, rounds, peaks)
    peaks_line = ", ".join(f"{dtype} {value:.0f}" for dtype, value in peaks.items())
    note = f"Measured peak in GFLOP/s: {peaks_line}. Agreement is of tokens after one denoise evaluation and the decoding.\n\n"
    heading = ["set-up", "sampler", "texts/s", "ratio", "GFLOP/s", "of the peak", "same tokens"]
    return {
        "title": "Sampling at the paper's sizes, 32 steps",
        "markdown": note + markdown_table(heading, map(cells, rows)) + "\n",
        "rows": rows,
        "ratios": {f"{r['setup']}, {r['sampler']}": r["ratio"] for r in rows if r["sampler"] != REFERENCE},
    }


def cells(row: dict) -> list[str]:
    return [
        row["setup"], row["sampler"], f"{row['texts_per_s']:.3g}", f"{row['ratio']:.2f}x", f"{row['gflops']:.0f}",
        f"{row['of_peak']:.0%}", f"{row['agreement']:.1%}",
    ]  # fmt: skip


def setup_rows(workers: Workers, config: Config, batch: int, rounds: int, peaks: Mapping[Dtype, float]) -> list[dict]:
    tokens = workers.ask({"batch": batch, "what": "tokens"})  # also compiles
    evaluation = workers.medians({"batch": batch, "what": "evaluate"}, rounds)
    decoding = workers.medians({"batch": batch, "what": "decode"}, rounds)
    flops = 2 * batch * sampling_macs(config)["total"]
    rows = []
    for name in workers.workers:
        seconds = config.sampler.steps * evaluation[name] + decoding[name]
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


# ---------------------------------------------------------------- contestants


@dataclass(frozen=True)
class Contestant:
    """One denoise evaluation with self-conditioning (z to the predicted latents) and the decoding of latents to tokens."""

    evaluate: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]


def serve(name: str, sampler: str, changes: str) -> Callable[[Request], Any]:
    """A worker: seconds of what is asked for, or tokens."""
    if sampler != REFERENCE:
        keep_freed_memory()
    torch.manual_seed(0)  # all have the same weights
    method = trained_like(JpegDlm(override(preset(name), json.loads(changes))).eval())
    contestant, m = contestant_of(method, sampler), method.config.model

    def act(request: Request) -> Any:
        z = torch.randn(request["batch"], m.latent_len, m.latent_dim, generator=torch.Generator().manual_seed(0))
        if request["what"] == "tokens":
            return contestant.decode(contestant.evaluate(z)).tolist()
        began = time.perf_counter()
        getattr(contestant, request["what"])(z)
        return time.perf_counter() - began

    return act


def contestant_of(method: JpegDlm, sampler: str) -> Contestant:
    m, w = method.config.model, method.config.sampler.w
    if sampler in (REFERENCE, KEPT):
        released = Released(method.export_state(), m.heads, m.codec_heads)
        return Contestant(lambda z: released.evaluate(z, TIME, z, w), lambda z: released.tokens(z, w))
    engine = Engine(method, *(ENGINES | COMPILED)[sampler])
    (prefix,) = engine.dit.prefixes([TIME], w, decode=False)
    evaluate = torch.inference_mode()(lambda z: engine.denoise(z, z, prefix))
    return Contestant(evaluate, torch.inference_mode()(lambda z: engine.tokens(z, w)))


@torch.no_grad()
def trained_like(method: JpegDlm) -> JpegDlm:
    """Small noise on every weight: fresh heads are zero, so that all contestants would trivially agree."""
    g = torch.Generator().manual_seed(0)
    for p in method.parameters():
        p.add_(0.02 * torch.randn(p.shape, generator=g))
    return method


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="LM1B at batch 1, one round")
    parser.add_argument("--compile", action="store_true", help="also compiled, which takes minutes to begin at every size")
    args = parser.parse_args()
    print(measure(args.short, args.compile)["markdown"])


if __name__ == "__main__":
    main()
