"""The command line: help, exit codes, options, one-sentence errors, and runs that survive interruptions."""

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import micro_flags

from jpeg_dlm import files
from jpeg_dlm.api import Model, load
from jpeg_dlm.cli.main import VERBS, build_parser, main
from jpeg_dlm.cli.options import GROUPS
from jpeg_dlm.cli.values import SOLVERS
from jpeg_dlm.config_io import from_dict, option_choices, option_names
from jpeg_dlm.errors import UsageError
from jpeg_dlm.folders import checkpoint
from jpeg_dlm.folders.checkpoint import verify_run
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.methods.registry import build_method, for_method, names
from jpeg_dlm.presets import preset
from jpeg_dlm.training.loop import Trainer
from jpeg_dlm.training.metrics import read_metrics

pytest_plugins = ["stand_in"]  # fixtures


def train(data, out, *more, **changes):
    command = ["train", "--preset", "smoke", "--data", str(data), "--out", str(out), "--quiet", "--device", "cpu"]
    return [*command, *micro_flags(**changes), *more]


def refusal(capsys, argv, code):
    """The one sentence with which a command is refused."""
    assert main([str(word) for word in argv]) == code
    seen = capsys.readouterr()
    lines = [line for line in seen.err.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("error: "), seen.err
    assert "Traceback" not in seen.err and seen.out == ""
    return lines[0]


@pytest.fixture(scope="session")
def finished(corpus_file, tmp_path_factory):
    """A finished run, with options given in every way there is."""
    out = tmp_path_factory.mktemp("cli") / "run"
    (out.parent / "options.json").write_text(json.dumps({"objective": {"sigma": 0.5, "w_max": 4}, "train.lr": 0.003}))
    more = ["--config", str(out.parent / "options.json"), "--objective.time-mean", "-1.25", "--sampler.grid-mean=-0.5"]
    assert main(train(corpus_file, out, *more, "--objective.w_max", "3.5")) == 0
    return out


@pytest.fixture
def run(finished, tmp_path):
    """A copy to damage."""
    return shutil.copytree(finished, tmp_path / "run")


# ---------------------------------------------------------------- help


def test_help_of_every_verb_answers_without_torch():
    script = """
import sys
from jpeg_dlm.cli.main import VERBS, main
for words in [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS), ["train", "--help-all"]]:
    try:
        main(words)
    except SystemExit as stop:
        assert stop.code == 0, words
    assert not {"torch", "transformers", "rich", "tokenizers"} & set(sys.modules), words
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert all(verb in done.stdout for verb in VERBS)
    assert "--model.latent-len" in done.stdout and "(paper" in done.stdout


def shown(capsys, monkeypatch, *words):
    """What a command prints, with lines so long that nothing is wrapped."""
    monkeypatch.setenv("COLUMNS", "2000")
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", [*([verb] for verb in VERBS), ["study", "ablations"], ["study", "cost"], ["study", "steps"]])
def test_help_shows_the_verbs_own_options_with_defaults_and_choices(words, capsys, monkeypatch):
    text = shown(capsys, monkeypatch, *words, "--help")
    assert "%" not in text and re.search(r"^  --(data|model|train|sampler)\.", text, re.MULTILINE) is None
    lines = {line.split()[0].rstrip(","): line for line in text.splitlines() if line.startswith("  -")}
    parser = build_parser(words[0])
    for word in words:
        parser = parser._subparsers._group_actions[0].choices[word]
    for action in parser._actions:
        if action.nargs != 0 and action.option_strings and action.help != "==SUPPRESS==":
            line = lines[action.option_strings[0]]
            assert action.default in (None, []) or str(action.default) in line.split("default:")[1]
            assert all(str(choice) in line for choice in action.choices or ())


def test_options_of_the_config_that_concern_a_verb_are_behind_help_all(capsys, monkeypatch):
    expected = {"prepare": ("data",), "generate": ("sampler",), "train": GROUPS, "info": GROUPS}
    for verb, groups in expected.items():
        text = shown(capsys, monkeypatch, verb, "--help-all")
        listed = re.findall(r"^  --([a-z]+\.[a-z0-9-]+)", text, re.MULTILINE)
        known = [name for name in option_names() if name.split(".")[0] in groups]
        assert [name.replace("-", "_") for name in listed] == known, verb
        assert f"{len(known)} more options" in shown(capsys, monkeypatch, verb, "--help")
        assert "%%" not in text


def test_help_all_shows_the_values_of_the_preset(capsys, monkeypatch):
    for name, length in (("smoke", 16), ("lm1b", 128)):
        text = shown(capsys, monkeypatch, "train", "--preset", name, "--help-all")
        (line,) = [line for line in text.splitlines() if line.startswith("  --data.token-len")]
        assert f"default: {length})" in line
    (line,) = [line for line in text.splitlines() if line.startswith("  --data.packing")]
    assert "one of continuous, sentences, padded; default: continuous" in line
    (line,) = [line for line in text.splitlines() if line.startswith("  --train.compile ")]
    assert "one of true, false" in line and "0 is min(10%, 2000)" in text


def test_solvers_are_those_of_the_systems():
    found = {name: option_choices(for_method(preset("tiny"), name)).get("sampler.solver") for name in names("system")}
    assert SOLVERS == {name: solvers for name, solvers in found.items() if solvers}


@pytest.mark.parametrize("words, hint", [
    ([], "VERB"), (["fly"], "choose one of demo, generate"), (["genrate"], "did you mean generate?"),
    (["train"], "--out"), (["train", "--out"], "--out needs a value"), (["interpolate", "one"], "second"),
    (["study", "ablation", "--out", "x"], "did you mean ablations?"), (["train", "--otu", "x"], "did you mean --out?"),
    (["study", "rates", "--ouut", "x"], "did you mean --out?"),
    (["export", "x", "--out", "y", "--format", "onx"], "mean onnx?"),
])  # fmt: skip
def test_words_that_make_no_command_are_refused(words, hint, capsys):
    assert hint in refusal(capsys, words, 2)


@pytest.mark.parametrize("words, hint", [
    (["train", "--out", "x", "--preest", "smoke"], "did you mean --preset?"),
    (["train", "--out", "x", "--latent-len", "4"], "did you mean --model.latent-len?"),
    (["train", "--out", "x", "--model.latent-lenght", "4"], "did you mean 'model.latent_len'?"),
    (["generate", "--stepps", "4"], "did you mean --steps?"),
    (["reconstruct", "text", "--chekpoint=x"], "did you mean --checkpoint?"),
    (["verify", "one", "two"], "Unexpected argument 'two'"),
    (["generate", "--model.depth", "4"], "cannot be changed here; only --sampler.* options can"),
    (["verify", "x", "--train.steps", "4"], "Unknown option '--train.steps'"),
    (["info", "--model.depth"], "needs a value"),
    (["info", "--preset", "large"], "choose one of lm1b"),
])  # fmt: skip
def test_an_unknown_option_is_refused_with_the_nearest_known_one(words, hint, capsys):
    assert hint in refusal(capsys, words, 2)


BAD_VALUES = [
    ["generate", "-n", "0"], ["generate", "-n", "many"], ["generate", "--steps", "0"], ["generate", "--seed", "-1"],
    ["generate", "--w", "nan"], ["generate", "--w", "inf"], ["generate", "--w", "0"], ["generate", "--batch", "0"],
    ["generate", "-n", "9" * 30], ["generate", "--top-p", "1.5"], ["generate", "--temperature", "-1"],
    ["generate", "--solver", "rk4"], ["generate", "--grid", "log"], ["generate", "--dtype", "fp8"],
    ["evaluate", "-n", "1"], ["evaluate", "--steps", "4,0"], ["evaluate", "--solver", "euler,rk4"],
    ["evaluate", "--seed", "-2"],
    ["interpolate", "a", "b", "--points", "1"], ["benchmark", "--batch", "0"], ["benchmark", "--warmup", "-1"],
    ["tune", "--out", "x", "--w", "nan"], ["tune", "--out", "x", "--trials", "0"], ["compare", "--out", "x", "--seeds", "0"],
    ["study", "rates", "--out", "x", "--jobs", "0"], ["study", "cost", "--out", "x", "--limit", "0"],
    ["train", "--out", "x", "--threads", "0"], ["train", "--out", "x", "--train.lr", "nan"],
    ["train", "--out", "x", "--method", "a"],
    ["evaluate", "--scorer", "gpt2"], ["compare", "--out", "x", "--scorer", "hf:"],
    ["info", "--plan", "--tflops", "-1"], ["info", "--plan", "--utilization", "2"],
]  # fmt: skip


def test_bad_values_are_refused_before_torch_is_loaded():
    script = (
        "import json, sys\nfrom jpeg_dlm.cli.main import main\n"
        "codes = [main(words) for words in json.loads(sys.argv[1])]\nprint(codes, 'torch' in sys.modules)"
    )
    words = [sys.executable, "-c", script, json.dumps(BAD_VALUES)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{[2] * len(BAD_VALUES)} False"
    sentences = done.stderr.splitlines()
    assert len(sentences) == len(BAD_VALUES)
    for asked, sentence in zip(BAD_VALUES, sentences, strict=True):
        assert sentence.startswith("error: ") and asked[-2].lstrip("-").replace("-", "_") in sentence.replace("-", "_"), (
            sentence
        )
        assert asked[-1].split(",")[-1] in sentence or "--train." in asked[-2], sentence


@pytest.mark.parametrize("value, kind", [("nan", "a finite number"), ("wide", "a finite number")])
def test_a_number_that_is_none_is_named_so(value, kind, capsys):
    assert f"'objective.sigma' must be {kind}, not '{value}'" in refusal(capsys, ["info", "--objective.sigma", value], 2)
    assert "'train.steps' must be a whole number, not '2.5'" in refusal(capsys, ["info", "--train.steps", "2.5"], 2)
    assert "'model.shared' must be one of" not in refusal(capsys, ["info", "--model.shared", "perhaps"], 2)


def test_debug_shows_the_traceback():
    with pytest.raises(UsageError):
        main(["info", "--preset", "large", "--debug"])


@pytest.mark.parametrize("words", [["info", "--preset", "smoke"], ["train", "--help"]])
def test_a_reader_that_went_away_is_not_an_error(words):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "jpeg_dlm.cli.main", *words], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


# ---------------------------------------------------------------- what is loaded on the way

# Each takes a tenth of a second or more to import; the last ones are of verbs that draw, export or fetch.
SLOW_TO_IMPORT = (
    "torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "sympy", "transformers", "huggingface_hub", "rich",
    "matplotlib", "onnx", "onnxruntime", "openvino", "datasets", "sentencepiece",
)  # fmt: skip


def modules_after(*words):
    """The modules that a command has loaded by its end, in a process of its own."""
    script = "import sys\nfrom jpeg_dlm.cli.main import main\ncode = main(sys.argv[1:])\nprint('\\n', code, *sys.modules)"
    done = subprocess.run([sys.executable, "-c", script, *map(str, words)], capture_output=True, text=True, check=True)
    code, *names = done.stdout.splitlines()[-1].split()
    return int(code), set(names), done


def test_generate_loads_nothing_that_it_does_not_need():
    code, loaded, _ = modules_after("generate", "-n", "1", "--steps", "1")
    assert code == 0 and "torch" in loaded and not set(SLOW_TO_IMPORT) & loaded


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("name, total", [("lm1b", 151_468_670), ("owt1024", 152_877_694)])
def test_info_counts_the_papers_models(name, total, capsys):
    assert main(["info", "--preset", name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"]["dit_and_projection"] == 104_843_364 and found["parameters"]["total"] == total
    macs = found["macs"]["compressed"]["total"] / 1e12, found["macs"]["full"]["total"] / 1e12
    assert macs == pytest.approx({"lm1b": (0.131, 0.414), "owt1024": (1.704, 3.648)}[name], rel=0.01)


def test_info_is_also_a_table(capsys):
    assert main(["info"]) == 0
    assert "104,843,364" in capsys.readouterr().out


def test_preset_file_and_command_line_apply_in_this_order(finished):
    config = json.loads((finished / "config.json").read_text())
    assert config["objective"]["sigma"] == 0.5 and config["train"]["lr"] == 0.003  # from the file
    assert config["objective"]["w_max"] == 3.5  # the command line comes last
    assert config["objective"]["time_mean"] == -1.25 and config["sampler"]["grid_mean"] == -0.5  # negative, both spellings
    assert config["data"]["token_len"] == 12 and config["preset"] == "smoke"


@pytest.mark.parametrize("content, word", [
    ('{"model": {"latent_lenght": 4}}', "did you mean 'model.latent_len'?"), ('{"model": 4}', "model"),
    ('{"train": {"steps": "many"}}', "train.steps"), ("[1]", "JSON object"), ('{"train": ', "not valid JSON"),
])  # fmt: skip
def test_a_wrong_config_file_is_refused(content, word, tmp_path, capsys):
    (tmp_path / "options.json").write_text(content)
    assert word in refusal(capsys, ["info", "--config", tmp_path / "options.json"], 2)


def test_a_preset_in_the_file_brings_its_values(tmp_path, capsys):
    file = tmp_path / "options.json"
    file.write_text('{"preset": "smoke", "train": {"lr": 0.25}}')
    assert main(["info", "--options", "--config", str(file)]) == 0
    shown = capsys.readouterr().out
    assert main(["info", "--options", "--preset", "smoke", "--train.lr", "0.25"]) == 0
    assert capsys.readouterr().out == shown
    assert main(["info", "--options", "--preset", "smoke", "--config", str(file)]) == 0  # said twice
    assert capsys.readouterr().out == shown


def test_two_presets_are_refused(finished, tmp_path, capsys):
    file = tmp_path / "options.json"
    file.write_text('{"preset": "lm1b"}')
    for words in (["info", "--preset", "tiny"], ["prepare", "x", "--preset", "tiny", "--out", tmp_path / "x"]):
        assert "begins with the preset lm1b, not tiny: leave one" in refusal(capsys, [*words, "--config", file], 2)
    resumed = ["train", "--data", "x", "--out", finished, "--resume", "--config", file]
    assert "begins with the preset lm1b, not smoke" in refusal(capsys, resumed, 2)
    file.write_text('{"preset": ["lm1b"]}')
    assert "Unknown preset" in refusal(capsys, ["info", "--config", file], 2)


def test_a_missing_config_file_is_refused(tmp_path, capsys):
    assert "Cannot read" in refusal(capsys, ["info", "--config", tmp_path / "none.json"], 2)


@pytest.mark.parametrize("words, sentence", [
    (["--model.latent-len", "17"], "model.latent_len 17 exceeds data.token_len 16"),
    (["--model.hidden", "100", "--model.heads", "3"], "model.hidden 100 is not divisible by model.heads 3"),
    (["--model.latent-dim=66"], "model.latent_dim 66 is not divisible by model.codec_heads 4"),
    (["--train.lr", "-1"], "Learning rates must be positive"), (["--train.steps", "2.5"], "train.steps"),
])  # fmt: skip
def test_impossible_sizes_are_refused_before_anything_runs(words, sentence, corpus_file, tmp_path, capsys):
    command = ["train", "--preset", "smoke", "--data", corpus_file, "--out", tmp_path / "run", *words]
    assert sentence in refusal(capsys, command, 2)
    assert not (tmp_path / "run").exists()


def test_the_value_of_an_option_is_not_taken_for_an_argument(corpus_file, tmp_path, capsys):
    command = ["prepare", "--data.vocab-size", "300", "--data.token-len", "12", str(corpus_file), "--out", str(tmp_path / "b")]
    assert main([*command, "--quiet"]) == 0
    assert "blocks of 12 tokens (vocabulary 300)" in capsys.readouterr().out
    assert main([*command, "--quiet"]) == 0
    assert "already there" in capsys.readouterr().out


# ---------------------------------------------------------------- text that is none


@pytest.mark.parametrize("content", [b"", b" \n\n ", bytes(range(256)) * 40], ids=["empty", "blank", "binary"])
@pytest.mark.parametrize("verb", ["prepare", "train"])
def test_a_file_without_text_is_refused(verb, content, tmp_path, capsys):
    (tmp_path / "file.txt").write_bytes(content)
    source = [tmp_path / "file.txt"] if verb == "prepare" else ["--data", tmp_path / "file.txt"]
    command = [verb, "--preset", "smoke", *source, "--out", tmp_path / "out", "--quiet"]
    assert "file.txt" in refusal(capsys, command, 1)
    assert not (tmp_path / "out" / "index.json").exists() and not (tmp_path / "out" / "checkpoints").exists()


def test_text_that_is_not_there_is_refused(tmp_path, capsys):
    assert "none.txt" in refusal(capsys, ["prepare", tmp_path / "none.txt", "--out", tmp_path / "out", "--quiet"], 1)
    assert main(["reconstruct", "", "--checkpoint", str(tmp_path)]) == 1


# ---------------------------------------------------------------- what is already there stays


def test_nothing_is_overwritten(finished, corpus_file, tmp_path, capsys):
    (tmp_path / "mine.jsonl").write_text("mine")
    assert "nothing was overwritten" in refusal(capsys, ["generate", finished, "--out", tmp_path / "mine.jsonl"], 2)
    assert (tmp_path / "mine.jsonl").read_text() == "mine"

    before = files.sha256_file(finished / "checkpoints" / "step-00000012" / "model.safetensors")
    assert "--resume" in refusal(capsys, train(corpus_file, finished), 2)
    assert files.sha256_file(finished / "checkpoints" / "step-00000012" / "model.safetensors") == before

    (tmp_path / "results.json").write_text("{}")
    assert "already holds results" in refusal(capsys, ["evaluate", finished, "--out", tmp_path], 2)
    assert "already exists" in refusal(capsys, ["export", finished, "--out", tmp_path], 1)
    assert (tmp_path / "results.json").read_text() == "{}"


def test_export_stores_the_options_of_the_sampler(finished, tmp_path, capsys):
    out = tmp_path / "model"
    stored = ["--sampler.solver", "sde", "--sampler.gamma", "0.5", "--sampler.fast-solver", "sde"]
    assert main([str(word) for word in ("export", finished, "--out", out, *stored)]) == 0
    capsys.readouterr()
    sampler = load(out).config.sampler
    assert (sampler.solver, sampler.gamma, sampler.fast_solver) == ("sde", 0.5, "sde")
    assert "sampler.gamma" in refusal(capsys, ["export", finished, "--out", tmp_path / "no", "--sampler.gamma", "-1"], 2)
    assert "--model.depth" in refusal(capsys, ["export", finished, "--out", tmp_path / "no", "--model.depth", "2"], 2)
    assert not (tmp_path / "no").exists()


def test_a_run_that_only_trained_its_encoder_counts_as_a_run(finished, corpus_file, tmp_path, capsys):
    shutil.copytree(finished / "encoder-training", tmp_path / "run" / "encoder-training")
    assert "--resume" in refusal(capsys, train(corpus_file, tmp_path / "run"), 2)


# ---------------------------------------------------------------- results


def test_generate_prints_text_tokens_or_json_lines(finished, tmp_path, capsys):
    assert main(["generate", str(finished), "-n", "3", "--seed", "1"]) == 0
    assert [line[:4] for line in capsys.readouterr().out.splitlines()] == ["[0] ", "[1] ", "[2] "]
    assert main(["generate", str(finished), "-n", "3", "--seed", "1", "--tokens"]) == 0
    tokens = [list(map(int, line.split())) for line in capsys.readouterr().out.splitlines()]
    assert [len(row) for row in tokens] == [12, 12, 12]
    assert main(["generate", "--sampler.steps", "3", str(finished), "-n", "3", "--seed", "1", "--out", f"{tmp_path}/a"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "a").read_text("utf-8").splitlines()]
    assert [row["token_ids"] for row in rows] == tokens and [row["index"] for row in rows] == [0, 1, 2]
    assert all(isinstance(row["prediction"], str) for row in rows) and capsys.readouterr().out == ""


def test_of_several_that_write_one_file_at_once_one_succeeds(finished, tmp_path, capsys, monkeypatch):
    out, to_text, others = tmp_path / "texts.jsonl", Model.to_text, []
    words = ["generate", str(finished), "-n", "1", "--device", "cpu", "--out", str(out)]

    def late(self, tokens, given=None):  # both have found that there is no such file, and the other one is sooner
        monkeypatch.setattr(Model, "to_text", to_text)
        others.append(main([*words, "--seed", "1"]))
        capsys.readouterr()
        return to_text(self, tokens, given)

    monkeypatch.setattr(Model, "to_text", late)
    assert "texts.jsonl' already exists" in refusal(capsys, words, 2) and others == [0]
    theirs = out.read_text("utf-8")
    out.unlink()
    assert main([*words, "--seed", "1"]) == 0 and out.read_text("utf-8") == theirs
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]


@pytest.mark.parametrize("verb", ["prepare", "evaluate"])
def test_a_folder_of_results_has_one_writer_at_a_time(verb, corpus_file, tmp_path, capsys):
    words = {"prepare": ["prepare", corpus_file], "evaluate": ["evaluate", "-n", "2"]}[verb]
    script = "import sys; from pathlib import Path; from jpeg_dlm.training.lock import run_lock\n"
    script += "with run_lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script, tmp_path / "out"], stdin=-1, stdout=-1) as holder:
        assert holder.stdout.readline() == b"held\n"
        assert f"in use by process {holder.pid}" in refusal(capsys, [*words, "--out", tmp_path / "out"], 2)
        holder.stdin.close()


def test_errors_of_the_disk_name_the_file_that_was_asked_for(finished, tmp_path, capsys):
    out = tmp_path / "missing" / "texts.jsonl"
    said = main(["generate", str(finished), "-n", "1", "--device", "cpu", "--out", str(out)]), capsys.readouterr().err
    assert said[0] == 1 and f"'{out}'" in said[1] and ".tmp-" not in said[1]


@pytest.mark.parametrize("more", [[], ["--steps", "11"], ["--fast"], ["--fast", "--steps", "11"]])
def test_the_released_protocol_has_no_stored_grid(more, capsys):
    line = refusal(capsys, ["generate", "-n", "1", "--protocol", "released", "--grid", "stored", *more], 2)
    assert "'stored' is not in the released protocol" in line


def test_what_takes_long_on_a_cpu_is_told_of_openvino(finished, capsys, monkeypatch):
    words = ["generate", str(finished), "-n", "1", "--steps", "2", "--device", "cpu"]
    assert main(words) == 0 and "openvino" not in capsys.readouterr().err
    monkeypatch.setattr("jpeg_dlm.cli.generate_verb.SLOW_S", 0.0)
    assert main(words) == 0 and f"jpeg-dlm export {finished} --format openvino" in capsys.readouterr().err
    assert main([*words, "--dtype", "int8"]) == 0 and "openvino" not in capsys.readouterr().err


def test_watching_changes_no_text(finished, capsys):
    assert main(["generate", str(finished), "-n", "1", "--steps", "4"]) == 0
    alone = capsys.readouterr().out
    assert main(["generate", str(finished), "-n", "1", "--steps", "4", "--watch"]) == 0
    seen = capsys.readouterr()
    assert seen.out == alone and "step   0/4" in seen.err and "step   4/4" in seen.err


def test_reconstruct_and_interpolate_print_texts(finished, capsys, monkeypatch):
    assert main(["reconstruct", "The farmer plants corn.", "--checkpoint", str(finished)]) == 0
    seen = capsys.readouterr()
    assert "tokens kept" in seen.err and seen.out.count("\n") == 1
    words = ["interpolate", "The farmer", "The smith", "--points", "3", "--checkpoint", str(finished)]
    assert main(words) == 0
    assert [line[:4] for line in capsys.readouterr().out.splitlines()] == ["0.00", "0.50", "1.00"]


# ---------------------------------------------------------------- checkpoints that are missing or damaged


def test_a_file_in_place_of_a_model_is_told_how_to_become_one(corpus_file, capsys):
    line = refusal(capsys, ["generate", corpus_file], 1)
    assert line.endswith("is a file, not the folder of a model or a run: name a folder, or convert a published checkpoint "
                         "with  jpeg-dlm import.")  # fmt: skip


def test_a_missing_checkpoint_is_refused(tmp_path, capsys):
    assert "does not exist" in refusal(capsys, ["generate", tmp_path / "none"], 1)
    assert "neither a model nor a run" in refusal(capsys, ["generate", tmp_path], 1)
    assert "nothing to verify" in refusal(capsys, ["verify", tmp_path], 1)


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)


def test_a_damaged_checkpoint_falls_back_loudly(run, corpus_file, capsys):
    assert main(["verify", str(run)]) == 0
    flip_a_byte(run / "checkpoints" / "step-00000012" / "ema.safetensors")
    assert main(["verify", str(run)]) == 1
    assert "ema.safetensors" in capsys.readouterr().out
    assert main(["generate", str(run), "-n", "1"]) == 0
    seen = capsys.readouterr()
    assert "DAMAGED" in seen.err and "step 8" in seen.err and seen.out.startswith("[0] ") and "DAMAGED" not in seen.out
    assert main(["train", "--out", str(run), "--resume", "--quiet", "--device", "cpu"]) == 0
    assert "DAMAGED" in capsys.readouterr().err
    assert main(["verify", str(run)]) == 0


def test_a_run_without_a_whole_checkpoint_is_refused(run, corpus_file, capsys):
    for path in (run / "checkpoints").iterdir():
        flip_a_byte(path / "model.safetensors")
    assert "No checkpoint" in refusal(capsys, ["generate", run], 1)
    assert "No checkpoint" in refusal(capsys, ["train", "--out", run, "--resume", "--quiet", "--device", "cpu"], 1)


def test_an_encoder_that_only_the_hub_has_is_one_sentence_without_network(corpus_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    flags = {"encoder__kind": "hf", "encoder__name": "nobody/no-such-encoder", "encoder__scale": "none"}
    error = refusal(capsys, train(corpus_file, tmp_path / "run", **flags), 1)
    assert "Cannot load the encoder 'nobody/no-such-encoder'" in error and "local folder" in error


# ---------------------------------------------------------------- a full disk


def no_space_left(monkeypatch, way):
    if way == "seen before writing":
        monkeypatch.setattr(checkpoint, "free_bytes", lambda path: 1000)
        return
    real = files._write

    def write(handle, data):
        if "optimizer" in str(handle.name):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle, data)

    monkeypatch.setattr(files, "_write", write)


@pytest.mark.parametrize("way", ["seen before writing", "met while writing"])
def test_a_full_disk_ends_the_run_and_leaves_the_earlier_checkpoint(way, corpus_file, tmp_path, capsys, monkeypatch):
    real = Trainer.launch_step

    def step(self, *args):
        if self.step == 5 and self.config.method == "jpeg-dlm":
            no_space_left(monkeypatch, way)
        return real(self, *args)

    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(Trainer, "launch_step", step)
    assert "earlier checkpoints are intact" in refusal(capsys, train(corpus_file, tmp_path / "run"), 1)
    reports = verify_run(tmp_path / "run")
    assert [(report.step, report.error) for report in reports] == [(4, None)]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]
    monkeypatch.undo()
    assert main(["train", "--out", str(tmp_path / "run"), "--resume", "--quiet", "--device", "cpu"]) == 0
    assert [report.step for report in verify_run(tmp_path / "run")] == [8, 12]


# ---------------------------------------------------------------- a loss that is not a number


@pytest.fixture
def nan_at_step_6(monkeypatch):
    """One loss is not a number; what the step did to weights and optimizer is kept."""
    real_losses, real_step, weights = JpegDlm.losses, Trainer.launch_step, {}

    def losses(self, batch, noise):
        found = real_losses(self, batch, noise)
        return found | {"ce": found["ce"] * float("nan")} if self.training and noise.step == 6 else found

    def state(trainer):
        slots = {f"{i} {k}": t for i, s in enumerate(trainer.optimizer.state.values()) for k, t in s.items()}
        return {k: t.detach().clone() for k, t in (trainer.parameters | slots).items()}

    def step(self, *args):
        number, before = self.step, state(self)
        try:
            return real_step(self, *args)
        finally:
            if self.config.method == "jpeg-dlm":
                weights[number] = before, state(self)

    monkeypatch.setattr(JpegDlm, "losses", losses)
    monkeypatch.setattr(Trainer, "launch_step", step)
    return weights


def same(pair):
    return all(torch.equal(pair[0][name], pair[1][name]) for name in pair[0])


def test_a_loss_that_is_not_a_number_stops_the_run(nan_at_step_6, corpus_file, tmp_path, capsys):
    run = tmp_path / "run"
    error = refusal(capsys, train(corpus_file, run), 1)
    assert "ce" in error and "step 6" in error and "nonfinite-rank0.jsonl" in error and "--train.nonfinite skip" in error
    (line,) = (run / "nonfinite-rank0.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert entry["step"] == 6 and {"ce", "grad_norm", "loss"} <= set(entry["bad"])
    assert len(set(entry["rows"])) == 8 and all(isinstance(row, int) for row in entry["rows"])
    assert same(nan_at_step_6[6]) and not same(nan_at_step_6[5])
    assert [report.step for report in verify_run(run)] == [4]


def test_with_skip_the_run_goes_on(nan_at_step_6, corpus_file, tmp_path):
    run = tmp_path / "run"
    assert main(train(corpus_file, run, "--train.nonfinite", "skip")) == 0
    assert len((run / "nonfinite-rank0.jsonl").read_text().splitlines()) == 1
    assert same(nan_at_step_6[6]) and not same(nan_at_step_6[7])
    assert all(t.isfinite().all() for t in nan_at_step_6[11][1].values() if t.is_floating_point())
    steps = [row["step"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    assert steps == list(range(1, 13))


# ---------------------------------------------------------------- other methods


def test_generate_goes_on_from_a_prompt(micro_folders, capsys):
    ar = str(micro_folders("ar"))
    assert (
        main(["generate", ar, "-n", "2", "--prompt", "The farmer", "--temperature", "0.5", "--top-k", "9", "--top-p", "0.9"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line[4:].startswith("The farmer") for line in lines)
    assert main(["generate", ar, "-n", "1", "--template", "The [MASK:2] corn", "--watch"]) == 0
    assert "corn" in capsys.readouterr().out


def test_a_text_is_edited_and_filled_in(finished, capsys):
    run = str(finished)
    assert main(["edit", "The farmer plants", "--checkpoint", run, "-n", "2", "--noise", "0.5", "--steps", "2"]) == 0
    told = capsys.readouterr()
    assert [line[:4] for line in told.out.splitlines()] == [
        "[0] ",
        "[1] ",
    ] and "of the tokens stand where they stood" in told.err
    assert main(["generate", run, "-n", "2", "--template", "The [MASK:2] corn", "--contains", "river", "--strength", "2"]) == 0
    told = capsys.readouterr()
    assert told.out.count("The") >= 2 and told.out.count("corn") >= 2
    assert re.search(r"\d of \d+ given tokens are what the latents decode to", told.err)
    assert "must be a number between 0 and 1" in refusal(capsys, ["edit", "The", "--noise", "2"], 2)
    assert "must be words with commas" in refusal(capsys, ["generate", "--contains", "a,,b"], 2)


def test_options_that_a_model_lacks_are_refused(finished, micro_folders, capsys):
    ar = micro_folders("ar")
    assert "has no option 'temperature': it has steps" in refusal(capsys, ["generate", finished, "--temperature", "1"], 2)
    assert "has no option 'w': it has temperature, top_k" in refusal(capsys, ["generate", ar, "--w", "2"], 2)
    assert "has no option 'wild'" in refusal(capsys, ["generate", ar, "--sampler.wild", "2"], 2)
    assert "AR does not take guides: use elf, cosmos or jpeg-dlm" in refusal(capsys, ["generate", ar, "--contains", "a"], 2)
    assert "does not take guides" in refusal(capsys, ["generate", ar, "--prompt", "The", "--strength", "2"], 2)
    assert "AR does not take edits: use elf, cosmos or jpeg-dlm" in refusal(
        capsys, ["edit", "The farmer", "--checkpoint", ar], 2
    )
    assert "not both" in refusal(capsys, ["generate", ar, "--prompt", "The", "--template", "[MASK]"], 2)
    assert "need jpeg-dlm" in refusal(capsys, ["reconstruct", "The farmer", "--checkpoint", ar], 2)


def test_info_describes_a_run(finished, tmp_path, capsys):
    assert main(["info", str(finished), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    metrics = read_metrics(finished / "metrics.jsonl")
    heldout = [row for row in metrics if "heldout_ce" in row]
    assert found["kind"] == "run" and found["method"] == "jpeg-dlm" and found["preset"] == "smoke" and found["trouble"] == []
    assert found["steps"] == {"done": 12, "total": 12, "finished": True} and found["seconds"] > 0
    assert found["heldout"]["ce"] == heldout[-1]["heldout_ce"] and found["heldout_step"] == heldout[-1]["step"]
    assert found["checkpoint"] == "step-00000012" and len(found["samples"]["texts"]) == 2
    index = json.loads((finished / "data" / "index.json").read_text())
    assert found["text"]["train_blocks"] == index["splits"]["train"]["rows"]
    config = from_dict(json.loads((finished / "config.json").read_text()))
    assert found["sizes"]["parameters"] == sum(p.numel() for p in build_method(config).parameters() if p.requires_grad)
    assert main(["info", str(finished)]) == 0
    text = capsys.readouterr().out
    assert "12 of 12, finished" in text and "12 tokens as 3 latents" in text
    for line in text.split("Go on with:\n")[1].splitlines():
        assert shlex.split(line)[2 if "--resume" not in line else 4] == str(finished)


def test_info_says_how_to_go_on_with_a_run_that_is_not_done(run, tmp_path, capsys):
    moved = run.rename(tmp_path / "my run")
    shutil.rmtree(moved / "checkpoints")
    (moved / "metrics.jsonl").write_text('{"step": 5, "loss": 3.0}\n{"step": 6, "lo')
    (moved / "samples" / "step-00000012.txt").write_text("[0] \x1b[31mred\n[1] two")
    assert main(["info", str(moved)]) == 0
    text = capsys.readouterr().out
    assert "5 of 12\n" in text and "nothing yet" in text and "\\x1b[31mred" in text
    assert [shlex.split(line) for line in text.split("Go on with:\n")[1].splitlines()] == [
        ["jpeg-dlm", "train", "--resume", "--out", str(moved)]
    ]
    (moved / "config.json").write_text("{")
    assert main(["info", str(moved)]) == 0
    assert "The configuration cannot be shown" in capsys.readouterr().out


def test_info_describes_a_model_folder_and_nothing_else(micro_folders, tmp_path, capsys):
    ar = micro_folders("ar")
    assert main(["info", str(ar)]) == 0
    text = capsys.readouterr().out
    assert "AR (ar), preset smoke" in text and f"jpeg-dlm generate {ar}" in text and "steps" not in text
    assert "no run and no model folder" in refusal(capsys, ["info", tmp_path], 1)
    assert "jpeg-dlm info --preset smoke" in refusal(capsys, ["info", "smoke"], 2)
    assert "leave one of them out" in refusal(capsys, ["info", ar, "--preset", "smoke"], 2)
    assert "leave one of them out" in refusal(capsys, ["info", ar, "--model.depth", "2"], 2)


def test_commands_that_are_suggested_can_be_typed(micro_folders, tmp_path, capsys):
    out = tmp_path / "my model's folder"
    assert main(["export", str(micro_folders("ar")), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert shlex.split(said.split("  or  ")[1]) == ["jpeg-dlm", "generate", str(out)]
    assert main(["generate", str(out), "-n", "1"]) == 0
    assert capsys.readouterr().err.startswith("1 text of 12 tokens in")


def test_no_hint_has_an_unquoted_path_or_names_a_file_that_a_wheel_lacks():
    for path in sorted(Path(files.__file__).parent.rglob("*.py")):
        text = path.read_text("utf-8")
        assert not re.search(rf"jpeg-dlm ({'|'.join(VERBS)}) [^\"`\n]*\{{", text), path
        assert "benchmarks/" not in text, path


def test_info_of_another_method(capsys):
    assert main(["info", "--method", "mdlm", "--preset", "smoke"]) == 0
    assert "smoke (mdlm)" in capsys.readouterr().out
    assert main(["info", "--method", "mdlm", "--preset", "smoke", "--model.depth", "3", "--options"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["--model.depth"].split()[1] == "3" and "layers" in lines["--model.depth"]
    assert "--model.latent-len" not in lines and "--sampler.steps" in lines
    assert "choose one of ar, mdlm" in refusal(capsys, ["info", "--method", "gpt"], 2)


def test_a_wrong_method_of_a_run_is_refused(finished, corpus_file, capsys):
    assert "choose one of ar, mdlm" in refusal(capsys, train(corpus_file, finished.parent / "new", "--method", "gpt"), 2)
    command = ["train", "--out", finished, "--resume", "--method", "ar"]
    assert "was started with --method jpeg-dlm, not ar" in refusal(capsys, command, 2)


def test_watching_shows_what_is_not_written_yet(micro_folders):
    from jpeg_dlm.api import load
    from jpeg_dlm.report.moments import readable

    model = load(micro_folders("ar"), "cpu")
    a, b = model.tokenizer.encode("The farmer"), model.tokenizer.encode("corn")
    row = [*a, 300, model.tokenizer.mask_id, *b, -1]
    assert readable(model, row) == "The farmer __ corn _"
