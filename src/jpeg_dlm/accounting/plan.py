"""Plan a training before anyone pays for it: memory of each device, time of a step, days of the run.

Time is operations over a speed that is either stated (a device's peak and the share of it that is reached) or measured here.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from jpeg_dlm.accounting.encoder import EncoderSize, encoder_size
from jpeg_dlm.config import Config
from jpeg_dlm.errors import UsageError
from jpeg_dlm.sampling.speeds import with_precision

if TYPE_CHECKING:
    from collections.abc import Callable

    from jpeg_dlm.accounting.costs import TrainingCost

FP32 = 4  # bytes
UNITS = {"MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2.0**20, "GiB": 2.0**30}
USABLE = 0.92  # share of a device that tensors can fill; the rest is the driver's and lost between tensors (assumed)
PEAK_TFLOPS = {"bf16": 312.0, "fp32": 19.5}  # of an A100, dense (NVIDIA)
UTILIZATION = 0.3  # of that peak by networks of this width (assumed)
# Tokens of a corpus in the preset's tokenizer. OpenWebText: five epochs are 95,000 steps of 512 rows of 1,024 (ELF).
# LM1B: 0.77 billion words at 1.3 tokens (assumed).
CORPUS_TOKENS = {"lm1b": 1.0e9, "owt1024": 9.96e9, "owt128": 9.96e9}
CE_CHUNK = 8192  # positions whose logits exist at once, as advised
DAY = 86_400


@dataclass(frozen=True)
class Devices:
    """Equal devices; `text` is how they were asked for."""

    count: int
    capacity: float  # bytes of one
    text: str


def parse_devices(text: str) -> Devices:
    """Read '8x80GB', '2x24GB' or '1x0.5GB'."""
    match = re.fullmatch(r"(\d+)\s*[x×]\s*(\d+(?:\.\d+)?)\s*(MB|GB|TB|MiB|GiB)", text.strip())
    if match is None or int(match[1]) < 1 or float(match[2]) <= 0:
        raise UsageError(f"Devices are a number and the memory of each, such as 8x80GB or 1x0.5GB, not '{text}'.")
    return Devices(int(match[1]), float(match[2]) * UNITS[match[3]], text)


def parse_tokens(text: str) -> float:
    """Read '1.2B', '800M' or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMBT]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"Tokens are a number such as 800M or 1.2B, not '{text}'.")
    return float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2]]


@dataclass(frozen=True)
class Speed:
    """Operations a second that one device really does, at two a multiply-accumulate, and where the number is from."""

    flops: float
    said: str


def stated_speed(config: Config, tflops: float | None, utilization: float | None) -> Speed:
    """Return a peak times the share of it that is reached."""
    from jpeg_dlm.accounting.costs import planned_precision

    precision = planned_precision(config)
    peak = PEAK_TFLOPS[precision] if tflops is None else tflops
    share = UTILIZATION if utilization is None else utilization
    if peak <= 0 or not 0 < share <= 1:
        raise UsageError("--tflops must be positive and --utilization above 0 and at most 1.")
    whose = f"an A100's peak in {precision}" if tflops is None else "stated"
    return Speed(peak * 1e12 * share, f"{peak:g} TFLOP/s ({whose}) x {share:g} utilization")


# ---------------------------------------------------------------- memory of one device


@dataclass(frozen=True)
class Placement:
    """Placement of the training state on the devices, and if layers are computed again in the backward pass."""

    fsdp: bool
    recompute: bool

    def name(self, count: int) -> str:
        spread = "FSDP" if self.fsdp else "DDP" if count > 1 else "one device"
        return spread + (" + checkpointing" if self.recompute else "")


@dataclass(frozen=True)
class Training:
    """Measured costs of a training, one measurement for each micro-batch size."""

    config: Config
    trained: int  # parameters
    copies: int  # frozen ones, such as a target or a codec
    encoder: EncoderSize | None  # that runs in every step
    cost: Callable[[int, bool], TrainingCost]  # of rows at once, with layers computed again or not

    def memory(self, rows: int, count: int, layout: Placement) -> dict[str, int]:
        """Return bytes of a device by use, and `total`. FSDP gathers whole weights for a step, like DDP's buckets."""
        cost = self.cost(rows, layout.recompute)
        weights = FP32 * self.trained // (count if layout.fsdp else 1)
        parts = {
            "weights": weights,
            "gradients": weights,
            "optimizer": (1 if self.config.train.optimizer == "muon" else 2) * weights,  # Muon keeps one momentum of a matrix
            "ema": weights,
            "copies": FP32 * self.copies,
            "encoder": 0 if self.encoder is None else FP32 * self.encoder.parameters(),
            "bf16_weights": cost.casts,  # autocast keeps them until backward is done
            "communication": 0 if count == 1 else FP32 * self.trained,
            "activations": cost.activations,
            "working": cost.working,
        }
        return parts | {"total": sum(parts.values())}

    def row_macs(self, rows: int, recompute: bool) -> dict[str, float]:
        """Return operations of one row in one step by part, and `total`."""
        cost = self.cost(rows, recompute)
        encoder = 0.0 if self.encoder is None else float(self.encoder.macs(self.config.data.token_len))
        parts = {"encoder": encoder, "forward": cost.forward, "backward": cost.backward}
        return parts | {"total": sum(parts.values())}

    def seconds(self, rows: int, at_once: int, layout: Placement, speed: Speed) -> float:
        """Return the time of a step of `rows` rows; reading, sending and updating are part of the utilization."""
        return 2 * self.row_macs(at_once, layout.recompute)["total"] * rows / speed.flops


def measured_training(config: Config) -> Training:
    """Return the training of a config; nothing of its size is allocated."""
    from jpeg_dlm.accounting.costs import build_weightless, parameter_parts, training_cost

    method = build_weightless(config)
    parts = parameter_parts(method)
    encoder = encoder_size(config) if method.needs_encoder(config) and not config.data.cache_features else None
    cost = cache(lambda rows, recompute: training_cost(config, rows, recompute))
    return Training(config, parts["total"], parts.get("frozen", 0), encoder, cost)


# ---------------------------------------------------------------- how a step is split


def splits(rows: int, most: int) -> list[int]:
    """Return micro-batches of at most `most` rows that divide the `rows` of a step on one device, largest first."""
    return [batch for batch in range(min(most, rows), 0, -1) if rows % batch == 0]


def layouts(config: Config, count: int) -> list[Placement]:
    """Return what the config asks for, then simplest first; one device has nothing to spread."""
    spreads = (False, True) if count > 1 else (False,)
    found = [Placement(fsdp, recompute) for fsdp in spreads for recompute in (False, True)]
    own = Placement(config.train.sharding == "fsdp" and count > 1, config.train.checkpoint_layers)
    return sorted(found, key=lambda layout: layout != own)


def make_plan(config: Config, devices: Devices, speed: Speed, corpus_tokens: float | None = None) -> dict[str, Any]:
    """Return everything `format_plan` shows, as JSON values."""
    from jpeg_dlm.accounting.costs import planned_precision
    from jpeg_dlm.methods.registry import method_class

    t = config.train
    rows = math.ceil(t.batch * t.accumulation * t.devices / devices.count)  # of a step, on one device
    per_step = rows * devices.count * config.data.token_len
    corpus = corpus_tokens or CORPUS_TOKENS.get(config.preset)
    steps = t.steps or (math.ceil(t.epochs * corpus / per_step) if corpus else 0)
    config = replace(config, train=replace(t, steps=steps))
    training, possible = measured_training(config), splits(rows, t.batch)
    asked, ways = possible[0], []

    def fits(batch: int, layout: Placement) -> bool:
        return training.memory(batch, devices.count, layout)["total"] <= USABLE * devices.capacity

    for layout in layouts(config, devices.count):
        whole = fits(asked, layout)
        place = 0 if whole else bisect_left(possible, True, 1, key=lambda batch, layout=layout: fits(batch, layout))
        batch = possible[place] if place < len(possible) else 0
        ways.append({
            "layout": layout.name(devices.count), "fsdp": layout.fsdp, "recompute": layout.recompute,
            "memory": training.memory(asked, devices.count, layout), "fits": whole, "batch": batch,
            "accumulation": rows // batch if batch else 0, "seconds_per_step": training.seconds(rows, asked, layout, speed),
        })  # fmt: skip
    chosen = next((way for way in ways if way["batch"]), ways[-1])
    days = steps * chosen["seconds_per_step"] / DAY
    return {
        "preset": config.preset, "method": config.method, "precision": planned_precision(config),
        "devices": {"count": devices.count, "bytes": devices.capacity, "text": devices.text},
        "speed": {"flops": speed.flops, "said": speed.said},
        "parameters": {"trained": training.trained, "copies": training.copies},
        "encoder_counted": not method_class(config.method).needs_encoder(config) or encoder_size(config) is not None,
        "row_macs": training.row_macs(asked, False), "batch": asked, "rows_per_step": rows * devices.count,
        "tokens_per_step": per_step, "corpus_tokens": corpus, "steps": steps, "ways": ways, "chosen": ways.index(chosen),
        "tokens_per_day": per_step * DAY / chosen["seconds_per_step"], "days": days,
        "logit_share": _saved_by_chunks(training, asked, chosen), "ce_chunk": getattr(config.objective, "ce_chunk", None),
    }  # fmt: skip


def _saved_by_chunks(training: Training, rows: int, way: dict[str, Any]) -> float:
    """Return the share of the memory that fewer logits at once would save, where it does not fit and they are all kept."""
    config = training.config
    if way["fits"] or getattr(config.objective, "ce_chunk", None) != 0:
        return 0.0
    chunked = measured_training(replace(config, objective=replace(config.objective, ce_chunk=CE_CHUNK)))
    kept, rest = (t.cost(rows, way["recompute"]) for t in (training, chunked))
    return max(0, kept.activations + kept.working - rest.activations - rest.working) / way["memory"]["total"]


def full_plan(config: Config, devices: Devices, speed: Speed, corpus_tokens: float | None = None) -> dict[str, Any]:
    """Return `make_plan`, with the plan of what must be trained before as `first_stage`."""
    from jpeg_dlm.methods.registry import method_class

    found = make_plan(config, devices, speed, corpus_tokens)
    stage = method_class(config.method).first_stage(config)
    return found if stage is None else found | {"first_stage": make_plan(stage, devices, speed, corpus_tokens)}


# ---------------------------------------------------------------- this machine's speed

TIMED, LONG_ENOUGH = 3, 1.0  # passes that are timed, and seconds below which one says little (assumed)


def measured_speed(config: Config, device: str | None = None) -> Speed:
    """Time forward and backward of a few rows of the model itself; as many as make a pass last, or as the preset has."""
    import time

    import torch

    from jpeg_dlm.accounting.costs import training_cost
    from jpeg_dlm.evaluation.trial import random_batch, train_pass
    from jpeg_dlm.machine.dist import read_ranks
    from jpeg_dlm.methods.registry import build_method

    on = read_ranks(device, {}).device
    method = build_method(config).to(on).train()
    config = with_precision(config, on.type)

    def seconds(rows: int, passes: range) -> float:
        batch = random_batch(config, rows, on, method.needs_encoder(config))
        began = time.perf_counter()
        for step in passes:
            train_pass(method, config, batch, step)
        if on.type == "cuda":
            torch.cuda.synchronize(on)
        return (time.perf_counter() - began) / len(passes)

    rows = min(2, config.train.batch)
    seconds(rows, range(1))  # the first is slow
    spent = seconds(rows, range(1))
    while spent < LONG_ENOUGH and 2 * rows <= config.train.batch:
        try:
            spent = seconds(2 * rows, range(1))
        except torch.OutOfMemoryError:
            break
        rows *= 2
    spent = seconds(rows, range(1, 1 + TIMED))
    flops = 2 * training_cost(config, rows).macs * rows / spent
    where = torch.cuda.get_device_name(on) if on.type == "cuda" else f"{on.type}, {torch.get_num_threads()} threads"
    return Speed(flops, f"{flops / 1e12:.3g} TFLOP/s measured here ({where}, {rows} rows at once)")
