"""Words and copies against a corpus made by hand."""

from pathlib import Path

import numpy as np
import pytest

from jpeg_dlm.config import DataConfig
from jpeg_dlm.evaluation.metrics import TrainingTextStats, words_of
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.prepare import prepare


def test_words():
    assert words_of("The dog's 2 bones—they DON'T rot.", whole=True) == ["the", "dog's", "bones", "they", "don't", "rot"]
    assert words_of("ing the dog bar", whole=False) == ["the", "dog"]


SENTENCES = ["A dog runs home.", "A cat sits here.", "Two men walk home.", "The dog sits."]


def prepared(folder: Path, packing: str) -> TrainingTextStats:
    text = folder / "text.txt"
    text.write_text("\n\n".join(SENTENCES * 30))
    length = 16 if packing == "padded" else 8
    data = DataConfig(source=str(text), vocab_size=300, token_len=length, packing=packing, holdout=0.1)
    prepare(data, folder / "data")
    train = Blocks(folder / "data", "train")
    return TrainingTextStats(train, train.tokenizer())


def rows_of(known: TrainingTextStats, *texts: str) -> list[np.ndarray]:
    rows = [known.tokenizer.encode(text) + [known.tokenizer.eos_id] * known.padded for text in texts]
    return [np.array(row) for row in rows]


def test_a_corpus_made_by_hand(tmp_path: Path):
    known = prepared(tmp_path, "padded")
    assert known.known == {"a", "dog", "runs", "home", "cat", "sits", "here", "two", "men", "walk", "the"}
    found = known.measure(rows_of(known, "A dog sits home.", "A cat sits here.", "Two rulady walk"))
    assert found["words"] == pytest.approx(10 / 11)
    assert found["distinct"] == 1.0  # a dog, dog sits, sits home, a cat, cat sits, sits here, two rulady, rulady walk
    assert found["copied"] == pytest.approx(1 / 3)
    assert known.measure(rows_of(known, "A cat", "A cat"))["distinct"] == 0.5
    assert known.measure(rows_of(known, "cat sits here."))["copied"] == 0.0  # part of a text is no copy of one


def test_rows_that_are_cut_anywhere(tmp_path: Path):
    known = prepared(tmp_path, "continuous")
    assert known.known <= {"a", "dog", "runs", "home", "cat", "sits", "here", "two", "men", "walk", "the"}
    stream = np.frombuffer(known.stream, "<u4")
    assert known.has(stream[3:11].astype(np.int64))  # across two rows of 8
    assert not known.has(np.array([*stream[3:10], 299]))
