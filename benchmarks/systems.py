"""JPEG-DLM with everything together, beside AR and ELF at the paper's sizes: fastest type and fewest evaluations.

python benchmarks/run.py systems            # LM1B and OWT-1024 at batch 1, 2, 8 and 64, with random weights
python benchmarks/run.py systems --short    # LM1B at batch 1

Evaluations of diffusion samplers all take the same time, so one evaluation and one decoding are timed and added up. AR with a
KV cache is timed as a whole. Without one, a token costs the more the later it comes: tokens at the middles of equal parts of
a text are timed. Large batches of long texts are timed in part, and the note above the table says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from sampling import TIME
from timing import clock
from torch import Tensor

from jpeg_dlm.config import Config
from jpeg_dlm.evaluation.paper import paper_figures
from jpeg_dlm.evaluation.table import Table
from jpeg_dlm.export.onnx_model import OnnxNetworks, build_graphs
from jpeg_dlm.methods.ar import Ar
from jpeg_dlm.methods.base import FREE, Method
from jpeg_dlm.methods.elf import Elf
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.options import override
from jpeg_dlm.presets import preset
from jpeg_dlm.util.rng import RowNoise

PRESETS, BATCHES = ("lm1b", "owt1024"), (1, 2, 8, 64)
PARTS = 4  # of a text, in the middle of each of which AR without a cache is timed
POSITIONS = 8192  # most positions of a timed evaluation: from here on a text takes the same time in a larger batch (assumed)
DECODED = 8  # most rows decoded at once, since the logits of more would take gigabytes
WHOLE = 8192  # most tokens of a batch for which AR with a cache is timed as a whole
TOKENS = 8  # tokens in the middle of each part that are timed otherwise
REPEATED = 1024  # most tokens of a batch that is timed twice
AR, CACHED, ELF = "AR, no KV cache", "AR, KV cache", "ELF"


@dataclass(frozen=True)
class System:
    """A name, the number of evaluations, the paper's speed, and the seconds of a batch of texts."""

    name: str
    evaluations: int
    paper: float | None
    seconds: Callable[[int], float]


def measure(
    short: bool = False, presets: Sequence[str] = (), batches: Sequence[int] = (), changes: Mapping[str, Any] | None = None
) -> dict:
    """Time every system at every batch; `changes` override options of the presets."""
    presets, batches = presets or PRESETS[: 1 if short else None], batches or BATCHES[: 1 if short else None]
    tables, rows = [], []
    for name in presets:
        base = override(preset(name), changes or {})
        of_preset = [row_of(system, base, batches) for system in systems(base)]
        for row in of_preset:
            row["ratio"] = {batch: speed / of_preset[0]["texts_per_s"][batch] for batch, speed in row["texts_per_s"].items()}
        tables += [note(base, batches), table(of_preset, batches), winner(of_preset, batches)]
        rows += of_preset
    return {
        "title": f"Systems at the sizes of {' and '.join(presets)}",
        "markdown": "\n\n".join(tables) + "\n",
        "rows": rows,
        "ratios": {
            f"{r['preset']}, {r['system']}, batch {b}": r["ratio"][b] for r in rows if r["system"] != AR for b in batches
        },
    }


def row_of(system: System, base: Config, batches: Sequence[int]) -> dict[str, Any]:
    length = base.data.token_len
    seconds = {b: min(system.seconds(b) for _ in range(2 if b * length <= REPEATED else 1)) for b in batches}
    return {
        "preset": base.preset, "system": system.name, "evaluations": system.evaluations, "paper": system.paper,
        "texts_per_s": {batch: batch / spent for batch, spent in seconds.items()},
    }  # fmt: skip


def note(base: Config, batches: Sequence[int]) -> str:
    """Say what the figures are, and which of them were timed in part."""
    length = base.data.token_len
    most = max(1, POSITIONS // length)
    text = f"{base.preset}: texts of {length} tokens per second, and the ratio to {AR}; random weights. "
    text += f"{AR} was timed at {PARTS} tokens of a text, diffusion by one evaluation and one decoding, both scaled to all."
    if max(batches) > most:
        text += f" At batches above {most}, {AR} and {ELF} were timed with {most} texts, JPEG-DLM with as many positions."
    if max(batches) * length > WHOLE:
        text += f" At batches above {WHOLE // length}, {CACHED} was timed at {PARTS * TOKENS} tokens of a text."
    return text


def table(rows: Sequence[Mapping[str, Any]], batches: Sequence[int]) -> str:
    cells = [
        [r["system"], str(r["evaluations"]), *(f"{r['texts_per_s'][b]:.3g} ({r['ratio'][b]:.2f}x)" for b in batches),
         f"{r['paper']:g}x" if r["paper"] else ""]
        for r in rows
    ]  # fmt: skip
    return Table.of(
        "", ["system", "evaluations", *(f"batch {b}" for b in batches), "paper, batch 64 on a GPU"], cells
    ).markdown()


def winner(rows: Sequence[Mapping[str, Any]], batches: Sequence[int]) -> str:
    """Say how the last system compares with AR with a cache, and at which batches that wins."""
    cached, last = next(r for r in rows if r["system"] == CACHED), rows[-1]
    gain = {b: last["texts_per_s"][b] / cached["texts_per_s"][b] for b in batches}
    gains = ", ".join(f"{gain[b]:.2f}x at batch {b}" for b in batches)
    wins = [str(b) for b in batches if gain[b] < 1]
    return f"{last['system']} against {CACHED}: {gains}. " + (
        f"{CACHED} wins at batch {', '.join(wins)}." if wins else f"{CACHED} wins at none of them."
    )


def systems(base: Config) -> list[System]:
    """Return the systems in the order of the table."""
    ar, elf, own = built(base, "ar"), built(base, "elf"), built(base, "jpeg-dlm")
    assert isinstance(ar, Ar) and isinstance(elf, Elf) and isinstance(own, JpegDlm)
    length, paper_ar = base.data.token_len, paper_figures(base.preset, ar.title)
    onnx = functools.cache(lambda precision: OnnxNetworks(base, build_graphs(own, precision)))
    full, few = (sampler.evaluations(length) for sampler in (base.sampler, replace(base.sampler, steps=11)))
    elf_evaluations = elf.config.sampler.evaluations(length)
    paper_own = paper_figures(base.preset).get("speed")
    return [
        System(AR, length, paper_ar.get("speed"), lambda batch: without_cache(ar, batch)),
        System(CACHED, length, paper_ar.get("speed_kv_cache"), lambda batch: with_cache(ar, batch)),
        System(ELF, elf_evaluations, paper_figures(base.preset, elf.title).get("speed"),
               lambda batch: elf_seconds(elf, batch, elf_evaluations)),
        System("JPEG-DLM, fp32, all steps", full, paper_own, lambda batch: own_seconds(onnx("fp32"), batch, full)),
        System("JPEG-DLM, fp32, 11 steps", few, None, lambda batch: own_seconds(onnx("fp32"), batch, few)),
        System("JPEG-DLM, int8, 11 steps", few, None, lambda batch: own_seconds(onnx("int8"), batch, few)),
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


def middles(length: int) -> list[int]:
    """Return the positions in the middle of each part of a text."""
    return [int((part + 0.5) * length / PARTS) for part in range(PARTS)]


def without_cache(ar: Ar, batch: int) -> float:
    """Return the seconds of a batch: the cost of tokens in the middle of each part, times the length of a part."""
    length, sampler = ar.config.data.token_len, replace(ar.config.sampler, kv_cache=False)
    rows = min(batch, max(1, POSITIONS // length))
    spent = [
        timed(lambda i=i: ar.sample(sampler, RowNoise(0, range(rows)), fixed_BL=free(rows, length, i))) for i in middles(length)
    ]
    return sum(spent) * length / PARTS * batch / rows


def with_cache(ar: Ar, batch: int) -> float:
    """Return the seconds of a batch, or of tokens in the middle of each part, which follow a cache as if it had been filled."""
    length, sampler, noise = ar.config.data.token_len, replace(ar.config.sampler, kv_cache=True), RowNoise(0, range(batch))
    if batch * length <= WHOLE:
        return timed(lambda: ar.sample(sampler, noise))
    count, spent = min(TOKENS, length // PARTS), 0.0
    for i in middles(length):
        filled = ar.backbone.new_cache(batch, length + ar.before)
        for cache in filled:
            cache.length = i + ar.before - 1
        with mock.patch.object(ar.backbone, "new_cache", return_value=filled):
            spent += timed(lambda i=i: ar.sample(sampler, noise, fixed_BL=free(batch, length, i, count)))
    return spent * length / (PARTS * count)


def free(batch: int, length: int, start: int, count: int = 1) -> Tensor:
    """Return rows in which all tokens but `count` of them are given."""
    fixed_BL = torch.full((batch, length), 1)
    fixed_BL[:, start : start + count] = FREE
    return fixed_BL


def elf_seconds(elf: Elf, batch: int, evaluations: int) -> float:
    z = torch.randn(batch, *elf.latent_shape)
    return diffusion(lambda x: elf.denoise(x, TIME, x, 1.0), elf.tokens, z, evaluations)


def own_seconds(writer: JpegDlm | OnnxNetworks, batch: int, evaluations: int) -> float:
    m, w = writer.config.model, writer.config.sampler.w
    z = torch.randn(batch, m.latent_len, m.latent_dim)
    return diffusion(lambda x: writer.denoise(x, TIME, x, w), lambda x: writer.tokens(x, w), z, evaluations)


def diffusion(evaluate: Callable[[Tensor], object], decode: Callable[[Tensor], object], z: Tensor, evaluations: int) -> float:
    """Return the seconds of all evaluations, of which the last decodes."""
    batch = len(z)
    z = z[: max(1, POSITIONS // z.shape[1])]
    few = z[:DECODED]
    timed(lambda: evaluate(z[:1]))  # packs weights, if they are packed at the first use
    return batch * ((evaluations - 1) * timed(lambda: evaluate(z)) / len(z) + timed(lambda: decode(few)) / len(few))
