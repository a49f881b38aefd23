"""A model that learns its own features needs no encoder anywhere: in its run, its folder, its verbs."""

import json

import pytest
from conftest import micro_flags

from jpeg_dlm import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.files import load_tensors

TEXT = "The corn"


@pytest.fixture(scope="module")
def run(corpus_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("no-encoder") / "run"
    words = ["train", "--preset", "smoke", "--data", str(corpus_file), "--out", str(out), "--device", "cpu", "--quiet"]
    assert main([*words, *micro_flags(encoder__kind="none")]) == 0
    return out


def test_a_run_has_no_encoder_and_a_folder_has_its_embedding(run, tmp_path):
    assert not (run / "encoder").exists() and not (run / "encoder-training").exists()
    model = load(run, "cpu")
    folder = model.save(tmp_path / "model")
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    weights = load_tensors(folder / "model.safetensors")["embedding.weight"]
    assert weights.shape == (model.config.data.vocab_size, 16)
    again = load(folder, "cpu")
    assert again.encode(TEXT).equal(model.encode(TEXT)) and again.generate(2, seed=3) == model.generate(2, seed=3)


def test_the_verbs(run, tmp_path, capsys):
    for words in (
        ["reconstruct", "--checkpoint", str(run), TEXT],
        ["edit", "--checkpoint", str(run), TEXT, "--noise", "0.5"],
        ["interpolate", "--checkpoint", str(run), TEXT, "The nails"],
        ["generate", str(run), "-n", "2", "--prompt", "The"],
        ["verify", str(run)],
        ["info", str(run)],
    ):
        assert main(words) == 0, words
        assert capsys.readouterr().out.strip(), words
    assert main(["info", "--preset", "smoke", "--encoder.kind", "none", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["parameters"]
    assert parts["embedding"] == 512 * 64 and parts["total"] == sum(
        parts[name] for name in ("embedding", "compressor", "decompressor", "dit", "unembed_proj", "lm_head")
    )
    assert main(["info", "--preset", "lm1b", "--encoder.kind", "none", "--plan"]) == 0
    assert "text encoder" not in capsys.readouterr().out


def test_the_finishing_stage_goes_on_from_it(run, tmp_path):
    words = ["train", "--method", "finish", "--teacher", str(run), "--out", str(tmp_path / "finished"), "--device", "cpu"]
    assert main([*words, "--train.steps", "2", "--quiet"]) == 0
    before, after = load(run, "cpu"), load(tmp_path / "finished", "cpu")
    assert after.method.embedding.weight.equal(before.method.embedding.weight) and after.encode(TEXT).equal(before.encode(TEXT))


def test_methods_that_need_an_encoder_say_so(corpus_file, tmp_path, capsys):
    words = ["train", "--preset", "smoke", "--method", "elf", "--data", str(corpus_file), "--out", str(tmp_path / "elf")]
    sizes = ["--data.vocab-size", "300", "--data.token-len", "12"]
    assert main([*words, *sizes, "--encoder.kind", "none", "--device", "cpu", "--quiet"]) == 2
    assert "Only jpeg-dlm learns its own features" in capsys.readouterr().err
