"""A training step beside that of examples/jpeg_dlm_in_one_file.py at equal sizes: seconds and memory.

python benchmarks/run.py training            # tiny and lm1b: about three minutes on one core
python benchmarks/run.py training --short    # tiny alone

Both steps take features from a cache, run in fp32 and take turns; the fastest round counts. Ours also keeps a moving average of
the weights. Memory is the peak of a process with one of them, beyond what it held after a first step with one row.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import best_seconds

from jpeg_dlm.config import Config
from jpeg_dlm.evaluation.table import Table
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.presets import preset
from jpeg_dlm.training.trainer import Trainer
from jpeg_dlm.util.distributed import Ranks
from jpeg_dlm.util.rng import RowNoise

PLAIN, OURS, RECOMPUTED = "one file", "ours", "ours, layers recomputed"
VARIANTS = (PLAIN, OURS, RECOMPUTED)
ROWS = {"tiny": 64, "lm1b": 8}  # of a micro-batch; the paper's 384 for lm1b need an accelerator
ROUNDS = {"tiny": 9, "lm1b": 2}
MIB = 1 << 20


@dataclass
class OneBatch:
    """A stream of the same random tokens with new noise, instead of a corpus."""

    batch: Batch

    @property
    def rows_per_step(self) -> int:
        return len(self.batch.tokens_BL)

    def micro_batches(self, step: int) -> Iterator[tuple[Batch, RowNoise]]:
        yield self.batch, RowNoise(0, range(self.rows_per_step), step)


def random_batch(config: Config, rows: int) -> Batch:
    g, shape = torch.Generator().manual_seed(0), (rows, config.data.token_len)
    tokens = torch.randint(config.data.vocab_size, shape, generator=g)
    features = torch.randn(*shape, config.encoder.feature_dim, generator=g)
    return Batch(tokens, torch.ones(shape, dtype=torch.bool), features)


def step_of(name: str, variant: str) -> Callable[[int], object]:
    """Return a function that trains one step on so many rows."""
    config = preset(name)
    train = replace(config.train, precision="fp32", batch=ROWS[name], accumulation=1, devices=1, steps=1000)
    config = replace(config, train=replace(train, checkpoint_layers=variant == RECOMPUTED))
    torch.manual_seed(0)
    if variant == PLAIN:
        return one_file_step(config)
    trainer: Any = Trainer(config, JpegDlm(config), OneBatch(random_batch(config, ROWS[name])), Path("."), Ranks())  # pyright: ignore[reportArgumentType]

    def act(rows: int) -> None:
        trainer.stream = OneBatch(random_batch(config, rows))
        trainer.train_step()

    return act


def one_file_step(config: Config) -> Callable[[int], object]:
    """Return the step of the example at the sizes of a config."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import jpeg_dlm_in_one_file as one_file

    m, data, o = config.model, config.data, config.objective
    model = one_file.JpegDlm(
        one_file.Options(
            data.vocab_size, data.token_len, m.latent_len, m.latent_dim, config.encoder.feature_dim, m.bottleneck_dim,
            m.codec_layers, m.codec_heads, m.hidden, m.depth, m.heads, sigreg_slices=o.sigreg_slices, steps=1000,
        )
    )  # fmt: skip
    optimizer, g = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3), torch.Generator()

    def act(rows: int) -> None:
        batch = random_batch(config, rows)
        losses = model.losses(batch.tokens_BL, batch.mask_BL, batch.features_BLF, one_file.Noise(rows, g), 0)
        optimizer.zero_grad()
        sum(losses.values()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(model.target.parameters()), list(model.compressor.parameters()), 0.001)

    return act


def peak_bytes() -> int:
    """Return the largest memory of this process so far (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))


def step_bytes(name: str, variant: str) -> int:
    """Return the memory that a step takes beyond its state, measured in a process of its own."""
    # Return freed blocks to the system at once, so that the high-water mark counts live memory only.
    eager = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    words = [sys.executable, __file__, name, variant]
    return int(subprocess.run(words, capture_output=True, text=True, check=True, env=eager).stdout.split()[-1])


def measure(short: bool = False) -> dict[str, Any]:
    """Return the table as Markdown, its rows, and the ratios to the one-file step."""
    rows: list[dict[str, Any]] = []
    for name in ("tiny",) if short else ("tiny", "lm1b"):
        steps = {variant: step_of(name, variant) for variant in VARIANTS}
        seconds = best_seconds({v: partial(act, ROWS[name]) for v, act in steps.items()}, ROUNDS[name])
        steps.clear()
        memory = {variant: step_bytes(name, variant) for variant in VARIANTS}
        for v in VARIANTS:
            ratios = {"speed": seconds[PLAIN] / seconds[v], "less": memory[PLAIN] / memory[v]}
            rows.append({"preset": name, "variant": v, "seconds": seconds[v], "bytes": memory[v], **ratios})
    cells = [
        [
            r["preset"],
            r["variant"],
            f"{r['seconds']:.3g}",
            f"{r['speed']:.2f}x",
            f"{r['bytes'] / MIB:,.0f}",
            f"{1 / r['less']:.0%}",
        ]
        for r in rows
    ]
    ours = [r for r in rows if r["variant"] != PLAIN]
    return {
        "title": "A training step beside that of the one file",
        "markdown": Table.of(
            "", ["preset", "variant", "s per step", "speed", "MiB beyond the state", "memory"], cells
        ).markdown(),
        "rows": rows,
        "ratios": {f"{r['preset']}, {r['variant']}: speed": r["speed"] for r in ours}
        | {f"{r['preset']}, {r['variant']}: times less memory": r["less"] for r in ours},
    }


if __name__ == "__main__":
    act = step_of(*sys.argv[1:])
    act(1)
    before = peak_bytes()
    act(ROWS[sys.argv[1]])
    print(peak_bytes() - before)
