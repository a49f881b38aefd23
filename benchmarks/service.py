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
from typing import Any

import jpeg_dlm
from jpeg_dlm.evaluation.table import Table

CLIENTS = (1, 8, 64)
SEEDS = 16  # texts that are asked for, again and again


def measure(short: bool = False) -> dict[str, Any]:
    """Measure texts per second and latency with growing numbers of clients."""
    expected = [jpeg_dlm.load(device="cpu").generate(1, seed=seed)[0] for seed in range(SEEDS)]
    rounds, each = (1, 2) if short else (5, 4)  # requests of each client in a round
    runs: dict[int, list[dict[str, Any]]] = {clients: [] for clients in CLIENTS}
    with server() as port:
        asyncio.run(load(port, 4, 2))  # warm-up
        for _ in range(rounds):
            for clients in CLIENTS:
                runs[clients].append(asyncio.run(load(port, clients, each if clients > 1 else 4 * each)))
    rows = [summary(clients, of_clients, expected) for clients, of_clients in runs.items()]
    for row in rows:
        row["ratio"] = row["texts/s"] / rows[0]["texts/s"]
        row["p95 ratio"] = row["p95 ms"] / rows[0]["p95 ms"]
    cells = [[f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    return {
        "title": "jpeg-dlm serve, bundled model, requests of one text",
        "markdown": Table.of("", list(rows[0]), cells).markdown(),
        "rows": rows,
        "ratios": {f"{row['clients']} clients": row["ratio"] for row in rows},
    }


@contextlib.contextmanager
def server() -> Iterator[int]:
    """Start a server on a free port; it must leave in order."""
    command = [sys.executable, "-m", "jpeg_dlm", "serve", "--port", "0", "--device", "cpu", "--time-limit", "600"]
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
    reply = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    size = re.search(r"content-length: (\d+)", reply)
    assert reply.startswith("http/1.1 200 ") and size, reply
    return json.loads(await reader.readexactly(int(size[1])))["choices"][0]["text"]


def summary(clients: int, runs: list[dict[str, Any]], expected: list[str]) -> dict[str, Any]:
    """Return the speed of the median round, its percentiles of latency, and how many answers were wrong.

    Percentiles are medians of the rounds' own: on a shared machine one slow round decides those of all requests.
    """
    answers = [answer for run in runs for answer in run["answers"]]
    rounds = [statistics.quantiles([1e3 * s for s in run["latencies"]], n=100, method="inclusive") for run in runs]
    return {
        "clients": clients,
        "requests": len(answers),
        "wrong": sum(text != expected[seed] for seed, text in answers),
        "texts/s": statistics.median(len(run["answers"]) / run["seconds"] for run in runs),
        "p50 ms": statistics.median(cuts[49] for cuts in rounds),
        "p95 ms": statistics.median(cuts[94] for cuts in rounds),
    }
