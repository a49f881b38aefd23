"""Fine-tuning starts from the weights of a trained model, with its options, tokenizer and encoder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_runs import largest_difference, weights

from jpeg_dlm.api import load
from jpeg_dlm.cli.main import main

QUIET = ("--quiet", "--threads", "1", "--device", "cpu")
STILL = ("--train.lr", "1e-30", "--train.codec-lr", "1e-30")  # a training that moves nothing


@pytest.fixture(scope="module")
def runs(micro_folders) -> dict[str, Path]:
    """Short runs of a joint method and of one with two stages."""
    return {"jpeg-dlm": micro_folders.run(), "cosmos": micro_folders.run("cosmos", objective__codec_steps=2)}


@pytest.mark.parametrize("method", ["jpeg-dlm", "cosmos"])
def test_it_starts_where_the_model_ended(method: str, runs: dict[str, Path], corpus_file: Path, tmp_path: Path):
    words = ["train", "--init", str(runs[method]), "--data", str(corpus_file), "--out", str(tmp_path / "more")]
    assert main([*words, "--train.steps", "1", *STILL, *QUIET]) == 0
    before, after = load(runs[method], "cpu"), load(tmp_path / "more", "cpu")
    start = before.method.export_state()
    for name, t in after.method.export_state().items():
        if name in ("latent_mean", "latent_scale"):  # these go on: one batch counts for a hundredth
            torch.testing.assert_close(t, start[name], rtol=0.02, atol=0.02)
        else:
            assert torch.equal(t, start[name]), name
    assert not list((tmp_path / "more").glob("*-training")), "neither the encoder nor a first stage is trained again"
    after.save(tmp_path / "saved")
    config = (tmp_path / "saved" / "config.json").read_text()
    assert str(tmp_path) not in config and str(runs[method].parent) not in config  # no local folder


def test_it_learns_and_resumes_exactly(runs: dict[str, Path], corpus_file: Path, tmp_path: Path):
    for out, stops in (("straight", ()), ("cut", ("1", "2"))):
        words = ["train", "--init", str(runs["jpeg-dlm"]), "--data", str(corpus_file), "--out", str(tmp_path / out)]
        words += ["--train.steps", "3", *QUIET]
        for stop in stops:
            assert main([*words, "--resume", "--stop-at", stop]) == 0
        assert main([*words, "--resume"]) == 0
    straight, cut = (weights(tmp_path / out, 3) for out in ("straight", "cut"))
    assert largest_difference(straight, cut) == 0
    start = load(runs["jpeg-dlm"], "cpu").method.state_dict()
    assert not torch.equal(straight["model/lm_head.weight"], start["lm_head.weight"])


@pytest.mark.parametrize("extra", [["--preset", "smoke"], ["--method", "ar"], ["--model.hidden", "32"]])
def test_what_does_not_fit_is_refused(extra, runs, corpus_file, tmp_path):
    words = ["train", "--init", str(runs["jpeg-dlm"]), "--data", str(corpus_file), "--out", str(tmp_path / "more")]
    assert main([*words, *extra, "--train.steps", "1", *QUIET]) in (1, 2)
