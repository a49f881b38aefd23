"""Bad prompts, templates and words of `jpeg-dlm generate`: one sentence, and nothing is written."""

from __future__ import annotations

import pytest
from conftest import MICRO, made_up_text, perturb
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from jpeg_dlm.cli.main import main
from jpeg_dlm.config_io import override
from jpeg_dlm.folders.model_folder import ModelParts, write_model
from jpeg_dlm.methods.registry import build_method
from jpeg_dlm.presets import preset


@pytest.fixture(scope="module", params=[0, 2], ids=["one block", "context"])
def words(request, tmp_path_factory) -> list[str]:
    """The command for a model of 12 tokens whose tokenizer knows the words of one text and no other character."""
    folder = tmp_path_factory.mktemp("words")
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=300, special_tokens=["<pad>", "</s>", "<unk>"])
    backend.train_from_iterator([made_up_text()], trainer)
    backend.save(str(folder / "tokenizer.json"))
    sizes = {"data.vocab_size": backend.get_vocab_size(), "data.packing": "padded", "encoder.kind": "random"}
    config = override(preset("smoke"), MICRO | sizes | {"encoder.scale": "none", "model.context_blocks": request.param})
    method = perturb(build_method(config).eval())
    model = write_model(ModelParts(method, config, folder, folder / "tokenizer.json", None), folder / "model")
    return ["generate", str(model), "-n", "1", "--device", "cpu", "--out", "texts.jsonl"]


def test_a_good_request_is_written(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--prompt", "The farmer plants"]) == 0 and (tmp_path / "texts.jsonl").is_file()


@pytest.mark.parametrize(("flags", "said"), [
    (["--prompt", ""], "The prompt is empty"), (["--prompt", " \n "], "The prompt is empty"),
    (["--prompt", "The farmer plants \u732b"], "The model's tokenizer does not know"),
    (["--template", "The \u732b [MASK:2]"], "The model's tokenizer does not know"),
    (["--contains", "\u732b"], "The model's tokenizer does not know"),
    (["--template", ""], "The template is empty"), (["--template", "  "], "The template is empty"),
    (["--template", "The farmer"], "The template has no hole"), (["--template", "The [MASK:0]"], "holds no token"),
    (["--template", "[MASK:13]"], "has 13 tokens or more, and a text of this model has 12"),
    (["--template", "The farmer plants corn " * 4 + "[MASK]"], "has 17 tokens or more"),
    (["--template", "[MASK:" + "9" * 50 + "]"], "a text of this model has 12"),
    (["--contains", "corn " * 13], "longer than a text of this model"),
    (["--prompt", "The", "--template", "[MASK]"], "Give a prompt or a template, not both"),
])  # fmt: skip
def test_bad_requests_are_one_sentence(words, flags, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*words, *flags]) in (1, 2)
    shown = capsys.readouterr()
    [line] = shown.err.splitlines()
    assert line.startswith("error: ") and said in line and not shown.out
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_longer_than_the_model_is_refused_or_cut_with_a_notice(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status = main([*words, "--prompt", "The farmer plants corn " * 10])
    shown = capsys.readouterr().err
    if status == 0:  # it has a context of two blocks
        assert shown.startswith("The prompt has 40 tokens, of which the model sees the last 28.\n")
        return
    assert (
        shown
        == "error: The prompt has 40 tokens, and a text of this model has 12: shorten it, so that something is left to write.\n"
    )
    assert list(tmp_path.iterdir()) == []
