"""Measure time and peak memory of a model with random weights in a new process, because the peak of a process never falls."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jpeg_dlm.config import Config
from jpeg_dlm.config_io import from_dict, to_dict
from jpeg_dlm.sampling.speeds import with_precision

if TYPE_CHECKING:
    import torch

    from jpeg_dlm.methods.base import Batch, Trainable

START_SECONDS = 120.0  # for importing torch and drawing weights, on top of the time limit (assumed)


@dataclass(frozen=True)
class Trial:
    """A measurement; `work` is sampling a batch of token ids, or forward and backward of a micro-batch."""

    work: Literal["sample", "train"]
    batch: int
    device: str = "cpu"
    threads: int = 1
    limit: float = 60.0  # most seconds of one run


def run_trial(config: Config, trial: Trial) -> dict[str, Any] | None:
    """Return `seconds`, `built_bytes` of the model and `peak_bytes` beyond it, or None if a run took too long."""
    request = json.dumps({"config": to_dict(config), "trial": asdict(trial)})
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__], input=request, capture_output=True, text=True, check=False,
            timeout=START_SECONDS + 2 * trial.limit,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        raise RuntimeError(f"A trial failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'no reason'}")
    found = json.loads(done.stdout)
    return found if found["seconds"] <= trial.limit else None


def random_batch(config: Config, rows: int, device: torch.device | str, uses_encoder: bool) -> Batch:
    """Return random tokens and, for models that need an encoder, random features: as much work as real ones."""
    import torch

    from jpeg_dlm.methods.base import Batch
    from jpeg_dlm.rng import generator

    g, shape = generator(0, "trial"), (rows, config.data.token_len)
    tokens = torch.randint(config.data.vocab_size, shape, generator=g).to(device)
    features = torch.randn(*shape, config.encoder.feature_dim, generator=g).to(device) if uses_encoder else None
    return Batch(tokens, features_BLF=features)


def train_pass(method: Trainable, config: Config, batch: Batch, step: int = 0) -> None:
    """Clear the gradients, then run forward and backward of one micro-batch as the trainer does."""
    import torch

    from jpeg_dlm.rng import RowNoise

    device, rows = batch.tokens_BL.device, len(batch.tokens_BL)
    method.zero_grad(set_to_none=True)
    with torch.autocast(device.type, torch.bfloat16, enabled=config.train.precision == "bf16"):
        method.total_loss(method(batch, RowNoise(config.train.seed, range(rows), step, device))).backward()


def main() -> None:
    """Run the trial given on standard input and print its result; entry point of the separate process."""
    import torch

    from jpeg_dlm.methods.base import Method
    from jpeg_dlm.methods.registry import build_method
    from jpeg_dlm.rng import RowNoise

    request = json.load(sys.stdin)
    config, trial = from_dict(request["config"]), Trial(**request["trial"])
    torch.set_num_threads(trial.threads)
    device = torch.device(trial.device)
    config = with_precision(config, device.type) if trial.work == "train" else config
    empty = peak_bytes(device)
    method = build_method(config).to(device).train(trial.work == "train")
    batch = random_batch(config, trial.batch, device, method.needs_encoder(config)) if trial.work == "train" else None

    built = peak_bytes(device)

    def run(number: int) -> float:
        began = time.perf_counter()
        if batch is not None:
            train_pass(method, config, batch, number)
        else:
            assert isinstance(method, Method)
            rows = range(number * trial.batch, (number + 1) * trial.batch)
            method.sample(config.sampler, RowNoise(0, rows, 0, device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    seconds = run(0)
    if seconds < trial.limit / 2:  # the first run is slower, but repeating a long one is not worth the time
        seconds = run(1)
    print(json.dumps({"seconds": seconds, "built_bytes": built - empty, "peak_bytes": peak_bytes(device) - built}))


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this process so far."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.is_file():  # on Linux, `ru_maxrss` starts from the peak of the parent process
        return 1024 * int(next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM:")))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


if __name__ == "__main__":
    main()
