"""Describe a config: sizes, parameters, operations and memory, with the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from jpeg_dlm.config import Config
from jpeg_dlm.evaluation.paper import paper_figures

Row = tuple[str, str, str]  # label, ours, paper
SAMPLING_BATCH = 16  # released: the batch of the OWT script
FP32 = 4  # bytes


def describe(config: Config) -> dict[str, Any]:
    """Return everything `format_description` shows, as JSON values."""
    from jpeg_dlm.accounting.costs import build_weightless, parameter_parts

    method, t = build_weightless(config), config.train
    rows = t.batch * t.accumulation * t.devices
    found = {
        "preset": config.preset,
        "method": config.method,
        "step": {"global_batch": rows, "tokens_per_step": rows * config.data.token_len, "lr": t.lr},
    }
    if config.method == "jpeg-dlm":
        return found | _describe_own(config, found["step"])
    sizes = {"token_len": config.data.token_len, "vocab_size": config.data.vocab_size, "rate": config.rate}
    return found | {
        "title": method.title,
        "sizes": sizes | asdict(config.model),
        "parameters": parameter_parts(method),
        "sampler": {"label": config.sampler.label(), "evaluations": config.sampler.evaluations(config.data.token_len)},
        "paper": dict(paper_figures(config.preset, method.title)),
    }


def _describe_own(config: Config, step: dict[str, Any]) -> dict[str, Any]:
    """Return what is said of JPEG-DLM more than of other systems."""
    m = config.model
    full = replace(config, model=replace(m, latent_len=config.data.token_len))
    return {
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
        }
        | ({} if m.decoder == "projection" else {"decoder": m.decoder, "decoder_size": [m.decoder_layers, m.decoder_width]}),
        "parameters": own_parameters(config),
        "macs": {"compressed": sampling_macs(config), "full": sampling_macs(full)},
        "memory": own_memory(config),
        "step": step | {"codec_lr": config.train.codec_lr},
        "sampler": {"solver": config.sampler.solver, "steps": config.sampler.steps, "w": config.sampler.w},
        "paper": dict(paper_figures(config.preset)),
    }


def own_parameters(config: Config) -> dict[str, int]:
    """Return parameters by part; the frozen encoder and the target compressor, which is a copy, are not counted."""
    from jpeg_dlm.accounting.costs import build_weightless

    children = dict(build_weightless(config).named_children())
    order = (
        "embedding", "compressor", "decompressor", "dit", "unembed_proj", "lm_head", "predictor", "token_decoder",
    )  # fmt: skip
    parts = {name: sum(p.numel() for p in children[name].parameters()) for name in order if name in children}
    flow = sum(parts[name] for name in ("dit", "unembed_proj", "lm_head"))
    return parts | {"dit_and_projection": flow, "total": sum(parts.values())}


def sampling_macs(config: Config) -> dict[str, int]:
    """Return the operations of one sample of JPEG-DLM by part, as the released code does them."""
    from jpeg_dlm.accounting.costs import sampling_cost

    cost = sampling_cost(config, prepare=as_released)
    parts = {name: cost.parts[name] for name in ("dit", "decompressor")}
    projection = cost.parts["unembed_proj"] + cost.parts["lm_head"]
    evaluations = config.sampler.evaluations(config.data.token_len)
    found = parts | {"projection": projection, "evaluations": evaluations, "total": cost.macs}
    if config.model.decoder == "projection":
        return found
    # A contextual decoder runs outside of `forward`, so it is what the other parts leave over.
    steps = config.data.token_len if config.model.decoder == "autoregressive" else 1
    return found | {"token_decoder": cost.macs - sum(parts.values()) - projection, "decoder_steps": steps}


def as_released(method: Any) -> None:
    """Repeat the decompressor's base query for every token before its network, like the released code; ours comes after."""
    tokens = method.config.data.token_len
    method.decompressor.query_ffn.register_forward_pre_hook(lambda _, args: (args[0].expand(-1, tokens, -1),))


def own_memory(config: Config) -> dict[str, int]:
    """Return bytes on one device by use, without the frozen encoder; weights and optimizer are fp32 in every precision."""
    from jpeg_dlm.accounting.costs import sampling_cost, training_cost

    parts, cost = own_parameters(config), training_cost(config, config.train.batch, places=(0.5,))
    sampled = sampling_cost(config, SAMPLING_BATCH)
    weights = FP32 * parts["total"]
    training = {
        "weights": weights,
        "target_compressor": FP32 * parts["compressor"],
        "gradients": weights,
        "adamw": 2 * weights,  # first and second moments
        "ema": weights,
        "activations": cost.activations + cost.casts + cost.working,
    }
    return training | {"training": sum(training.values()), "sampling": sampled.weights + sampled.peak}


# ---------------------------------------------------------------- as text

SIZES = {
    "latent_len": "latents N", "latent_dim": "latent width D", "hidden": "width", "depth": "layers", "heads": "attention heads",
}  # fmt: skip
PARAMETERS = {
    "dit_and_projection": "DiT and token projection", "total": "all parameters", "frozen": "copies that are not trained",
}  # fmt: skip


def format_description(description: dict[str, Any]) -> str:
    """Return a table for a terminal; the column 'paper' appears where the paper gives a figure."""
    paper, step = description["paper"], description["step"]
    parameters = [(PARAMETERS.get(k, k), f"{n:,}", paper.get(k, "")) for k, n in description["parameters"].items()]
    batch = paper.get("global_batch")
    rows = [
        ("rows per step", f"{step['global_batch']:,}", f"{batch:,}" if batch else ""),
        ("tokens per step", f"{step['tokens_per_step']:,}", ""),
    ]
    if "macs" in description:
        rates = ("learning rate, flow / codec", f"{step['lr']:g} / {step['codec_lr']:g}", "")
        sections = [_own_sizes(description), parameters, _compute(description), [*rows, rates, *_memory(description["memory"])]]
    else:
        rates = ("learning rate", f"{step['lr']:g}", "")
        sections = [_sizes(description["sizes"]), parameters, _sampler(description["sampler"]), [*rows, rates]]
    title = f"{description['preset']} ({description['method']})"
    return aligned(title, [*sections, quality_rows(paper)])


def aligned(title: str, sections: Sequence[list[Row]]) -> str:
    """Return rows in three columns, a blank line between sections."""
    rows = [row for section in sections if section for row in [*section, ("", "", "")]][:-1]
    has_paper = any(paper for _, _, paper in rows)
    header = ("", "ours", "paper" if has_paper else "")
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(2)]
    lines = [f"{name:<{widths[0]}}  {ours:>{widths[1]}}  {paper:>8}".rstrip() for name, ours, paper in [header, *rows]]
    return "\n".join([title, *lines])


def _sizes(sizes: Mapping[str, Any]) -> list[Row]:
    named = [(label, f"{sizes[key]:,}", "") for key, label in SIZES.items() if key in sizes]
    rate = [("rate N / L", f"{sizes['rate']:g}", "")] if sizes["rate"] is not None else []
    return [("tokens L", f"{sizes['token_len']:,}", ""), ("vocabulary V", f"{sizes['vocab_size']:,}", ""), *named, *rate]


def _sampler(sampler: Mapping[str, Any]) -> list[Row]:
    return [("sampler", sampler["label"], ""), ("network evaluations per sample", str(sampler["evaluations"]), "")]


def _own_sizes(description: dict[str, Any]) -> list[Row]:
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
        *([("token decoder, layers / width", f"{s['decoder']}, {s['decoder_size'][0]} / {s['decoder_size'][1]}", "")]
          if "decoder" in s else []),
        ("solver steps / guidance w", f"{sampler['steps']} {sampler['solver']} / {sampler['w']:g}", ""),
    ]  # fmt: skip


def _compute(description: dict[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for key, label in (("compressed", "N latents"), ("full", "one latent per token")):
        macs = description["macs"][key]["total"]
        paper = description["paper"].get(f"macs_{key}_T")
        rows.append((f"operations per sample, {label}", operations(macs), f"{paper:.2f} T" if paper else ""))
    macs = description["macs"]["compressed"]
    rows.append(("network evaluations per sample", str(macs["evaluations"]), ""))
    if "token_decoder" in macs:
        rows.append(("token decoder, operations per sample", operations(macs["token_decoder"]), ""))
        rows.append(("token decoder, sequential steps", str(macs["decoder_steps"]), ""))
    return rows


def _memory(memory: Mapping[str, int]) -> list[Row]:
    labels = {"training": "training memory, estimated", "sampling": f"sampling memory at batch {SAMPLING_BATCH}, estimated"}
    return [(labels.get(key, f"  {key.replace('_', ' ')}"), gigabytes(n), "") for key, n in memory.items()]


def quality_rows(paper: Mapping[str, Any]) -> list[Row]:
    """Return what the paper reports; ours is for `evaluate` and `benchmark` to measure."""
    note = f", {paper['note']}" if "note" in paper else ""
    labels = {
        "gen_ppl": f"Gen-PPL{note}", "entropy": "entropy (nats)", "mauve": "MAUVE", "speed": "speed (AR = 1)",
        "speed_kv_cache": "speed with KV cache",
    }  # fmt: skip
    return [(label, "", f"{paper[key]:g}") for key, label in labels.items() if key in paper]


def operations(count: float) -> str:
    """Return a number of operations; the paper's sizes are in units of 1e12."""
    for unit, size in (("T", 1e12), ("G", 1e9)):
        if count >= size / 10:
            return f"{count / size:.3f} {unit}"
    return f"{count / 1e6:.3f} M"


def gigabytes(size: float) -> str:
    """Return bytes in units a person compares with a device."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
