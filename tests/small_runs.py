"""Micro runs of any method on prepared blocks, in this process or as `torchrun small_runs.py JOBS.json`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from micro import micro_config
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from jpeg_dlm.checkpoints.checkpoint import latest_checkpoint
from jpeg_dlm.cli.main import main
from jpeg_dlm.config import Config
from jpeg_dlm.encoders import FrozenEncoder, build_encoder
from jpeg_dlm.methods.base import Trainable
from jpeg_dlm.methods.registry import build_method, method_class
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.training.data import BatchStream
from jpeg_dlm.training.sharding import local_shard
from jpeg_dlm.training.trainer import Trainer
from jpeg_dlm.util import distributed
from jpeg_dlm.util.distributed import Ranks
from jpeg_dlm.util.files import load_tensors

ALONE = Ranks()
ROWS, STEPS = 8, 6  # rows of a micro-batch over all processes, optimizer steps
# Slow to start: the first gradients of a zero head are partly rounding, of which Adam would make steps of full size.
SIZES = {"train__steps": STEPS, "train__lr": 1e-3, "train__codec_lr": 1e-3, "train__warmup": 100, "train__batch": ROWS}
SIZES |= {"model__depth": 2}


def prepare_blocks(corpus: Path, folder: Path, *flags: str) -> Path:
    words = ["prepare", str(corpus), "--data.vocab-size", "300", "--data.token-len", "12"]
    assert main([*words, *flags, "--out", str(folder), "--quiet"]) == 0
    return folder


def start(method: str, blocks: Blocks, run: Path, ranks: Ranks = ALONE, **changes: object) -> Trainer:
    """A trainer before its first step, or where the last checkpoint of `run` was made."""
    config = micro_config(method, **(SIZES | changes))
    train = replace(config.train, batch=config.train.batch // ranks.world)
    config = replace(config, data=replace(config.data, vocab_size=blocks.vocab_size), train=train)
    stream = BatchStream(blocks, config.train, ranks.device, ranks.rank, ranks.world)
    encoded = method_class(method).uses_encoder
    encoder = build_encoder(config.encoder, blocks.vocab_size, 0, run) if encoded else None
    fresh = build_method(config, encoder)
    checkpoint = latest_checkpoint(run, print)
    if not checkpoint:
        start_from_stages(fresh, config, encoder, blocks, run, ranks)
    trainer = Trainer(config, fresh, stream, run, ranks)
    if checkpoint:
        trainer.restore(checkpoint)
    return trainer


def start_from_stages(
    method: Trainable, config: Config, encoder: FrozenEncoder | None, blocks: Blocks, run: Path, ranks: Ranks
) -> None:
    for stage in method.stages(config):
        stage = replace(stage, train=replace(stage.train, steps=2, sharding=config.train.sharding))
        stream = BatchStream(blocks, stage.train, ranks.device, ranks.rank, ranks.world)
        trainer = Trainer(stage, build_method(stage, encoder), stream, run, ranks)
        for _ in range(2):
            trainer.train_step()
        method.start_from(trainer.finished_method(), [stream.batch(list(range(16)))])


def train(job: Mapping, ranks: Ranks) -> Trainer:
    """Do a job: {'method', 'blocks', 'run', 'until', 'changes'}; the main process writes RUN/steps.json."""
    run = Path(job["run"])
    run.mkdir(parents=True, exist_ok=True)
    trainer = start(job["method"], Blocks(Path(job["blocks"])), run, ranks, **job.get("changes", {}))
    stats = []
    while trainer.step < job.get("until", STEPS):
        stats.append(trainer.train_step())
    trainer.save()
    trainer.finish_saving()
    sizes = {"part": held(trainer), "total": sum(p.numel() for p in trainer.parameters.values())}
    with trainer.averaged():
        sizes["evaluated"] = sum(p.double().sum().item() for p in trainer.method.parameters())
    if ranks.is_main:
        (run / "steps.json").write_text(
            json.dumps({"stats": stats, "sharded": isinstance(trainer.method, FSDPModule), **sizes})
        )
    return trainer


def held(trainer: Trainer) -> dict[str, int]:
    """Numbers this process holds between steps, by kind."""
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    slots = [t for state in states for t in state.values() if isinstance(t, Tensor) and t.ndim]
    kinds = {"parameters": trainer.parameters.values(), "averages": trainer.ema.shadow.values(), "optimizer": slots}
    return {kind: sum(local_shard(t).numel() for t in tensors) for kind, tensors in kinds.items()}


def launch(*words: str, processes: int = 2, timeout: float = 500) -> subprocess.CompletedProcess[str]:
    """Python arguments under torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*torchrun, *words], capture_output=True, text=True, timeout=timeout, env=env)


def train_with_two(jobs: list[dict], file: Path) -> None:
    """Many jobs in one launch, because starting Python takes longer than all of them."""
    file.write_text(json.dumps(jobs))
    done = launch(__file__, str(file))
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-4000:]


def weights(run: Path, step: int = STEPS) -> dict[str, Tensor]:
    folder = run / "checkpoints" / f"step-{step:08d}"
    kinds = {kind: load_tensors(folder / f"{kind}.safetensors") for kind in ("model", "ema")}
    return {f"{kind}/{name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}


def largest_difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


def steps_of(run: Path) -> dict:
    return json.loads((run / "steps.json").read_text())


if __name__ == "__main__":
    torch.set_num_threads(1)
    members = distributed.setup("cpu", timeout_s=100.0)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        if members.is_main:
            print(job["run"], file=sys.stderr)
        train(job, members)
    distributed.teardown()
