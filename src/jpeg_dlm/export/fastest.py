"""Choose the fastest form of a model on this machine: torch's engine in some type, or an exported form that is there.

One evaluation is timed in each form, once per machine and model size, where a runtime cannot kill this process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from jpeg_dlm.config import Config
from jpeg_dlm.config_io import to_dict
from jpeg_dlm.errors import CheckpointError, UsageError
from jpeg_dlm.export.cpu_trial import try_layers
from jpeg_dlm.export.fastest_trial import form_seconds, positions, texts_at_once
from jpeg_dlm.export.folder import EXPORT_BYTES, EXPORT_FILE, FORMATS, exports_folder, weights_key
from jpeg_dlm.files import load_json
from jpeg_dlm.flow.latent_sampler import networks_of
from jpeg_dlm.folders.model_folder import ModelParts
from jpeg_dlm.machine.cpu import Runtime, make_safe, remembered
from jpeg_dlm.methods.jpeg_dlm_config import JpegDlmModel
from jpeg_dlm.sampling.linear import Dtype, computes_in_bf16

MEASURED = "seconds of an evaluation: "  # how the names of findings begin
TOOK = "measuring"  # beside the names of forms: the seconds that the measurement took
CHILD_SECONDS = 120  # after which a child counts as killed (assumed: importing torch and opening a large file take seconds)
COPY_SECONDS = 10  # after which a copy of this process is given up, and a child tries instead (assumed)
# Smallest speedup over torch in fp32 that is worth another runtime, and worth other tokens (assumed).
CLEARLY, WORTH_TOKENS = 1.05, 1.2


@dataclass(frozen=True)
class Form:
    """A runtime and the type of its products; `folder` is that of an exported form."""

    runtime: Runtime
    dtype: Dtype
    folder: Path | None = None

    @property
    def name(self) -> str:
        return f"{self.runtime} {self.dtype}"


PLAIN = Form("torch", "fp32")
Seconds = dict[str, float | None]  # of an evaluation by the name of its form; None if that form does not run here
Child = Callable[[Config, Sequence[Form]], list[float | None]]  # times forms in order, as far as it lives


def available_forms(parts: ModelParts, reduced: bool, device: str = "cpu") -> list[Form]:
    """Return the forms that write the tokens of fp32, plain torch first; with `reduced` also those that nearly do."""
    if device != "cpu":
        return [PLAIN]
    forms = [PLAIN]
    if reduced:
        with contextlib.suppress(UsageError):  # products of reduced types kill processes here
            make_safe()
            forms += [Form("torch", "bf16")] if computes_in_bf16(torch.device("cpu")) else []
            forms.append(Form("torch", "int8"))
    return forms + [form for form in exported_forms(parts) if reduced or form.dtype == "fp32"]


def exported_forms(parts: ModelParts) -> list[Form]:
    """Return the exported forms of these very weights, in the folder of its run or in the cache, that can run here."""
    networks = networks_of(parts.writer)
    places = [*parts.origin.glob(f"*/{EXPORT_FILE}"), *exports_folder().glob(f"*/*/{EXPORT_FILE}")]
    if networks is None or networks.token_decoder is not None or not places:
        return []
    key, found = weights_key(networks), {}
    for place in places:
        with contextlib.suppress(CheckpointError):  # a damaged one is as good as none
            said = load_json(place, EXPORT_BYTES)
            runtime = FORMATS[said["format"]].runtime if said.get("format") in FORMATS else None
            if runtime and said.get("weights") == key and importlib.util.find_spec(runtime):
                form = Form(runtime, "int8" if said.get("dtype") == "int8" else "fp32", place.parent)
                found.setdefault(form.name, form)
    return list(found.values())


def ranked(config: Config, forms: Sequence[Form], child: Child | None = None) -> list[Form]:
    """Return the forms that run on this machine, the one to take first; plain torch is always among them."""
    if len(forms) == 1:
        return list(forms)
    seconds = speeds_of(config, forms, child)
    known = {form: float(found) for form in forms if (found := seconds[form.name]) is not None}
    known.setdefault(PLAIN, float("inf"))
    return sorted(known, key=lambda form: known[form] * handicap(form))


def handicap(form: Form) -> float:
    if form.dtype != "fp32":
        return WORTH_TOKENS
    return 1.0 if form == PLAIN else CLEARLY


def speeds_of(config: Config, forms: Sequence[Form], child: Child | None = None) -> Seconds:
    """Return the seconds of an evaluation in each form, from the cache of this machine if they are there."""

    def valid(found: Any) -> bool:
        numbers = [found.get(form.name, "") for form in forms] if isinstance(found, dict) else [""]
        return all(n is None or (isinstance(n, float) and n > 0) for n in numbers)

    return remembered(MEASURED + shape_of(config), lambda: measure(config, forms, child or run_child), valid)


def measure(config: Config, forms: Sequence[Form], child: Child) -> Seconds:
    """Time torch's forms here and the others in a child; a form that ends the child is out, and another child goes on."""
    began = time.perf_counter()
    safe = any(form.folder is None and form != PLAIN for form in forms) and harmless()
    here = [form for form in forms if form == PLAIN or (form.folder is None and safe)]
    found = {form.name: form_seconds(config, form.dtype, None) for form in here}
    left = [form for form in forms if form not in here]
    while left:
        answers = child(config, left)[: len(left)]
        found |= {form.name: answer for form, answer in zip(left, [*answers, None], strict=False)}
        left = left[len(answers) + 1 :]
    return {form.name: found[form.name] for form in forms} | {TOOK: time.perf_counter() - began}


def harmless() -> bool:
    """Return True if a copy of this process survives torch's products of reduced types; False if that cannot be tried."""
    if not hasattr(os, "fork") or sys.platform == "darwin":  # there, a copy may not compute
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the copy has one thread, and the time it gets is limited
        copy = os.fork()
    if copy == 0:
        with contextlib.suppress(BaseException):
            faulthandler.disable()  # its end is an answer, not a fault
            torch.set_num_threads(1)  # the threads of torch are not copied
            try_layers()
            os._exit(0)
        os._exit(1)
    until = time.monotonic() + COPY_SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(copy, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.005)
    os.kill(copy, signal.SIGKILL)
    os.waitpid(copy, 0)
    return False


def run_child(config: Config, forms: Sequence[Form]) -> list[float | None]:
    """Time forms in a new interpreter and return the answers that it gave before it ended."""
    words = [sys.executable, "-m", f"{__package__}.fastest_trial"]
    asked = {"config": to_dict(config), "threads": torch.get_num_threads(), "forms": [asdict(form) for form in forms]}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:  # in its own session, so that Ctrl-C does not look like a killed trial
        said = subprocess.run(
            words, env=env, input=json.dumps(asked, default=str).encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True, timeout=CHILD_SECONDS, check=False,
        ).stdout  # fmt: skip
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
    except OSError:
        return []
    return [json.loads(line) for line in said.decode().splitlines()]


def shape_of(config: Config) -> str:
    """Describe everything about a model that speed depends on."""
    m: JpegDlmModel = config.model
    return (
        f"{m.depth} blocks of width {m.hidden} with {m.heads} heads and MLP ratio {m.mlp_ratio:g}, {texts_at_once(m)} x "
        f"{positions(m)} positions from width {m.latent_dim}, {torch.get_num_threads()} threads"
    )
