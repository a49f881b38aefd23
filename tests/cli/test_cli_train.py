"""`prepare` and `train`: text that is none, what is already there, a full disk, and losses that are no numbers."""

import errno
import json
import os
import re
import shlex
import shutil

import pytest
from micro import micro_flags
from refusals import refusal

from jpeg_dlm.checkpoints import checkpoint
from jpeg_dlm.cli.main import main
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.training.lock import run_lock
from jpeg_dlm.training.metrics import read_metrics
from jpeg_dlm.training.trainer import Trainer
from jpeg_dlm.util import files


def train(data, out, *more):
    command = ["train", "--preset", "smoke", "--data", str(data), "--out", str(out), "--quiet", "--device", "cpu"]
    return [*command, *micro_flags(encoder__kind="random", encoder__scale="none"), *more]


def test_the_value_of_an_option_is_not_taken_for_an_argument(corpus_file, tmp_path, capsys):
    command = ["prepare", *micro_flags()[:8], "--data.vocab-size", "300", "--data.token-len", "12", str(corpus_file)]
    assert main([*command, "--out", str(tmp_path / "b"), "--quiet"]) == 0
    assert "blocks of 12 tokens (vocabulary 300)" in capsys.readouterr().out
    assert main([*command, "--out", str(tmp_path / "b"), "--quiet"]) == 0
    assert "already there" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b" \n\n ", bytes(range(256)) * 40, None], ids=["empty", "blank", "binary", "missing"])
@pytest.mark.parametrize("verb", ["prepare", "train"])
def test_a_file_without_text_is_refused(verb, content, tmp_path, capsys):
    if content is not None:
        (tmp_path / "file.txt").write_bytes(content)
    source = [tmp_path / "file.txt"] if verb == "prepare" else ["--data", tmp_path / "file.txt"]
    command = [verb, "--preset", "smoke", *source, "--out", tmp_path / "out", "--quiet"]
    assert "file.txt" in refusal(capsys, command, 1)
    assert not (tmp_path / "out" / "index.json").exists() and not (tmp_path / "out" / "checkpoints").exists()


def test_a_run_is_not_overwritten_or_continued_as_another(micro_folders, corpus_file, tmp_path, capsys):
    run = shutil.copytree(micro_folders.run(), tmp_path / "run")
    weights = max(run.glob("checkpoints/*/model.safetensors"))
    before = files.sha256_file(weights)
    assert "--resume" in refusal(capsys, train(corpus_file, run), 2)
    assert "--method" in refusal(capsys, ["train", "--out", run, "--resume", "--method", "ar"], 2)
    assert "--preset" in refusal(capsys, ["train", "--out", run, "--resume", "--preset", "tiny"], 2)
    assert files.sha256_file(weights) == before
    shutil.rmtree(run / "checkpoints")
    (run / "config.json").unlink()
    assert "--resume" in refusal(capsys, train(corpus_file, run), 2)  # its encoder's training counts as a run


def test_a_run_says_how_often_it_reads_the_text_and_how_to_go_on(corpus_file, tmp_path, capsys):
    run = tmp_path / "my run"
    words = [word for word in train(corpus_file, run, "--train.steps", "20000", "--stop-at", "1") if word != "--quiet"]
    assert main(words) == 0
    err = capsys.readouterr().err
    passes, rows = re.search(r"([\d.e+]+) passes over ([\d,]+) rows; it will learn them by heart", err).groups()
    assert float(passes) == pytest.approx(20_000 * 8 / int(rows.replace(",", "")), rel=0.01)
    resume = shlex.split(err[err.index("jpeg-dlm train") :])
    assert resume == ["jpeg-dlm", "train", "--resume", "--out", str(run), "--device", "cpu"]
    assert main([*resume[1:], "--stop-at", "2", "--quiet"]) == 0 and checkpoint.newest_step(run) == 2


@pytest.mark.parametrize("verb", ["prepare", "evaluate"])
def test_a_folder_of_results_has_one_writer_at_a_time(verb, corpus_file, tmp_path, capsys):
    words = {"prepare": ["prepare", corpus_file], "evaluate": ["evaluate", "-n", "2"]}[verb]
    with run_lock(tmp_path / "out"):
        assert f"process {os.getpid()}" in refusal(capsys, [*words, "--out", tmp_path / "out"], 2)


def test_a_full_disk_ends_the_run_and_leaves_the_earlier_checkpoint(corpus_file, tmp_path, capsys, monkeypatch):
    real = Trainer.launch_step

    def full_disk(path, tensors):
        raise OSError(errno.ENOSPC, "No space left on device")

    def step(self, *args):
        if self.step == 5 and self.config.method == "jpeg-dlm":
            self.background.wait()  # the checkpoint of step 4 is written by a thread
            monkeypatch.setattr(checkpoint.files, "save_tensors", full_disk)
        return real(self, *args)

    monkeypatch.setattr(Trainer, "launch_step", step)
    assert "No space left" in refusal(capsys, train(corpus_file, tmp_path / "run"), 1)
    assert main(["verify", str(tmp_path / "run")]) == 0 and checkpoint.newest_step(tmp_path / "run") == 4
    monkeypatch.undo()
    assert main(["train", "--out", str(tmp_path / "run"), "--resume", "--quiet", "--device", "cpu"]) == 0
    assert checkpoint.newest_step(tmp_path / "run") == 12


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_a_loss_that_is_not_a_number_reaches_no_weight(action, corpus_file, tmp_path, capsys, monkeypatch):
    real, run = JpegDlm.losses, tmp_path / "run"

    def losses(self, batch, noise):
        terms = real(self, batch, noise)
        return terms | {"ce": terms["ce"] * float("nan")} if self.training and noise.step == 6 else terms

    monkeypatch.setattr(JpegDlm, "losses", losses)
    words = train(corpus_file, run, "--train.nonfinite", action)
    if action == "stop":
        assert "--train.nonfinite skip" in refusal(capsys, words, 1)
        assert checkpoint.newest_step(run) == 4
    else:
        assert main(words) == 0
        assert [row["step"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row] == list(range(1, 13))
        last = run / "checkpoints" / "step-00000012"
        tensors = [t for file in last.glob("*.safetensors") for t in files.load_tensors(file).values()]
        assert tensors and all(t.isfinite().all() for t in tensors)
    (entry,) = map(json.loads, (run / "nonfinite-rank0.jsonl").read_text().splitlines())
    assert entry["step"] == 6 and {"ce", "grad_norm", "loss"} <= set(entry["bad"]) and len(set(entry["rows"])) == 8
