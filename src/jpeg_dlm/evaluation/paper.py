"""The paper's figures as data (`paper.json` has every table), shown next to ours where the two are comparable."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

LOWER = "-lower"  # suffix of protocols that convert texts to lower case


class PaperFigures(TypedDict, total=False):
    """The paper's figures for one setup; figures that it does not state are absent."""

    dit_and_projection: str  # parameters, as printed
    total: str  # the same with compressor and decompressor
    macs_compressed_T: float  # "sampling compute", in units of 1e12 multiply-accumulates a sample
    macs_full_T: float  # the same with one latent per token
    global_batch: int  # rows of an optimizer step
    gen_ppl: float
    entropy: float  # nats
    mauve: float
    speed: float  # throughput relative to an autoregressive model without KV cache
    speed_kv_cache: float  # the same for the autoregressive model with KV cache


@cache
def paper_tables() -> dict[str, Any]:
    """Load every table, by name."""
    return json.loads((Path(__file__).parent / "paper.json").read_text("utf-8"))


def _figures() -> dict[str, PaperFigures]:
    tables = paper_tables()
    found: dict[str, PaperFigures] = {}
    for name in ("lm1b", "owt1024"):
        system = tables["system"][name]
        own = next(row for row in tables["main"][name] if row["method"] == "JPEG-DLM")
        found[name] = {
            "dit_and_projection": system["dit_and_projection"], "total": system["total"],
            "macs_compressed_T": system["macs_compressed_T"], "macs_full_T": system["macs_full_T"],
            "global_batch": system["global_batch"], "gen_ppl": own["gen_ppl"], "entropy": own["entropy"],
            "mauve": own["mauve"], "speed": own["speed"],
        }  # fmt: skip
    base = tables["ablation"]["rows"][0]
    found["owt128"] = {"gen_ppl": base["gen_ppl"], "entropy": base["entropy"], "mauve": base["mauve"]}
    return found


OWN = "JPEG-DLM"  # the title of the paper's own system
PAPER: dict[str, PaperFigures] = _figures()


def paper_figures(preset: str, title: str = OWN) -> PaperFigures:
    """Return the paper's figures for a preset and the title of a system; empty for presets that the paper does not have."""
    if title == OWN:
        return PAPER.get(preset, {})
    row = next((row for row in paper_tables()["main"].get(preset, []) if row["method"] == title), None)
    if row is None:
        return {}
    found: PaperFigures = {
        "total": f"{row['params_M']}M", "gen_ppl": row["gen_ppl"], "entropy": row["entropy"], "mauve": row["mauve"],
        "speed": row["speed"],
    }  # fmt: skip
    return found | {"speed_kv_cache": row["speed_kv_cache"]} if "speed_kv_cache" in row else found


def comparable_rows(protocol: str, scorer: str, preset: str | None = None, title: str | None = None) -> list[dict[str, Any]]:
    """Return the paper's rows comparable with an evaluation, each with `name` and `method`, those of `title` first.

    The list is empty unless all conditions are equal: figures of another scorer, protocol or data set are not comparable.
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
