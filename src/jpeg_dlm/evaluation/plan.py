"""What a training needs of a machine before anyone pays for it: memory of each device, time of a step, days of the run.

Memory is by the formulas of `memory.py`, time by the operations of `training_counts.py` over a speed that is either stated
(a device's peak and the share of it that is reached) or measured here with forward and backward of a few rows.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from jpeg_dlm.config import Config
from jpeg_dlm.cpu import with_precision
from jpeg_dlm.errors import UsageError
from jpeg_dlm.evaluation.counts import dit_block_parameters, parameter_counts
from jpeg_dlm.evaluation.info import gigabytes, operations
from jpeg_dlm.evaluation.memory import BF16, FP32, activation_bytes, logit_bytes, planned_precision
from jpeg_dlm.evaluation.training_counts import USES_ENCODER, encoder_size, training_macs

UNITS = {"MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2.0**20, "GiB": 2.0**30}
USABLE = 0.92  # share of a device that tensors can fill; the rest is the driver's and lost between tensors (assumed)
WORKING = 0.3  # what comes and goes during backward, over what it keeps (measured on a CPU: 0.20 to 0.36)
PEAK_TFLOPS = {"bf16": 312.0, "fp32": 19.5}  # of an A100, dense (NVIDIA)
UTILIZATION = 0.3  # of that peak by networks of this width (assumed)
# Tokens of a corpus in the preset's tokenizer. OpenWebText: five epochs are 95,000 steps of 512 rows of 1,024 (ELF).
# LM1B: 0.77 billion words at 1.3 tokens (assumed).
CORPUS_TOKENS = {"lm1b": 1.0e9, "owt1024": 9.96e9, "owt128": 9.96e9}
LOGITS_MANY = 0.1  # share of the memory from which on chunks of logits are advised (assumed)
DAY = 86_400


@dataclass(frozen=True)
class Devices:
    """Equal devices; `text` is how they were asked for."""

    count: int
    capacity: float  # bytes of one
    text: str


def parse_devices(text: str) -> Devices:
    """'8x80GB', '2x24GB' or '1x0.5GB'."""
    match = re.fullmatch(r"(\d+)\s*[x×]\s*(\d+(?:\.\d+)?)\s*(MB|GB|TB|MiB|GiB)", text.strip())
    if match is None or int(match[1]) < 1 or float(match[2]) <= 0:
        raise UsageError(f"Devices are a number and the memory of each, such as 8x80GB or 1x0.5GB, not '{text}'.")
    return Devices(int(match[1]), float(match[2]) * UNITS[match[3]], text)


def parse_tokens(text: str) -> float:
    """'1.2B', '800M' or a plain number."""
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
    """A peak and the share of it that is reached."""
    precision = planned_precision(config)
    peak = PEAK_TFLOPS[precision] if tflops is None else tflops
    share = UTILIZATION if utilization is None else utilization
    if peak <= 0 or not 0 < share <= 1:
        raise UsageError("--tflops must be positive and --utilization above 0 and at most 1.")
    whose = f"an A100's peak in {precision}" if tflops is None else "stated"
    return Speed(peak * 1e12 * share, f"{peak:g} TFLOP/s ({whose}) x {share:g} utilization")


# ---------------------------------------------------------------- memory of one device


@dataclass(frozen=True)
class Layout:
    """How the state of training lies on the devices and whether layers are computed again in backward."""

    fsdp: bool
    recompute: bool

    def name(self, count: int) -> str:
        spread = "FSDP" if self.fsdp else "DDP" if count > 1 else "one device"
        return spread + (" + checkpointing" if self.recompute else "")


@dataclass(frozen=True)
class Sizes:
    """Numbers of a model: trained, frozen copies (a target, a codec), and of its largest layer."""

    trained: int
    copies: int
    layer: int


def sizes_of(config: Config) -> Sizes:
    """By formula for JPEG-DLM, else counted on the method built without memory."""
    if config.method == "jpeg-dlm":
        parts = parameter_counts(config)
        return Sizes(parts["total"], parts["compressor"], dit_block_parameters(config))
    from torch import nn

    from jpeg_dlm.evaluation.method_info import build_weightless, parameter_parts

    method = build_weightless(config)
    parts = parameter_parts(method)
    layers = [layer for stack in method.modules() if isinstance(stack, nn.ModuleList) for layer in stack]
    largest = max(sum(p.numel() for p in layer.parameters()) for layer in layers)
    return Sizes(parts["total"], parts.get("frozen", 0), largest)


def memory_per_device(config: Config, sizes: Sizes, count: int, layout: Layout) -> dict[str, int]:
    """Bytes by use, and `total`, with `train.batch` rows at once."""
    bf16 = planned_precision(config) == "bf16"
    weights = FP32 * sizes.trained // (count if layout.fsdp else 1)
    whole = 2 * sizes.layer if layout.fsdp else sizes.trained  # FSDP gathers a layer while the one before it is in use
    encoder = encoder_size(config.encoder, config.data.vocab_size) if config.method in USES_ENCODER else None
    activations = activation_bytes(config, layout.recompute)
    parts = {
        "weights": weights,
        "gradients": weights,
        "optimizer": (1 if config.train.optimizer == "muon" else 2) * weights,  # Muon keeps one momentum of a matrix
        "ema": weights,
        "copies": FP32 * sizes.copies,
        "encoder": 0 if encoder is None or config.data.cache_features else FP32 * encoder.parameters(),
        "bf16_weights": BF16 * whole if bf16 else 0,  # autocast keeps them until backward is done
        "communication": 0 if count == 1 else FP32 * whole,  # DDP's buckets, or FSDP's gathered layers
        "activations": activations,
        "working": round(WORKING * activations),
    }
    return parts | {"total": sum(parts.values())}


# ---------------------------------------------------------------- how a step is split


def with_batch(config: Config, batch: int, accumulation: int = 1) -> Config:
    return replace(config, train=replace(config.train, batch=batch, accumulation=accumulation))


def splits(rows: int, most: int) -> list[int]:
    """Micro-batches of at most `most` rows that divide the `rows` of a step on one device, largest first."""
    return [batch for batch in range(min(most, rows), 0, -1) if rows % batch == 0]


def fits(memory: dict[str, int], devices: Devices) -> bool:
    return memory["total"] <= USABLE * devices.capacity


def step_seconds(config: Config, rows: int, layout: Layout, speed: Speed) -> float:
    """One optimizer step with `rows` rows on each device; reading, sending and updating are part of the utilization."""
    return 2 * training_macs(config, layout.recompute)["total"] * rows / speed.flops


def layouts(config: Config, count: int) -> list[Layout]:
    """What the config asks for, then simplest first; one device has nothing to spread."""
    spreads = (False, True) if count > 1 else (False,)
    found = [Layout(fsdp, recompute) for fsdp in spreads for recompute in (False, True)]
    own = Layout(config.train.sharding == "fsdp" and count > 1, config.train.checkpoint_layers)
    return sorted(found, key=lambda layout: layout != own)


def make_plan(config: Config, devices: Devices, speed: Speed, corpus_tokens: float | None = None) -> dict[str, Any]:
    """Everything `format_plan` shows, as JSON values."""
    t, sizes, tokens = config.train, sizes_of(config), config.data.token_len
    rows = math.ceil(t.batch * t.accumulation * t.devices / devices.count)  # of a step, on one device
    possible = splits(rows, t.batch)
    asked, ways = possible[0], []
    for layout in layouts(config, devices.count):
        memory = {b: memory_per_device(with_batch(config, b), sizes, devices.count, layout) for b in possible}
        batch = next((b for b in possible if fits(memory[b], devices)), 0)
        ways.append({
            "layout": layout.name(devices.count), "fsdp": layout.fsdp, "recompute": layout.recompute, "memory": memory[asked],
            "fits": batch == asked, "batch": batch, "accumulation": rows // batch if batch else 0,
            "seconds_per_step": step_seconds(with_batch(config, asked), rows, layout, speed),
        })  # fmt: skip
    chosen = next((way for way in ways if way["batch"]), ways[-1])
    corpus = corpus_tokens or CORPUS_TOKENS.get(config.preset)
    per_step = rows * devices.count * tokens
    steps = t.steps or (math.ceil(t.epochs * corpus / per_step) if corpus else 0)
    days = steps * chosen["seconds_per_step"] / DAY
    return {
        "preset": config.preset, "method": config.method, "precision": planned_precision(config),
        "devices": {"count": devices.count, "bytes": devices.capacity, "text": devices.text},
        "speed": {"flops": speed.flops, "said": speed.said},
        "parameters": {"trained": sizes.trained, "copies": sizes.copies},
        "encoder_counted": config.method not in USES_ENCODER or encoder_size(config.encoder, 1) is not None,
        "row_macs": training_macs(with_batch(config, asked)), "batch": asked, "rows_per_step": rows * devices.count,
        "tokens_per_step": per_step, "corpus_tokens": corpus, "steps": steps, "ways": ways, "chosen": ways.index(chosen),
        "tokens_per_day": per_step * DAY / chosen["seconds_per_step"], "days": days,
        "logit_share": logit_bytes(with_batch(config, asked)) / chosen["memory"]["total"],
        "ce_chunk": getattr(config.objective, "ce_chunk", None),
    }  # fmt: skip


def full_plan(config: Config, devices: Devices, speed: Speed, corpus_tokens: float | None = None) -> dict[str, Any]:
    """`make_plan`, with the plan of what must be trained before as `first_stage`."""
    found = make_plan(config, devices, speed, corpus_tokens)
    if config.method == "jpeg-dlm":
        return found
    from jpeg_dlm.methods.registry import method_class

    stage = method_class(config.method).first_stage(config)
    return found if stage is None else found | {"first_stage": make_plan(stage, devices, speed, corpus_tokens)}


# ---------------------------------------------------------------- this machine's speed

TIMED, LONG_ENOUGH = 3, 1.0  # passes that are timed, and seconds below which one says little (assumed)


def measured_speed(config: Config, device: str | None = None) -> Speed:
    """Forward and backward of a few rows of the model itself; as many as make a pass last, or as the preset has."""
    import time

    import torch

    from jpeg_dlm.evaluation.trial import random_batch, train_pass
    from jpeg_dlm.methods.registry import build_method
    from jpeg_dlm.training.dist import read_ranks

    on = read_ranks(device, {}).device
    method = build_method(config).to(on).train()
    config = with_precision(config, on.type)
    config = replace(config, data=replace(config.data, cache_features=True))  # features are given, not computed

    def seconds(rows: int, passes: range) -> float:
        batch = random_batch(config, rows, on, type(method).uses_encoder)
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
    flops = 2 * training_macs(with_batch(config, rows))["total"] * rows / spent
    where = torch.cuda.get_device_name(on) if on.type == "cuda" else f"{on.type}, {torch.get_num_threads()} threads"
    return Speed(flops, f"{flops / 1e12:.3g} TFLOP/s measured here ({where}, {rows} rows at once)")


# ---------------------------------------------------------------- as text

MEMORY_LABELS = {
    "weights": "weights", "gradients": "gradients", "optimizer": "optimizer", "ema": "averaged weights",
    "copies": "frozen copies", "encoder": "frozen text encoder", "bf16_weights": "weights in bf16",
    "communication": "communication", "activations": "activations", "working": "working memory", "total": "all",
}  # fmt: skip


def format_plan(plan: dict[str, Any]) -> str:
    """For a terminal."""
    lines = [f"{plan['preset']} ({plan['method']}), {plan['precision']}, on {plan['devices']['text']}", ""]
    if "first_stage" in plan:
        lines += ["First stage:", "", *_body(plan["first_stage"]), "", "Second stage:", ""]
    lines += _body(plan)
    if "first_stage" in plan:
        lines += ["", f"Both stages: {_days(plan['days'] + plan['first_stage']['days'])}."]
    return "\n".join(lines)


def _body(plan: dict[str, Any]) -> list[str]:
    way = plan["ways"][plan["chosen"]]
    corpus = plan["corpus_tokens"]
    memory = [(f"  {MEMORY_LABELS[name]}", gigabytes(size)) for name, size in way["memory"].items() if size]
    facts = [
        ("trained parameters", f"{plan['parameters']['trained']:,}"),
        ("operations per row (multiply-accumulates)", operations(round(plan["row_macs"]["total"]))),
        ("speed of a device", plan["speed"]["said"]),
        ("rows per step", f"{plan['rows_per_step']:,}"),
        ("tokens per step", f"{plan['tokens_per_step']:,}"),
        ("seconds per step", f"{way['seconds_per_step']:.3g}"),
        ("tokens per day", _count(plan["tokens_per_day"])),
        ("epochs per day", f"{plan['tokens_per_day'] / corpus:.3g} of {_count(corpus)} tokens" if corpus else "unknown"),
        ("steps", f"{plan['steps']:,}" if plan["steps"] else "unknown"),
        ("whole run", _days(plan["days"]) if plan["steps"] else "unknown: state the corpus with --tokens 1.2B"),
    ]
    heading = f"memory of a device, {way['layout']}, {plan['batch']:,} rows at once:"
    return [*_aligned(facts), "", heading, *_aligned(memory), "", *_ways(plan), "", *advice(plan)]


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _ways(plan: dict[str, Any]) -> list[str]:
    heading = ("", f"memory at {plan['batch']:,} rows", "fits", "rows x accumulation that fit", "s/step")
    cells = [heading] + [
        (
            way["layout"], gigabytes(way["memory"]["total"]), "yes" if way["fits"] else "no",
            f"{way['batch']:,} x {way['accumulation']:,}" if way["batch"] else "none", f"{way['seconds_per_step']:.3g}",
        )
        for way in plan["ways"]
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in cells) for i in range(len(heading))]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def options(way: dict[str, Any]) -> str:
    """How `jpeg-dlm train` is told."""
    spread = " --train.sharding fsdp" if way["fsdp"] else ""
    again = " --train.checkpoint-layers true" if way["recompute"] else ""
    return f"--train.batch {way['batch']} --train.accumulation {way['accumulation']}{spread}{again}"


def advice(plan: dict[str, Any]) -> list[str]:
    """Whether it fits and, where it does not, what to change."""
    way, device = plan["ways"][plan["chosen"]], gigabytes(round(USABLE * plan["devices"]["bytes"]))
    has = f"of which {100 * USABLE:.0f}%, {device}, can be filled"
    found = []
    if way["fits"]:
        found.append(f"It fits with {way['layout']}: a device has {gigabytes(round(plan['devices']['bytes']))}, {has}.")
        found.append(f"Use {options(way)}.")
    elif way["batch"]:
        found.append(
            f"{plan['batch']:,} rows at once do not fit a device, {has}; the same step in smaller parts does, with "
            f"{way['layout']}: {options(way)}."
        )
    else:
        found.append(f"Not even one row fits a device, {has}: take larger ones, or lower model.hidden and model.depth.")
    if not way["fits"] and plan["ce_chunk"] == 0 and plan["logit_share"] > LOGITS_MANY:
        found.append(f"Logits are {100 * plan['logit_share']:.0f}% of the memory: --objective.ce-chunk 8192 avoids most of it.")
    if not plan["encoder_counted"]:
        found.append("The text encoder is not counted: its size is known only to its files.")
    return found


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,.0f}"


def _days(days: float) -> str:
    return f"{days:.1f} days" if days >= 2 else f"{24 * days:.1f} hours" if days >= 1 / 12 else f"{1440 * days:.1f} minutes"
