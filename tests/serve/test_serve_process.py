"""Server processes under load and with faults: no answer is lost or wrong."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from refusals import refusal
from serving import PATIENCE, eventually, process

from jpeg_dlm import load
from jpeg_dlm.cli.main import build_parser

pytest_plugins = ["stand_in"]  # fixtures
CLIENT = """
import http.client, json, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
body = {"n": 64, "steps": 1000, "stream": len(sys.argv) > 2}
connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
print("sent", flush=True)
connection.getresponse().read()
"""


def test_what_cannot_be_served_is_one_sentence(capsys, tmp_path):
    def refused(*words):
        return refusal(capsys, ["serve", *words], (1, 2))

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "in use" in refused("--port", taken.getsockname()[1])
    assert "--port" in refused("--port", "70000")
    assert "nothing" in refused(tmp_path / "nothing", "--port", "0")
    assert "Cannot listen" in refused("--host", "192.0.2.1", "--port", "0")
    (tmp_path / "keys").write_text("")
    assert "no key" in refused("--keys", tmp_path / "keys", "--port", "0")


@pytest.mark.slow
def test_a_signal_under_load_finishes_what_was_accepted(micro_folders):
    """Every request is either answered rightly or never reached the server."""
    folder, begun = micro_folders("jpeg-dlm"), threading.Event()
    expected = [list(load(folder, "cpu").generate(4, seed=seed, steps=40)) for seed in range(4)]

    def ask(seed):
        answers = []
        with contextlib.suppress(OSError):  # refused or closed before it began
            while True:
                answers.append(server.ask.texts(seed=seed % 4, n=4, steps=40))
                begun.set()
        return answers

    with process(folder, "--batch", "2", "--time-limit", "900") as server, ThreadPoolExecutor(12) as threads:
        futures = [threads.submit(ask, seed) for seed in range(12)]
        assert begun.wait(PATIENCE)
        eventually(lambda: server.ask("/readyz").json["waiting"] >= 36)  # texts of nine requests
        assert server.stop(signal.SIGTERM) == 0
        answers = [future.result(PATIENCE) for future in futures]
        assert len(server.lines) == 1, server.lines
    assert sum(map(len, answers)) >= 9  # those in the queue were answered
    assert all(texts == expected[seed % 4] for seed, of_client in enumerate(answers) for texts in of_client)


@pytest.mark.slow
def test_killed_clients_leave_a_server_that_answers(micro_folders):
    folder = micro_folders("jpeg-dlm")
    with process(folder, "--batch", "4") as server:
        clients = []
        for extra in ([], ["stream"]) * 3:
            command = [sys.executable, "-c", CLIENT, str(server.port), *extra]
            clients.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            assert clients[-1].stdout is not None and clients[-1].stdout.readline() == "sent\n"
        eventually(lambda: server.ask("/readyz").json["waiting"] > 4 * 64)
        for client in clients:
            client.kill()
            client.communicate()
        eventually(lambda: server.ask("/readyz").json["waiting"] == 0)
        assert server.ask.texts(seed=1) == list(load(folder, "cpu").generate(1, seed=1))
        assert server.stop() == 0


def test_the_container_runs_what_there_is():
    """The image itself needs Docker; its files and its command are checked without."""
    root = Path(__file__).parent.parent.parent
    lines = (root / "Dockerfile").read_text("utf-8").splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied and all((root / name).exists() for name in copied)
    (entry,) = [json.loads(line.removeprefix("ENTRYPOINT ")) for line in lines if line.startswith("ENTRYPOINT ")]
    args = build_parser("serve").parse_args([*entry[1:], "bundled", "--log"])
    assert args.host == "0.0.0.0" and args.port == 8000 and f"EXPOSE {args.port}" in lines
