"""Fine-tuning starts from the weights of a trained model, with its options, tokenizer and encoder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import micro_flags

from jpeg_dlm.api import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.util.files import load_tensors

LEFT_OUT = {"cosmos": ("--model.freq-dim", "--objective.sigreg-slices")}  # options of JPEG-DLM alone
QUIET = ("--quiet", "--threads", "1", "--device", "cpu")
STILL = ("--train.lr", "1e-30", "--train.codec-lr", "1e-30")  # a training that moves nothing


@pytest.fixture(scope="module")
def runs(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Short runs of a joint method and of one with two stages."""
    found = {}
    for method in ("jpeg-dlm", "cosmos"):
        found[method] = tmp_path_factory.mktemp("runs") / method
        flags = micro_flags(train__steps=3, train__encoder_steps=2, train__eval_every=0)
        kept = [pair for pair in zip(flags[::2], flags[1::2], strict=True) if pair[0] not in LEFT_OUT.get(method, ())]
        more = [word for pair in kept for word in pair] + (["--objective.codec-steps", "2"] if method == "cosmos" else [])
        words = ["train", "--preset", "smoke", "--method", method, "--data", str(corpus_file), "--out", str(found[method])]
        assert main([*words, *more, *QUIET]) == 0
    return found


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
    ends = [load_tensors(tmp_path / out / "checkpoints" / "step-00000003" / "model.safetensors") for out in ("straight", "cut")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    start = load(runs["jpeg-dlm"], "cpu").method.state_dict()
    assert not torch.equal(ends[0]["lm_head.weight"], start["lm_head.weight"])


@pytest.mark.parametrize("extra", [["--preset", "smoke"], ["--method", "ar"], ["--model.hidden", "32"]])
def test_what_does_not_fit_is_refused(extra, runs, corpus_file, tmp_path):
    words = ["train", "--init", str(runs["jpeg-dlm"]), "--data", str(corpus_file), "--out", str(tmp_path / "more")]
    assert main([*words, *extra, "--train.steps", "1", *QUIET]) in (1, 2)
