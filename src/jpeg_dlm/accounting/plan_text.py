"""A plan as text for a terminal, and the advice in it."""

from __future__ import annotations

from typing import Any

from jpeg_dlm.accounting.info import gigabytes, operations
from jpeg_dlm.accounting.plan import CE_CHUNK, USABLE

LOGITS_MANY = 0.1  # share of the memory from which on chunks of logits are advised (assumed)
MEMORY_LABELS = {
    "weights": "weights", "gradients": "gradients", "optimizer": "optimizer", "ema": "averaged weights",
    "copies": "frozen copies", "encoder": "frozen text encoder", "bf16_weights": "weights in bf16",
    "communication": "communication", "activations": "activations", "working": "working memory", "total": "all",
}  # fmt: skip


def format_plan(plan: dict[str, Any]) -> str:
    """Return a plan for a terminal."""
    lines = [f"{plan['preset']} ({plan['method']}), {plan['precision']}, on {plan['devices']['text']}", ""]
    if "first_stage" in plan:
        lines += ["First stage:", "", *_body(plan["first_stage"]), "", "Second stage:", ""]
    lines += _body(plan)
    if "first_stage" in plan and plan["steps"] and plan["first_stage"]["steps"]:
        lines += ["", f"Both stages: {_days(plan['days'] + plan['first_stage']['days'])}."]
    return "\n".join(lines)


def _body(plan: dict[str, Any]) -> list[str]:
    way = plan["ways"][plan["chosen"]]
    corpus = plan["corpus_tokens"]
    memory = [(f"  {MEMORY_LABELS[name]}", gigabytes(size)) for name, size in way["memory"].items() if size]
    facts = [
        ("trained parameters", f"{plan['parameters']['trained']:,}"),
        ("operations per row (multiply-accumulates)", operations(plan["row_macs"]["total"])),
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
    """Return the options of `jpeg-dlm train`."""
    spread = " --train.sharding fsdp" if way["fsdp"] else ""
    again = " --train.checkpoint-layers true" if way["recompute"] else ""
    return f"--train.batch {way['batch']} --train.accumulation {way['accumulation']}{spread}{again}"


def advice(plan: dict[str, Any]) -> list[str]:
    """Say whether it fits and, where it does not, what to change."""
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
        share = f"{100 * plan['logit_share']:.0f}% of the memory"
        found.append(f"Logits are {share} that --objective.ce-chunk {CE_CHUNK} saves.")
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
