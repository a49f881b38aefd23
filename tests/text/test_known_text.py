"""Trigram, words and copies against computations by hand and by brute force."""

import itertools
import math
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jpeg_dlm.config import DataConfig
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.known_text import KnownText, Trigram, cut_rows, shuffled, spread, words_of
from jpeg_dlm.text.prepare import prepare

VOCAB = 7


def random_rows(count, seed, vocab=VOCAB):
    rng = random.Random(seed)
    return [np.array([rng.randrange(vocab) for _ in range(rng.randint(1, 6))]) for _ in range(count)]


def brute_force(train, token, history, vocab):
    """Witten and Bell's rule written down: dictionaries, one token at a time."""
    p = 1 / vocab
    for n in range(3):
        context = tuple(history[len(history) - n :])
        after = Counter()
        for row in train:
            padded = [None, None, *row.tolist()]
            for i in range(2, len(padded)):
                if tuple(padded[i - n : i]) == context:
                    after[padded[i]] += 1
        if after:
            p = (after[token] + len(after) * p) / (sum(after.values()) + len(after))
    return p


def test_the_trigram_is_the_rule():
    train = random_rows(25, 0, vocab=5)  # two tokens are never seen
    other = random_rows(10, 1)
    expected = []
    for row in other:
        history = [None, None]
        for token in row.tolist():
            expected.append(-math.log(brute_force(train, token, history, VOCAB)))
            history.append(token)
    trigram = Trigram(train, VOCAB)
    assert trigram.nats(other) == pytest.approx(expected)
    assert trigram.perplexity(other) == pytest.approx(math.exp(sum(expected) / len(expected)))


def test_probabilities_sum_to_one():
    trigram = Trigram(random_rows(25, 0, vocab=5), VOCAB)
    for a, b in itertools.product(range(VOCAB), repeat=2):
        last = [trigram.nats([np.array([a, b, c])])[2] for c in range(VOCAB)]
        assert np.exp(-np.array(last)).sum() == pytest.approx(1)


def test_a_closed_form():
    """One row 'x x': after the start and after x only x is known, so p = (1 + p') / 2 at each order of each token."""
    found = Trigram([np.array([0, 0])], 4).nats([np.array([0, 0])])
    unigram = (2 + 1 / 4) / 3
    p = (1 + (1 + unigram) / 2) / 2
    assert np.exp(-found) == pytest.approx([p, p])


def test_rows_end_with_their_end():
    rows = np.array([[5, 6, 1, 9], [1, 5, 5, 1], [5, 6, 7, 8]])
    assert [row.tolist() for row in cut_rows(rows, 1)] == [[5, 6, 1], [1], [5, 6, 7, 8]]
    assert [row.tolist() for row in cut_rows(rows, None)] == rows.tolist()


def test_shuffled_rows_keep_tokens_and_end():
    rows = [np.arange(2, 40), np.array([5, 6, 7, 1])]
    mixed = shuffled(rows, 1)
    assert [sorted(row.tolist()) for row in mixed] == [sorted(row.tolist()) for row in rows]
    assert mixed[1][-1] == 1 and mixed[0].tolist() != rows[0].tolist()
    assert all(np.array_equal(a, b) for a, b in zip(mixed, shuffled(rows, 1), strict=True))


def test_spread():
    assert spread(10, 20).tolist() == list(range(10))
    assert spread(10, 5).tolist() == [0, 2, 4, 6, 8]


def test_words():
    assert words_of("The dog's 2 bones—they DON'T rot.", whole=True) == ["the", "dog's", "bones", "they", "don't", "rot"]
    assert words_of("ing the dog bar", whole=False) == ["the", "dog"]


SENTENCES = ["A dog runs home.", "A cat sits here.", "Two men walk home.", "The dog sits."]


def prepared(folder: Path, packing: str) -> KnownText:
    text = folder / "text.txt"
    text.write_text("\n\n".join(SENTENCES * 30))
    data = DataConfig(
        source=str(text), vocab_size=300, token_len=16 if packing == "padded" else 8, packing=packing, holdout=0.1
    )  # fmt: skip
    prepare(data, folder / "data")
    train = Blocks(folder / "data", "train")
    return KnownText(train, Blocks(folder / "data", "heldout"), train.tokenizer())


def rows_of(known: KnownText, *texts: str) -> list[np.ndarray]:
    rows = [known.tokenizer.encode(text) + [known.tokenizer.eos_id] * known.padded for text in texts]
    return [np.array(row) for row in rows]


def test_a_corpus_made_by_hand(tmp_path: Path):
    known = prepared(tmp_path, "padded")
    assert known.known == {"a", "dog", "runs", "home", "cat", "sits", "here", "two", "men", "walk", "the"}
    found = known.measure(rows_of(known, "A dog sits home.", "A cat sits here.", "Two rulady walk"))
    assert found.words == pytest.approx(10 / 11)
    assert found.distinct == 1.0  # a dog, dog sits, sits home, a cat, cat sits, sits here, two rulady, rulady walk
    assert found.copied == pytest.approx(1 / 3)
    assert known.measure(rows_of(known, "A cat", "A cat")).distinct == 0.5
    assert known.measure(rows_of(known, "cat sits here.")).copied == 0.0  # part of a text is no copy of one
    assert known.real is not None and known.shuffled is not None
    assert (
        known.real.words == 1.0
        and known.real.copied == 1.0
        and 1 < known.real.trigram < 3 * known.real.trigram < known.shuffled
    )


def test_what_follows_the_end_is_not_looked_at(tmp_path: Path):
    known = prepared(tmp_path, "padded")
    rows = rows_of(known, "A cat sits here.")
    noise = np.array([known.tokenizer.encode("blurb blurb blurb")[:4]])
    longer = known.cut(np.concatenate([rows[0][None], noise], 1))
    assert known.measure(longer) == known.measure(rows)


def test_rows_that_are_cut_anywhere(tmp_path: Path):
    known = prepared(tmp_path, "continuous")
    assert known.known <= {"a", "dog", "runs", "home", "cat", "sits", "here", "two", "men", "walk", "the"}
    stream = np.frombuffer(known.stream, "<u4")
    assert known.has(stream[3:11].astype(np.int64))  # across two rows of 8
    assert not known.has(np.array([*stream[3:10], 299]))
