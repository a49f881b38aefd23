"""Every method, interrupted and resumed, ends with the bits of an undisturbed run: weights, averages, optimizer, logs."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from reliability_runs import (
    STEPS,
    VARIANTS,
    end_state,
    hurried,
    interruptions,
    prepare_text,
    resume_is_exact,
    train_to_the_end,
    train_words,
)

from jpeg_dlm.files import load_tensors
from jpeg_dlm.methods.registry import names


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("blocks"))


@pytest.mark.parametrize("method", names("system", "stage"))
def test_interrupted_in_every_stage(method: str, blocks: Path, tmp_path: Path):
    assert resume_is_exact(method, "plain", blocks, tmp_path, train__eval_every=0)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "plain"])
@pytest.mark.parametrize("method", names("system", "stage"))
def test_interrupted_with_accumulation_and_in_bf16(method: str, variant: str, blocks: Path, tmp_path: Path):
    assert resume_is_exact(method, variant, blocks, tmp_path)


def test_a_cut_after_any_step(blocks: Path, tmp_path: Path):
    words = {
        run: train_words("langflow", blocks, tmp_path / run, train__save_every=3, train__eval_every=0)
        for run in ("straight", *"1234")
    }
    with hurried():
        train_to_the_end(words["straight"])
        for step in range(1, STEPS + 1):
            with interruptions(terms=set(), cuts={step}) as taken:
                assert train_to_the_end(words[str(step)]) == 1
            assert taken[step] == (0 if step <= 3 else 3)  # the cut after step 3 comes before its checkpoint
            assert end_state(tmp_path / str(step)) == end_state(tmp_path / "straight")


# ---------------------------------------------------------------- that the tests above can fail


def test_every_kind_of_state_is_compared(blocks: Path, tmp_path: Path):
    with hurried():
        train_to_the_end(train_words("jpeg-dlm", blocks, tmp_path / "run", train__eval_every=0))
    last = tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}"
    names = {path.stem: set(load_tensors(path)) for path in last.glob("*.safetensors")}
    parts = {name.partition(".")[0] for name in names["model"]}
    assert {"compressor", "target", "dit", "latent_mean", "latent_scale", "latent_updates"} <= parts
    slots = {name.partition("/")[0] for name in names["optimizer"]}
    assert {"step", "exp_avg", "exp_avg_sq"} <= slots and names["ema"] <= names["model"]
    state = end_state(tmp_path / "run")
    assert {f"checkpoints/{last.name}/{name}.safetensors" for name in names} < set(state)
    losses = [row for row in state["./metrics"] if "loss" in row]
    assert [row["step"] for row in losses] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("lost", ["copy_tensors", "load_optimizer_tensors"])
def test_lost_state_is_noticed(lost: str, blocks: Path, tmp_path: Path):
    with patch(f"jpeg_dlm.training.loop.{lost}", lambda *args: None):
        assert not resume_is_exact("ar", "plain", blocks, tmp_path, train__eval_every=0)
