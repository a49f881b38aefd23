"""The table of all systems: equal budgets, one failure, continuing after a stop, and the files written."""

import json

import pytest
from conftest import MICRO

from jpeg_dlm.cli.main import main
from jpeg_dlm.config_io import override
from jpeg_dlm.errors import UsageError
from jpeg_dlm.evaluation.evaluate import EvaluationRequest
from jpeg_dlm.evaluation.protocols import protocol
from jpeg_dlm.machine.console import Console
from jpeg_dlm.machine.dist import Ranks
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.results.table import markdown
from jpeg_dlm.scorers.scoring import build_scorer
from jpeg_dlm.studies import workshop as workshop_module
from jpeg_dlm.studies.budget import parse_budget
from jpeg_dlm.studies.compare import Comparison, compare, method_names
from jpeg_dlm.studies.compare_report import compare_table, draw_comparison
from jpeg_dlm.studies.study import read_base
from jpeg_dlm.studies.workshop import StudyStopped, Workshop
from jpeg_dlm.training.run import Outcome

pytest_plugins = ["tiny_evaluation"]  # fixtures


def asked(corpus_file, methods, budget="6steps"):
    base = override(preset("smoke"), MICRO | {"data.source": str(corpus_file)})
    return Comparison(base, method_names(methods), parse_budget(budget), {}, batch=2, repeats=1)


def run(asked, folder, byte_gpt2):
    request = EvaluationRequest(protocol("default"), (0, 1), 4, mauve="off")
    return compare(asked, Workshop(folder, Ranks(), Console(quiet=True)), lambda: build_scorer(f"hf:{byte_gpt2}"), request)


def test_two_systems(corpus_file, byte_gpt2, tmp_path, monkeypatch):
    result = run(asked(corpus_file, "jpeg-dlm,ar"), tmp_path, byte_gpt2)
    ar, jpeg = result["rows"]  # in the paper's order
    assert (ar["title"], jpeg["title"]) == ("AR", "JPEG-DLM")
    config = for_method(asked(corpus_file, "ar").base, "ar")
    assert ar["parameters"] == sum(p.numel() for p in build_method(config).parameters()) and jpeg["parameters"] > 5_000
    assert ar["tokens_seen"] == jpeg["tokens_seen"] == 6 * 8 * 12 and min(ar["training_seconds"], jpeg["training_seconds"]) > 0
    assert ar["entry"]["figures"]["real"] == jpeg["entry"]["figures"]["real"]  # held against the very same text
    assert [row["name"] for row in result["speed"]["rows"]] == ["AR", "AR, KV cache", "JPEG-DLM"]
    assert result["speed"]["rows"][0]["ratio"] == 1 and result["budget"]["text"] == "6steps"
    text = markdown([compare_table(result)])
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    names = [line.split(" | ")[0].removeprefix("| ").split(" (degenerate")[0] for line in lines[2:]]
    assert names == ["AR", "AR, KV cache", "JPEG-DLM", "*real text*", "*shuffled text*"]
    assert "151.36" in text and "96.76" in text and "± " in text
    assert draw_comparison(result, tmp_path / "compare.png").stat().st_size > 10_000
    json.dumps(result)

    # The same again trains, writes and scores nothing.
    monkeypatch.setattr(workshop_module, "train_run", lambda *a, **k: pytest.fail("trained twice"))
    again = run(asked(corpus_file, "jpeg-dlm,ar"), tmp_path, byte_gpt2)
    assert again == result


def test_a_failing_system_does_not_cost_the_others(corpus_file, byte_gpt2, tmp_path, monkeypatch):
    from jpeg_dlm.methods.ar import Ar

    monkeypatch.setattr(Ar, "losses", lambda *a: (_ for _ in ()).throw(RuntimeError("no luck")))
    result = run(asked(corpus_file, "ar,jpeg-dlm"), tmp_path, byte_gpt2)
    ar, jpeg = result["rows"]
    assert ar["error"] == "RuntimeError: no luck" and "entry" not in ar and "entry" in jpeg
    assert "no luck" in (tmp_path / "error-ar.txt").read_text()
    text = markdown([compare_table(result)])
    assert "| AR | failed |" in text and "AR failed: RuntimeError: no luck" in text


def test_a_stop_is_no_failure(corpus_file, byte_gpt2, tmp_path, monkeypatch):
    monkeypatch.setattr(workshop_module, "train_run", lambda *a, **k: Outcome(1, "SIGTERM"))
    with pytest.raises(StudyStopped) as stopped:
        run(asked(corpus_file, "ar,jpeg-dlm"), tmp_path, byte_gpt2)
    assert stopped.value.exit_code == 143


def test_equal_time_is_measured_once(corpus_file, tmp_path):
    shop = Workshop(tmp_path, Ranks(), Console(quiet=True))
    config = shop.conditions(for_method(asked(corpus_file, "ar").base, "ar"))
    first = shop.budgeted(config, parse_budget("2s"))
    assert first.train.steps >= 1 and first == shop.budgeted(config, parse_budget("2s"))  # measured anew it would differ


def test_one_cause_for_all_is_told_once_and_before_scoring(tmp_path):
    with pytest.raises(UsageError, match="No system could be trained: No text at"):
        compare(asked(tmp_path / "nothing", "ar,mdlm"), Workshop(tmp_path, Ranks(), Console(quiet=True)), pytest.fail, None)


def test_names():
    paper = ("ar", "mdlm", "sedd", "duo", "flm", "langflow", "elf", "cosmos", "jpeg-dlm")
    assert method_names("all") == paper
    assert method_names("jpeg-dlm, ar") == ("ar", "jpeg-dlm")


def test_the_command(corpus_file, byte_gpt2, tmp_path, capsys):
    words = [
        "compare",
        "--methods",
        "ar,mdlm",
        "--preset",
        "smoke",
        "--data",
        str(corpus_file),
        "--budget",
        "2steps",
        "-n",
        "4",
    ]
    words += ["--seeds", "1", "--scorer", f"hf:{byte_gpt2}", "--mauve", "off", "--batch", "2", "--repeats", "1", "--quiet"]
    assert main([*words, "--out", str(tmp_path / "out"), "--train.batch", "4"]) == 0
    shown = capsys.readouterr().out
    assert shown.strip() == (tmp_path / "out" / "compare.md").read_text().strip() and "| MDLM |" in shown
    assert (tmp_path / "out" / "compare.png").is_file()
    assert main(["compare", "--methods", "arr", "--out", str(tmp_path)]) == 2
    assert "Unknown method 'arr'" in capsys.readouterr().err
    assert main(["compare", "--out", str(tmp_path), "--model.hiden", "8"]) == 2
    assert "Unknown option 'model.hiden'; did you mean 'model.hidden'?" in capsys.readouterr().err


def test_options_of_jpeg_dlm_shape_every_system_and_the_others_hold_for_all():
    options = {"model.depth": "3", "train.lr": "0.5", "data.token-len": "24"}
    base, shared = read_base("smoke", "some.txt", options)
    assert shared == {"train.lr": "0.5", "data.token-len": "24", "data.source": "some.txt"}
    ar, elf = (override(for_method(base, name), shared) for name in ("ar", "elf"))
    assert ar.model.depth == elf.model.depth == 3
    assert elf.train.lr == 0.5 != for_method(base, "elf").train.lr  # ELF's own recipe gives way to what was asked for
    assert (ar.data.token_len, ar.data.source) == (24, "some.txt")
