"""The models that ship with the package: whole, small, and able to do what the demo shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jpeg_dlm import load
from jpeg_dlm.checkpoints.model_folder import PACKAGED
from jpeg_dlm.cli.doctor import PAIRS
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


@pytest.fixture(scope="module")
def translator():
    return load("translator", "cpu")


@pytest.mark.parametrize(("name", "limit"), [("bundled", 15e6), ("translator", 15e6)])
def test_their_files_are_whole_and_small(name, limit):
    assert verify_manifest(PACKAGED[name]) and sum(file.stat().st_size for file in PACKAGED[name].iterdir()) < limit


@pytest.mark.parametrize("name", PACKAGED)
def test_they_have_names_that_give_way_to_a_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load(name, "cpu").parts.origin == PACKAGED[name]
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=name):
        load(name, "cpu")


def test_it_has_the_sizes_text_and_sampler_of_the_preset(model):
    expected = preset("captions")
    expected = replace(expected, data=replace(expected.data, tokenizer="tokenizer.json"))  # fine-tuned with that of its start
    for section in ("data", "encoder", "model"):
        assert getattr(model.config, section) == getattr(expected, section)
    stored = {"solver": "sde", "gamma": 0.5}  # see the model card
    assert model.config.sampler == replace(expected.sampler, **stored)
    assert model.config.rate == 0.25
    assert model.tokenizer.vocab_size == expected.data.vocab_size


def test_the_translator_is_the_model_of_its_preset(translator):
    expected = preset("translate")
    expected = replace(expected, data=replace(expected.data, tokenizer="bpe"))
    for section in ("data", "encoder", "model", "objective", "sampler"):
        assert getattr(translator.config, section) == getattr(expected, section)


def test_the_translator_translates_its_own_source(translator):
    """Held-out sentences: words are those of a person's translation, and not those of another sentence's."""
    from sacrebleu import CHRF

    texts, references = translator.generate(source=list(PAIRS)), list(PAIRS.values())
    own, other = (CHRF().corpus_score(texts, [refs]).score for refs in (references, references[1:] + references[:1]))
    assert own > 30 and own > 2 * other
    assert texts[:3] == translator.generate(source=list(PAIRS)[:3], seed=5)  # without noise at the start there is one answer


def test_the_demo_shows_all_its_acts(capsys):
    assert main(["demo"]) == 0
    out, err = capsys.readouterr()
    assert "step " in err and "t=1.00" in err
    acts = ("1. French to English", "2. Writing", "3. The codec", "4. Halfway", "What to try next")
    for part in (*acts, *PAIRS, *PAIRS.values()):
        assert part in " ".join(out.split())


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
        given = (fixed >= 0) & (fixed != model.tokenizer.eos_id)  # an earlier end may take the place of the one that is given
        assert tokens[given].equal(fixed[given])
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
