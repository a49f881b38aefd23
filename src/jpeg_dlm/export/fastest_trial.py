"""Time one denoise evaluation of a model's size in each form, for `export.fastest`, whose child process this is too.

Torch's forms are timed on random weights and few blocks. A child answers in lines of JSON, in the order of the request.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from jpeg_dlm.config import Config
from jpeg_dlm.config_io import from_dict
from jpeg_dlm.errors import JpegDlmError
from jpeg_dlm.export.folder import read_exported
from jpeg_dlm.machine.cpu import make_safe
from jpeg_dlm.methods.jpeg_dlm import build_dit
from jpeg_dlm.methods.jpeg_dlm_config import JpegDlmModel
from jpeg_dlm.sampling.engine_dit import FastDiT
from jpeg_dlm.sampling.folded import fold_dit
from jpeg_dlm.sampling.linear import Dtype, linear_maker

SECONDS = 0.1  # measuring time per form, with at least two evaluations
PARAMETERS = 8e6  # of the timed blocks together; one block at LM1B sizes
ROWS = 352  # positions of all timed texts together, about (assumed: 8 texts at LM1B sizes, where ratios have settled)
TIME = 0.2  # t of the timed evaluation; the cost does not depend on it


def texts_at_once(m: JpegDlmModel) -> int:
    """Return how many texts are timed together."""
    return max(1, min(8, ROWS // positions(m)))


def positions(m: JpegDlmModel) -> int:
    return m.latent_len + m.time_tokens + m.sc_tokens + m.mode_tokens


def form_seconds(config: Config, dtype: Dtype, folder: Path | None) -> float | None:
    """Return the seconds of an evaluation in a form; None if it does not run here."""
    m, g = config.model, torch.Generator().manual_seed(0)
    z = torch.randn(texts_at_once(m), m.latent_len, m.latent_dim, generator=g)
    try:
        act, times = evaluation(config, dtype, folder)
        return times * seconds_of(lambda: act(z))
    except JpegDlmError:  # a missing package, a damaged file, products that kill
        return None


def evaluation(config: Config, dtype: Dtype, folder: Path | None) -> tuple[Callable[[Tensor], object], float]:
    """Return a function of latents that evaluates a form, and how many times its cost the whole evaluation has."""
    if folder is not None:
        writer = read_exported(folder).writer
        assert writer.latent_sampler is not None
        denoise = writer.latent_sampler.denoiser([TIME], config.sampler.w)
        return (lambda z: denoise(z, TIME, z)), 1.0
    depth = config.model.depth
    few = max(1, min(depth, int(PARAMETERS / (12 * config.model.hidden**2))))
    return torch_evaluation(replace(config, model=replace(config.model, depth=few)), dtype), depth / few


@torch.no_grad()
def torch_evaluation(config: Config, dtype: Dtype) -> Callable[[Tensor], object]:
    """Return the DiT of a config in torch's engine, with random weights."""
    if dtype != "fp32":
        make_safe()
    with torch.random.fork_rng(devices=[]):  # random weights are not to change what a program draws
        dit = FastDiT(fold_dit(build_dit(config)), linear_maker(dtype), compile=False)
    (prefix,) = dit.prefixes([TIME], config.sampler.w, decode=False)
    return lambda z: dit.states(z, z, prefix)


@torch.inference_mode()
def seconds_of(act: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several calls after a first one, of this process alone if it has one thread."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    act()
    best, began, calls = float("inf"), clock(), 0
    while calls < 2 or clock() - began < SECONDS:
        start = clock()
        act()
        best, calls = min(best, clock() - start), calls + 1
    return max(best, 1e-9)  # a coarse clock may return 0


def main() -> None:
    asked = json.load(sys.stdin)
    config = from_dict(asked["config"])
    torch.set_num_threads(asked["threads"])
    for form in asked["forms"]:
        folder = None if form["folder"] is None else Path(form["folder"])
        print(json.dumps(form_seconds(config, form["dtype"], folder)), flush=True)


if __name__ == "__main__":
    main()
