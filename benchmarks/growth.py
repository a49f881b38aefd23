"""Cost of a text against its length and the compression rate, counted and measured, compared with AR and full length.

python benchmarks/run.py growth                 # networks of the bundled model's size, 128 to 8,192 tokens
jpeg-dlm study cost --preset lm1b --measure --limit 120 --out cost      # the same at the paper's size
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jpeg_dlm.evaluation.paper import OWN
from jpeg_dlm.results.table import markdown
from jpeg_dlm.studies import cost, cost_pictures
from jpeg_dlm.studies.cost_points import FULL

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
RATES = (1, 0.5, 0.25, 0.125, 0.0625)


def measure(short: bool = False) -> dict[str, Any]:
    """Run `study cost` at the size of the bundled model; its ratios are relative to full length."""
    with tempfile.TemporaryDirectory() as scratch:
        asked = argparse.Namespace(
            preset="tiny", rates=",".join(map(str, RATES)), lengths=",".join(map(str, LENGTHS[: 3 if short else None])),
            batch=1, repeats=1, measure=True, device="cpu", limit=15.0, out=Path(scratch), quiet=False,
        )  # fmt: skip
        # Compare the rates at 512 tokens, where they matter, not at the 32 tokens of the preset.
        outcome = cost.study(asked, {"data.token_len": 512, "model.latent_len": 128, "sampler.steps": 32})
    result = dict(outcome.result)
    return {
        "title": "How cost grows with the length of a text", "markdown": markdown(outcome.tables),
        "rows": result["by_length"], "ratios": speed_over_full_length(result), "study": result,
    }  # fmt: skip


def speed_over_full_length(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the speed relative to the model with one latent per token, by length."""
    seconds = {
        (row["system"], row["token_len"]): row["measured"]["seconds"]
        for row in result["by_length"]
        if "seconds" in row.get("measured", {})
    }
    return {
        f"{OWN} over full length, L = {length}": seconds[FULL, length] / own
        for (system, length), own in seconds.items()
        if system == OWN and (FULL, length) in seconds
    }


def draw(result: Mapping[str, Any], path: Path) -> Path:
    return cost_pictures.draw(result["study"], path)
