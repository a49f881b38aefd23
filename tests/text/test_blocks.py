"""Rows come back as they were written, damage is noticed, and the order visits every row once per epoch."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jpeg_dlm.config import DataConfig
from jpeg_dlm.errors import DataError
from jpeg_dlm.text.blocks import Blocks, EpochOrder
from jpeg_dlm.text.prepare import prepare

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
    with pytest.raises(IndexError):
        blocks.rows([len(blocks)])
    with pytest.raises(IndexError):
        blocks.rows([-1])


def test_rows_decode_to_the_text(folder):
    blocks = Blocks(folder, "heldout")
    text = blocks.tokenizer().decode(blocks.rows(range(len(blocks))).flatten())
    paragraphs = text.split(" else.")[:-1]
    assert len(paragraphs) > 3 and all(p.strip() + " else." in TEXT for p in paragraphs)


def test_one_flipped_bit_is_named(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
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


def test_folders_that_are_not_prepared_are_refused(folder, tmp_path):
    with pytest.raises(DataError, match="not a prepared folder"):
        Blocks(tmp_path)
    (tmp_path / "index.json").write_text("{", "utf-8")
    with pytest.raises(DataError, match="cannot be read"):
        Blocks(tmp_path)
    (tmp_path / "index.json").write_text(json.dumps({"format": 99}), "utf-8")
    with pytest.raises(DataError, match="another version"):
        Blocks(tmp_path)


@given(st.integers(0, 5), st.integers(1, 40), st.integers(0, 3), st.integers(1, 17))
def test_every_row_is_seen_once_per_epoch_whatever_the_batch(seed, n_rows, epoch, batch):
    first = epoch * n_rows
    order = EpochOrder(seed, n_rows).rows(first, n_rows)
    assert sorted(order) == list(range(n_rows))
    walker = EpochOrder(seed, n_rows)
    seen = [walker.rows(first + i, min(batch, n_rows - i)) for i in range(0, n_rows, batch)]
    assert np.concatenate(seen).tolist() == order.tolist()


@given(st.integers(0, 200), st.integers(0, 60), st.integers(1, 30))
def test_the_stream_is_addressed_by_position_alone(position, count, n_rows):
    whole = EpochOrder(3, n_rows).rows(0, position + count)
    part = EpochOrder(3, n_rows).rows(position, count)
    assert part.tolist() == whole[position:].tolist()


def test_epochs_and_seeds_differ_and_the_order_is_pinned():
    a, b, c = EpochOrder(0, 100).rows(0, 100), EpochOrder(0, 100).rows(100, 100), EpochOrder(1, 100).rows(0, 100)
    assert a.tolist() != b.tolist() and a.tolist() != c.tolist()
    # A run resumed on another machine must see the same batches: these numbers may never change.
    assert EpochOrder(42, 10).rows(0, 8).tolist() == [5, 1, 8, 6, 9, 7, 2, 3]
    with pytest.raises(DataError, match="no rows"):
        EpochOrder(0, 0).rows(0, 1)
