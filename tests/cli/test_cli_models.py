"""`info`, `export` and `verify`: what a run or a model is, and damage to it."""

import json
import shlex
import shutil

import pytest
from refusals import refusal

from jpeg_dlm.api import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.methods.registry import build_method
from jpeg_dlm.options import from_dict
from jpeg_dlm.training.metrics import read_metrics


@pytest.fixture
def run(micro_folders, tmp_path):
    """A copy of a finished run."""
    return shutil.copytree(micro_folders.run(), tmp_path / "my run")


def test_info_of_another_method(capsys):
    words = ["info", "--method", "mdlm", "--preset", "smoke"]
    assert main(words) == 0 and "mdlm" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0 and json.loads(capsys.readouterr().out)["parameters"]["total"] > 0
    assert main([*words, "--model.depth", "3", "--options"]) == 0
    values = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()}
    assert values["--model.depth"] == "3" and "--model.latent-len" not in values and "--sampler.steps" in values


def test_info_describes_a_run(run, capsys):
    assert main(["info", str(run), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    heldout = [row for row in read_metrics(run / "metrics.jsonl") if "heldout_ce" in row][-1]
    assert summary["kind"] == "run" and summary["method"] == "jpeg-dlm" and summary["preset"] == "smoke"
    assert summary["steps"] == {"done": 12, "total": 12, "finished": True}
    assert summary["heldout"]["ce"] == heldout["heldout_ce"]
    config = from_dict(json.loads((run / "config.json").read_text()))
    assert summary["sizes"]["parameters"] == sum(p.numel() for p in build_method(config).parameters() if p.requires_grad)
    assert main(["info", str(run)]) == 0
    assert "12 of 12, finished" in capsys.readouterr().out


def test_info_says_how_to_go_on_with_a_run_that_is_not_done(run, capsys):
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").write_text('{"step": 5, "loss": 3.0}\n{"step": 6, "lo')
    assert main(["info", str(run)]) == 0
    text = capsys.readouterr().out
    assert "cannot be shown" not in text  # nothing is saved yet, which is no damage
    assert "no checkpoint yet" in refusal(capsys, ["generate", run], 1)  # its encoder's training makes it a run
    assert "5 of 12" in text and f"jpeg-dlm train --resume --out {shlex.quote(str(run))}" in text


def test_info_describes_a_model_folder_and_nothing_else(micro_folders, tmp_path, capsys):
    ar = micro_folders("ar")
    assert main(["info", str(ar)]) == 0 and f"jpeg-dlm generate {ar}" in capsys.readouterr().out
    refusal(capsys, ["info", tmp_path], 1)
    assert "--preset smoke" in refusal(capsys, ["info", "smoke"], 2)
    assert "--preset" in refusal(capsys, ["info", ar, "--preset", "smoke"], 2)
    assert "--model.depth" in refusal(capsys, ["info", ar, "--model.depth", "2"], 2)


def test_export_stores_the_options_of_the_sampler(run, tmp_path, capsys):
    out = tmp_path / "my model's folder"
    assert main(["export", str(run), "--out", str(out), "--sampler.solver", "sde", "--sampler.gamma", "0.5"]) == 0
    assert shlex.split(capsys.readouterr().out.split("  or  ")[1]) == ["jpeg-dlm", "generate", str(out)]
    sampler = load(out).config.sampler
    assert (sampler.solver, sampler.gamma) == ("sde", 0.5)
    for option, value in (("--sampler.gamma", "-1"), ("--model.depth", "2")):
        name = option[2:] if value == "-1" else option
        assert name in refusal(capsys, ["export", run, "--out", tmp_path / "no", option, value], 2)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("verb", ["generate", "verify"])
def test_what_is_no_model_is_refused(verb, corpus_file, tmp_path, capsys):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for path in (tmp_path / "none", tmp_path, tmp_path / "run", corpus_file):
        assert str(path) in refusal(capsys, [verb, path], 1)


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)


def test_a_damaged_checkpoint_falls_back_loudly(run, capsys):
    assert main(["verify", str(run)]) == 0
    flip_a_byte(run / "checkpoints" / "step-00000012" / "ema.safetensors")
    assert main(["verify", str(run)]) == 1 and "ema.safetensors" in capsys.readouterr().out
    assert main(["generate", str(run), "-n", "1"]) == 0
    output = capsys.readouterr()
    assert "DAMAGED" in output.err and output.out.startswith("[0] ")
    assert main(["train", "--out", str(run), "--resume", "--quiet", "--device", "cpu"]) == 0
    assert "DAMAGED" in capsys.readouterr().err and main(["verify", str(run)]) == 0
