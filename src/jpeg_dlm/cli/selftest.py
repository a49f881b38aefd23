"""The checks of `jpeg-dlm doctor --selftest`: each is a child process of its own, so that a crash or hang fails it alone.

`python -m jpeg_dlm.cli.selftest CHECK FOLDER` runs one check; torchrun starts `... selftest MEMBER FOLDER` as its members.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from jpeg_dlm import load
from jpeg_dlm.config import DataConfig, validate
from jpeg_dlm.config_io import override
from jpeg_dlm.encoders import build_encoder
from jpeg_dlm.errors import reason_of
from jpeg_dlm.evaluation.throughput import Subject, measure
from jpeg_dlm.files import load_tensors, save_tensors
from jpeg_dlm.machine import dist
from jpeg_dlm.machine.console import Console
from jpeg_dlm.machine.dist import Ranks, read_ranks
from jpeg_dlm.methods.registry import build_method, for_method, method_class, names
from jpeg_dlm.presets import preset
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.prepare import prepare
from jpeg_dlm.training.data import BatchStream
from jpeg_dlm.training.loop import Trainer
from jpeg_dlm.training.sharding import gathered

Result = Literal["ok", "failed", "not available"]

ROWS = 8  # of a step over all processes
MICRO = {
    "data.vocab_size": 300, "data.token_len": 12, "encoder.kind": "random", "encoder.scale": "none", "encoder.feature_dim": 16,
    "model.latent_len": 3, "model.latent_dim": 16, "model.bottleneck_dim": 8, "model.codec_layers": 1, "model.codec_heads": 2,
    "model.proj_dim": 16, "model.hidden": 16, "model.depth": 1, "model.heads": 2, "model.freq_dim": 8,
    "objective.sigreg_slices": 8, "train.steps": 10, "train.batch": ROWS, "train.precision": "fp32",
    # Slow to start: the first gradients of a zero head are partly rounding, of which Adam would make steps of full size.
    "train.warmup": 100,
}  # fmt: skip
# The structure of preset lm1b, without its text and its pretrained encoder; narrower on a CPU.
LM1B = {"encoder.kind": "random", "encoder.scale": "none", "encoder.depth": 2, "train.steps": 100, "train.accumulation": 1}
LM1B_NARROW = {
    "encoder.feature_dim": 128, "model.latent_dim": 128, "model.bottleneck_dim": 64, "model.codec_layers": 2,
    "model.proj_dim": 128, "model.hidden": 192, "model.depth": 4, "model.heads": 4,
}  # fmt: skip
SAME_UPDATE = 0.05  # largest difference of two trainings as a share of their updates: rounding gives below 0.01 (measured)
SAME_TOKENS = 0.9  # smallest share: rounding may turn over ids that are equally probable, and all later steps (assumed)
PATIENCE_S = 400  # longest time of one check (assumed: ten times what the slowest takes on two cores)
# What torch says where it has no compiler to call.
NO_COMPILER = ("InvalidCxxCompiler", "TritonMissing", "Failed to find C compiler", "Cannot find a working triton", "Python.h")


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check."""

    check: str
    result: Result
    detail: str
    seconds: float = 0.0


def run_checks(checks: Sequence[str], console: Console) -> list[Verdict]:
    """Run each check in a child process, one after the other."""
    verdicts = []
    with tempfile.TemporaryDirectory() as scratch, console.progress("Self-test", "checks") as report:
        for i, check in enumerate(checks):
            console.say(f"  {check} ...")
            report(i, len(checks))
            folder = Path(scratch) / check
            folder.mkdir()
            began = time.monotonic()
            verdict = _run_child(check, folder)
            verdicts.append(replace(verdict, detail=anonymous(verdict.detail), seconds=time.monotonic() - began))
            report(i + 1, len(checks))
    return verdicts


def _run_child(check: str, folder: Path) -> Verdict:
    error = run_process(["-m", __spec__.name, check, str(folder)])
    outcome = folder / "verdict.json"
    if outcome.is_file():
        return Verdict(check, **json.loads(outcome.read_text("utf-8")))
    return Verdict(check, "failed", error or "ended without a result")


def run_process(words: Sequence[str], threads: int | None = None) -> str:
    """Run Python with these arguments to the end; return why it failed in one line, or ''."""
    env = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env, errors="replace",
        start_new_session=True,  # so that its own children end with it
    )  # fmt: skip
    try:
        _, said = process.communicate(timeout=PATIENCE_S)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return f"did not end within {PATIENCE_S} s"
        raise
    if process.returncode == 0:
        return ""
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
    return f"ended with code {process.returncode}: {last}"[:300]


def anonymous(text: str) -> str:
    """Return the text without paths and without the names of the user and of this machine."""
    text = re.sub(r"""(?<=['"])(/|[A-Za-z]:\\)[^'"]*|(?<![\w.])(/|[A-Za-z]:\\)[^\s'":,;)]+""", "PATH", text)
    private = {"HOST": socket.gethostname(), "USER": ""}
    with contextlib.suppress(OSError, KeyError, ImportError):  # an id without a name
        private["USER"] = getpass.getuser()
    for stand_in, name in private.items():
        text = re.sub(rf"\b{re.escape(name)}\b", stand_in, text) if name else text
    return text


# ---------------------------------------------------------------- micro trainings


def start(method: str, folder: Path, ranks: Ranks, **train: object) -> Trainer:
    """Return the trainer of a method at the micro size before its first step; its text is made in `folder`."""
    kind = "jpeg-dlm" if method in names("student") else method
    options = MICRO | {"train.batch": ROWS // ranks.world} | {f"train.{name}": value for name, value in train.items()}
    base = override(preset("smoke"), {name: value for name, value in options.items() if not name.startswith("train.")})
    config = override(for_method(base, kind), {name: value for name, value in options.items() if name.startswith("train.")})
    blocks = micro_text(folder, config.data.token_len)
    config = validate(replace(config, data=replace(config.data, vocab_size=blocks.vocab_size)))
    teacher = None
    if method != kind:
        teacher = config
        config = method_class(method).student_config(teacher, Path("teacher"), None, None)
        config = replace(config, train=teacher.train)
    before = teacher or method_class(method).first_stage(config)
    needs = method_class(method).needs_encoder(config)
    encoder = build_encoder(config.encoder, blocks.vocab_size) if needs else None
    stream = BatchStream(blocks, config.train, ranks.device, ranks.rank, ranks.world)
    model = build_method(config, encoder).to(ranks.device)
    if before:
        model.start_from(build_method(before, encoder).to(ranks.device), [stream.batch(list(range(16)))])
    return Trainer(config, model, stream, folder, ranks)


def micro_text(folder: Path, token_len: int) -> Blocks:
    """Return blocks of made-up words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=4)) for _ in range(200)]
    source = folder / "text.txt"
    if not source.is_file():
        source.write_text("\n\n".join(" ".join(rng.choices(words, k=400)) for _ in range(40)), "utf-8")
    prepare(DataConfig(source=str(source), vocab_size=300, token_len=token_len), folder / "data")
    return Blocks(folder / "data")


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Return a copy of the trained weights on the CPU; a collective call if they are sharded."""
    return {name: t.clone() for name, t in gathered(trainer.parameters, keep=True).items()}


def difference(start: Mapping[str, Tensor], one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    """Return the distance of two trained models as a share of how far the first one went."""

    def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
        return sum((a[name].double() - b[name].double()).square().sum().item() for name in a) ** 0.5

    return distance(one, two) / distance(start, one)


# ---------------------------------------------------------------- checks


def gradients(folder: Path) -> tuple[Result, str]:
    """Take bf16 steps of every method: all parameters must get a finite gradient in each."""
    device, problems, count = read_ranks(None, {}).device, [], 0
    for method in (every := names("system", "stage", "student")):
        try:
            trainer = start(method, folder, Ranks(device=device), precision="bf16")
            count += len(trainer.parameters)
            for _ in range(4):  # rows are conditioned on a prediction, and decoded, at random
                trainer.train_step()
                problems += [f"{method}: {problem}" for problem in gradient_problems(trainer)]
        except Exception as error:
            problems.append(f"{method}: {type(error).__name__}: {reason_of(error)}")
    if problems:
        return "failed", "; ".join(dict.fromkeys(problems))
    return "ok", f"{len(every)} methods, {count} parameters"


def gradient_problems(trainer: Trainer) -> list[str]:
    """Name the parameters whose last gradient is missing or not finite; a loss term of weight 0 may leave some without."""
    grads = {name: p.grad for name, p in trainer.parameters.items()}
    unused = not all(trainer.method.loss_weights.values())
    kinds = {
        "no gradient": [] if unused else [name for name, grad in grads.items() if grad is None],
        "gradient not finite": [name for name, grad in grads.items() if grad is not None and not grad.isfinite().all()],
    }
    return [f"{kind}: {', '.join(found)}" for kind, found in kinds.items() if found]


def processes(folder: Path) -> tuple[Result, str]:
    """Let two processes take two steps of every method with half of the rows each: as one process with all rows."""
    return together(folder, "none")


def sharding(folder: Path) -> tuple[Result, str]:
    """Let two processes that share the weights by FSDP do the same for JPEG-DLM."""
    return together(folder, "fsdp")


def launched(sharded: str) -> Sequence[str]:
    """Return the methods that two processes train; those of students decode the first rows of each process."""
    return names("system", "stage") if sharded == "none" else ["jpeg-dlm"]


def shared_device() -> str:
    """Return the kind of device of two processes: GPUs if there are two."""
    return "cuda" if torch.cuda.device_count() >= 2 else "cpu"


def together(folder: Path, sharded: str) -> tuple[Result, str]:
    """Compare the members of a launch with each other and with one process."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    error = run_process([*launch, "-m", __spec__.name, f"member-{sharded}", str(folder)], threads=1)
    if error:
        errors = [path.read_text("utf-8") for path in sorted(folder.glob("error-*.txt"))]
        return "failed", errors[0] if errors else error
    worst = 0.0
    for method in launched(sharded):
        trainer = start(method, folder, Ranks(device=read_ranks(shared_device(), {}).device))
        fresh = weights(trainer)
        norms = [trainer.train_step()["grad_norm"] for _ in range(2)]
        first, second = (load_tensors(folder / f"{method}-{rank}.safetensors") for rank in range(2))
        if any(not torch.equal(first[name], second[name]) for name in first):
            return "failed", f"{method}: the two processes end with different weights"
        worst = max(worst, share := difference(fresh, weights(trainer), first))
        theirs = json.loads((folder / f"{method}.json").read_text("utf-8"))
        if share > SAME_UPDATE or any(abs(a - b) > 1e-2 * a for a, b in zip(norms, theirs, strict=True)):
            found = f"updates differ by {share:.2g}, gradient norms are {theirs}, not {norms}"
            return "failed", f"{method}: one process trains otherwise: {found}"
    backend = {"cuda": "nccl on 2 GPUs", "cpu": "gloo on the CPU"}[shared_device()]
    return "ok", f"{backend}; equal weights; updates differ from one process's by at most {worst:.1g}"


def member(sharded: str, folder: Path) -> None:
    """Train as one of several processes, and write weights and gradient norms, or the error, to the folder."""
    torch.set_num_threads(1)
    ranks = dist.setup(shared_device(), timeout_s=60.0)
    own = folder / f"rank-{ranks.rank}"
    own.mkdir()
    for method in launched(sharded):
        try:
            trainer = start(method, own, ranks, sharding=sharded)
            norms = [trainer.train_step()["grad_norm"] for _ in range(2)]
            save_tensors(folder / f"{method}-{ranks.rank}.safetensors", weights(trainer), {})
        except Exception as error:
            # The one that fails first knows the cause; the others only lose it.
            (folder / f"error-{time.time():.3f}.txt").write_text(
                f"{method}: {type(error).__name__}: {reason_of(error)}", "utf-8"
            )
            raise
        if ranks.is_main:
            (folder / f"{method}.json").write_text(json.dumps(norms), "utf-8")
        del trainer
    dist.teardown()


def compiled(folder: Path) -> tuple[Result, str]:
    """Compare a compiled JPEG-DLM with the same one run eagerly."""
    from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

    device = read_ranks(None, {}).device
    eager, fast = (start("jpeg-dlm", folder, Ranks(device=device), compile=compile) for compile in (False, True))
    fresh = weights(eager)
    counters.clear()
    clear_compilation_metrics()
    losses = []
    try:
        for _ in range(3):  # the number of self-conditioned rows changes from step to step
            losses.append((eager.train_step()["loss"], fast.train_step()["loss"]))
    except Exception as error:
        if any(mark in f"{type(error)} {error}" for mark in NO_COMPILER):
            return "not available", f"no compiler: {reason_of(error)}"
        raise
    share = difference(fresh, weights(eager), weights(fast))
    frames = [m for m in get_compilation_metrics() if m.co_name]  # the others are backward passes
    again = [m for m in frames if not re.search(r"/0\b", str(m.compile_id))]
    breaks = sum(counters["graph_break"].values())
    detail = f"{counters['stats']['unique_graphs']} graphs, {breaks} graph breaks, {len(again)} recompilations; "
    detail += f"updates differ from eager ones by {share:.1g}"
    same = share <= SAME_UPDATE and all(abs(a - b) <= 1e-2 * abs(a) for a, b in losses)
    return "ok" if same and frames else "failed", detail


class HostNoise(RowNoise):
    """Noise drawn on the CPU and moved to the device: the generators of a GPU give other numbers."""

    def normal(self, purpose: str, *shape: int) -> Tensor:
        return RowNoise(self.seed, self.rows, self.step, "cpu", self.total).normal(purpose, *shape).to(self.device)


def parity(folder: Path) -> tuple[Result, str]:
    """Compare the tokens that the bundled model writes here and on the CPU, in fp32 from the same noise."""
    device = read_ranks(None, {}).device
    rows_BL = []
    for place in (device, torch.device("cpu")):
        model = load(device=place)
        rows_BL.append(model.writer.sample(model.config.sampler, HostNoise(0, range(32), 0, place)).cpu())
    same = (rows_BL[0] == rows_BL[1]).sum().item()
    total = rows_BL[0].numel()
    return "ok" if same >= SAME_TOKENS * total else "failed", f"{same} of {total} tokens on {device.type} are the CPU's"


def throughput(folder: Path) -> tuple[Result, str]:
    """Measure the texts per second of the bundled model by the paper's rule."""
    model = load()
    subject = Subject(
        "bundled", model.writer, model.config.sampler, model.config.data.token_len, model.config.preset, "bundled"
    )
    result = measure([subject], batch=16)  # (paper: on OWT-1024)
    [row] = result["rows"]
    speeds = f"{row['texts_per_second']:.4g} texts/s, {row['tokens_per_second']:.4g} tokens/s"
    return "ok", f"{speeds} (bundled model, fp32, batch 16, {row['evaluations']} evaluations, {result['threads']} threads)"


def training(folder: Path) -> tuple[Result, str]:
    """Measure the rows per second of JPEG-DLM in training, with the structure of preset lm1b."""
    device = read_ranks(None, {}).device
    narrow = device.type != "cuda"
    config = override(preset("lm1b"), LM1B | (LM1B_NARROW if narrow else {}) | {"train.batch": 8 if narrow else 64})
    blocks = micro_text(folder, config.data.token_len)
    encoder = build_encoder(config.encoder, config.data.vocab_size)
    stream = BatchStream(blocks, config.train, device)
    trainer = Trainer(config, build_method(config, encoder).to(device), stream, folder, Ranks(device=device))
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        trainer.train_step()  # waits for the gradient norm, and so for all that a GPU still had to do for the step before
        seconds.append(time.perf_counter() - began)
    rate = config.train.batch / statistics.median(seconds[2:])
    millions = sum(p.numel() for p in trainer.parameters.values()) / 1e6
    size = f"{millions:.0f} M parameters, {config.data.token_len} tokens, {config.model.latent_len} latents"
    detail = f"{rate:.4g} rows/s ({size}, {trainer.config.train.precision}, batch {config.train.batch})"
    peak = f", peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if device.type == "cuda" else ""
    return "ok", detail + peak


CHECKS: dict[str, Callable[[Path], tuple[Result, str]]] = {
    "gradients": gradients, "processes": processes, "sharding": sharding, "compile": compiled, "parity": parity,
    "throughput": throughput, "training": training,
}  # fmt: skip


def main(name: str, folder: Path) -> None:
    """Run one check, or one member of a launch, and write the outcome of a check to the folder."""
    if name.startswith("member-"):
        member(name.removeprefix("member-"), folder)
        return
    try:
        result, detail = CHECKS[name](folder)
    except Exception as error:
        result, detail = "failed", f"{type(error).__name__}: {reason_of(error)}"
    (folder / "verdict.json").write_text(json.dumps({"result": result, "detail": detail}), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
