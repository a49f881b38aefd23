"""Two processes with half the batch each train the same model as one process with all of it."""

import json

import pytest
import torch
from interrupted_runs import train_words
from small_runs import STEPS, largest_difference, launch, prepare_blocks, steps_of, train, train_with_two, weights

from jpeg_dlm.cli.main import main
from jpeg_dlm.config import TrainConfig
from jpeg_dlm.methods.registry import names
from jpeg_dlm.training.data import BatchStream
from jpeg_dlm.training.metrics import read_metrics
from jpeg_dlm.util.distributed import Ranks
from jpeg_dlm.util.errors import CheckpointError
from jpeg_dlm.util.files import load_tensors

METHODS = names("system", "stage")
CASES = {
    "encoder first, context": ("jpeg-dlm", {"encoder__kind": "small", "model__context_blocks": 2, "data__packing": "padded"}),
    "no feature loss": ("ldlm", {"objective__feat_weight": 0}),  # D gets no gradient
}


# ---------------------------------------------------------------- every method


@pytest.mark.slow
def test_two_halves_of_every_method(corpus_file, tmp_path):
    """Each job, by one process and by two: the same weights, averages, losses and gradient norms."""
    packings = {"accumulated": ("continuous", {"train__accumulation": 2}), "padded": ("padded", {})}
    kinds = [(kind, method, *packing) for kind, packing in packings.items() for method in METHODS]
    blocks = {
        "continuous": str(prepare_blocks(corpus_file, tmp_path / "continuous")),
        "padded": str(prepare_blocks(corpus_file, tmp_path / "padded", "--data.packing", "padded")),
    }
    jobs = [(f"{kind}-{method}", method, blocks[packing], changes) for kind, method, packing, changes in kinds]

    def by(processes):
        return [{"run": str(tmp_path / processes / n), "method": m, "blocks": b, "changes": c} for n, m, b, c in jobs]

    train_with_two(by("two"), tmp_path / "jobs.json")
    for job in by("one"):
        train(job, Ranks())
    for name, *_ in jobs:
        one, two = tmp_path / "one" / name, tmp_path / "two" / name
        ours = weights(one)
        assert largest_difference(ours, weights(two)) < (1e-3 if name.endswith("elf") else 1e-5), name  # bf16 of Muon
        averages = {n.removeprefix("ema/"): t for n, t in ours.items() if n.startswith("ema/")}
        assert largest_difference(averages, {n: ours[f"model/{n}"] for n in averages}) > 2e-5, name  # something was learned
        for a, b in zip(steps_of(one)["stats"], steps_of(two)["stats"], strict=True):
            assert b == pytest.approx(a, rel=1e-3, abs=1e-5), name


# ---------------------------------------------------------------- going on with another number of processes


@pytest.mark.slow
def test_the_number_of_processes_may_change_and_the_rows_may_not(blocks, tmp_path):
    def job(run, **more):
        return {"method": "jpeg-dlm", "blocks": str(blocks.folder), "run": str(tmp_path / run), **more}

    straight = train(job("straight"), Ranks())
    train(job("one-two", until=3), Ranks())
    train_with_two([job("two-one", until=3), job("one-two")], tmp_path / "jobs.json")
    train(job("two-one"), Ranks())
    for run in ("one-two", "two-one"):
        assert largest_difference(weights(tmp_path / "straight"), weights(tmp_path / run)) < 1e-5
    assert straight.step == STEPS


@pytest.mark.parametrize("batch, accumulation", [(4, 1), (5, 3)])
def test_a_step_of_other_rows_is_refused(blocks, tmp_path, batch, accumulation):
    job = {"method": "ar", "blocks": blocks.folder, "run": str(tmp_path / "run")}
    train(job | {"until": 1}, Ranks())
    with pytest.raises(CheckpointError, match="--train.batch"):
        train(job | {"changes": {"train__batch": batch, "train__accumulation": accumulation}}, Ranks())
    train(job | {"until": 2, "changes": {"train__batch": 4, "train__accumulation": 2}}, Ranks())


# ---------------------------------------------------------------- whole runs


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_halves_make_a_whole(case, corpus_file, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    method, changes = CASES[case]
    # Slow to start: the first gradient of the zero head's bias is the mean of standardized latents, which is rounding alone,
    # and Adam makes a step of full size out of it.
    slow = {"train__lr": 1e-3, "train__codec_lr": 1e-3, "train__warmup": 100}
    changes = slow | {"train__steps": STEPS, "train__save_every": 3} | changes
    assert main(train_words(method, corpus_file, one, **changes)) == 0
    done = launch("-m", "jpeg_dlm", *train_words(method, corpus_file, two, **changes, train__batch=4))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "terminate called" not in done.stderr and "Traceback" not in done.stderr, done.stderr[-3000:]

    start = load_tensors(one / "checkpoints" / "step-00000003" / "model.safetensors")
    whole = weights(one, STEPS)
    assert largest_difference(start, {name: whole[f"model/{name}"] for name in start}) > 1e-4  # something was learned
    assert largest_difference(whole, weights(two, STEPS)) < 1e-5

    assert main(["verify", str(two)]) == 0
    assert not list(two.glob("checkpoints/.tmp-*")) and len(list((two / "samples").iterdir())) == 2
    ours, theirs = (list(read_metrics(run / "metrics.jsonl")) for run in (one, two))
    assert [row["step"] for row in theirs] == [row["step"] for row in ours]  # each line once
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        # Two processes leave out the last of an odd number of held-out rows, so those losses only resemble each other.
        for name in a.keys() & {"loss", "grad_norm", "heldout_jep", "heldout_flow", "heldout_ce", "heldout_sigreg"}:
            assert b[name] == pytest.approx(a[name], rel=0.2 if name.startswith("heldout_") else 1e-3), name


def test_the_rows_of_a_step_do_not_depend_on_how_they_are_split(blocks):
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
