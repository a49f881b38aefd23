"""JPEG-DLM with everything together, beside AR and ELF at the paper's sizes: fastest type and fewest evaluations.

python benchmarks/run.py systems            # LM1B at batch 1, 2, 8, 64, with random weights

Evaluations of diffusion samplers all take the same time, so one evaluation and one decoding are timed and added up. AR with a
KV cache is timed as a whole. Without one, a token costs the more the later it comes: tokens at the middles of equal parts of
a text are timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sampling import TIME
from torch import Tensor
from workers import clock

from jpeg_dlm.config import Config
from jpeg_dlm.config_io import override
from jpeg_dlm.evaluation.paper import paper_figures
from jpeg_dlm.flow.latent_sampler import LatentSampler
from jpeg_dlm.methods.ar import Ar
from jpeg_dlm.methods.base import FREE, Method
from jpeg_dlm.methods.elf import Elf
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.results.pictures import INK, LINE_COLORS, dress, new_figure, save_png
from jpeg_dlm.results.table import markdown_table
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.sampling.engine import accelerated

PRESET, BATCHES = "lm1b", (1, 2, 8, 64)
PARTS = 4  # of a text, in the middle of each of which AR without a cache is timed
DECODED = 8  # most rows decoded at once, since the logits of more would take gigabytes
REPEATED = 8  # largest batch that is timed twice
AR, CACHED, ELF = "AR, no KV cache", "AR, KV cache", "ELF"


@dataclass(frozen=True)
class System:
    """A name, the number of evaluations, the paper's speed, and the seconds of a batch of texts."""

    name: str
    evaluations: int
    paper: float | None
    seconds: Callable[[int], float]


def measure(short: bool = False, batches: Sequence[int] | None = None, changes: Mapping[str, Any] | None = None) -> dict:
    """Time every system at every batch; `changes` override options of the preset."""
    base = override(preset(PRESET), changes or {})
    batches = batches or (BATCHES[:1] if short else BATCHES)
    rows = []
    for system in systems(base):
        seconds = {batch: min(system.seconds(batch) for _ in range(2 if batch <= REPEATED else 1)) for batch in batches}
        rows.append({
            "system": system.name, "evaluations": system.evaluations, "paper": system.paper,
            "texts_per_s": {batch: batch / spent for batch, spent in seconds.items()},
        })  # fmt: skip
        first = rows[0]["texts_per_s"]
        rows[-1]["ratio"] = {batch: speed / first[batch] for batch, speed in rows[-1]["texts_per_s"].items()}
    cells = [
        [r["system"], str(r["evaluations"]), *(f"{r['texts_per_s'][b]:.3g} ({r['ratio'][b]:.2f}x)" for b in batches),
         f"{r['paper']:g}x" if r["paper"] else ""]
        for r in rows
    ]  # fmt: skip
    heading = ["system", "evaluations", *(f"batch {b}" for b in batches), "paper, batch 64 on a GPU"]
    note = f"Texts per second, and the ratio to {AR}; random weights, {base.data.token_len} tokens."
    return {
        "title": f"Systems at the sizes of {base.preset}",
        "markdown": f"{note}\n\n{markdown_table(heading, cells)}\n",
        "rows": rows,
        "ratios": {f"{r['system']}, batch {b}": r["ratio"][b] for r in rows[1:] for b in batches},
    }


def systems(base: Config) -> list[System]:
    """Return the systems, each with its own network, which goes when the next one is timed."""
    ar, elf, own = built(base, "ar"), built(base, "elf"), built(base, "jpeg-dlm")
    assert isinstance(ar, Ar) and isinstance(elf, Elf) and isinstance(own, JpegDlm)
    length, paper_ar = base.data.token_len, paper_figures(base.preset, ar.title)
    engine = functools.cache(lambda dtype: accelerated(own, dtype))
    full, few = (sampler.evaluations(length) for sampler in (base.sampler, base.sampler.fast()))
    elf_evaluations = elf.config.sampler.evaluations(length)
    paper_own = paper_figures(base.preset).get("speed")
    return [
        System(AR, length, paper_ar.get("speed"), lambda batch: without_cache(ar, batch)),
        System(CACHED, length, paper_ar.get("speed_kv_cache"), lambda batch: with_cache(ar, batch)),
        System(ELF, elf_evaluations, paper_figures(base.preset, elf.title).get("speed"),
               lambda batch: elf_seconds(elf, batch, elf_evaluations)),
        System("JPEG-DLM, fp32, all steps", full, paper_own, lambda batch: own_seconds(engine("fp32"), batch, full)),
        System("JPEG-DLM, fp32, --fast", few, None, lambda batch: own_seconds(engine("fp32"), batch, few)),
        System("JPEG-DLM, int8, --fast", few, None, lambda batch: own_seconds(engine("int8"), batch, few)),
    ]  # fmt: skip


def built(base: Config, name: str) -> Method:
    torch.manual_seed(0)
    method = build_method(for_method(base, name))
    assert isinstance(method, Method)
    return method.eval()


def timed(act: Callable[[], object]) -> float:
    with torch.inference_mode():
        began = clock()
        act()
        return clock() - began


def without_cache(ar: Ar, batch: int) -> float:
    """Return the seconds of a batch: the cost of tokens in the middle of each part, times the length of a part."""
    length, sampler = ar.config.data.token_len, replace(ar.config.sampler, kv_cache=False)

    def one_token(position: int) -> float:
        given_BL = torch.full((batch, length), 1)
        given_BL[:, position] = FREE
        return timed(lambda: ar.sample(sampler, RowNoise(0, range(batch)), given_BL=given_BL))

    return sum(one_token(int((part + 0.5) * length / PARTS)) for part in range(PARTS)) * length / PARTS


def with_cache(ar: Ar, batch: int) -> float:
    return timed(lambda: ar.sample(replace(ar.config.sampler, kv_cache=True), RowNoise(0, range(batch))))


def elf_seconds(elf: Elf, batch: int, evaluations: int) -> float:
    z, w = torch.randn(batch, elf.config.data.token_len, elf.config.encoder.feature_dim), torch.ones(batch)
    return diffusion(lambda x: elf.predict(x, TIME, x, w[: len(x)]), lambda x: elf.greedy(x, w[: len(x)]), z, evaluations)


def own_seconds(writer: LatentSampler, batch: int, evaluations: int) -> float:
    m, w = writer.config.model, writer.config.sampler.w
    denoise = writer.denoiser([TIME], w)
    z = torch.randn(batch, m.latent_len, m.latent_dim)
    return diffusion(lambda x: denoise(x, TIME, x), lambda x: writer.tokens(x, w), z, evaluations)


def diffusion(evaluate: Callable[[Tensor], object], decode: Callable[[Tensor], object], z: Tensor, evaluations: int) -> float:
    """Return the seconds of all evaluations, of which the last decodes."""
    rows = min(len(z), DECODED)
    timed(lambda: evaluate(z[:1]))  # packs weights, if they are packed at the first use
    return (evaluations - 1) * timed(lambda: evaluate(z)) + timed(lambda: decode(z[:rows])) * len(z) / rows


def draw(result: Mapping[str, Any], path: Path) -> Path:
    """Draw the ratios: a group of bars for each batch, a color for each system."""
    figure, (axes,) = new_figure(1, result["title"])
    rows = result["rows"]
    batches, width = list(rows[0]["ratio"]), 0.84 / len(rows)
    for i, row in enumerate(rows):
        places = [place + (i - (len(rows) - 1) / 2) * width for place in range(len(batches))]
        heights = [row["ratio"][batch] for batch in batches]
        axes.bar(places, heights, width, color=LINE_COLORS[i % len(LINE_COLORS)], label=row["system"])
    axes.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    dress(axes, "", f"speed, {AR} = 1", "")
    axes.legend(fontsize=6.5, frameon=False, labelcolor=INK)
    return save_png(figure, path)
