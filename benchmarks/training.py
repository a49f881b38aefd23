"""A training step against the straightforward one: samples per second, memory, and where the time goes.

python benchmarks/training.py [--short] [--compile]

Seconds are medians of interleaved whole steps: forward, backward, clipping, AdamW, both moving averages. Each variant has its
own process. The straightforward step runs with the default allocator and again with freed memory kept, as `jpeg-dlm train`
does. Memory is the peak of another process with one variant (the kernel's high-water mark), without the state that lives
between steps: weights, target, encoder, moving average and the two moments of AdamW.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from straightforward import Straightforward, StraightforwardStep
from torch import Tensor
from workers import Request, Workers

from jpeg_dlm.cli.allocator import keep_freed_memory
from jpeg_dlm.config import Config
from jpeg_dlm.encoders.build import build_encoder
from jpeg_dlm.encoders.frozen import FrozenEncoder
from jpeg_dlm.evaluation.trial import peak_bytes, random_batch
from jpeg_dlm.machine.dist import Ranks
from jpeg_dlm.methods import jpeg_dlm
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.common.token_decoding import TokenReader
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.presets import preset
from jpeg_dlm.results.table import markdown_table
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.training.loop import Trainer

PLAIN, PLAIN_KEPT = "straightforward", "straightforward, memory kept"
OURS, COMPILED = "ours", "ours, compiled"
CACHED, LEAN = "ours, cached features", "ours, layers recomputed"
ROWS = {"tiny": 64, "lm1b": 8}  # of a micro-batch; the paper's 384 for lm1b need an accelerator
ROUNDS = {"tiny": 9, "lm1b": 2}
MIB = 1 << 20


# ---------------------------------------------------------------- variants


@dataclass
class OneBatch:
    """A stream of the same tokens with new noise, instead of a corpus."""

    batch: Batch
    seed: int = 0

    @property
    def rows_per_step(self) -> int:
        return len(self.batch.tokens_BL)

    def micro_batches(self, step: int) -> Iterator[tuple[Batch, RowNoise]]:
        yield self.batch, RowNoise(self.seed, range(self.rows_per_step), step)


def sized(name: str, rows: int, variant: str) -> Config:
    """Return a preset in fp32 with micro-batches of `rows`."""
    config = preset(name)
    train = replace(config.train, precision="fp32", batch=rows, accumulation=1, devices=1, steps=1000)
    train = replace(train, checkpoint_layers=variant == LEAN, compile=variant == COMPILED)
    return replace(config, train=train)


def stand_in_encoder(config: Config) -> FrozenEncoder:
    """Build an encoder with random weights; at the paper's width with the layers of T5-small: six, with eight heads (T5)."""
    depth, heads = (6, 8) if config.encoder.kind == "hf" else (config.encoder.depth, config.encoder.heads)
    settings = replace(config.encoder, kind="random", depth=depth, heads=heads, scale="none")
    return build_encoder(settings, config.data.vocab_size)


def data(config: Config, rows: int, cached: bool) -> Batch:
    """Return random tokens, with features if these come from a cache."""
    batch = random_batch(config, rows, "cpu", uses_encoder=True)
    return batch if cached else replace(batch, features_BLF=None)


def build(name: str, rows: int, variant: str) -> Trainer | StraightforwardStep:
    """Build one variant with the same initial weights as all others; ours is the real trainer."""
    config = sized(name, rows, variant)
    cached = config.data.cache_features or variant == CACHED
    encoder = None if cached else stand_in_encoder(config)
    stream = OneBatch(data(config, rows, cached))
    torch.manual_seed(0)
    if variant in (PLAIN, PLAIN_KEPT):
        return StraightforwardStep(Straightforward(config, encoder), config.train, stream)
    return Trainer(config, JpegDlm(config, encoder), stream, Path("."), Ranks())  # pyright: ignore[reportArgumentType]


def lasting_bytes(run: Trainer | StraightforwardStep) -> int:
    """Return the size of the state that lives between steps."""
    averages = run.average if isinstance(run, StraightforwardStep) else run.ema.shadow
    moments = [x for slots in run.optimizer.state.values() for x in slots.values() if isinstance(x, Tensor)]
    return sum(t.nbytes for t in [*run.method.parameters(), *run.method.buffers(), *moments, *averages.values()])


# ---------------------------------------------------------------- memory


def step_bytes(name: str, rows: int, variant: str) -> int:
    """Return the peak memory of a step beyond the state that lives between steps, measured in a separate process."""
    # Return freed blocks to the system at once, so that the high-water mark counts live memory only.
    eager = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    words = [sys.executable, __file__, "--peak", name, str(rows), variant]
    return int(subprocess.run(words, capture_output=True, text=True, check=True, env=eager).stdout.split()[-1])


def print_step_bytes(name: str, rows: int, variant: str) -> None:
    """Measure in this process. A first step with one row creates the optimizer's state, which is not counted."""
    device = torch.device("cpu")
    empty = peak_bytes(device)
    run: Any = build(name, rows, variant)
    whole, run.stream = run.stream, fewer(run.stream, 1)
    run.train_step()
    run.stream = whole
    run.train_step()
    print(peak_bytes(device) - empty - lasting_bytes(run))


def fewer(stream: OneBatch, rows: int) -> OneBatch:
    b = stream.batch
    return OneBatch(Batch(b.tokens_BL[:rows], None, None if b.features_BLF is None else b.features_BLF[:rows]))


# ---------------------------------------------------------------- shares of time


class Stopwatch:
    """Seconds by part; nested parts count for the innermost one alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.stack: list[str] = []
        self.since = time.perf_counter()

    def turn(self, begin: str | None) -> None:
        """Begin a part, or end the latest one if `begin` is None."""
        now = time.perf_counter()
        current = self.stack[-1] if self.stack else "rest"
        self.seconds[current] = self.seconds.get(current, 0.0) + now - self.since
        self.since = now
        if begin is None:
            self.stack.pop()
        else:
            self.stack.append(begin)

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Time every call of `owner.name`."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.turn(part)
            try:
                return inner(*args, **kwargs)
            finally:
                self.turn(None)

        setattr(owner, name, timed)


def shares(name: str, rows: int, steps: int) -> dict[str, float]:
    """Return the share of a step's time by part, largest first."""
    run, clock = build(name, rows, OURS), Stopwatch()
    assert isinstance(run, Trainer)
    method: Any = run.method
    plain = TokenReader.losses, jpeg_dlm.latent_regularizers, torch.Tensor.backward
    for owner, attribute, part in (
        (method, "features", "encoder"), (method, "target_latents", "target compressor"),
        (method.compressor, "forward", "compressor"), (method, "self_condition", "self-conditioning"),
        (method, "both_branches", "DiT"), (method.decompressor, "forward", "decompressor"),
        (TokenReader, "losses", "token loss with its gradient"), (jpeg_dlm, "latent_regularizers", "regularizers"),
        (run.optimizer, "step", "optimizer"), (method, "after_step", "moving averages"), (run.ema, "update", "moving averages"),
    ):  # fmt: skip
        clock.watch(owner, attribute, part)
    try:
        clock.watch(torch.Tensor, "backward", "backward")
        run.train_step()
        clock.seconds.clear()
        for _ in range(steps):
            run.train_step()
    finally:
        TokenReader.losses, jpeg_dlm.latent_regularizers, torch.Tensor.backward = plain
    total = sum(clock.seconds.values())
    return dict(sorted(((part, s / total) for part, s in clock.seconds.items()), key=lambda item: -item[1]))


# ---------------------------------------------------------------- tables


def measure(short: bool = False, compiled: bool = False) -> dict[str, Any]:
    """Return the tables as Markdown, their rows, and the ratios to compare with the record."""
    rows: list[dict[str, Any]] = []
    parts: dict[str, dict[str, float]] = {}
    for name in ("tiny",) if short else ("tiny", "lm1b"):
        rows += compared(name, ROWS[name], 3 if short else ROUNDS[name], compiled)
        parts[name] = shares(name, ROWS[name], 2 if name == "lm1b" else 5)
    ours = [row for row in rows if row["variant"] != PLAIN]
    label = "{preset}, {variant}: {kind}".format
    return {
        "title": "A training step against the straightforward one",
        "markdown": f"{step_table(rows)}\n\n{share_table(parts)}\n",
        "rows": rows,
        "ratios": {label(**row, kind="speed"): row["speed"] for row in ours}
        | {label(**row, kind="times less memory"): 1 / row["memory"] for row in ours if "memory" in row},
    }


def variants(name: str, compiled: bool) -> list[str]:
    """Return the variants of a preset: at the paper's size, those that fit into 24 GB together."""
    cached = [] if preset(name).data.cache_features else [CACHED]
    recomputed = [LEAN] if name == "tiny" else []
    return [PLAIN, PLAIN_KEPT, OURS, *recomputed, *cached, *([COMPILED] if compiled else [])]


def compared(name: str, rows: int, rounds: int, compiled: bool) -> list[dict[str, Any]]:
    """Compare all variants of one size."""
    with Workers("training", {variant: (name, str(rows), variant) for variant in variants(name, compiled)}) as workers:
        workers.ask({})  # the first step creates the optimizer's state and compiles
        seconds = workers.medians({}, rounds)
    found = []
    for variant, s in seconds.items():
        row = {"preset": name, "batch": rows, "variant": variant, "rows_per_second": rows / s, "speed": seconds[PLAIN] / s}
        if variant not in (PLAIN_KEPT, COMPILED):  # same as PLAIN; would include the compiler's own memory
            row["bytes"] = step_bytes(name, rows, variant)
            row["memory"] = row["bytes"] / (found[0]["bytes"] if found else row["bytes"])
        found.append(row)
    return found


def serve(name: str, rows: str, variant: str) -> Callable[[Request], float]:
    """Return the function of a worker, which times the next step."""
    if variant != PLAIN:
        keep_freed_memory()
    run = build(name, int(rows), variant)

    def act(request: Request) -> float:
        began = time.perf_counter()
        run.train_step()
        return time.perf_counter() - began

    return act


def step_table(rows: list[dict[str, Any]]) -> str:
    heading = ("preset", "rows", "variant", "rows per second", "ratio", "MiB beyond the state", "ratio")
    return markdown_table(heading, [
        (
            r["preset"], str(r["batch"]), r["variant"], f"{r['rows_per_second']:.2f}", f"{r['speed']:.2f}x",
            f"{r['bytes'] / MIB:,.0f}" if "bytes" in r else "", f"{r['memory']:.0%}" if "memory" in r else "",
        )
        for r in rows
    ])  # fmt: skip


def share_table(parts: dict[str, dict[str, float]]) -> str:
    names = list(dict.fromkeys(part for found in parts.values() for part in found))
    cells = [[part, *(f"{found.get(part, 0.0):.1%}" for found in parts.values())] for part in names]
    return markdown_table(("share of time", *parts), cells)


def main() -> None:
    parser = argparse.ArgumentParser(description="A training step against the straightforward one.")
    parser.add_argument("--short", action="store_true", help="the small size alone")
    parser.add_argument("--compile", action="store_true", help="also with train.compile, which takes minutes to start")
    parser.add_argument("--peak", nargs=3, metavar=("PRESET", "ROWS", "VARIANT"), help="memory of one variant in this process")
    args = parser.parse_args()
    if args.peak:
        name, rows, variant = args.peak
        print_step_bytes(name, int(rows), variant)
        return
    found = measure(args.short, args.compile)
    print(f"### {found['title']}\n\n{found['markdown']}")


if __name__ == "__main__":
    main()
