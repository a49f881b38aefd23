"""Two processes with half the batch each train the same model as one process with all of it."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import micro_flags

from jpeg_dlm.cli.main import main
from jpeg_dlm.config import TrainConfig
from jpeg_dlm.files import load_tensors
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.training.checkpoint import verify_run
from jpeg_dlm.training.data import BatchStream
from jpeg_dlm.training.metrics import read_metrics

STEPS = 6
CASES = {
    "one micro-batch": {"encoder__kind": "random"},
    "two micro-batches": {"encoder__kind": "random", "train__accumulation": 2},
    "an encoder trained first": {"encoder__kind": "small"},
    "no token loss": {"encoder__kind": "random", "objective__ce_weight": 0},  # the projection gets no gradient
    "no flow loss": {"encoder__kind": "random", "objective__flow_weight": 0, "objective__sigreg_weight": 0},
}


def command(data, out, batch, **changes):
    flags = micro_flags(train__steps=STEPS, train__save_every=3, train__eval_every=3, train__batch=batch, **changes)
    # Slow to start: the first gradient of the zero head's bias is the mean of standardized latents, which is rounding alone,
    # and Adam makes a step of full size out of it.
    rates = ["--train.lr", "1e-3", "--train.codec-lr", "1e-3", "--train.warmup", "100"]
    where = ["--data", str(data), "--out", str(out), "--quiet", "--device", "cpu", "--threads", "1"]
    return ["train", "--preset", "smoke", *where, *flags, *rates]


def with_two(words):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, "-m", "jpeg_dlm.cli.main", *words],
        capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "terminate called" not in done.stderr and "Traceback" not in done.stderr, done.stderr[-3000:]


def weights(run, step):
    folder = run / "checkpoints" / f"step-{step:08d}"
    model, ema = load_tensors(folder / "model.safetensors"), load_tensors(folder / "ema.safetensors")
    return model | {f"averaged {name}": tensor for name, tensor in ema.items()}


def largest_difference(a, b):
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_halves_make_a_whole(case, corpus_file, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(command(corpus_file, one, 8, **CASES[case])) == 0
    with_two(command(corpus_file, two, 4, **CASES[case]))

    start = load_tensors(one / "checkpoints" / "step-00000003" / "model.safetensors")
    whole = weights(one, STEPS)
    assert largest_difference(start, {name: whole[name] for name in start}) > 1e-4  # something was learned in between
    assert largest_difference(whole, weights(two, STEPS)) < 1e-5

    assert [(report.step, report.error) for report in verify_run(two)] == [(3, None), (6, None)]
    assert not list(two.glob("checkpoints/.tmp-*")) and len(list((two / "samples").iterdir())) == 2
    ours, theirs = (list(read_metrics(run / "metrics.jsonl")) for run in (one, two))
    assert [row["step"] for row in theirs] == [row["step"] for row in ours]  # each line once
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        # Two processes leave out the last of an odd number of held-out rows, so those losses only resemble each other.
        for name in a.keys() & {"loss", "grad_norm", "heldout_jep", "heldout_flow", "heldout_ce", "heldout_sigreg"}:
            assert b[name] == pytest.approx(a[name], rel=0.2 if name.startswith("heldout_") else 1e-3), name


@pytest.mark.slow
def test_a_run_of_two_goes_on_with_one(corpus_file, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(command(corpus_file, one, 8, encoder__kind="random")) == 0
    with_two(command(corpus_file, two, 4, encoder__kind="random"))
    shutil.rmtree(two / "checkpoints" / "step-00000006")
    assert main(["train", "--out", str(two), "--resume", "--quiet", "--device", "cpu", "--train.batch", "8"]) == 0
    assert largest_difference(weights(one, STEPS), weights(two, STEPS)) < 1e-5
    steps = [row["step"] for row in read_metrics(two / "metrics.jsonl") if "loss" in row]
    assert steps == list(range(1, STEPS + 1))


def test_the_rows_of_a_step_do_not_depend_on_how_they_are_split(corpus_file, tmp_path):
    words = ["prepare", str(corpus_file), "--preset", "smoke", "--data.vocab-size", "300", "--out", str(tmp_path / "blocks")]
    assert main([*words, "--quiet"]) == 0
    blocks = Blocks(tmp_path / "blocks")

    def rows(batch, accumulation, world, step):
        """Places and rows of one step, over micro-batches and processes in turn."""
        train = TrainConfig(batch=batch, accumulation=accumulation, seed=3)
        streams = [BatchStream(blocks, train, torch.device("cpu"), rank, world) for rank in range(world)]
        parts = [stream.row_numbers(step, micro) for micro in range(accumulation) for stream in streams]
        return [p for places, _ in parts for p in places], [r for _, numbers in parts for r in numbers]

    assert len(blocks) % 24  # an epoch ends in the middle of a step
    for step in (0, 1, 2, len(blocks) // 24, 100):
        alone = rows(24, 1, 1, step)
        assert alone[0] == list(range(24)) and len(set(alone[1])) > 12
        for batch, accumulation, world in ((12, 1, 2), (12, 2, 1), (6, 2, 2), (8, 1, 3), (2, 3, 4)):
            assert rows(batch, accumulation, world, step) == alone, json.dumps([batch, accumulation, world])
