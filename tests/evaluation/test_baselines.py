"""Floors and ceiling: lengths, frequencies, words and texts, against the rows that they are made of."""

from collections import Counter

import pytest

from jpeg_dlm.evaluation.texts import ModelSource, TextBaseline
from jpeg_dlm.options import override
from jpeg_dlm.text.blocks import Blocks

pytest_plugins = ["tiny_evaluation"]  # fixtures


@pytest.fixture
def source(micro, heldout):
    model = type(micro)(micro.parts, "cpu")
    model.config = override(micro.config, {"data.packing": "padded" if heldout.index["padded"] else "continuous"})
    return ModelSource(model, "micro", 4, heldout)


def test_real_texts_are_other_ones_than_those_compared_with(source):
    real = TextBaseline("real", source)
    n = len(source.heldout) // 2
    own, others = real.write(0, n, {}, False).texts, real.real(n).texts.texts
    assert real.enough(n) and own == source.texts(source.heldout.rows(range(n, 2 * n)), False).texts and own != others
    assert not real.enough(len(source.heldout)) and real.runs((0, 1, 2)) == [0]


def test_shuffled_words_are_the_words_of_the_real_texts(source):
    real, words = TextBaseline("real", source).write(0, 8, {}, False), TextBaseline("words", source).write(0, 8, {}, False)
    assert [Counter(t.split()) for t in words.texts] == [Counter(t.split()) for t in real.texts] and words.texts != real.texts
    assert words.texts != TextBaseline("words", source).write(1, 8, {}, False).texts


def test_tokens_by_frequency_have_real_lengths_and_the_frequencies_of_the_training_text(source):
    rows = source.heldout.rows(range(len(source.heldout)))
    unigram = TextBaseline("unigram", source)
    drawn = unigram.drawn(rows, 0)
    train = Blocks(source.heldout.folder, "train")
    seen = train.rows(range(len(train)))
    ends = {train.pad_id, train.index["eos_id"]} if train.index["padded"] else set()
    for row, other in zip(rows.tolist(), drawn.tolist(), strict=True):
        assert [i in ends for i in row] == [i in ends for i in other]
    kept, known = ([i for i in x.flatten().tolist() if i not in ends] for x in (drawn, seen))
    found, wanted = Counter(kept), Counter(known)
    for token, count in wanted.most_common(5):
        share, sd = count / len(known), (count / len(known) / len(kept)) ** 0.5
        assert abs(found[token] / len(kept) - share) < 5 * sd
    assert unigram.drawn(rows, 0).equal(drawn) and not unigram.drawn(rows, 1).equal(drawn)
