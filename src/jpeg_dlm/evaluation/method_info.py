"""What a config of any method amounts to; parameters are counted on the method itself, built without memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from jpeg_dlm.config import Config
from jpeg_dlm.evaluation.counts import tokens_per_step
from jpeg_dlm.evaluation.info import Row, aligned, quality_rows
from jpeg_dlm.evaluation.paper import paper_figures
from jpeg_dlm.methods.base import Method
from jpeg_dlm.methods.registry import build_method

SIZES = {
    "latent_len": "latents N", "latent_dim": "latent width D", "hidden": "width", "depth": "layers", "heads": "attention heads",
}  # fmt: skip


def build_weightless(config: Config) -> Method:
    """The method on the meta device, where tensors have shapes only; with weights, if its tables need real numbers."""
    try:
        with torch.device("meta"):
            return build_method(config)
    except RuntimeError:
        return build_method(config)


def parameter_parts(method: Method) -> dict[str, int]:
    """Trainable parameters by top-level part, `total`, and `frozen` ones such as copies of others where there are any."""
    parts: dict[str, int] = {}
    for name, parameter in method.named_parameters():
        part = name.split(".")[0] if parameter.requires_grad else "frozen"
        parts[part] = parts.get(part, 0) + parameter.numel()
    frozen = parts.pop("frozen", 0)
    return parts | {"total": sum(parts.values())} | ({"frozen": frozen} if frozen else {})


def describe_method(config: Config) -> dict[str, Any]:
    """Everything `format_method` shows, as JSON values."""
    method, t = build_weightless(config), config.train
    model = {f.name: getattr(config.model, f.name) for f in dataclasses.fields(config.model)}
    return {
        "preset": config.preset,
        "method": config.method,
        "title": method.title,
        "sizes": {"token_len": config.data.token_len, "vocab_size": config.data.vocab_size, "rate": config.rate} | model,
        "parameters": parameter_parts(method),
        "step": {
            "global_batch": t.batch * t.accumulation * t.devices,
            "tokens_per_step": tokens_per_step(config),
            "lr": t.lr,
        },
        "sampler": {"label": config.sampler.label(), "evaluations": config.sampler.evaluations(config.data.token_len)},
        "paper": dict(paper_figures(config.preset, method.title)),
    }


def format_method(description: dict[str, Any]) -> str:
    """A table for a terminal, like that of `info.format_description`."""
    sizes, step, sampler = description["sizes"], description["step"], description["sampler"]
    named = [(label, f"{sizes[key]:,}", "") for key, label in SIZES.items() if key in sizes]
    rate = [("rate N / L", f"{sizes['rate']:g}", "")] if sizes["rate"] is not None else []
    shape: list[Row] = [
        ("tokens L", f"{sizes['token_len']:,}", ""), ("vocabulary V", f"{sizes['vocab_size']:,}", ""), *named, *rate,
    ]  # fmt: skip
    sampling: list[Row] = [
        ("sampler", sampler["label"], ""),
        ("network evaluations per sample", str(sampler["evaluations"]), ""),
    ]
    training: list[Row] = [
        ("rows per step", f"{step['global_batch']:,}", ""),
        ("tokens per step", f"{step['tokens_per_step']:,}", ""),
        ("learning rate", f"{step['lr']:g}", ""),
    ]
    paper = description["paper"]
    labels = {"total": "all parameters", "frozen": "copies that are not trained"}
    counted = [(labels.get(k, k), f"{n:,}", paper.get(k, "")) for k, n in description["parameters"].items()]
    sections = [shape, counted, sampling, training, quality_rows(paper)]
    return aligned(f"{description['preset']} ({description['method']})", sections)
