"""Load test of `jpeg-dlm serve`: clients that each ask for one text and wait, against one request at a time.

python benchmarks/run.py service             # a few minutes on two cores
python benchmarks/run.py service --short

A server process with the bundled model answers over HTTP. Rounds go through all numbers of clients in turn, so that a busy
machine slows all of them. Every answer is compared with the text that `generate` writes for its seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jpeg_dlm
from jpeg_dlm.evaluation.table import markdown_table
from jpeg_dlm.util.pictures import LINE_COLORS, dress, new_figure, save_png

CLIENTS = (1, 8, 64)
SEEDS = 16  # texts that are asked for, again and again
PERCENTILES = (50, 95)


def measure(short: bool = False) -> dict[str, Any]:
    """Measure texts per second and latency with growing numbers of clients."""
    expected = [jpeg_dlm.load(device="cpu", dtype="exact").generate(1, seed=seed)[0] for seed in range(SEEDS)]
    rounds, each = (1, 2) if short else (5, 4)  # requests of each client in a round
    found: dict[int, list[dict[str, Any]]] = {clients: [] for clients in CLIENTS}
    with server() as port:
        asyncio.run(load(port, 4, 2))  # warm-up
        for _ in range(rounds):
            for clients in CLIENTS:
                found[clients].append(asyncio.run(load(port, clients, each if clients > 1 else 4 * each)))
    rows = [summary(clients, runs, expected) for clients, runs in found.items()]
    for row in rows:
        row["ratio"] = row["texts_per_second"] / rows[0]["texts_per_second"]
        row["slower"] = row["p95"] / rows[0]["p95"]
        row["slower_round"] = row["p95_round"] / rows[0]["p95_round"]
    ratios = {f"{row['clients']} clients": row["ratio"] for row in rows}
    title = "jpeg-dlm serve, bundled model, 32 Euler steps, requests of one text"
    return {"title": title, "markdown": table(rows), "rows": rows, "ratios": ratios}


@contextlib.contextmanager
def server() -> Iterator[int]:
    """Start a server on a free port; it must leave in order."""
    command = [sys.executable, "-m", "jpeg_dlm.cli.main", "serve", "--port", "0", "--device", "cpu", "--time-limit", "600"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            match = re.search(r":(\d+)\. ", process.stderr.readline())
            assert match, "the server did not start"
            yield int(match[1])
            process.send_signal(signal.SIGTERM)
            assert process.wait(600) == 0
        finally:
            process.kill()


async def load(port: int, clients: int, each: int) -> dict[str, Any]:
    """Let clients ask `each` times, one request after the other; return seconds, latencies and answers."""
    latencies: list[float] = []
    answers: list[tuple[int, str]] = []

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for i in range(each):
            seed, began = (number * each + i) % SEEDS, time.perf_counter()
            answers.append((seed, await ask(reader, writer, {"seed": seed})))
            latencies.append(time.perf_counter() - began)
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*map(client, range(clients)))
    return {"seconds": time.perf_counter() - began, "latencies": latencies, "answers": answers}


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: Mapping[str, Any]) -> str:
    """Send one request on a connection that stays open; return the text."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    told = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    size = re.search(r"content-length: (\d+)", told)
    assert told.startswith("http/1.1 200 ") and size, told
    return json.loads(await reader.readexactly(int(size[1])))["choices"][0]["text"]


def summary(clients: int, runs: list[dict[str, Any]], expected: list[str]) -> dict[str, Any]:
    """Return the speed of the median round, percentiles over all requests, and how many answers were wrong.

    `p95_round` is the median of the rounds' own p95: on a shared machine one slow round decides the p95 of all requests.
    """
    answers = [answer for run in runs for answer in run["answers"]]
    rounds = [_percentiles(run["latencies"]) for run in runs]
    pooled = _percentiles([seconds for run in runs for seconds in run["latencies"]])
    return {
        "clients": clients,
        "requests": len(answers),
        "wrong": sum(text != expected[seed] for seed, text in answers),
        "texts_per_second": statistics.median(len(run["answers"]) / run["seconds"] for run in runs),
        **{f"p{p}": pooled[p - 1] for p in PERCENTILES},
        "p95_round": statistics.median(cut[94] for cut in rounds),
    }


def _percentiles(seconds: list[float]) -> list[float]:
    return statistics.quantiles([1e3 * s for s in seconds], n=100, method="inclusive")


def table(rows: list[dict[str, Any]]) -> str:
    heading = (
        "clients",
        "requests",
        "wrong",
        "texts/s",
        "ratio",
        *(f"p{p} ms" for p in PERCENTILES),
        "p95 ratio",
        "p95 ratio, by round",
    )
    cells = []
    for row in rows:
        counts = [str(row[name]) for name in ("clients", "requests", "wrong")]
        latency = [f"{row[f'p{p}']:.0f}" for p in PERCENTILES]
        cells.append(
            [
                *counts,
                f"{row['texts_per_second']:.1f}",
                f"{row['ratio']:.2f}x",
                *latency,
                f"{row['slower']:.2f}x",
                f"{row['slower_round']:.2f}x",
            ]
        )
    return markdown_table(heading, cells)


def draw(result: Mapping[str, Any], path: Path) -> Path:
    """Draw throughput and latency against the number of clients."""
    figure, (left, right) = new_figure(2, result["title"])
    x = [row["clients"] for row in result["rows"]]
    left.plot(x, [row["texts_per_second"] for row in result["rows"]], "o-", ms=3.5, lw=1.5, color=LINE_COLORS[0])
    for p, style in zip((50, 95), ("-", "--"), strict=True):
        right.plot(x, [row[f"p{p}"] for row in result["rows"]], style, lw=1.5, color=LINE_COLORS[0], label=f"p{p}")
    dress(left, "throughput", "texts per second", "clients")
    dress(right, "latency", "milliseconds", "clients")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [str(n) for n in x])
        axes.set_ylim(bottom=0)
    right.legend(fontsize=7.5, frameon=False)
    return save_png(figure, path)
