"""Rows come back as they were written, damage is noticed, and the order visits every row once per epoch."""

import json
import random
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jpeg_dlm.config import DataConfig
from jpeg_dlm.text.blocks import Blocks, EpochOrder
from jpeg_dlm.text.prepare import prepare
from jpeg_dlm.util.errors import DataError

TEXT = "\n\n".join(f"Paragraph {i} tells of the {w} and of nothing else." for i in range(40) for w in ("sun", "moon"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("blocks")
    (base / "a.txt").write_text(TEXT, "utf-8")
    data = DataConfig(source=str(base / "a.txt"), vocab_size=300, token_len=8, holdout=0.2)
    prepare(data, base / "out", shard_bytes=8 * 2 * 25)
    return base / "out"


def test_rows_are_those_of_the_shards_in_any_order(folder):
    blocks = Blocks(folder)
    files = sorted(folder.glob("train-*.bin"))
    assert len(files) > 2
    everything = np.concatenate([np.fromfile(f, "<u2") for f in files]).reshape(-1, 8)
    assert len(blocks) == len(everything) and blocks.token_len == 8
    wanted = [len(blocks) - 1, 0, 24, 25, 26, 0]
    rows = blocks.rows(wanted)
    assert rows.dtype == torch.int64 and rows.tolist() == everything[wanted].tolist()
    assert blocks.rows([]).shape == (0, 8) and blocks.mask(rows) is None
    for outside in (len(blocks), -1):
        with pytest.raises(IndexError):
            blocks.rows([outside])


def test_one_flipped_bit_is_named(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    Blocks(tmp_path).verify()
    before = Blocks(tmp_path).fingerprint
    shard = tmp_path / "train-00001.bin"
    raw = bytearray(shard.read_bytes())
    raw[7] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(DataError, match="train-00001.bin"):
        Blocks(tmp_path).verify()
    Blocks(tmp_path, "heldout").verify()
    assert Blocks(tmp_path).fingerprint == before == Blocks(folder).fingerprint
    shard.write_bytes(raw[:-2])
    with pytest.raises(DataError, match="train-00001.bin"):
        Blocks(tmp_path)
    shard.unlink()
    with pytest.raises(DataError, match="train-00001.bin"):
        Blocks(tmp_path)


def test_folders_that_are_not_prepared_are_refused(tmp_path):
    for index, word in {None: "not a prepared folder", "{": "not valid JSON", '{"format": 99}': "another version"}.items():
        if index:
            (tmp_path / "index.json").write_text(index, "utf-8")
        with pytest.raises(DataError, match=word):
            Blocks(tmp_path)


@given(st.integers(0, 5), st.integers(1, 30), st.integers(0, 200), st.integers(0, 60))
def test_every_row_is_seen_once_per_epoch_and_the_stream_is_addressed_by_position_alone(seed, n_rows, position, count):
    whole = EpochOrder(seed, n_rows).rows(0, position + count)
    assert EpochOrder(seed, n_rows).rows(position, count).tolist() == whole[position:].tolist()
    for first in range(0, len(whole) - n_rows, n_rows):
        assert sorted(whole[first : first + n_rows]) == list(range(n_rows))


def test_epochs_and_seeds_differ_and_the_order_is_pinned():
    a, b, c = EpochOrder(0, 100).rows(0, 100), EpochOrder(0, 100).rows(100, 100), EpochOrder(1, 100).rows(0, 100)
    assert a.tolist() != b.tolist() and a.tolist() != c.tolist()
    # A run resumed on another machine must see the same batches: these numbers may never change.
    assert EpochOrder(42, 10).rows(0, 8).tolist() == [5, 1, 8, 6, 9, 7, 2, 3]
    with pytest.raises(DataError, match="no rows"):
        EpochOrder(0, 0).rows(0, 1)


# ---------------------------------------------------------------- rows before a row


@pytest.fixture(scope="module")
def documents_folder(tmp_path_factory):
    """Documents of 1 to 5 rows; the words of each are its own."""
    rng, path = random.Random(0), tmp_path_factory.mktemp("documents")
    texts = [" ".join(f"d{i}" for _ in range(rng.randint(1, 16))) for i in range(80)]
    (path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = DataConfig(source=str(path / "text.jsonl"), vocab_size=300, token_len=8, packing="padded", holdout=0.1)
    prepare(data, path / "blocks")
    return path / "blocks"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_rows_before_are_those_of_the_same_document(documents_folder, count):
    blocks = Blocks(documents_folder)
    everything = blocks.rows(range(len(blocks)))
    documents: list[list[int]] = [[]]  # by the text itself: a document is what was joined, up to its end token
    for i, row in enumerate(everything.tolist()):
        documents[-1].append(i)
        if blocks.index["eos_id"] in row:
            documents.append([])
    assert max(map(len, documents)) > 3 and [1 for d in documents if len(d) == 1]
    rows, present = blocks.before(range(len(blocks)), count)
    for document in documents:
        for place, i in enumerate(document):
            there = [place - count + k >= 0 for k in range(count)]
            assert present[i].tolist() == there
            for k in range(count):
                if there[k]:
                    assert torch.equal(rows[i, k], everything[document[place - count + k]])


def test_rows_without_documents_have_none_before_them(documents_folder, tmp_path):
    shutil.copytree(documents_folder, tmp_path, dirs_exist_ok=True)
    index = json.loads((documents_folder / "index.json").read_text()) | {"given_rows": True}
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="prepare the text itself"):
        Blocks(tmp_path).before([1], 1)
