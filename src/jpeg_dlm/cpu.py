"""Reduced precision on this CPU: which instructions are safe, and which type is fastest. Both are found once per machine.

A CPU may report AMX, and its kernel may grant it, while the first tile instruction kills the process: a virtual machine
within another (measured). So before a process multiplies in bf16 or int8, or opens another runtime, a child process tries
it. Where the child is killed, oneDNN is limited to the widest instruction set with which it lives. This module imports no
torch: `--help` and `doctor` answer without it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from jpeg_dlm.assets import cache_dir
from jpeg_dlm.config import Config
from jpeg_dlm.errors import CheckpointError, UsageError
from jpeg_dlm.files import load_json, make_directory, write_atomic

Runtime = Literal["torch", "openvino", "onnxruntime"]
Child = Callable[[Runtime, str], int]  # tries a runtime below a limit ('': none); the exit code of the process that did

# oneDNN reads it when it is first used, in torch and in OpenVINO alike (measured); its older name is read too.
VARIABLE, OLD_VARIABLE = "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"
# oneDNN's names for what lies below its widest instruction set, widest first. ONNX Runtime has no such setting.
NARROWER = ("AVX512_CORE_AMX", "AVX512_CORE_FP16", "AVX512_CORE_BF16", "AVX512_CORE_VNNI", "AVX512_CORE", "AVX2")
LADDERS: dict[Runtime, tuple[str, ...]] = {"torch": NARROWER, "openvino": NARROWER, "onnxruntime": ()}
CHILD_SECONDS = 300  # a child that takes longer says nothing (assumed: importing torch takes seconds)
FOUND_BYTES = 1 << 16  # a file of findings has a few hundred
WORTH_IT = 1.2  # speed of bf16 products over fp32 from which a training step gains: the casts take time too (assumed)


# ---------------------------------------------------------------- the machine


def cpu_facts(path: Path = Path("/proc/cpuinfo")) -> tuple[str, frozenset[str]]:
    """Model name and flags of the CPU, as Linux tells them; other systems tell nothing here and report no AMX."""
    with contextlib.suppress(OSError):
        lines = [line.partition(":") for line in path.read_text("utf-8", "replace").split("\n\n")[0].splitlines()]
        facts = {name.strip(): value.strip() for name, _, value in lines}
        return facts.get("model name", platform.machine()), frozenset(facts.get("flags", "").split())
    return platform.machine(), frozenset()


def reports_amx() -> bool:
    """Whether the CPU says that it has tile instructions, the only ones known to be granted and then to trap."""
    return any(flag.startswith("amx_") for flag in cpu_facts()[1])


def instruction_limit() -> str:
    """The limit that oneDNN has in this process by the user's or this module's setting; '' is none."""
    return os.environ.get(VARIABLE) or os.environ.get(OLD_VARIABLE, "")


def with_limit(dtype: str) -> str:
    """A reduced type as results name it: with the instruction set, where that is limited."""
    return f"{dtype} ({VARIABLE}={instruction_limit()})" if instruction_limit() else dtype


def fingerprint() -> str:
    """Everything that findings depend on: CPU, kernel, libraries, and settings that limit instructions."""
    versions = []
    for package in ("jpeg-dlm", "torch", "openvino", "onnxruntime"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    name, flags = cpu_facts()
    settings = [os.environ.get(v, "") for v in (VARIABLE, OLD_VARIABLE, "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")]
    facts = [name, *sorted(flags), platform.system(), platform.release(), *versions, *settings]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


# ---------------------------------------------------------------- findings on disk


def remembered(name: str, find: Callable[[], Any], valid: Callable[[Any], bool]) -> Any:
    """What `find` returns, kept in the cache folder for this machine; a damaged file or a full disk costs only the time."""
    path = cache_dir() / f"cpu-{fingerprint()}.json"
    found = _findings(path)
    if valid(found.get(name)):
        return found[name]
    value = find()
    with contextlib.suppress(OSError):
        make_directory(path.parent)
        write_atomic(path, json.dumps({**_findings(path), name: value}, indent=1) + "\n")
    return value


def _findings(path: Path) -> dict[str, Any]:
    with contextlib.suppress(CheckpointError):  # absent or damaged
        return load_json(path, FOUND_BYTES)
    return {}


# ---------------------------------------------------------------- what is safe


def run_child(runtime: Runtime, limit: str) -> int:
    """The exit code of a fresh interpreter that tries the products of a runtime; minus the signal that killed it."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | ({VARIABLE: limit} if limit else {})
    words = [sys.executable, "-m", "jpeg_dlm.cpu_trial", runtime]
    quiet = subprocess.DEVNULL
    try:  # in a session of its own: a Ctrl-C must not look like a CPU that kills
        return subprocess.run(
            words, env=env, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True, timeout=CHILD_SECONDS, check=False
        ).returncode  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return 0  # no interpreter to start, or no answer: nothing is known, so nothing is limited


def widest(runtime: Runtime, child: Child) -> str:
    """The widest limit below which a child survives the products of a runtime; '' where it needs none."""
    for limit in ("", *LADDERS[runtime]):
        if child(runtime, limit) >= 0:  # an error of Python is not the CPU's: it will be told where the product is asked for
            return limit
    if runtime == "torch":
        raise UsageError("Products in bf16 and int8 kill the process on this CPU: use fp32.")
    raise UsageError(f"{runtime} kills the process on this CPU: use the model itself, or another format.")


@functools.cache
def make_safe(runtime: Runtime = "torch") -> str:
    """Call before products of reduced precision on a CPU, and before another runtime: limits instructions where they kill.

    Returns the limit. It costs nothing where the CPU reports no AMX; a limit the user set is left alone.
    """
    if not reports_amx():
        return instruction_limit()
    if not instruction_limit():
        known = ("", *LADDERS[runtime])
        impose(remembered(f"limit of {runtime}", lambda: widest(runtime, run_child), lambda found: found in known), runtime)
    limit = instruction_limit()
    if limit and runtime == "torch" and "AMX" not in limit and "AMX" in effective_isa():
        raise UsageError(
            f"This CPU kills products in bf16 and int8 unless {VARIABLE} is {limit}, and torch has computed before that was "
            "known: start the program again, or ask for the type when the model is loaded."
        )
    return limit


def impose(limit: str, runtime: str) -> None:
    """Limit oneDNN in this process and its children, and say so once."""
    if not limit:
        return
    os.environ[VARIABLE] = limit
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody listens
            print(
                f"This CPU reports AMX but kills what uses it ({runtime}): {VARIABLE} is set to {limit}.", file=sys.stderr
            )  # fmt: skip


def recall_limit() -> None:
    """Impose a limit that an earlier process found: once torch has computed in fp32 it would be too late."""
    if reports_amx() and not instruction_limit():
        limit = _findings(cache_dir() / f"cpu-{fingerprint()}.json").get("limit of torch")
        if limit in NARROWER:
            impose(limit, "torch")


def effective_isa() -> str:
    """What torch's oneDNN says its instruction set is, '' if it does not say; this is a first use of it."""
    import torch

    with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:
        kept = os.dup(1)  # oneDNN writes to the process's standard output
        try:
            os.dup2(file.fileno(), 1)
            with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
                torch.nn.functional.gelu(torch.ones(16))
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        return next((line.partition(",isa:")[2] for line in file.read().decode().splitlines() if ",isa:" in line), "")
    return ""


# ---------------------------------------------------------------- what is fast


def speeds() -> dict[str, float]:
    """GFLOP/s of one core in fp32, bf16 and int8: measured in a tenth of a second, then known."""
    make_safe()

    def measure() -> dict[str, float]:
        from jpeg_dlm.cpu_trial import measure_speeds

        return measure_speeds()

    def valid(found: Any) -> bool:
        numbers = found.values() if isinstance(found, dict) and found.keys() == {"fp32", "bf16", "int8"} else [None]
        return all(isinstance(n, float) and n > 0 for n in numbers)

    return remembered("GFLOP/s of one core", measure, valid)


def cost_of(dtype: str) -> str | None:
    """A sentence if products in this type are slower than in fp32 on this CPU, which were asked for all the same."""
    found = speeds()
    ratio = found[dtype] / found["fp32"]
    return None if ratio >= 1 else f"{dtype} products run at {ratio:.2f}x the speed of fp32 on this CPU (measured)."


def training_precision(asked: str, device: str) -> Literal["fp32", "bf16"]:
    """The type that `train.precision` stands for: 'auto' is the paper's bf16 on CUDA and the faster of both on a CPU."""
    if asked != "auto":
        if asked == "bf16" and device == "cpu":
            make_safe()
        return "bf16" if asked == "bf16" else "fp32"
    if device == "cpu":
        return "bf16" if speeds()["bf16"] >= WORTH_IT * speeds()["fp32"] else "fp32"
    return "bf16" if device == "cuda" else "fp32"


def with_precision(config: Config, device: str) -> Config:
    """The config with the precision it is trained in on a kind of device, which is then safe to use."""
    return replace(config, train=replace(config.train, precision=training_precision(config.train.precision, device)))
