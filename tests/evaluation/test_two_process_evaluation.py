"""`torchrun ... evaluate` with two processes gives the result of one, bit for bit, once."""

import json
import os
import subprocess
import sys

import pytest
from small_runs import launch
from tiny_evaluation import untimed

pytest_plugins = ["tiny_evaluation"]  # fixtures


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("jpeg-dlm", ["-n", "100", "--batch", "7", "--seeds", "2", "--steps", "1,2"]),  # 15 batches, enough texts for MAUVE
        ("jpeg-dlm", ["-n", "9", "--batch", "2", "--task", "infill"]),
        ("jpeg-dlm", ["-n", "9", "--batch", "2", "--task", "continue"]),
        ("mdlm", ["-n", "9", "--batch", "2", "--likelihood"]),
        ("mdlm", ["-n", "9", "--batch", "2", "--frontier", "--sampler.temperature", "0.5,1"]),
    ],
    ids=["scores", "infill", "continue", "likelihood", "frontier"],
)
def test_the_result_has_the_bits_of_one_process(method, more, byte_gpt2, micro_folders, corpus_file, tmp_path, monkeypatch):
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    words = ["evaluate", str(micro_folders(method)), "--data", str(corpus_file), "--device", "cpu", "--quiet", *more]
    scorer = [] if "--likelihood" in more else ["--scorer", f"hf:{byte_gpt2}"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # other threads, other bits
    command = [sys.executable, "-m", "jpeg_dlm", *words, *scorer, "--out", str(tmp_path / "one")]
    alone = subprocess.run(command, capture_output=True, text=True, env=env)
    both = launch("-m", "jpeg_dlm", *words, *scorer, "--out", str(tmp_path / "two"))
    assert alone.returncode == both.returncode == 0, alone.stderr + both.stderr[-4000:]
    assert len(both.stdout.splitlines()) == len(alone.stdout.splitlines()) and "Traceback" not in both.stderr
    outs = [tmp_path / name for name in ("one", "two")]
    one, two = (json.loads((out / "results.json").read_text()) for out in outs)
    files = [sorted(str(path.relative_to(out)) for path in out.rglob("*")) for out in outs]
    assert untimed(one) == untimed(two) and files[0] == files[1]
    assert any(one.get(name) for name in ("entries", "infill", "continue", "likelihood"))
