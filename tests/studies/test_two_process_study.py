"""`torchrun ... study` and `compare`: every training on all processes, with the rows of the preset, and one set of files."""

import json
import os
import re
import subprocess
import sys

import pytest
from conftest import micro_flags
from small_runs import largest_difference, launch, weights

from jpeg_dlm.checkpoints.checkpoint import latest_checkpoint

pytest_plugins = ["tiny_evaluation"]  # fixtures

STUDY = ["study", "regularizers"]
COMPARE = ["compare", "--methods", "ar,cosmos", "--repeats", "1"]

FAULTY = """
import sys
from jpeg_dlm.cli.main import main
from jpeg_dlm.util.errors import NonFiniteError
from jpeg_dlm.util import distributed
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
everywhere, losses = sys.argv[1] == "everywhere", JpegDlm.losses
def fail(self, batch, noise):
    o = self.config.objective
    if not o.sigreg_weight and not o.var_weight and (everywhere or distributed.dist.get_rank() == 1):
        raise NonFiniteError("no luck")
    return losses(self, batch, noise)
JpegDlm.losses = fail
raise SystemExit(main(sys.argv[2:]))
"""


def words(verb, corpus_file, byte_gpt2, out, *more):
    """A command at the preset's batch: 64 rows a step."""
    flags = micro_flags(encoder__kind="small", train__encoder_steps=2, train__lr=1e-3, train__codec_lr=1e-3, train__warmup=100)
    rows = flags.index("--train.batch")
    flags = flags[:rows] + flags[rows + 2 :]
    common = [*verb, "--preset", "smoke", "--data", str(corpus_file), "--budget", "4steps", "-n", "6", "--seeds", "1"]
    scoring = ["--scorer", f"hf:{byte_gpt2}", "--mauve", "off", "--device", "cpu"]
    return [*common, *scoring, "--out", str(out), *flags, *more]


def files(folder):
    """Paths without the hashes of parts: those of weights differ, as weights do in their last bits, and those of timings."""
    paths = (str(path.relative_to(folder)) for path in folder.rglob("*") if not path.name.startswith("speed-"))
    return sorted(re.sub("-[0-9a-f]{16}", "", path) for path in paths)


@pytest.mark.slow
@pytest.mark.parametrize("verb", [STUDY, COMPARE], ids=["study", "compare"])
def test_two_processes_do_what_one_does(verb, corpus_file, byte_gpt2, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    command = [sys.executable, "-m", "jpeg_dlm", *words(verb, corpus_file, byte_gpt2, one)]
    alone = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    both = launch("-m", "jpeg_dlm", *words(verb, corpus_file, byte_gpt2, two))
    assert alone.returncode == both.returncode == 0, alone.stderr + both.stderr[-4000:]
    assert "Traceback" not in both.stderr and both.stdout.count("\n") == alone.stdout.count("\n")

    assert files(one) == files(two)
    runs = sorted(path.parent for path in one.rglob("checkpoints"))
    assert len(runs) == (5 if verb is STUDY else 4)  # the encoder, and four variants or AR and two stages of COSMOS
    for run in runs:
        ours, theirs = (latest_checkpoint(folder / run.relative_to(one), print).state for folder in (one, two))
        assert ours["rows_per_step"] == theirs["rows_per_step"] == 64 and ours["step"] == theirs["step"]
        batches = [
            [state["config"]["train"][name] for name in ("batch", "accumulation", "devices")] for state in (ours, theirs)
        ]
        assert batches == [[64, 1, 1], [32, 1, 2]]
        step = ours["step"]
        assert largest_difference(weights(run, step), weights(two / run.relative_to(one), step)) < 1e-4
    name = "study-regularizers.json" if verb is STUDY else "compare.json"
    a, b = (json.loads((folder / name).read_text())["records"] for folder in (one, two))
    assert [(r["label"], r["tokens"]) for r in a] == [(r["label"], r["tokens"]) for r in b]


@pytest.fixture
def faulty(tmp_path):
    path = tmp_path / "faulty.py"
    path.write_text(FAULTY)
    return str(path)


@pytest.mark.slow
def test_a_variant_that_fails_on_every_process_is_left_out(corpus_file, byte_gpt2, tmp_path, faulty):
    done = launch(faulty, "everywhere", *words(STUDY, corpus_file, byte_gpt2, tmp_path / "out", "--train.log-every", "1"))
    assert done.returncode == 1 and done.stderr.count("failed and is left out") == 1, done.stderr[-4000:]
    result = json.loads((tmp_path / "out" / "study-regularizers.json").read_text())
    assert list(result["errors"].values()) == ["no luck"] and len(result["records"]) == 3


@pytest.mark.slow
def test_a_variant_that_fails_on_one_process_ends_the_study_and_it_goes_on_later(corpus_file, byte_gpt2, tmp_path, faulty):
    asked, result = words(STUDY, corpus_file, byte_gpt2, tmp_path / "out"), tmp_path / "out" / "study-regularizers.json"
    assert launch(faulty, "once", *asked, timeout=120).returncode == 1 and not result.exists()
    done = launch("-m", "jpeg_dlm", *asked)
    assert done.returncode == 0, done.stderr[-4000:]
    assert not json.loads(result.read_text())["errors"]
