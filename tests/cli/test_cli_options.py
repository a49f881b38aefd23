"""Words of commands: unknown options, bad values, config files, and words that only look like options."""

import json
import subprocess
import sys

import pytest
import yaml
from refusals import refusal

from jpeg_dlm.cli.main import build_parser, main
from jpeg_dlm.cli.options import overrides, read_config
from jpeg_dlm.methods.registry import for_method
from jpeg_dlm.options import to_dict
from jpeg_dlm.presets import preset
from jpeg_dlm.util.errors import UsageError


@pytest.mark.parametrize(
    "words, hint",
    [
        ([], "VERB"),
        (["genrate"], "generate?"),
        (["train"], "--out"),
        (["train", "--out"], "--out needs a value"),
        (["train", "--otu", "x"], "--out?"),
        (["train", "--out", "x", "--latent-len", "4"], "--model.latent-len?"),
        (["train", "--out", "x", "--model.latent-lenght", "4"], "--model.latent-len?"),
        (["generate", "--model.depth", "4"], "--model.depth"),
        (["reconstruct", "text", "--chekpoint=x"], "--checkpoint?"),
        (["verify", "one", "two"], "'two'"),
        (["verify", "x", "--train.steps", "4"], "--train.steps"),
        (["info", "--model.depth"], "needs a value"),
        (["info", "--preset", "large"], "lm1b"),
        (["info", "--method", "gpt"], "mdlm"),
        (["info", "--method", "mdlm", "--model.latent-len", "4"], "latent_len"),
        (["info", "--train.steps", "2.5"], "train.steps"),
        (["train", "--preset", "smoke", "--out", "x", "--model.latent-len", "17"], "latent_len"),
        (["export", "x", "--out", "y", "--share", "0.3"], "--blend"),
        (["info", "--json", "--options"], "--json"),
        (["info", "--plan", "--options"], "--plan"),
        (["doctor", "--only", "parity"], "--selftest"),
    ],
)
def test_wrong_words_are_refused_with_the_nearest_known_one(words, hint, capsys):
    assert hint in refusal(capsys, words, 2)


BAD_VALUES = [
    ["generate", "-n", "0"],
    ["generate", "-n", "9" * 30],
    ["generate", "--w", "nan"],
    ["generate", "--top-p", "1.5"],
    ["generate", "--contains", "a,,b"],
    ["evaluate", "--steps", "4,0"],
    ["evaluate", "--scorer", "gpt2"],
    ["edit", "text", "--noise", "2"],
    ["interpolate", "a", "b", "--points", "1"],
    ["benchmark", "--warmup", "-1"],
    ["train", "--out", "x", "--train.lr", "nan"],
    ["info", "--plan", "--tflops", "-1"],
]


def test_bad_values_are_refused_by_name_before_torch_is_loaded():
    script = (
        "import json, sys\nfrom jpeg_dlm.cli.main import main\n"
        "codes = [main(words) for words in json.loads(sys.argv[1])]\nprint(codes, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, json.dumps(BAD_VALUES)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{[2] * len(BAD_VALUES)} False"
    for words, sentence in zip(BAD_VALUES, done.stderr.splitlines(), strict=True):
        assert sentence.startswith("error: ") and words[-2].lstrip("-") in sentence


def test_words_after_two_dashes_and_values_with_spaces_are_no_options():
    args = build_parser("reconstruct").parse_args(["reconstruct", "--", "--No.5", "--train.steps", "3"])
    assert args.text == ["--No.5", "--train.steps", "3"] and overrides(args) == {}
    args = build_parser("generate").parse_args(["generate", "--prompt", "--No. 5", "--sampler.w", "2"])
    assert args.prompt == "--No. 5" and overrides(args, "sampler") == {"w": "2"}
    args = build_parser("generate").parse_args(["generate", "--prompt=--sampler.w", "--sampler.grid-mean=-0.5"])
    assert args.prompt == "--sampler.w" and overrides(args) == {"sampler.grid_mean": "-0.5"}


def config_of(*words):
    args = build_parser("train").parse_args(["train", "--out", "x", *map(str, words)])
    return read_config(args, method=args.method)


def test_preset_file_and_command_line_apply_in_this_order(tmp_path):
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"preset": "smoke", "objective": {"sigma": 0.5, "time_std": 4}, "train.lr": 0.003}))
    config = config_of("--config", file, "--objective.time_std", "3.5", "--objective.time-mean", "-1.25")
    words = "--preset smoke --objective.sigma=0.5 --objective.time-std=3.5 --objective.time-mean=-1.25 --train.lr=3e-3"
    assert config.preset == "smoke" and config == config_of(*words.split())
    file.write_text('{"method": "ar", "sampler": {"top_k": 3}}')
    assert config_of("--config", file, "--sampler.top-p", "0.5").sampler.top_p == 0.5
    assert config_of("--method", "ar", "--sampler.top-k", "3").sampler == config_of("--config", file).sampler


@pytest.mark.parametrize("method", ["jpeg-dlm", "mdlm"])
def test_a_yaml_file_of_all_options_gives_them_back(method, tmp_path):
    config = for_method(preset("lm1b"), method)
    (tmp_path / "options.yaml").write_text(yaml.safe_dump(to_dict(config)))
    assert config_of("--config", tmp_path / "options.yaml") == config


def test_words_of_yaml_are_read_as_those_of_the_command_line(tmp_path):
    (tmp_path / "options.yml").write_text("preset: smoke  # small\ntrain.lr: 3e-3\ndata: {source: 0755, known: no}\n")
    words = "--preset smoke --train.lr 3e-3 --data.source 0755 --data.known no"
    assert config_of("--config", tmp_path / "options.yml") == config_of(*words.split())


@pytest.mark.parametrize(
    "content, word",
    [
        ('{"model": {"latent_lenght": 4}}', "model.latent_len"),
        ('{"modell": {"depth": 3}}', "did you mean 'model.depth'"),
        ('{"train": {"steps": "many"}}', "train.steps"),
        ("[1]", "not an object"),
        ('{"preset": "lm1b"}', "lm1b"),
        ('{"preset": ["lm1b"]}', "preset"),
        (None, "options.json"),
    ],
)
def test_a_wrong_config_file_is_refused(content, word, tmp_path, capsys):
    if content:
        (tmp_path / "options.json").write_text(content)
    assert word in refusal(capsys, ["info", "--preset", "tiny", "--config", tmp_path / "options.json"], 2)


@pytest.mark.parametrize(
    "content, word",
    [
        ("train: {steps: 1}\ntrain: {steps: 2}", "'train' is repeated"),
        ("train: {steps: 1, steps: 2}", "'steps' is repeated"),
        ("- 1", "not an object"),
        ("", "not an object"),
        ("data: !!python/object/apply:os.system [echo]", "a tag in line 1"),
        ("data: &all {source: x}\nmodel: *all", "an alias"),
        ("data: &all {source: *all}", "an alias"),
        ("train: {steps: null}", "train.steps"),
        ("train:\n  steps: [1", "in line 2"),
        ("a: 1\n---\nb: 2", "another document"),
        ("[" * 500, "nested too deeply"),
        ("a: \0", "not valid YAML"),
    ],
)
def test_a_wrong_yaml_file_is_refused(content, word, tmp_path, capsys):
    (tmp_path / "options.yaml").write_text(content)
    assert word in refusal(capsys, ["info", "--preset", "tiny", "--config", tmp_path / "options.yaml"], 2)


def test_a_missing_package_is_named_with_its_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    monkeypatch.setattr("jpeg_dlm.cli.doctor.packages", lambda: {"matplotlib": "plots"})
    monkeypatch.setattr("jpeg_dlm.cli.models.run_verify", lambda args: __import__("matplotlib.figure"))
    assert "jpeg-dlm[plots]" in refusal(capsys, ["verify", "x"], 1)


def test_debug_shows_the_traceback():
    with pytest.raises(UsageError):
        main(["info", "--preset", "large", "--debug"])
