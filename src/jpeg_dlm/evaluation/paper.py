"""The paper's figures as data (`paper.json` has every table), shown next to ours where the two are comparable."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

LOWER = "-lower"  # suffix of protocols that convert texts to lower case


OWN = "JPEG-DLM"  # the title of the paper's own system
SYSTEM = ("dit_and_projection", "total", "macs_compressed_T", "macs_full_T", "global_batch")  # of its sizes and cost
# speed: throughput relative to AR without KV cache; note: a condition that explains the row
QUALITY = ("gen_ppl", "entropy", "mauve", "speed", "speed_kv_cache", "note")


@cache
def paper_tables() -> dict[str, Any]:
    """Load every table, by name."""
    return json.loads((Path(__file__).parent / "paper.json").read_text("utf-8"))


def paper_figures(preset: str, title: str = OWN) -> dict[str, Any]:
    """Return the figures that the paper states for a preset and the title of a system; nothing for other presets."""
    tables = paper_tables()
    if (preset, title) == ("owt128", OWN):
        row, sizes = tables["ablation"]["rows"][0], {}
    else:
        row = next((row for row in tables["main"].get(preset, []) if row["method"] == title), None)
        if row is None:
            return {}
        system = tables["system"][preset]
        sizes = {key: system[key] for key in SYSTEM} if title == OWN else {"total": f"{row['params_M']}M"}
    return sizes | {key: row[key] for key in QUALITY if key in row}


def comparable_rows(protocol: str, scorer: str, preset: str | None = None, title: str | None = None) -> list[dict[str, Any]]:
    """Return the paper's rows of the same scorer, protocol and data set, each with `name` and `method`, `title` first.

    `preset` None stands for texts of another program, whose user must know that they are from the same data. The paper uses
    lower case for ELF alone.
    """
    tables = paper_tables()
    lower, protocol = protocol.endswith(LOWER), protocol.removesuffix(LOWER)
    if scorer.rsplit("/", 1)[-1] != tables["scorer"] or (preset is not None and preset != protocol):
        return []
    if lower:
        rows = tables["main"].get(protocol, [])
        return [{"name": row["method"]} | row for row in rows if row["method"] == "ELF" and title in (None, "ELF")]
    if protocol == "owt128":
        rows = [{"name": f"{OWN}, {row['variant']}", "method": OWN} | row for row in tables["ablation"]["rows"]]
        layers = tables["cosmos_layers"]["rows"]
        cosmos = [{"name": f"COSMOS, r = 1, layer {row['layer']}", "method": "COSMOS"} | row for row in layers]
        rows += cosmos if title == "COSMOS" else []
    else:
        rows = [{"name": row["method"]} | row for row in tables["main"].get(protocol, [])]
        if protocol == "lm1b" and title in (None, OWN):
            sweep = [row for row in tables["lm1b_steps"]["rows"] if row["steps"] != 32]  # 32 is in the main table
            rows += [{"name": f"{OWN}, {row['steps']} steps", "method": OWN} | row for row in sweep]
    return sorted(rows, key=lambda row: title is not None and row["method"] != title)
