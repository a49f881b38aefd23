"""Runs contestants in separate processes that take turns, because memory management is part of what is timed.

A benchmark module has `serve(*words)`, which builds a contestant and returns a function from a request to an answer, both JSON.
"""

from __future__ import annotations

import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

Request = Mapping[str, Any]


def clock() -> float:
    """Return seconds: those of this process if it has one thread, so that other processes do not matter, else of the wall."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


class Worker:
    """One contestant; the constructor does not wait for it, so that several are built in parallel."""

    def __init__(self, module: str, *words: str) -> None:
        command = [sys.executable, __file__, module, *words]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603

    def ask(self, request: Request) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{' '.join(self.process.args[2:])} ended: see its output above.")  # type: ignore[index]
        return json.loads(answer)

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self.process.kill()
        self.close()


class Workers(ExitStack):
    """Contestants by name, each with the arguments of its process; those with equal arguments share one."""

    def __init__(self, module: str, contestants: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__()
        started = {words: self.enter_context(Worker(module, *words)) for words in dict.fromkeys(contestants.values())}
        self.contestants = {name: started[words] for name, words in contestants.items()}

    def ask(self, request: Request) -> dict[str, Any]:
        """Return the answer of each contestant, asked one after the other; the request contains the contestant's name."""
        return {name: worker.ask({**request, "contestant": name}) for name, worker in self.contestants.items()}

    def medians(self, request: Request, rounds: int) -> dict[str, float]:
        """Return the median answer of each contestant over rounds."""
        answers = [self.ask(request) for _ in range(rounds)]
        return {name: statistics.median(answer[name] for answer in answers) for name in self.contestants}


def serve(act: Callable[[Request], Any]) -> None:
    for line in sys.stdin:
        print(json.dumps(act(json.loads(line))), flush=True)


if __name__ == "__main__":
    serve(importlib.import_module(sys.argv[1]).serve(*sys.argv[2:]))
