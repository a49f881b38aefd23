"""The model `stories` of the package: it begins, goes on and ends texts of many blocks, in words of its corpus."""

from __future__ import annotations

import pytest

from jpeg_dlm import load
from jpeg_dlm.files import verify_manifest
from jpeg_dlm.folders.model_folder import PACKAGED, bundled_folder
from jpeg_dlm.presets import preset

# Written for this test in the manner of the training text; none of them is in it.
SENTENCES = [
    "One day, Lily and her mom went to the park to see the ducks in the big pond.",
    "The little bear was sad because he could not find his red ball.",
    'Tom said, "Thank you for the cake!" and gave his friend a big hug.',
]


@pytest.fixture(scope="module")
def model():
    return load("stories", "cpu")


def test_the_models_of_the_package_are_whole_and_small_together():
    folders = [bundled_folder(name) for name in PACKAGED]
    assert all(verify_manifest(folder) for folder in folders)
    assert sum(file.stat().st_size for folder in folders for file in folder.iterdir()) < 30e6


def test_it_has_the_sizes_and_text_of_the_preset(model):
    expected = preset("stories")
    for section in ("data", "encoder", "model"):
        assert getattr(model.config, section) == getattr(expected, section)
    assert model.config.rate == 0.25 and "from the package" in repr(model)


def test_a_text_starts_as_stories_start_and_goes_on_over_blocks(model):
    texts = model.generate(8, length=100)
    assert sum(text.startswith(("Once upon a time", "One day", "There was")) for text in texts) >= 6
    assert all(len(model.tokenizer.encode(text)) > 64 for text in texts) and len(set(texts)) == 8
    assert texts[:2] == model.generate(2, length=100)


def test_a_prompt_is_kept_and_continued(model):
    prompt = "Once upon a time, there was a big brown bear. He lived in the forest and loved to eat honey"
    (text,) = model.generate(1, prompt=prompt, length=60)
    assert text.startswith(prompt) and len(text) > len(prompt) + 60


def test_it_keeps_most_of_a_sentence(model):
    kept = total = 0
    for text, back in zip(SENTENCES, model.reconstruct(SENTENCES), strict=True):
        words, found = text.split(), back.split()
        kept += sum(a == b for a, b in zip(words, found, strict=False))
        total += len(words)
    assert kept / total > 0.9


@pytest.mark.slow
def test_most_stories_end(model):
    texts = model.generate(16, length=400)
    assert sum(len(model.tokenizer.encode(text)) < 400 for text in texts) >= 12
