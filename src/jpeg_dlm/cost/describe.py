"""Describe a config: sizes, parameters and operations, with the paper's figures beside ours."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from jpeg_dlm.config import Config
from jpeg_dlm.evaluation.paper import QUALITY, paper_figures
from jpeg_dlm.evaluation.table import Cell, Table

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


def describe(config: Config) -> dict[str, Any]:
    """Return everything that `description_table` shows, as JSON values; operations of a sample of JPEG-DLM alone."""
    from jpeg_dlm.cost.flops import build_weightless, parameter_parts, sampling_macs, training_cost

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
