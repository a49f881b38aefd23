"""Sampling at the paper's sizes: the released network as plain operations, our plain path, and the engine in every mode.

python benchmarks/sampling.py            # LM1B at batch 1, 8, 64 and OWT-1024 at batch 1, 2: minutes on two cores
python benchmarks/sampling.py --short    # LM1B at batch 1, one round

A text takes 32 denoise evaluations and one decoding; one of each is timed, and a text's time is their sum in these
proportions. All contestants have the same random weights and take turns. Operations are counted for all by the same
formula, that of the released code, so work that is saved counts as done.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from peak import peak
from released import Released
from timing import interleaved
from torch import Tensor

from jpeg_dlm.evaluation.counts import sampling_macs
from jpeg_dlm.evaluation.report import markdown_table
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.presets import preset
from jpeg_dlm.sampling.engine import Engine
from jpeg_dlm.sampling.linear import DTYPES, Dtype
from jpeg_dlm.training.console import Console

SETUPS = (("lm1b", 1), ("lm1b", 8), ("lm1b", 64), ("owt1024", 1), ("owt1024", 2))
REFERENCE = "released, plain eager"
TIME = 0.2  # at which the timed evaluation is: its cost is the same at any
COMPILED = "engine fp32, compiled"


@dataclass(frozen=True)
class Contestant:
    """One denoise evaluation with self-conditioning (z to the predicted latents) and the decoding of latents to tokens."""

    dtype: Dtype
    evaluate: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]


def measure(short: bool = False, compiled: bool = False) -> dict:
    peaks = {dtype: peak(dtype) for dtype in DTYPES}
    setups, rounds = (SETUPS[:1], 1) if short else (SETUPS, 2)
    rows, console = [], Console()
    for name in dict.fromkeys(name for name, _ in setups):
        method = trained_like(JpegDlm(preset(name)).eval())
        everyone = contestants(method, compiled)
        for batch in [batch for setup, batch in setups if setup == name]:
            console.say(f"Measuring {name}, batch {batch} ...")
            rows += setup_rows(method, everyone, batch, rounds, peaks)
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


def setup_rows(
    method: JpegDlm, everyone: dict[str, Contestant], batch: int, rounds: int, peaks: dict[Dtype, float]
) -> list[dict]:
    config = method.config
    z = torch.randn(batch, config.model.latent_len, config.model.latent_dim, generator=torch.Generator().manual_seed(0))
    tokens = {name: c.decode(c.evaluate(z)) for name, c in everyone.items()}  # also compiles
    evaluation = interleaved({name: lambda c=c: c.evaluate(z) for name, c in everyone.items()}, rounds)
    decoding = interleaved({name: lambda c=c: c.decode(z) for name, c in everyone.items()}, rounds)
    seconds = {name: config.sampler.steps * evaluation[name] + decoding[name] for name in everyone}
    flops = 2 * batch * sampling_macs(config)["total"]
    return [
        {
            "setup": f"{config.preset}, batch {batch}",
            "sampler": name,
            "texts_per_s": batch / seconds[name],
            "ratio": seconds[REFERENCE] / seconds[name],
            "gflops": flops / seconds[name] / 1e9,
            "of_peak": flops / seconds[name] / 1e9 / peaks[c.dtype],
            "agreement": (tokens[name] == tokens[REFERENCE]).float().mean().item(),
        }
        for name, c in everyone.items()
    ]


# ---------------------------------------------------------------- contestants


def contestants(method: JpegDlm, compiled: bool = False) -> dict[str, Contestant]:
    m, w = method.config.model, method.config.sampler.w
    released = Released(method.export_state(), m.heads, m.codec_heads)
    return {
        REFERENCE: Contestant("fp32", lambda z: released.evaluate(z, TIME, z, w), lambda z: released.tokens(z, w)),
        "plain": plain(method, w),
        **{f"engine {dtype}": of_engine(Engine(method, dtype), w) for dtype in DTYPES},
        **({COMPILED: of_engine(Engine(method, compile=True), w)} if compiled else {}),
    }


def plain(method: JpegDlm, w: float) -> Contestant:
    def evaluate(z: Tensor) -> Tensor:
        return method.dit(z, torch.full((len(z),), TIME), z, torch.full((len(z),), w))

    decode = torch.no_grad()(lambda z: method.tokens(z, torch.full((len(z),), w)))
    return Contestant("fp32", torch.no_grad()(evaluate), decode)


def of_engine(engine: Engine, w: float) -> Contestant:
    (prefix,) = engine.dit.prefixes([TIME], w, decode=False)
    evaluate = torch.inference_mode()(lambda z: engine.denoise(z, z, prefix))
    return Contestant(engine.dtype, evaluate, torch.inference_mode()(lambda z: engine.tokens(z, w)))


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
