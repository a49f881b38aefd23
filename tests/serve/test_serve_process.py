"""Server processes under load and with faults: no answer is lost or wrong."""

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serving import PATIENCE, eventually, process

from jpeg_dlm import load
from jpeg_dlm.cli.main import build_parser, main

pytest_plugins = ["stand_in"]  # fixtures


def refusal(capsys, *words):
    assert main(["serve", *map(str, words)]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_what_cannot_be_served_is_one_sentence(capsys, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "is taken: choose another" in refusal(capsys, "--port", taken.getsockname()[1])
    assert "at most 65535" in refusal(capsys, "--port", "70000")
    assert "does not exist" in refusal(capsys, tmp_path / "nothing", "--port", "0")
    assert "Cannot listen" in refusal(capsys, "--host", "192.0.2.1", "--port", "0")
    (tmp_path / "keys").write_text("")
    assert "no key" in refusal(capsys, "--keys", tmp_path / "keys", "--port", "0")


@pytest.mark.slow
def test_64_clients_get_what_generate_gives():
    """Mixed requests, some of which share batches; every answer is compared."""
    rng, model = random.Random(0), load(None, "cpu", "exact")
    ways = [{}, {"steps": 8, "solver": "multistep"}, {"fast": True}]
    counts = [{"n": n, "stream": stream} for n, stream in ((1, False), (1, True), (2, False), (5, True))]
    asked = [{"seed": rng.randrange(50), **rng.choice(counts), **rng.choice(ways)} for _ in range(256)]

    def answer(body):
        reply = server.ask("/v1/completions", body)
        assert reply.status == 200, reply.body
        if not body["stream"]:
            return [choice["text"] for choice in reply.json["choices"]]
        found = {choice["index"]: choice["text"] for event in reply.events for choice in event["choices"]}
        return [found[i] for i in range(body["n"])]

    with process("--time-limit", "900") as server, ThreadPoolExecutor(64) as threads:
        found = list(threads.map(answer, asked))
        for _ in range(50):  # a batch is counted just after its last answer
            lines = server.ask("/metrics").body.decode().splitlines()
            values = dict(line.split() for line in lines if line.startswith("jpeg_dlm_batch_rows_") and "{" not in line)
            rows, batches = float(values["jpeg_dlm_batch_rows_sum"]), float(values["jpeg_dlm_batch_rows_count"])
            if rows == sum(body["n"] for body in asked):
                break
            time.sleep(0.1)
        assert server.stop() == 0
    known = {}
    for body, texts in zip(asked, found, strict=True):
        way = {name: value for name, value in body.items() if name not in ("seed", "n", "stream")}
        key = json.dumps([body["seed"], way])
        known[key] = known.get(key) or list(model.generate(5, seed=body["seed"], **way))
        assert texts == known[key][: body["n"]], body
    assert rows == sum(body["n"] for body in asked) and batches < rows / 4  # they were batched


@pytest.mark.slow
def test_1000_queued_requests_are_all_answered(micro_folders):
    folder = micro_folders("jpeg-dlm")
    model = load(folder, "cpu", "exact")
    expected = [model.generate(1, seed=seed)[0] for seed in range(50)]
    with process(folder, "--queue", "1000", "--time-limit", "900") as server, ThreadPoolExecutor(1000) as threads:
        assert list(threads.map(lambda i: server.ask.texts(seed=i % 50)[0], range(1000))) == expected * 20
        assert server.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_load_finishes_what_was_accepted(micro_folders, number):
    """Every request is either answered rightly or never reached the server."""
    folder, begun = micro_folders("jpeg-dlm"), threading.Event()
    expected = [list(load(folder, "cpu", "exact").generate(4, seed=seed, steps=40)) for seed in range(4)]

    def ask(seed):
        found = []
        while not found or found[-1] is not None:
            try:
                found.append(server.ask.texts(seed=seed % 4, n=4, steps=40))
                begun.set()
            except OSError:  # refused or closed before it began
                found.append(None)
        return found[:-1]

    with process(folder, "--batch", "2", "--time-limit", "900") as server, ThreadPoolExecutor(12) as threads:
        asked = [threads.submit(ask, seed) for seed in range(12)]
        assert begun.wait(PATIENCE)
        eventually(lambda: server.ask("/readyz").json["waiting"] >= 36)  # texts of nine requests
        assert server.stop(number) == 0
        found = [future.result(PATIENCE) for future in asked]
    assert sum(map(len, found)) >= 9  # those in the queue were answered
    assert all(texts == expected[seed % 4] for seed, answers in enumerate(found) for texts in answers)
    assert len(server.lines) == 1, server.lines


@pytest.mark.slow
def test_killed_clients_leave_a_server_that_answers(micro_folders):
    folder = micro_folders("jpeg-dlm")
    script = """
import http.client, json, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
connection.request("POST", "/v1/completions", json.dumps({"n": 64, "steps": 1000, "stream": len(sys.argv) > 2}), {"Content-Type": "application/json"})
print("sent", flush=True)
connection.getresponse().read()
"""  # noqa: E501
    with process(folder, "--batch", "4") as server:
        clients = []
        for extra in ([], ["stream"]) * 3:
            command = [sys.executable, "-c", script, str(server.port), *extra]
            clients.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            assert clients[-1].stdout is not None and clients[-1].stdout.readline() == "sent\n"
        eventually(lambda: server.ask("/readyz").json["waiting"] > 4 * 64)
        for client in clients:
            client.kill()
            client.communicate()
        eventually(lambda: server.ask("/readyz").json["waiting"] == 0)
        assert server.ask.texts(seed=1) == list(load(folder, "cpu", "exact").generate(1, seed=1))
        assert server.stop() == 0


@pytest.mark.slow
def test_two_servers_on_one_port(micro_folders):
    folder = micro_folders("jpeg-dlm")
    with process(folder) as server:
        command = [sys.executable, "-m", "jpeg_dlm.cli.main", "serve", str(folder), "--port", str(server.port)]
        second = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        assert second.returncode == 2 and "is taken" in second.stderr and "Traceback" not in second.stderr
        assert server.ask("/healthz").status == 200


def test_the_container_runs_what_there_is():
    """The image itself needs Docker; its files and its command are checked without."""
    root = Path(__file__).parent.parent.parent
    lines = (root / "Dockerfile").read_text("utf-8").splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied and all((root / name).exists() for name in copied)
    (entry,) = [json.loads(line.removeprefix("ENTRYPOINT ")) for line in lines if line.startswith("ENTRYPOINT ")]
    args = build_parser("serve").parse_args([*entry[1:], "bundled", "--log"])
    assert args.host == "0.0.0.0" and args.port == 8000 and f"EXPOSE {args.port}" in lines
    extras = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert ".[serve]" in "\n".join(lines) and {one.split(">")[0] for one in extras["serve"]} >= {"starlette", "uvicorn"}
