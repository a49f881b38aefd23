"""The sweep over solver steps: its steps, its rows, and the number of steps that suffices."""

import json
from dataclasses import replace

import pytest

from jpeg_dlm.api import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.evaluation.entry import of_models
from jpeg_dlm.evaluation.sources import ModelSource
from jpeg_dlm.machine.console import Console
from jpeg_dlm.results.plain import plain
from jpeg_dlm.results.resumable import Parts
from jpeg_dlm.results.table import markdown
from jpeg_dlm.scorers.language_models import build_scorer
from jpeg_dlm.studies import steps
from jpeg_dlm.studies.study import Asked
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.prepare import prepare

pytest_plugins = ["tiny_evaluation", "stand_in"]  # fixtures


def test_which_steps():
    assert steps.sweep_of("lm1b", 32) == (8, 16, 32, 64, 128, 256)  # the paper's
    assert steps.sweep_of("tiny", 64) == (4, 8, 16, 32, 64, 128)
    assert steps.sweep_of("smoke", 3) == (3, 4, 8, 16, 32, 64, 128)


def test_where_more_steps_stop_helping():
    assert steps.enough_steps([(8, 200.0), (16, 104.0), (32, 100.0), (64, 99.5)]) == 16
    assert steps.enough_steps([(8, 100.0), (16, 150.0)]) == 8
    assert steps.enough_steps([]) is None
    paper = [(row["steps"], row["gen_ppl"]) for row in steps.paper_tables()["lm1b_steps"]["rows"]]
    assert steps.enough_steps(paper) == 256  # the paper's Gen-PPL falls to the end


@pytest.fixture
def sources(micro_folders, corpus_file, tmp_path):
    """JPEG-DLM and AR with random weights on the same held-out text."""
    found = []
    for name in ("jpeg-dlm", "ar"):
        model = load(micro_folders(name), "cpu")
        folder = tmp_path / f"data-{name}"
        prepare(replace(model.config.data, source=str(corpus_file)), folder, lambda done, total: None, model.tokenizer)
        found.append(ModelSource(model, name, 4, Blocks(folder, "heldout")))
    return found


def asked(byte_gpt2, folder=None, **changes):
    values = {"n": 4, "seeds": (0, 1), "batch": 4, "mauve": "off"} | changes
    return Asked(
        **values, scorer=lambda: build_scorer(f"hf:{byte_gpt2}"), parts=Parts(folder), console=Console(quiet=True)
    )  # fmt: skip


def test_a_sweep_beside_the_papers(sources, byte_gpt2, tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "DEFAULT_STEPS", (1, 2))
    outcome = steps.analyze(sources, asked(byte_gpt2, tmp_path / "parts"))
    found = [(e.name, model.sampler.get("steps"), model.evaluations) for e, model in of_models(outcome.result["entries"])]
    assert found == [("jpeg-dlm", 1, 2), ("jpeg-dlm", 2, 3), ("jpeg-dlm", 3, 4), ("ar", None, 12)]
    assert outcome.result["protocol"] == "default" and outcome.result["enough"]["ar"] is None
    lines = [line for line in markdown(outcome.tables).splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + 4 + 1 + 6  # heading, ours, real text, the paper's
    assert lines[-1] == "| JPEG-DLM | 256 | 257 | 64.07 | 4.23 | 0.933 |  | paper |"
    assert "± " in lines[2] and "jpeg-dlm (JPEG-DLM) | 1 | 2 |" in lines[2]
    written = outcome.write(tmp_path, "steps")
    assert plain(outcome.result).items() <= json.loads(written[0].read_text()).items() and written[2].stat().st_size > 10_000
    # Each point is the evaluation of that sampler, so a second look finds it done.
    monkeypatch.setattr(ModelSource, "write", lambda *a, **k: pytest.fail("written twice"))
    assert steps.analyze(sources, asked(byte_gpt2, tmp_path / "parts")).tables == outcome.tables


def test_models_of_the_paper_are_scored_by_its_protocol(sources):
    assert steps.common_protocol(sources).name == "default"
    for source in sources:
        object.__setattr__(source.model.config, "preset", "lm1b")
    assert steps.common_protocol(sources).name == "lm1b"


def test_the_command(micro_folders, corpus_file, byte_gpt2, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(steps, "DEFAULT_STEPS", (2,))
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    words = ["study", "steps", str(micro_folders("jpeg-dlm")), "-n", "4", "--scorer", f"hf:{byte_gpt2}", "--mauve", "off"]
    assert main([*words, "--data", str(corpus_file), "--quiet", "--out", str(tmp_path / "out")]) == 0
    assert "| JPEG-DLM | 8 | 9 | 225.24 |" in capsys.readouterr().out
    assert (tmp_path / "out" / "study-steps.png").is_file()
