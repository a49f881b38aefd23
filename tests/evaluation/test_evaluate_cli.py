"""`evaluate` and `benchmark` from the command line: files written, one-sentence errors, continuing the same request."""

import json
import shlex

import pytest
from conftest import made_up_text
from refusals import refusal

from jpeg_dlm.cli.main import main
from jpeg_dlm.methods.ar import ArSampler

pytest_plugins = ["tiny_evaluation", "stand_in"]  # fixtures


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    stories = made_up_text(documents=4, seed=5).split("\n\n")
    (tmp_path / "real.jsonl").write_text("".join(json.dumps({"reference": s.strip()[:80]}) + "\n" for s in stories))
    for seed in (0, 1):
        rows = [{"prediction": f"{s[10 + seed : 70]}"} for s in stories]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"p_seed{seed}.jsonl").write_text(text)
    return tmp_path


def test_samples_of_another_program(byte_gpt2, files, capsys):
    words = ["evaluate", *(str(files / f"p_seed{s}.jsonl") for s in (0, 1)), "--reference", str(files / "real.jsonl")]
    words += ["--scorer", f"hf:{byte_gpt2}", "--protocol", "lm1b", "--out", str(files / "out"), "--quiet"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    result = json.loads((files / "out" / "results.json").read_text())
    [entry] = result["entries"]
    assert result["command"] == shlex.join(["jpeg-dlm", *words])  # as it was, with every option
    assert entry["name"] == "p" and len(entry["runs"]) == 2 and result["protocol"]["name"] == "lm1b"
    assert entry["measures"]["gen_ppl"]["sd"] is not None and "± " in shown and "| real (4)" in shown
    assert (files / "out" / "results.md").read_text().strip() == shown.strip()
    assert main(words) == 0  # the same request again
    assert capsys.readouterr().out == shown
    assert main([*words, "--seed", "3"]) == 2
    assert "another evaluation" in capsys.readouterr().err


def test_a_checkpoint_with_a_sweep(byte_gpt2, micro_folders, corpus_file, files, capsys):
    words = ["evaluate", str(micro_folders()), "-n", "4", "--steps", "1,2", "--scorer", f"hf:{byte_gpt2}", "--quiet"]
    words += ["--data", str(corpus_file)]
    assert main([*words, "--out", str(files / "out"), "--sampler.w", "2"]) == 0
    result = json.loads((files / "out" / "results.json").read_text())
    assert [e["sampler"]["steps"] for e in result["entries"]] == [1, 2] and result["entries"][0]["sampler"]["w"] == 2
    assert 0 <= result["entries"][0]["reconstruction"] <= 1 and "held-out" in result["entries"][0]["reference"]
    assert (files / "out" / "sweep.png").is_file() and (files / "out" / "lengths.png").is_file()
    assert "reconstructed at r = 0.25" in capsys.readouterr().out


def test_frontiers_of_two_systems(byte_gpt2, micro_folders, corpus_file, files, capsys):
    words = ["evaluate", str(micro_folders()), str(micro_folders("ar")), "--frontier", "-n", "4", "--mauve", "off", "--quiet"]
    words += ["--scorer", f"hf:{byte_gpt2}", "--data", str(corpus_file), "--sampler.noise-scale", "0.5,1", "--steps", "1"]
    assert main([*words, "--out", str(files / "out")]) == 0
    shown = capsys.readouterr().out
    result = json.loads((files / "out" / "results.json").read_text())
    ours, ar = result["frontier"]
    swept = [(entry["sampler"].get("noise_scale"), entry["sampler"].get("temperature")) for entry in result["entries"]]
    assert swept == [(0.5, None), (1.0, None), *((None, t) for t in ArSampler.frontier["temperature"])]
    assert (ours["knob"], ar["knob"]) == ("noise_scale", "temperature") and len(ar["points"]) == 7
    for curve, entries in ((ours, result["entries"][:2]), (ar, result["entries"][2:])):
        for point, entry in zip(curve["points"], entries, strict=True):
            assert point["gen_ppl"][0] == pytest.approx(entry["measures"]["gen_ppl"]["mean"])
            assert point["gap"] == pytest.approx(entry["entropy_gap"])
    assert "At matched entropy" in shown and "1 euler steps, noise_scale 0.5" in shown and "by_text" not in str(result)
    assert (files / "out" / "frontier.png").is_file() and not (files / "out" / "lengths.png").exists()
    assert main([*words, "--out", str(files / "out")]) == 0 and capsys.readouterr().out == shown  # from the stored parts
    assert "--task" in refusal(capsys, [*words, "--task", "infill"], 2)


@pytest.mark.parametrize(
    ("words", "match"),
    [(["-n", "1"], "-n"), (["--solver", "rk4"], "euler"), (["--model.hidden", "8"], "--model.hidden")],
)
def test_bad_requests_are_one_sentence(words, match, byte_gpt2, files, capsys):
    assert match in refusal(capsys, ["evaluate", *words, "--scorer", f"hf:{byte_gpt2}", "--quiet"], 2)


def test_text_prepared_for_another_model_is_refused(byte_gpt2, micro_folders, corpus_file, files, capsys):
    sizes = ["--data.vocab-size", "280", "--data.token-len", "12"]
    assert main(["prepare", str(corpus_file), *sizes, "--out", str(files / "p")]) == 0
    capsys.readouterr()
    words = ["evaluate", micro_folders(), "--data", files / "p", "--scorer", f"hf:{byte_gpt2}", "--quiet"]
    assert "another model" in refusal(capsys, words, 1)


def test_benchmark_of_methods(micro_folders, files, capsys):
    words = ["benchmark", str(micro_folders()), "--methods", "ar,mdlm", "--preset", "smoke", "--steps", "2,3"]
    words += ["--batch", "2", "--repeats", "1", "--warmup", "0", "--out", str(files / "b")]
    assert main(words) == 0
    rows = json.loads((files / "b" / "benchmark.json").read_text())["rows"]
    found = [(row["name"], row["sampler"].get("kv_cache"), row["sampler"].get("steps")) for row in rows]
    named = [("ar", False, None), ("ar-kv", True, None), ("mdlm", None, 2), ("mdlm", None, 3)]
    assert found[2:] == named and [steps for _, _, steps in found[:2]] == [2, 3]
    assert rows[2]["title"] == rows[3]["title"] == "AR" and rows[0]["ratio"] == 1
    assert "ar-kv has no --steps" in capsys.readouterr().err and main(words) == 2  # nothing is overwritten
    assert main(["benchmark", "--methods", "gpt", "--preset", "smoke"]) == 2
