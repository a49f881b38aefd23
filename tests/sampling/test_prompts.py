"""Prompts and templates: what samples keep, and what cannot be kept."""

import pytest
import torch
from conftest import MICRO, made_up_text

from jpeg_dlm import load
from jpeg_dlm.sampling.prompts import template_ids
from jpeg_dlm.text.packing import first_copy
from jpeg_dlm.text.tokenizer import train_bpe, train_words
from jpeg_dlm.util.errors import DataError, UsageError

pytest_plugins = ["stand_in"]  # fixtures

L = MICRO["data.token_len"]


@pytest.fixture(params=["ar", "unigram"])
def writer(request, stand_ins, micro_folders):
    """A model that can keep what it is given."""
    return load(micro_folders(request.param), "cpu")


def test_texts_begin_with_the_prompt(writer):
    prompt = "The farmer plants"
    ids = writer.tokenizer.encode(prompt)
    rows = writer.sample(4, fixed=writer.fixed_tokens(prompt)).tolist()
    assert all(row[: len(ids)] == ids and -1 not in row for row in rows)
    assert len({tuple(row[len(ids) :]) for row in rows}) > 1  # the rest is written
    texts = writer.generate(4, prompt=prompt)
    assert texts == writer.to_text(torch.tensor(rows)) and all(text.startswith(prompt) for text in texts)


def test_a_template_is_kept_around_its_holes(writer):
    fixed = writer.fixed_tokens(template="The farmer [MASK:2] corn")
    before, after = writer.tokenizer.encode("The farmer"), writer.tokenizer.encode("corn")
    free = [-1, -1]
    assert fixed.tolist() == [*before, *free, *after] + [-1] * (L - len(before) - 2 - len(after))
    for row in writer.sample(3, fixed=fixed):
        assert torch.equal(row[fixed >= 0], fixed[fixed >= 0])


@pytest.mark.parametrize("whole, template", [
    ("The farmer plants corn.", "The farmer [MASK] corn."), ("The farmer plants corn.", "The farmer plants [MASK]."),
    ("The farmer plants corn.", "[MASK] farmer plants corn[MASK]"), ("The smith reads, near", "The smith [MASK], near"),
])  # fmt: skip
@pytest.mark.parametrize("train", [train_bpe, train_words])
def test_pieces_of_a_template_are_the_tokens_of_the_whole_text(whole, template, train):
    """Filled with the right tokens, a template gives the ids of the text: a full stop stays one without a space before it."""
    tokenizer = train([made_up_text(), whole], 600)  # enough for every word to be a token
    ids, found = tokenizer.encode(whole), template_ids(tokenizer, template)
    assert len(found) == len(ids) and [a for a, b in zip(ids, found, strict=True) if b != -1] == [b for b in found if b != -1]


@pytest.mark.parametrize("fixed", [
    {"prompt": "a", "template": "[MASK]"}, {"prompt": "word " * 20}, {"prompt": " "}, {"template": "none"}, {"template": " "},
    {"template": "[MASK:9999999999]"}, {"template": "a [MASK:0]"}, {"template": "[MASK:13]"}, {"fixed": torch.zeros(3)},
])  # fmt: skip
def test_what_cannot_be_kept_is_refused(fixed, writer):
    with pytest.raises((UsageError, DataError), match="|".join(fixed)):
        writer.generate(1, **fixed)


def test_what_fills_a_block_by_repetition_is_one_text():
    end = 0
    assert first_copy([5, 6, 7, end, 5, 6, 7, end, 5, 6], end) == [5, 6, 7]
    assert first_copy([5, 6, 7, end, 5, 9, 7, end, 5, 6], end) == [5, 6, 7]  # the codec changed a token of a copy
    for row in ([5, 6, 7, end, 8, 9, 4, end, 3, 2], [5, 6, 7, end], [5, 5, 5, 5]):
        assert first_copy(row, end) == row  # three texts, and single ones
