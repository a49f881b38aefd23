"""Find out once per machine which instructions of reduced precision are safe on this CPU, and which type is fastest.

A CPU may report AMX, and yet the first tile instruction kills the process in a nested virtual machine (measured). So a child
process tries first, and if it is killed, oneDNN is limited to the widest set that survives. This module never imports torch.
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
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from jpeg_dlm.errors import CheckpointError, UsageError
from jpeg_dlm.files import load_json, make_directory, write_atomic
from jpeg_dlm.machine.cache import cache_dir

Runtime = Literal["torch", "openvino", "onnxruntime"]
Child = Callable[[Runtime, str], int]  # tries a runtime with a limit ('': none) and returns the exit code

# oneDNN reads the variable on first use, both in torch and OpenVINO (measured); it also reads the older name.
VARIABLE, OLD_VARIABLE = "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"
# oneDNN's names of the instruction sets below its widest one, widest first. ONNX Runtime has no such setting.
NARROWER = ("AVX512_CORE_AMX", "AVX512_CORE_FP16", "AVX512_CORE_BF16", "AVX512_CORE_VNNI", "AVX512_CORE", "AVX2")
LADDERS: dict[Runtime, tuple[str, ...]] = {"torch": NARROWER, "openvino": NARROWER, "onnxruntime": ()}
CHILD_SECONDS = 300  # a child that takes longer is inconclusive (assumed: importing torch takes seconds)
FOUND_BYTES = 1 << 16  # largest file of findings that is read; they have a few hundred bytes


def cpu_facts(path: Path = Path("/proc/cpuinfo")) -> tuple[str, frozenset[str]]:
    """Return the model name and flags of the CPU on Linux; other systems have no flags here, so no AMX."""
    with contextlib.suppress(OSError):
        lines = [line.partition(":") for line in path.read_text("utf-8", "replace").split("\n\n")[0].splitlines()]
        facts = {name.strip(): value.strip() for name, _, value in lines}
        return facts.get("model name", platform.machine()), frozenset(facts.get("flags", "").split())
    return platform.machine(), frozenset()


def reports_amx() -> bool:
    """Return True if the CPU reports tile instructions, the only ones known to be granted and then to trap."""
    return any(flag.startswith("amx_") for flag in cpu_facts()[1])


def instruction_limit() -> str:
    """Return the limit on oneDNN in this process, set by the user or this module; '' is none."""
    return os.environ.get(VARIABLE) or os.environ.get(OLD_VARIABLE, "")


def with_limit(dtype: str) -> str:
    """Return the name of a reduced type for results, with the instruction limit if there is one."""
    return f"{dtype} ({VARIABLE}={instruction_limit()})" if instruction_limit() else dtype


def fingerprint() -> str:
    """Return a hash of everything that findings depend on: CPU, kernel, libraries, and instruction limits."""
    versions = []
    for package in ("jpeg-dlm", "torch", "openvino", "onnxruntime"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    name, flags = cpu_facts()
    settings = [os.environ.get(v, "") for v in (VARIABLE, OLD_VARIABLE, "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")]
    facts = [name, *sorted(flags), platform.system(), platform.release(), *versions, *settings]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def remembered(name: str, find: Callable[[], Any], valid: Callable[[Any], bool]) -> Any:
    """Return the result of `find`, cached on disk for this machine; if the cache fails, `find` runs again."""
    path = _findings_file()
    found = findings(path)
    if valid(found.get(name)):
        return found[name]
    value = find()
    with contextlib.suppress(OSError):
        make_directory(path.parent)
        write_atomic(path, json.dumps({**findings(path), name: value}, indent=1) + "\n")
    return value


def findings(path: Path | None = None) -> dict[str, Any]:
    """Return everything that is cached for this machine, by name."""
    with contextlib.suppress(CheckpointError):  # absent or damaged
        return load_json(path or _findings_file(), FOUND_BYTES)
    return {}


def _findings_file() -> Path:
    return cache_dir() / f"cpu-{fingerprint()}.json"


def run_child(runtime: Runtime, limit: str) -> int:
    """Run the trial of a runtime in a new interpreter; return its exit code, negative for a signal that killed it."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | ({VARIABLE: limit} if limit else {})
    words = [sys.executable, "-m", "jpeg_dlm.export.cpu_trial", runtime]
    quiet = subprocess.DEVNULL
    try:  # in its own session, so that Ctrl-C does not look like a killed trial
        return subprocess.run(
            words, env=env, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True, timeout=CHILD_SECONDS, check=False
        ).returncode  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return 0  # no interpreter or no answer: set no limit


def widest(runtime: Runtime, child: Child) -> str:
    """Return the widest limit with which a child survives the products of a runtime; '' if it needs none."""
    for limit in ("", *LADDERS[runtime]):
        if child(runtime, limit) >= 0:  # a Python error is not the CPU's, and is raised again on use
            return limit
    if runtime == "torch":
        raise UsageError("Products in bf16 and int8 kill the process on this CPU: use fp32.")
    raise UsageError(f"{runtime} kills the process on this CPU: use the model itself, or another format.")


@functools.cache
def make_safe(runtime: Runtime = "torch") -> str:
    """Limit oneDNN if this CPU kills wider instructions, and return the limit; a limit that the user has set is kept.

    Call this before products of reduced precision on a CPU, and before opening another runtime.
    """
    if not reports_amx():
        return instruction_limit()
    if not instruction_limit():
        known = ("", *LADDERS[runtime])
        impose(remembered(f"limit of {runtime}", lambda: widest(runtime, run_child), lambda found: found in known), runtime)
    limit = instruction_limit()
    if limit and runtime == "torch" and "AMX" not in limit and "AMX" in effective_isa():
        raise UsageError(
            f"This CPU kills products in bf16 and int8 unless {VARIABLE} is {limit}, but torch was used before: "
            "start the program again, or choose the type when the model is loaded."
        )
    return limit


def impose(limit: str, runtime: str) -> None:
    """Limit oneDNN in this process and its children, and print one message."""
    if not limit:
        return
    os.environ[VARIABLE] = limit
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error is closed
            print(
                f"This CPU reports AMX but kills programs that use it ({runtime}): {VARIABLE} is set to {limit}.",
                file=sys.stderr,
            )


def recall_limit() -> None:
    """Set a limit that an earlier process found; once torch has computed in fp32, it would be too late."""
    if reports_amx() and not instruction_limit():
        limit = findings().get("limit of torch")
        if limit in NARROWER:
            impose(limit, "torch")


def effective_isa() -> str:
    """Return the instruction set that torch's oneDNN reports, '' if none; this call initializes oneDNN."""
    import torch

    with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:
        kept = os.dup(1)  # oneDNN writes to standard output
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
