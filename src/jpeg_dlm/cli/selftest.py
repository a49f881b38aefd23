"""The checks of `jpeg-dlm doctor --selftest`: short trainings of their own processes, and the texts of the bundled model."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jpeg_dlm.methods.registry import names
from jpeg_dlm.util.errors import reason_of

if TYPE_CHECKING:
    from jpeg_dlm.util.console import Console

Outcome = tuple[str, str]  # 'ok', 'failed' or 'not available', and a detail

# The preset `smoke` on made-up text. It starts slowly: the first gradients of a zero head are partly rounding, of which Adam
# would make steps of full size.
OPTIONS = {
    "data.tokenizer": "bpe",
    "data.vocab-size": 300,
    "data.known": "false",
    "data.packing": "continuous",
    "data.whole": "false",
    "train.encoder-steps": 2,
    "train.steps": 5,
    "train.batch": 8,
    "train.warmup": 100,
    "train.log-every": 1,
}
JPEG_DLM = {"train__precision": "fp32", "model__depth": 1, "model__codec_layers": 1, "encoder__kind": "random"}  # compiles soon
SAME_LOSS = 1e-4  # largest relative difference: rounding gives 1e-7 on a CPU, half of the learning rate 5e-4 (measured)
SAME_TOKENS = 0.9  # smallest share: rounding may turn over ids that are equally probable, and all later steps (assumed)
PATIENCE_S = 600  # longest time of one training (assumed: ten times what the slowest takes on two cores)
# What torch says where it has no compiler to call.
NO_COMPILER = ("InvalidCxxCompiler", "TritonMissing", "Failed to find C compiler", "Cannot find a working triton", "Python.h")


def run_checks(checks: Sequence[str], console: Console) -> list[tuple[str, str, str, int]]:
    """Run checks and return rows of check, result, detail and seconds."""
    rows = []
    for check in checks:
        console.say(f"  {check} ...")
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                result, detail = CHECKS[check](Path(folder))
            except Exception as error:
                result, detail = "failed", f"{type(error).__name__}: {reason_of(error)}"
        rows.append((check, result, detail, round(time.monotonic() - began)))
    return rows


def run_process(words: Sequence[str]) -> None:
    """Run Python with these arguments to the end; if it fails, raise `RuntimeError` with what it wrote to standard error."""
    command, silent, pipe = [sys.executable, *words], subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(command, start_new_session=True, stdout=silent, stderr=pipe, text=True) as process:
        try:
            _, output = process.communicate(timeout=PATIENCE_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # with its own children
            raise
    if process.returncode:
        raise RuntimeError(output or f"ended with code {process.returncode}")


def losses(folder: Path, processes: int = 1, **options: object) -> list[float]:
    """Train on made-up text and return the loss of every step."""
    from jpeg_dlm.training.metrics import read_metrics

    rng, out = random.Random(0), Path(tempfile.mkdtemp(dir=folder)) / "run"
    words = ["".join(rng.choices("abcdefghij", k=4)) for _ in range(200)]
    text = folder / "text.txt"
    text.write_text("\n\n".join(" ".join(rng.choices(words, k=400)) for _ in range(40)), "utf-8")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    command = ["-m", "jpeg_dlm", "train", "--preset", "smoke", "--data", str(text), "--out", str(out), "--quiet"]
    for name, value in (OPTIONS | {name.replace("__", "."): value for name, value in options.items()}).items():
        command += [f"--{name}", str(value)]
    run_process([*launch, *command])
    return [row["loss"] for row in read_metrics(out / "metrics.jsonl") if "loss" in row]


def cause(error: Exception) -> str:
    """Return the sentence of an error in the output of a training, else its last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("error: ")), lines[-1])[:300]


def agreement(one: Sequence[float], two: Sequence[float]) -> Outcome:
    """Compare the losses of two trainings that should be the same."""
    worst = max(abs(a - b) / abs(a) for a, b in zip(one, two, strict=True))
    return "ok" if worst <= SAME_LOSS else "failed", f"losses of {len(one)} steps differ by at most {worst:.1g} of their size"


def methods(folder: Path) -> Outcome:
    """Train every method in bf16; the training itself ends at a loss or a gradient that is not finite."""
    every, problems = names("system", "stage"), []
    for method in every:
        try:
            losses(folder, method=method, train__precision="bf16")
        except RuntimeError as error:
            problems.append(f"{method}: {cause(error)}")
    return ("failed", "; ".join(problems)) if problems else ("ok", f"{len(every)} methods")


def processes(sharding: str, folder: Path) -> Outcome:
    """Train in two processes with half of the rows each, as one process with all rows does; on GPUs if there are two."""
    import torch

    device = "cuda" if torch.cuda.device_count() >= 2 else "cpu"
    try:
        one = losses(folder, device=device, **JPEG_DLM)
        two = losses(folder, 2, device=device, train__batch=4, train__sharding=sharding, **JPEG_DLM)
    except RuntimeError as error:
        return "failed", cause(error)
    result, detail = agreement(one, two)
    return result, f"{device}: {detail}"


def compiled(folder: Path) -> Outcome:
    """Train a compiled JPEG-DLM as an eager one."""
    eager = losses(folder, **JPEG_DLM)
    try:
        return agreement(eager, losses(folder, train__compile="true", **JPEG_DLM))
    except RuntimeError as error:
        return "not available" if any(mark in str(error) for mark in NO_COMPILER) else "failed", cause(error)


def parity(folder: Path) -> Outcome:
    """Compare the tokens that the bundled model writes here and on the CPU, in fp32 from the same noise."""
    import torch

    from jpeg_dlm import load
    from jpeg_dlm.util.distributed import read_ranks
    from jpeg_dlm.util.rng import RowNoise

    device, cpu = read_ranks(None, {}).device, torch.device("cpu")
    models = [(load(device=place), place) for place in (device, cpu)]
    here, there = (m.writer.sample(m.config.sampler, RowNoise(0, range(32), 0, place)).cpu() for m, place in models)
    same = (here == there).float().mean().item()
    return "ok" if same >= SAME_TOKENS else "failed", f"{same:.1%} of the tokens on {device.type} are the CPU's"


CHECKS: dict[str, Callable[[Path], Outcome]] = {
    "methods": methods,
    "processes": partial(processes, "none"),
    "sharding": partial(processes, "fsdp"),
    "compile": compiled,
    "parity": parity,
}
