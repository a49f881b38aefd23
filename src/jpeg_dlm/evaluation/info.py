"""What a config of JPEG-DLM amounts to: sizes, parameters, operations and memory, with the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jpeg_dlm.config import Config
from jpeg_dlm.evaluation.counts import parameter_counts, sampling_macs, tokens_per_step
from jpeg_dlm.evaluation.memory import memory_estimate
from jpeg_dlm.evaluation.paper import paper_figures

Row = tuple[str, str, str]  # label, ours, paper
SAMPLING_BATCH = 16  # released: the batch of the OWT script


def describe(config: Config) -> dict[str, Any]:
    """Everything `format_description` shows, as JSON values."""
    m, t = config.model, config.train
    return {
        "preset": config.preset,
        "method": config.method,
        "sizes": {
            "token_len": config.data.token_len,
            "latent_len": m.latent_len,
            "rate": config.rate,
            "latent_dim": m.latent_dim,
            "feature_dim": config.encoder.feature_dim,
            "vocab_size": config.data.vocab_size,
            "codec_layers": [m.codec_layers, m.codec_layers],
            "codec_heads": m.codec_heads,
            "bottleneck_dim": m.bottleneck_dim,
            "dit_layers": m.depth,
            "dit_width": m.hidden,
            "dit_heads": m.heads,
        },
        "parameters": parameter_counts(config),
        "macs": {"compressed": sampling_macs(config), "full": sampling_macs(config, config.data.token_len)},
        "memory": memory_estimate(config, SAMPLING_BATCH),
        "step": {
            "global_batch": t.batch * t.accumulation * t.devices,
            "tokens_per_step": tokens_per_step(config),
            "lr": t.lr,
            "codec_lr": t.codec_lr,
        },
        "sampler": {"solver": config.sampler.solver, "steps": config.sampler.steps, "w": config.sampler.w},
        "paper": dict(paper_figures(config.preset)),
    }


def format_description(description: dict[str, Any]) -> str:
    """A table for a terminal; the column 'paper' appears where the paper gives a figure."""
    sections = [part(description) for part in (_sizes, _parameters, _compute, _training)]
    title = f"{description['preset']} ({description['method']})"
    return aligned(title, [*sections, quality_rows(description["paper"])])


def aligned(title: str, sections: Sequence[list[Row]]) -> str:
    """Rows in three columns, a blank line between sections."""
    rows = [row for section in sections if section for row in [*section, ("", "", "")]][:-1]
    has_paper = any(paper for _, _, paper in rows)
    header = ("", "ours", "paper" if has_paper else "")
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(2)]
    lines = [f"{name:<{widths[0]}}  {ours:>{widths[1]}}  {paper:>8}".rstrip() for name, ours, paper in [header, *rows]]
    return "\n".join([title, *lines])


def _sizes(description: dict[str, Any]) -> list[Row]:
    s, sampler = description["sizes"], description["sampler"]
    return [
        ("tokens L", f"{s['token_len']:,}", ""),
        ("latents N", f"{s['latent_len']:,}", ""),
        ("rate N / L", f"{s['rate']:g}", ""),
        ("latent width D", f"{s['latent_dim']:,}", ""),
        ("feature width F", f"{s['feature_dim']:,}", ""),
        ("vocabulary V", f"{s['vocab_size']:,}", ""),
        ("codec layers / heads", f"{'+'.join(map(str, s['codec_layers']))} / {s['codec_heads']}", ""),
        ("bottleneck width", f"{s['bottleneck_dim']:,}", ""),
        ("DiT layers / width / heads", f"{s['dit_layers']} / {s['dit_width']} / {s['dit_heads']}", ""),
        ("solver steps / guidance w", f"{sampler['steps']} {sampler['solver']} / {sampler['w']:g}", ""),
    ]


def _parameters(description: dict[str, Any]) -> list[Row]:
    names: dict[str, str] = {"dit_and_projection": "DiT and token projection", "total": "all parameters"}
    paper = description["paper"]
    parts: dict[str, int] = description["parameters"]
    return [(names.get(key, key), f"{n:,}", paper.get(key, "")) for key, n in parts.items()]


def _compute(description: dict[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for key, label in (("compressed", "N latents"), ("full", "one latent per token")):
        macs = description["macs"][key]["total"]
        paper = description["paper"].get(f"macs_{key}_T")
        rows.append((f"operations per sample, {label}", operations(macs), f"{paper:.2f} T" if paper else ""))
    return [*rows, ("network evaluations per sample", str(description["macs"]["compressed"]["evaluations"]), "")]


def _training(description: dict[str, Any]) -> list[Row]:
    step, memory, paper = description["step"], description["memory"], description["paper"]
    batch = paper.get("global_batch")
    labels = {"training": "training memory, estimated", "sampling": f"sampling memory at batch {SAMPLING_BATCH}, estimated"}
    return [
        ("rows per step", f"{step['global_batch']:,}", f"{batch:,}" if batch else ""),
        ("tokens per step", f"{step['tokens_per_step']:,}", ""),
        ("learning rate, flow / codec", f"{step['lr']:g} / {step['codec_lr']:g}", ""),
        *[(labels.get(key, f"  {key.replace('_', ' ')}"), gigabytes(n), "") for key, n in memory.items()],
    ]


def quality_rows(paper: Mapping[str, Any]) -> list[Row]:
    """What the paper reports; ours is for `evaluate` and `benchmark` to measure."""
    labels = {
        "gen_ppl": "Gen-PPL", "entropy": "entropy (nats)", "mauve": "MAUVE", "speed": "speed (AR = 1)",
        "speed_kv_cache": "speed with KV cache",
    }  # fmt: skip
    return [(label, "", f"{paper[key]:g}") for key, label in labels.items() if key in paper]


def operations(count: int) -> str:
    """A number of operations; the paper's sizes are in units of 1e12."""
    for unit, size in (("T", 1e12), ("G", 1e9)):
        if count >= size / 10:
            return f"{count / size:.3f} {unit}"
    return f"{count / 1e6:.3f} M"


def gigabytes(size: int) -> str:
    """Bytes in units a person compares with a device."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
