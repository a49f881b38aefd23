"""Tables of the cost of a text, and sentences on where attention dominates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jpeg_dlm.accounting.info import gigabytes, operations
from jpeg_dlm.evaluation.paper import OWN
from jpeg_dlm.results.table import Table
from jpeg_dlm.studies.cost_points import LONGEST

COLUMNS = ["parameters", "operations", "of these attention", "weights", "activations", "KV cache"]
MEASURED = ["s per text, measured", "memory beyond the model, measured"]


def tables(result: Mapping[str, Any]) -> list[Table]:
    more = MEASURED if result["repeats"] else []
    first = [["r", "N", *COLUMNS, *more, "paper"]]
    first += [[f"{row['rate']:g}", f"{row['latent_len']:,}", *_cells(row, result), _paper(row)] for row in result["by_rate"]]
    second = [["tokens L", "system", *COLUMNS, *more]]
    second += [[f"{row['token_len']:,}", row["system"], *_cells(row, result)] for row in result["by_length"]]
    measured = f" Measured at batch {result['batch']}, median of {result['repeats']} rounds." if more else ""
    head = (
        f"Preset {result['preset']}, {result['sampler']}; cost of one text in fp32, one multiply-accumulate is one operation."
        f"{measured} The paper's column is its 'sampling compute'."
    )
    return [
        Table(head),
        Table.of(f"{OWN} at L = {result['token_len']:,}:", first[0], first[1:]),
        Table.of(f"As texts grow, r = {result['rate']:g}:", second[0], second[1:], sentences(result)),
    ]


def _cells(row: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    kept = [gigabytes(row["memory"][name]) if row["memory"][name] else "" for name in ("weights", "activations", "kv_cache")]
    cells = [f"{row['parameters'] / 1e6:.1f} M", operations(row["macs"]), f"{100 * row['attention_share']:.1f}%", *kept]
    if not result["repeats"]:
        return cells
    found = row.get("measured", {})
    if "seconds" not in found:
        return [*cells, "left out", ""]
    return [*cells, f"{found['seconds'] / result['batch']:.3g}", gigabytes(found["peak_bytes"] / result["batch"])]


def _paper(row: Mapping[str, Any]) -> str:
    return f"{row['paper_macs_T']:.2f} T" if row["paper_macs_T"] else ""


def sentences(result: Mapping[str, Any]) -> list[str]:
    """Return sentences on where attention dominates and on what was not measured."""
    found = [
        f"{name}: attention is more than half of the operations from L = {length:,} on."
        if length else f"{name}: attention is never more than half of the operations up to L = {LONGEST:,}."
        for name, length in result["half_attention"].items()
    ]  # fmt: skip
    for row in {(r["system"], r["token_len"], r["latent_len"]): r for r in result["by_rate"] + result["by_length"]}.values():
        if "left_out" in row.get("measured", {}):
            found.append(f"{row['system']} at L = {row['token_len']:,} was not measured: {row['measured']['left_out']}.")
    return found
