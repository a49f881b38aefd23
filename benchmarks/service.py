"""Throughput and latency of the batching service with many small requests, compared with serving them one by one.

python benchmarks/run.py service             # under two minutes on two cores
python benchmarks/run.py service --short
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jpeg_dlm
from jpeg_dlm.results.pictures import LINE_COLORS, dress, new_figure, save_png
from jpeg_dlm.results.table import markdown_table
from jpeg_dlm.sampling.batching import BatchingService

OPTIONS = {"steps": 8, "solver": "multistep"}
WAYS = {"batched": 64, "one by one": 1}  # rows of a batch
LEVELS = (1, 2, 4, 8, 16, 32, 64)
PERCENTILES = (50, 95, 99)


def measure(short: bool = False) -> dict[str, Any]:
    """Measure growing numbers of requesters, each of which repeatedly requests one text and waits for it."""
    model = jpeg_dlm.load(device="cpu", dtype="fp32")
    sampler = model.sampler_options(**OPTIONS)
    model.sample(2, **OPTIONS)  # warm-up
    rows, ratios = [], {}
    for requesters in (1, 8, 64) if short else LEVELS:
        found = {}
        for way, max_batch in WAYS.items():
            requests = max(requesters, 16 if short else 32) * (2 if way == "batched" else 1)
            with BatchingService(max_batch) as service:
                found[way] = run(service, model.writer, sampler, requesters, requests)
            rows.append({"requesters": requesters, "way": way, **found[way]})
        ratios[_level(requesters)] = found["batched"]["samples_per_second"] / found["one by one"]["samples_per_second"]
    title = f"Service, bundled model, {OPTIONS['steps']} {OPTIONS['solver']} steps, requests of one text"
    return {"title": title, "markdown": table(rows, ratios), "rows": rows, "ratios": ratios}


def _level(requesters: int) -> str:
    return f"{requesters} requesters"


def run(service: BatchingService, writer: Any, sampler: Any, requesters: int, requests: int) -> dict[str, float]:
    """Return samples per second and percentiles of the latency in milliseconds."""

    def ask(number: int) -> float:
        began = time.perf_counter()
        service.submit(writer, 1, sampler, seed=number).result()
        return time.perf_counter() - began

    with ThreadPoolExecutor(requesters) as threads:
        began = time.perf_counter()
        latencies = list(threads.map(ask, range(requests)))
        seconds = time.perf_counter() - began
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return {"samples_per_second": requests / seconds} | {f"p{p}": 1e3 * cuts[p - 1] for p in PERCENTILES}


def table(rows: list[dict[str, Any]], ratios: Mapping[str, float]) -> str:
    cells = []
    for row in rows:
        ratio = f"{ratios[_level(row['requesters'])]:.2f}x" if row["way"] == "batched" else ""
        latency = [f"{row[f'p{p}']:.0f}" for p in PERCENTILES]
        cells.append([str(row["requesters"]), row["way"], f"{row['samples_per_second']:.1f}", ratio, *latency])
    heading = ("requesters", "", "samples/s", "ratio", *(f"p{p} ms" for p in PERCENTILES))
    return markdown_table(heading, cells)


def draw(result: Mapping[str, Any], path: Path) -> Path:
    """Draw throughput and latency against the number of requesters."""
    figure, (left, right) = new_figure(2, result["title"])
    x = sorted({row["requesters"] for row in result["rows"]})
    for way, color in zip(WAYS, LINE_COLORS, strict=False):
        rows = [row for row in result["rows"] if row["way"] == way]
        left.plot(x, [row["samples_per_second"] for row in rows], "o-", ms=3.5, lw=1.5, color=color, label=way)
        for p, style in zip((50, 95), ("-", "--"), strict=True):
            right.plot(x, [row[f"p{p}"] for row in rows], style, lw=1.5, color=color, label=f"{way}, p{p}")
    dress(left, "throughput", "samples per second", "concurrent requesters")
    dress(right, "latency", "milliseconds", "concurrent requesters")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [str(n) for n in x])
        axes.legend(fontsize=7.5, frameon=False)
    return save_png(figure, path)
