"""What a config costs: sizes, parameters and operations beside the paper's; memory, time of a step and days of a training.

Time is operations over a stated speed: a device's peak and the share of it that is reached.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from jpeg_dlm.config import Config
from jpeg_dlm.cost.flops import build_weightless, parameter_parts, planned_precision, sampling_macs, training_cost
from jpeg_dlm.evaluation.paper import QUALITY, paper_figures
from jpeg_dlm.evaluation.table import Cell, Table
from jpeg_dlm.methods.registry import method_class
from jpeg_dlm.util.errors import UsageError, minutes

FP32 = 4  # bytes
UNITS = {"MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2.0**20, "GiB": 2.0**30}
USABLE = 0.92  # share of a device that tensors can fill; the rest is the driver's and lost between tensors (assumed)
PEAK_TFLOPS = {"bf16": 312.0, "fp32": 19.5}  # of an A100, dense (NVIDIA)
UTILIZATION = 0.3  # of that peak by networks of this width (assumed)
# Tokens of a corpus in the preset's tokenizer. OpenWebText: five epochs are 95,000 steps of 512 rows of 1,024 (ELF).
# LM1B: 0.77 billion words at 1.3 tokens (assumed).
CORPUS_TOKENS = {"lm1b": 1.0e9, "owt1024": 9.96e9, "owt128": 9.96e9}
DAY = 86_400
MEASURED_ROWS = 8  # of a training step: enough for shares of rows such as a half or a quarter
LABELS = {
    "token_len": "tokens L",
    "vocab_size": "vocabulary V",
    "latent_len": "latents N",
    "rate": "rate N / L",
    "latent_dim": "latent width D",
    "feature_dim": "feature width F",
    "codec_layers": "layers of compressor and decompressor, each",
    "codec_heads": "their attention heads",
    "bottleneck_dim": "bottleneck width",
    "depth": "layers of the network",
    "hidden": "its width",
    "heads": "its attention heads",
    "dit_and_projection": "DiT and token projection",
    "total": "all parameters",
    "compressed": "operations per sample, N latents",
    "full": "operations per sample, one latent per token",
    "step": "operations per training step",
    "frozen": "copies that are not trained",
    "lr": "learning rate",
    "codec_lr": "learning rate of the codec",
    "gen_ppl": "Gen-PPL",
    "entropy": "entropy (nats)",
    "mauve": "MAUVE",
    "speed": "speed (AR = 1)",
    "speed_kv_cache": "speed with KV cache",
}


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
    label: str


def stated_speed(config: Config, tflops: float | None, utilization: float | None) -> Speed:
    """Return a peak times the share of it that is reached."""
    precision = planned_precision(config)
    peak = PEAK_TFLOPS[precision] if tflops is None else tflops
    share = UTILIZATION if utilization is None else utilization
    whose = f"an A100's peak in {precision}" if tflops is None else "stated"
    return Speed(peak * 1e12 * share, f"{peak:g} TFLOP/s ({whose}) x {share:g} utilization")


T5_SMALL = (6, 512, 2048, 2, 32_128)  # layers, width, inner width, matrices of its network, vocabulary (published)


def encoder_cost(config: Config) -> tuple[int, int]:
    """Return parameters of a config's encoder and the operations of one text; norms and position biases are next to nothing."""
    encoder, length = config.encoder, config.data.token_len
    layers, width, inner, matrices, vocabulary = T5_SMALL
    if encoder.kind in ("small", "random"):
        layers, width, matrices, vocabulary = encoder.depth, encoder.feature_dim, 3, config.data.vocab_size + 1
        inner = 8 * math.ceil(width / 3)
    layer = 4 * width * width + matrices * width * inner
    return layers * layer + vocabulary * width, layers * (length * layer + 2 * length**2 * width)


def splits(rows: int, most: int) -> list[int]:
    """Return micro-batches of at most `most` rows that divide the `rows` of a step on one device, largest first."""
    return [batch for batch in range(min(most, rows), 0, -1) if rows % batch == 0]


def make_plan(config: Config, devices: Devices, speed: Speed, corpus_tokens: float | None = None) -> dict[str, Any]:
    """Return the plan of one training, as JSON values; `fits` holds the micro-batch that fits, 0 if none does."""
    t, count = config.train, devices.count
    rows = math.ceil(t.batch * t.accumulation * t.devices / count)  # of a step, on one device
    per_step = rows * count * config.data.token_len
    corpus = corpus_tokens or CORPUS_TOKENS.get(config.preset)
    steps = t.steps or (math.ceil(t.epochs * corpus / per_step) if corpus else 0)
    config = replace(config, train=replace(t, steps=steps))
    method, batch = build_weightless(config), splits(rows, t.batch)[0]
    parameters, cost = parameter_parts(method), training_cost(config, batch)
    with_encoder = method.uses_encoder and not config.data.cache_features
    encoder_parameters, encoder_macs = encoder_cost(config) if with_encoder else (0, 0)

    placements = {}
    for name in ("none", "fsdp") if count > 1 else ("none",):
        weights = FP32 * parameters["total"] // (count if name == "fsdp" else 1)
        memory = {
            "weights": weights,
            "gradients": weights,
            "optimizer": (1 if t.optimizer == "muon" else 2) * weights,  # Muon keeps one momentum of a matrix
            "ema": weights,
            "copies": FP32 * parameters.get("frozen", 0),
            "encoder": FP32 * encoder_parameters,
            "communication": 0 if count == 1 else FP32 * parameters["total"],  # whole weights of a step, or buckets of DDP
            "activations": cost.activations,
        }
        state, room = sum(memory.values()) - cost.activations, USABLE * devices.capacity
        fitting = (fewer for fewer in splits(rows, batch) if state + cost.activations * fewer / batch <= room)
        placements[name] = {"memory": memory | {"total": sum(memory.values())}, "fits": next(fitting, 0)}
    macs = encoder_macs + cost.forward + cost.backward
    seconds = 2 * macs * rows / speed.flops  # reading, sending and updating are part of the utilization
    return {
        "preset": config.preset,
        "method": config.method,
        "precision": planned_precision(config),
        "devices": asdict(devices),
        "speed": asdict(speed),
        "parameters": parameters["total"],
        "row_macs": macs,
        "batch": batch,
        "rows_of_a_device": rows,
        "rows_per_step": rows * count,
        "tokens_per_step": per_step,
        "steps": steps,
        "placements": placements,
        "seconds_per_step": seconds,
        "tokens_per_day": per_step * DAY / seconds,
        "days": steps * seconds / DAY,
    }


def stages(config: Config) -> list[Config]:
    """Return what is trained before a method, apart from the encoder, which all methods share, and the method itself."""
    return [*(stage for stage in method_class(config.method).stages(config) if stage.method != "encoder"), config]


def plan_tables(plan: dict[str, Any]) -> list[Table]:
    """Return the facts and the memory of a plan."""
    days = plan["days"]
    facts = {
        "trained parameters": f"{plan['parameters']:,}",
        "operations per row (multiply-accumulates)": operations(plan["row_macs"]),
        "speed of a device": plan["speed"]["label"],
        "rows per step": f"{plan['rows_per_step']:,}",
        "tokens per step": f"{plan['tokens_per_step']:,}",
        "seconds per step": f"{plan['seconds_per_step']:.3g}",
        "tokens per day": f"{plan['tokens_per_day'] / 1e9:.3g} B",
        "steps": f"{plan['steps']:,}",
        "whole run": f"{days:.1f} days" if days >= 2 else minutes(DAY * days),
    }
    if not plan["steps"]:
        facts |= {"steps": "unknown", "whole run": "unknown: state the corpus with --tokens 1.2B"}
    memories = {name: placement["memory"] for name, placement in plan["placements"].items()}
    uses = [use for use, size in memories["none"].items() if size]
    rows = [(use, *(gigabytes(memory[use]) for memory in memories.values())) for use in uses]
    remarks = [_verdict(plan, name, placement["fits"]) for name, placement in plan["placements"].items()]
    head = f"{plan['preset']} ({plan['method']}), {plan['precision']}, on {plan['devices']['text']}"
    columns = ("", *(f"sharding {name}" for name in memories))
    return [
        Table.of(head, ("", "plan"), facts.items()),
        Table.of(f"Memory of a device, {plan['batch']:,} rows at once:", columns, rows, remarks),
    ]


def _verdict(plan: dict[str, Any], sharding: str, batch: int) -> str:
    """Say which micro-batch of a step fits a device."""
    room = f"{100 * USABLE:.0f}% of {gigabytes(plan['devices']['capacity'])}"
    if not batch:
        return f"Sharding {sharding}: not even one row fits {room}."
    accumulation = plan["rows_of_a_device"] // batch
    options = f"--train.sharding {sharding} --train.batch {batch} --train.accumulation {accumulation}"
    return f"Fits {room}: {options}"


# ---------------------------------------------------------------- descriptions


def describe(config: Config) -> dict[str, Any]:
    """Return everything that `description_table` shows, as JSON values; operations of a sample of JPEG-DLM alone."""
    method, t, data = build_weightless(config), config.train, config.data
    rows = t.batch * t.accumulation * t.devices
    sizes = {"token_len": data.token_len, "vocab_size": data.vocab_size, "rate": config.rate} | asdict(config.model)
    cost = training_cost(config, MEASURED_ROWS)
    description = {
        "preset": config.preset,
        "method": config.method,
        "title": method.title,
        "sizes": sizes,
        "parameters": parameter_parts(method),
        "macs": {"step": rows * (cost.forward + cost.backward)},
        "sampler": {"label": config.sampler.label(), "evaluations": config.sampler.evaluations(data.token_len)},
        "step": {"global_batch": rows, "tokens_per_step": rows * data.token_len, "lr": t.lr},
        "paper": dict(paper_figures(config.preset, method.title)),
    }
    if config.method != "jpeg-dlm":
        return description
    parts = description["parameters"]
    flow = sum(parts[name] for name in ("dit", "unembed_proj", "lm_head"))
    full = replace(config, model=replace(config.model, latent_len=data.token_len))
    return description | {
        "sizes": sizes | {"feature_dim": config.encoder.feature_dim},
        "parameters": parts | {"dit_and_projection": flow},
        "macs": {"compressed": sampling_macs(config), "full": sampling_macs(full)} | description["macs"],
        "step": description["step"] | {"codec_lr": t.codec_lr},
    }


def description_table(description: dict[str, Any]) -> Table:
    """Return sizes and cost, with the paper's figures beside them where it gives any."""
    paper, step, sizes = description["paper"], description["step"], description["sizes"]
    rows: list[tuple[Cell, Cell, Cell]] = [(LABELS[key], sizes[key], None) for key in LABELS if sizes.get(key) is not None]
    rows += [(LABELS.get(key, key), count, paper.get(key)) for key, count in description["parameters"].items()]
    for key, count in description["macs"].items():
        stated = f"{paper[name]:.2f} T" if (name := f"macs_{key}_T") in paper else None
        rows.append((LABELS[key], operations(count), stated))
    rows += [
        ("network evaluations per sample", description["sampler"]["evaluations"], None),
        ("sampler", description["sampler"]["label"], None),
        ("rows per step", step["global_batch"], paper.get("global_batch")),
        ("tokens per step", step["tokens_per_step"], None),
        *((LABELS[key], step[key], None) for key in ("lr", "codec_lr") if key in step),
    ]
    note = f", {paper['note']}" if "note" in paper else ""
    rows += [(LABELS[key] + note * (key == "gen_ppl"), None, paper[key]) for key in QUALITY if key in LABELS and key in paper]
    return Table.of(f"{description['preset']} ({description['method']})", ("", "ours", "paper"), rows)


def operations(count: float) -> str:
    """Return a number of operations; the paper's sizes are in units of 1e12."""
    for unit, size in (("T", 1e12), ("G", 1e9)):
        if count >= size / 10:
            return f"{count / size:.3f} {unit}"
    return f"{count / 1e6:.3f} M"


def gigabytes(size: float) -> str:
    """Return bytes in units a person compares with a device."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
