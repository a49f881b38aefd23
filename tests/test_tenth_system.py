"""Another system is one file and one line: that of `new-system`, as it stands, and an entry point that names its class."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from micro import installed_package, micro_flags
from small_runs import largest_difference, weights

from jpeg_dlm import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.cli.new_system import TEMPLATE
from jpeg_dlm.methods.registry import METHODS, method_class, names
from jpeg_dlm.util.errors import UsageError

pytest_plugins = ["tiny_evaluation"]  # fixtures

STEPS = 12


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installed_package(tmp_path_factory.mktemp("site"), TEMPLATE, "toy = toy_system:Toy", "ar = toy_system:Toy"):
        yield


def train_words(corpus: Path, out: Path, **options: object) -> list[str]:
    """The command that trains the toy; it has few of the micro model's options."""
    flags = micro_flags(**options)
    kept = [(a, b) for a, b in zip(flags[::2], flags[1::2], strict=True) if a[2:].split(".")[0] in ("data", "train")]
    words = ["train", "--preset", "smoke", "--method", "toy", "--data", str(corpus), "--out", str(out), "--quiet"]
    return [*words, *(word for pair in kept for word in pair), "--model.hidden", "16", "--model.depth", "1"]


@pytest.fixture(scope="module")
def trained(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("toy") / "run"
    assert main(train_words(corpus_file, run)) == 0
    return run


def test_the_name_is_known_before_anything_is_loaded():
    known = "from jpeg_dlm.methods.registry import names; print(names('system')[-1])"
    code = f"import sys; {known}; print({{'torch', 'toy_system'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["toy", "set()"]


def test_a_package_adds_and_does_not_replace():
    assert names("system") == (*(name for name, entry in METHODS.items() if entry.kind == "system"), "toy")
    assert method_class("toy").__module__ == "toy_system" and method_class("ar").__module__ == "jpeg_dlm.methods.ar"
    with pytest.raises(UsageError, match="Unknown method 'toys'; choose one of ar, .*toy"):
        method_class("toys")


def test_it_resumes_to_the_bit(trained: Path, tmp_path: Path):
    run = shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08}")
    assert main(["train", "--out", str(run), "--resume", "--quiet"]) == 0
    assert largest_difference(weights(run, STEPS), weights(trained, STEPS)) == 0


def test_it_samples(trained: Path, capsys: pytest.CaptureFixture[str]):
    rows = load(trained).sample(3, seed=1)
    assert rows.shape == (3, 12) and int(rows.max()) < 300 and torch.equal(rows, load(trained).sample(3, seed=1))
    assert main(["generate", str(trained), "-n", "2"]) == 0
    assert capsys.readouterr().out.strip()
    for words, request in (
        (["generate", str(trained), "--contains", "word"], "guides"),
        (["edit", "The", "--checkpoint", str(trained)], "edits"),
        (["generate", str(trained), "--prompt", "The"], "prompts"),
    ):
        assert main(words) == 2 and f"Toy does not take {request}" in capsys.readouterr().err


def test_it_is_evaluated_and_reported(trained: Path, byte_gpt2: Path, tmp_path: Path):
    words = ["evaluate", str(trained), "--scorer", f"hf:{byte_gpt2}", "-n", "4", "--seeds", "1", "--mauve", "off", "--quiet"]
    assert main([*words, "--out", str(tmp_path / "scores")]) == 0
    assert json.loads((tmp_path / "scores" / "results.json").read_text())["entries"][0]["measures"]["gen_ppl"]["mean"] > 1
    assert main(["report", str(trained), str(tmp_path / "scores"), "--out", str(tmp_path / "page")]) == 0
    assert "toy" in (tmp_path / "page" / "index.html").read_text()


def test_it_is_compared(corpus_file: Path, byte_gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["compare", "--methods", "toy", "--preset", "smoke", "--data", str(corpus_file), "--budget", "2steps", "-n", "4"]
    words += ["--seeds", "1", "--scorer", f"hf:{byte_gpt2}", "--mauve", "off", "--batch", "2", "--repeats", "1", "--quiet"]
    assert main([*words, "--out", str(tmp_path / "out"), "--data.token-len", "12", "--train.batch", "4"]) == 0
    assert "| Toy |" in capsys.readouterr().out or "| Toy (degenerate?) |" in (tmp_path / "out" / "compare.md").read_text()


def test_it_is_timed_and_described(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["benchmark", "--methods", "toy", "--preset", "smoke", "--batch", "2", "--repeats", "1", "--warmup", "0", "--quiet"]
    assert main([*words, "--out", str(tmp_path / "speed")]) == 0
    [row] = json.loads((tmp_path / "speed" / "benchmark.json").read_text())["rows"]
    assert (row["name"], row["title"]) == ("toy", "Toy")
    assert main(["info", "--method", "toy", "--preset", "smoke", "--options"]) == 0
    assert "--objective.hide" in capsys.readouterr().out
    assert main(["info", str(trained)]) == 0
    assert "Toy (toy)" in capsys.readouterr().out
    assert main(["info", "--method", "toy", "--preset", "smoke", "--plan", "--devices", "1x8GB", "--tokens", "1M"]) == 0
    assert "trained parameters" in capsys.readouterr().out
