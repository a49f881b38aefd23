"""`torchrun ... evaluate` with two processes gives the result of one, bit for bit, once."""

import json
import os
import subprocess
import sys

import pytest
from conftest import MICRO
from small_runs import launch

from jpeg_dlm.config_io import override
from jpeg_dlm.folders.model_folder import ModelParts, write_model
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.presets import preset

pytest_plugins = ["tiny_evaluation"]  # fixtures

TIMED = ("throughput", "texts_per_second", "tables")  # the tables show texts per second too


def untimed(value):
    """Return a result without what depends on the clock."""
    if isinstance(value, dict):
        return {name: untimed(part) for name, part in value.items() if name not in TIMED}
    return [untimed(part) for part in value] if isinstance(value, list) else value


def by_one_and_two(words, out):
    """Return the result of a command on one process and on two, which print the same."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # other threads, other bits
    command = [sys.executable, "-m", "jpeg_dlm", *words, "--out", str(out / "one")]
    one = subprocess.run(command, capture_output=True, text=True, env=env)
    two = launch("-m", "jpeg_dlm", *words, "--out", str(out / "two"))
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr[-4000:]
    assert len(two.stdout.splitlines()) == len(one.stdout.splitlines()) and "Traceback" not in two.stderr
    files = [sorted(str(path.relative_to(out / name)) for path in (out / name).rglob("*")) for name in ("one", "two")]
    return [json.loads((out / name / "results.json").read_text()) for name in ("one", "two")], files


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["-n", "100", "--batch", "7", "--seeds", "2", "--steps", "1,2"],  # 15 batches, enough texts for MAUVE
        ["-n", "10", "--batch", "3", "--sampler.protocol", "released", "--sampler.grid", "quantile"],
        ["-n", "9", "--batch", "2", "--task", "infill"],
        ["-n", "9", "--batch", "2", "--task", "continue"],
    ],
    ids=["scores", "released", "infill", "continue"],
)
def test_the_result_has_the_bits_of_one_process(more, byte_gpt2, micro_folder, corpus_file, tmp_path, monkeypatch):
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    words = ["evaluate", str(micro_folder), "--data", str(corpus_file), "--scorer", f"hf:{byte_gpt2}", "--device", "cpu"]
    (one, two), files = by_one_and_two([*words, *more, "--quiet"], tmp_path)
    assert untimed(one) == untimed(two) and files[0] == files[1]
    assert one["entries"] or one.get("infill") or one.get("continue")


@pytest.mark.slow
def test_the_likelihood_has_the_bits_of_one_process(micro_folder, corpus_file, tmp_path, monkeypatch):
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    config = for_method(override(preset("smoke"), MICRO | {"data.source": str(corpus_file)}), "mdlm")
    parts = ModelParts(build_method(config).eval(), config, tmp_path, micro_folder / "tokenizer.json", None)
    words = ["evaluate", str(write_model(parts, tmp_path / "model")), "--likelihood", "-n", "9", "--batch", "2"]
    words += ["--data", str(corpus_file)]
    (one, two), files = by_one_and_two([*words, "--device", "cpu", "--quiet"], tmp_path)
    assert one == two and files[0] == files[1] and one["likelihood"][0]["rows"] == 9
