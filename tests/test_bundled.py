"""The model that ships with the package: whole, small, and able to do what the demo shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jpeg_dlm import load
from jpeg_dlm.checkpoints.model_folder import BUNDLED_FOLDER
from jpeg_dlm.cli.main import main
from jpeg_dlm.evaluation.tasks import templates
from jpeg_dlm.presets import preset
from jpeg_dlm.sampling.prompts import FixedTokenCounter
from jpeg_dlm.util.errors import CheckpointError
from jpeg_dlm.util.files import verify_manifest

# Written for this test in the manner of the training text; none of them is in it.
SENTENCES = [
    "A man in a blue shirt is riding a bike down the road.",
    "Two little girls are playing with a ball near the lake.",
    "An old woman is reading a book on a bench in the park.",
]


@pytest.fixture(scope="module")
def model():
    return load(device="cpu")


def test_its_files_are_whole_and_small():
    assert verify_manifest(BUNDLED_FOLDER) and sum(file.stat().st_size for file in BUNDLED_FOLDER.iterdir()) < 30e6


def test_it_has_a_name_that_gives_way_to_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("bundled", "cpu").parts.origin == BUNDLED_FOLDER
    (tmp_path / "bundled").mkdir()
    with pytest.raises(CheckpointError, match="bundled"):
        load("bundled", "cpu")


def test_it_has_the_sizes_text_and_sampler_of_the_preset(model):
    expected = preset("captions")
    expected = replace(expected, data=replace(expected.data, tokenizer="tokenizer.json"))  # fine-tuned with that of its start
    for section in ("data", "encoder", "model"):
        assert getattr(model.config, section) == getattr(expected, section)
    stored = {"solver": "sde", "gamma": 0.5}  # see the model card
    assert model.config.sampler == replace(expected.sampler, **stored)
    assert model.config.rate == 0.25
    assert model.tokenizer.vocab_size == expected.data.vocab_size


def test_the_demo_shows_all_its_acts(capsys):
    assert main(["demo"]) == 0
    out, err = capsys.readouterr()
    assert "step " in err and "t=1.00" in err
    for part in ("1. Writing", "2. The codec", "3. Halfway", "What to try next"):
        assert part in out


@pytest.mark.parametrize("text", ["A dog is running in the grass.", "A man is sitting.", SENTENCES[1]])
def test_a_text_comes_back_once_from_its_latents(model, text):
    assert model.decode(model.encode([text])) == model.reconstruct([text]) == [text]


@pytest.mark.slow
def test_it_fills_in_templates_through_its_latents(model):
    """Templates of sentences that it did not see; without guidance the latents decode to few of the given tokens."""
    rows = model._rows(map(model._ids, SENTENCES))[0].repeat(4, 1)
    fixed = templates(rows, model.layout, seed=1)
    shares = []
    for strength in (0.0, 1.0):
        decoded = FixedTokenCounter(fixed)
        tokens = model.sample(len(rows), fixed=fixed, watch=decoded, strength=strength)
        assert tokens[fixed >= 0].equal(fixed[fixed >= 0])
        shares.append(decoded.kept / decoded.tokens)
    assert shares[0] < 0.4 and shares[1] > 0.95


@pytest.mark.slow
def test_its_texts_contain_words_that_they_shall_contain(model):
    plain, guided = model.generate(8, steps=16), model.generate(8, steps=16, guide=model.contains("dog", "water"))
    assert sum("dog" in text and "water" in text for text in plain) <= 1
    assert sum("dog" in text and "water" in text for text in guided) >= 6


@pytest.mark.slow
def test_an_edit_keeps_everything_without_noise_and_chance_with_noise_alone(model):
    for text in SENTENCES:
        assert model.edit(text, noise=0.0) == [text]
        assert model.edit(text, 2, noise=1.0, seed=5) == model.generate(2, seed=5)
    rows = model._rows(map(model._ids, SENTENCES))[0].repeat(8, 1)
    written = model.rewritten(rows, 1.0)
    real = rows != model.tokenizer.pad_id
    chance = (rows.roll(1, 0) == written)[real].float().mean()  # against another sentence
    assert abs((rows == written)[real].float().mean() - chance) < 0.15
    some = (rows == model.rewritten(rows, 0.5))[real].float().mean()
    assert some > chance + 0.3
