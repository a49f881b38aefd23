"""Time one denoise evaluation of a model's size in each form: the child process of `export.fastest`.

Torch's forms are timed on random weights and few blocks, since all blocks take the same time; together this takes under a
second. An exported form is the file itself, timed as a whole. Answers are lines of JSON, in the order of the request.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jpeg_dlm.config import Config
from jpeg_dlm.config_io import from_dict
from jpeg_dlm.errors import JpegDlmError
from jpeg_dlm.export.fastest import texts_at_once
from jpeg_dlm.export.folder import read_exported
from jpeg_dlm.machine.cpu import make_safe
from jpeg_dlm.methods.jpeg_dlm import build_dit
from jpeg_dlm.sampling.engine_dit import FastDiT
from jpeg_dlm.sampling.folded import fold_dit
from jpeg_dlm.sampling.linear import Dtype, linear_maker

SECONDS = 0.1  # measuring time per form, with at least two evaluations
PARAMETERS = 1.6e7  # of the timed blocks together; two blocks at LM1B sizes
TIME = 0.2  # t of the timed evaluation; the cost does not depend on it


def evaluation(config: Config, form: Mapping[str, Any]) -> tuple[Callable[[Tensor], object], float]:
    """Return a function of latents that evaluates a form, and how many times its cost the whole evaluation has."""
    if form["folder"] is not None:
        writer = read_exported(Path(form["folder"])).writer
        assert writer.latent_sampler is not None
        denoise = writer.latent_sampler.denoiser([TIME], config.sampler.w)
        return (lambda z: denoise(z, TIME, z)), 1.0
    depth = config.model.depth
    few = max(1, min(depth, int(PARAMETERS / (12 * config.model.hidden**2))))
    return torch_evaluation(replace(config, model=replace(config.model, depth=few)), form["dtype"]), depth / few


@torch.no_grad()
def torch_evaluation(config: Config, dtype: Dtype) -> Callable[[Tensor], object]:
    """Return the DiT of a config in torch's engine, with random weights."""
    if dtype != "fp32":
        make_safe()
    dit = FastDiT(fold_dit(build_dit(config)), linear_maker(dtype), compile=False)
    (prefix,) = dit.prefixes([TIME], config.sampler.w, decode=False)
    return lambda z: dit.states(z, z, prefix)


@torch.inference_mode()
def seconds_of(act: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several calls, after one that warms up.

    With one thread these are seconds of this process, so that others do not matter.
    """
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
    z = torch.randn(texts_at_once(config.model), config.model.latent_len, config.model.latent_dim)
    for form in asked["forms"]:
        try:
            act, times = evaluation(config, form)
            answer = times * seconds_of(lambda act=act: act(z))
        except JpegDlmError:  # a missing package, a damaged file, products that kill
            answer = None
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
