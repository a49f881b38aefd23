"""`generate`, `reconstruct`, `interpolate` and `edit`: what they print, and requests that cannot be met."""

import json
import re
import subprocess
import sys

import pytest
from refusals import refusal

from jpeg_dlm.api import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.report.trajectory import readable

# Each takes a tenth of a second or more to import; the last ones are of verbs that draw, export or fetch.
SLOW_TO_IMPORT = set(
    "torch._dynamo torch._inductor torch.distributed.fsdp sympy transformers huggingface_hub rich matplotlib onnx onnxruntime "
    "openvino datasets".split()
)


@pytest.fixture(scope="module")
def run(micro_folders):
    return str(micro_folders.run())


def test_generate_loads_nothing_that_it_does_not_need():
    script = "import sys\nfrom jpeg_dlm.cli.main import main\ncode = main(sys.argv[1:])\nprint('\\n', code, *sys.modules)"
    words = [sys.executable, "-c", script, "generate", "-n", "1", "--steps", "1"]
    code, *modules = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[-1].split()
    assert code == "0" and "torch" in modules and not SLOW_TO_IMPORT & set(modules)


def test_generate_prints_text_tokens_or_json_lines(run, tmp_path, capsys):
    words = ["generate", run, "-n", "3", "--seed", "1"]
    assert main(words) == 0
    texts = [line[4:] for line in capsys.readouterr().out.splitlines()]
    assert main([*words, "--tokens"]) == 0
    tokens = [list(map(int, line.split())) for line in capsys.readouterr().out.splitlines()]
    assert [len(row) for row in tokens] == [12, 12, 12]
    assert main([*words, "--sampler.steps", "3", "--watch", "--out", f"{tmp_path}/a"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "a").read_text("utf-8").splitlines()]
    assert [row["token_ids"] for row in rows] == tokens and [row["prediction"] for row in rows] == texts
    output = capsys.readouterr()
    assert output.out == "" and "step   0/3" in output.err and "step   3/3" in output.err


def test_nothing_is_overwritten(run, tmp_path, capsys):
    (tmp_path / "results.json").write_text("{}")
    assert "results.json" in refusal(capsys, ["generate", run, "--out", tmp_path / "results.json"], 2)
    assert str(tmp_path) in refusal(capsys, ["evaluate", run, "--out", tmp_path], 2)
    assert str(tmp_path) in refusal(capsys, ["export", run, "--out", tmp_path], 1)
    assert (tmp_path / "results.json").read_text() == "{}"
    assert main(["generate", run, "-n", "1", "--out", str(out := tmp_path / "missing" / "texts.jsonl")]) == 1
    assert f"'{out}'" in (sentence := capsys.readouterr().err) and ".tmp-" not in sentence


def test_texts_go_through_their_latents(run, capsys):
    assert main(["reconstruct", "The farmer plants corn.", "--checkpoint", run]) == 0
    output = capsys.readouterr()
    assert "tokens kept" in output.err and output.out.count("\n") == 1
    assert main(["interpolate", "The farmer", "The smith", "--points", "3", "--checkpoint", run]) == 0
    assert [line[:4] for line in capsys.readouterr().out.splitlines()] == ["0.00", "0.50", "1.00"]
    assert main(["edit", "The farmer plants", "--checkpoint", run, "-n", "2", "--noise", "0.5", "--steps", "2"]) == 0
    assert [line[:4] for line in capsys.readouterr().out.splitlines()] == ["[0] ", "[1] "]


def test_prompts_and_templates_are_kept(run, micro_folders, capsys):
    ar = str(micro_folders("ar"))
    assert main(["generate", ar, "-n", "2", "--prompt", "The farmer", "--temperature", "0.5", "--top-k", "9"]) == 0
    assert [line[4:14] for line in capsys.readouterr().out.splitlines()] == ["The farmer"] * 2
    assert main(["generate", run, "-n", "2", "--template", "The [MASK:2] corn", "--contains", "river", "--strength", "2"]) == 0
    output = capsys.readouterr()
    assert output.out.count("The") >= 2 and output.out.count("corn") >= 2 and re.search(r"\d of \d+", output.err)


def test_requests_that_a_model_cannot_meet_are_refused(run, micro_folders, capsys):
    ar = micro_folders("ar")
    for words, name in (
        (["generate", run, "--temperature", "1"], "temperature"),
        (["generate", ar, "--w", "2"], "w'"),
        (["generate", ar, "--contains", "a"], "guides"),
        (["edit", "The farmer", "--checkpoint", ar], "edits"),
        (["generate", run, "--template", "The farmer"], "template"),
        (["generate", run, "--contains", "corn " * 13], "corn"),
        (["reconstruct", "The farmer", "--checkpoint", ar], "jpeg-dlm"),
        (["reconstruct", " ", "--checkpoint", run], "text"),
    ):
        assert name in refusal(capsys, words, (1, 2)), words


def test_watching_shows_what_is_not_written_yet(micro_folders):
    model = load(micro_folders("ar"), "cpu")
    a, b = model.tokenizer.encode("The farmer"), model.tokenizer.encode("corn")
    assert readable(model, [*a, 300, model.tokenizer.mask_id, *b, -1]) == "The farmer __ corn _"
