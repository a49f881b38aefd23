"""Preparation: split by document, exact bytes after any interruption, and errors that say what to do."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hub_stand_in import HubStandIn
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from jpeg_dlm.config import DataConfig
from jpeg_dlm.text import prepare as module
from jpeg_dlm.text import split as split_module
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.prepare import prepare
from jpeg_dlm.text.split import choose_split, draw
from jpeg_dlm.text.tokenizer import SPECIALS, TextTokenizer
from jpeg_dlm.util.errors import DataError, UsageError

WORDS = "people union power law peace war trade land river state nation great small old new our their".split()


def write_corpus(path, documents=120, length=40):
    rng = np.random.default_rng(0)
    lines = [{"text": f"Document {i} says: {' '.join(rng.choice(WORDS, length))}. It ends here."} for i in range(documents)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return [line["text"] for line in lines]


def config(tmp_path, **options):
    if not (tmp_path / "a.jsonl").exists():
        write_corpus(tmp_path / "a.jsonl")
    return DataConfig(**({"source": str(tmp_path / "a.jsonl"), "vocab_size": 320, "token_len": 16, "holdout": 0.1} | options))


def content(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_documents_with_unknown_words_are_left_out_of_both_parts(tmp_path):
    texts = [f"The {' '.join(np.random.default_rng(i).choice(WORDS, 6))}{' rare' * (i % 5 == 0)}." for i in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    size = len(SPECIALS) + len(WORDS) + 2  # "The" and the period, but not "rare"
    data = config(tmp_path, tokenizer="words", vocab_size=size, known=True, packing="padded", whole=True)
    done = prepare(data, tmp_path / "out")
    kept = []
    for name in ("train", "heldout"):
        blocks = Blocks(tmp_path / "out", name)
        kept += [blocks.tokenizer().decode(row) for row in blocks.rows(range(len(blocks))).tolist()]
    assert set(kept) == {text for text in texts if "rare" not in text}
    assert f"{len(texts) - len(kept)} documents" in done.note
    with_all = prepare(replace(data, known=False), tmp_path / "all")
    assert with_all.train_rows + with_all.heldout_rows == len(texts) and not with_all.note


def test_splits_are_disjoint_whole_documents_and_lose_only_the_tail(tmp_path):
    data = config(tmp_path)
    texts = write_corpus(tmp_path / "a.jsonl")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train-00009.bin").write_bytes(b"left by other options")
    done = prepare(data, tmp_path / "out")
    assert not {"train-00009.bin", "state.npz"} & {path.name for path in (tmp_path / "out").iterdir()}
    index = json.loads((tmp_path / "out" / "index.json").read_text("utf-8"))
    seen = {}
    for name in ("train", "heldout"):
        blocks = Blocks(tmp_path / "out", name)
        tokenizer, part = blocks.tokenizer(), index["splits"][name]
        stream = blocks.rows(range(len(blocks))).flatten().tolist()
        ends = [i for i, t in enumerate(stream) if t == tokenizer.eos_id]
        seen[name] = [tokenizer.decode(stream[a + 1 : b]) for a, b in zip([-1, *ends], ends, strict=False)]
        assert 0 <= part["documents"] - len(seen[name]) <= 1
        assert 0 <= part["tokens"] + part["documents"] - len(stream) < 16
        assert part["unk"] == 0 and part["rows"] == len(blocks)
        order = [texts.index(t) for t in seen[name]]
        assert order == sorted(order)
    assert not set(seen["train"]) & set(seen["heldout"]) and len(seen["heldout"]) >= 5
    assert done.train_rows == len(Blocks(tmp_path / "out")) and not done.reused
    lines = (tmp_path / "out" / "heldout.jsonl").read_text("utf-8").splitlines()
    assert len(lines) == done.heldout_rows and json.loads(lines[0])["text"].startswith("Document")


class Stop(Exception):
    pass


def stop_after(count):
    """A check that raises when it is called for the `count`-th time."""
    left = iter(range(count - 1))

    def check():
        if next(left, None) is None:
            raise Stop

    return check


def interrupt_and_resume(data, tmp_path, monkeypatch, after, shard_bytes=16 * 2 * 30, damage=lambda out: None):
    """Prepare at one go and with an interruption; return where the second attempt began to read."""
    prepare(data, tmp_path / "whole", shard_bytes=shard_bytes)
    tokenizer = Blocks(tmp_path / "whole").tokenizer()
    with pytest.raises(Stop):
        prepare(data, tmp_path / "cut", tokenizer=tokenizer, check=stop_after(after), shard_bytes=shard_bytes)
    assert not (tmp_path / "cut" / "index.json").exists()
    damage(tmp_path / "cut")
    starts, pieces = [], split_module.Split.pieces
    monkeypatch.setattr(split_module.Split, "pieces", lambda *args: starts.append(args[2]) or pieces(*args))
    prepare(data, tmp_path / "cut", tokenizer=tokenizer, shard_bytes=shard_bytes)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    return starts[0]


@pytest.mark.parametrize("packing", ["continuous", "sentences", "padded"])
@pytest.mark.parametrize("after", [3, 9])
def test_interrupted_preparation_ends_with_the_same_bytes(tmp_path, monkeypatch, packing, after):
    monkeypatch.setattr(module, "BATCH", 1500)
    monkeypatch.setattr(module, "HEAD", 4000)
    start = interrupt_and_resume(config(tmp_path, packing=packing, frame=packing == "padded"), tmp_path, monkeypatch, after)
    assert after < 9 or start.document > 10, "finished shards are not made again"


CHILD = """
import sys, time
from pathlib import Path
from jpeg_dlm.config import DataConfig
from jpeg_dlm.text import prepare as module
module.BATCH, module.HEAD = 1500, 4000
data = DataConfig(source=sys.argv[1], vocab_size=320, token_len=16, holdout=0.1)
module.prepare(data, Path(sys.argv[2]), check=lambda: time.sleep(0.1), shard_bytes=16 * 2 * 30)
"""


@pytest.mark.slow
def test_killed_process_is_taken_up_again(tmp_path):
    source, out = config(tmp_path).source, tmp_path / "out"
    child = subprocess.Popen([sys.executable, "-c", CHILD, source, str(out)])
    while not (out / "train-00002.bin").exists():
        assert child.poll() is None
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not (out / "index.json").exists() and (out / "state.npz").exists()
    subprocess.run([sys.executable, "-c", CHILD, source, str(out)], check=True)
    subprocess.run([sys.executable, "-c", CHILD, source, str(tmp_path / "whole")], check=True)
    assert content(out) == content(tmp_path / "whole")


@pytest.mark.parametrize("victim", ["state.npz", "train-00000.bin"])
def test_damaged_state_or_shard_means_starting_over(tmp_path, monkeypatch, victim):
    def damage(out):
        raw = bytearray((out / victim).read_bytes())
        raw[len(raw) // 2] ^= 255
        (out / victim).write_bytes(raw)

    monkeypatch.setattr(module, "BATCH", 1500)
    start = interrupt_and_resume(config(tmp_path), tmp_path, monkeypatch, 9, damage=damage)
    assert start == split_module.START


def test_finished_folder_is_reused_or_refused(tmp_path):
    data, out = config(tmp_path), tmp_path / "out"
    first = prepare(data, out)
    before = content(out)
    assert prepare(replace(data, cache_features=True), out) == replace(first, reused=True)
    for option, value in {"token_len": 8, "packing": "padded", "frame": True, "field": "title"}.items():
        with pytest.raises(DataError, match=f"data.{option}"):
            prepare(replace(data, **{option: value}), out)
    assert content(out) == before
    write_corpus(tmp_path / "a.jsonl", documents=121)
    with pytest.raises(DataError, match="has changed"):
        prepare(data, out)
    (tmp_path / "a.jsonl").unlink()
    assert prepare(data, out).reused


@pytest.mark.parametrize("after", [3, 8])
def test_held_out_text_is_the_split_that_the_source_names(tmp_path, monkeypatch, after):
    texts = write_corpus(tmp_path / "a.jsonl", documents=200)
    splits = {"train": texts[:160], "test": texts[160:]}
    hub = HubStandIn({"default": {name: [{"text": text} for text in part] for name, part in splits.items()}})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    data = config(tmp_path, source="hf:own/set:train,test", packing="padded", token_len=128)
    prepare(data, tmp_path / "whole")
    for name, documents in {"train": texts[:160], "heldout": texts[160:]}.items():
        blocks = Blocks(tmp_path / "whole", name)
        assert [blocks.tokenizer().decode(row) for row in blocks.rows(range(len(blocks))).tolist()] == documents
    # An interruption at any place, also inside the held-out split, changes no byte.
    monkeypatch.setattr(module, "BATCH", 2000)
    tokenizer = Blocks(tmp_path / "whole").tokenizer()
    with pytest.raises(Stop):
        prepare(data, tmp_path / "out", tokenizer=tokenizer, check=stop_after(after), shard_bytes=4000)
    prepare(data, tmp_path / "out", tokenizer=tokenizer, shard_bytes=4000)
    for name in ("train", "heldout"):
        parts = [Blocks(tmp_path / folder, name) for folder in ("whole", "out")]
        assert torch.equal(*(blocks.rows(range(len(blocks))) for blocks in parts))


def test_frames_of_a_tokenizer_with_an_end_token_only(tmp_path):
    """The packing of MDLM and Duo with GPT-2's tokenizer: documents, each with an end token, cut anywhere between two more."""
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in ("ab\n\n cd", "efg", "h" * 40, "xy")))
    data = config(tmp_path, source=str(tmp_path / "b.jsonl"), frame=True, vocab_size=257, token_len=6, holdout=0.3)
    prepare(data, tmp_path / "out", None, TextTokenizer(backend))
    end = 256
    for name in ("train", "heldout"):
        blocks = Blocks(tmp_path / "out", name)
        rows = blocks.rows(range(len(blocks)))
        assert (rows[:, 0] == end).all() and (rows[:, -1] == end).all()
        stream = "".join("|" if i == end else blocks.tokenizer().decode([i]) for i in rows[:, 1:-1].flatten().tolist())
        documents = {"heldout": "ab\n\n cd|efg|xy|", "train": "h" * 40 + "|"}[name]  # with all white space
        assert documents.startswith(stream) and len(documents) - len(stream) < 4


@pytest.mark.parametrize("documents", [2, 3, 10, 400])
@pytest.mark.parametrize("share", [0.001, 0.02, 0.4])
def test_both_splits_get_documents(documents, share):
    head = ["word " * 20] * documents
    held, total = held_out(head, choose_split(head, share, 8))
    assert 64 <= held < total and held <= max(80, 1.3 * share * total)  # 64 characters: a row's worth


def held_out(documents, split):
    """Characters held out, and in all; the pieces are the documents."""
    pieces = list(split.pieces(documents))
    assert "".join(piece.content for piece in pieces) == "".join(documents)
    return sum(len(p.content) for p in pieces if p.split == "heldout"), sum(map(len, documents))


def test_many_small_documents_are_drawn_by_their_number_alone():
    rng = np.random.default_rng(1)
    head = ["x" * n for n in rng.integers(20, 200, 5000)]
    split = choose_split(head, 0.05, 16)
    pieces = list(split.pieces([*head, *head]))
    assert [p.content for p in pieces] == [*head, *head]
    assert [p.split == "heldout" for p in pieces] == [draw(i) < 0.05 for i in range(10_000)]


@pytest.mark.parametrize(
    "sizes", [[30_000], [9_000] * 4, [90_000, *[300] * 30], [*[300] * 30, 90_000], [2_000] * 20, [60_000, 200, 40_000, 100]]
)
@pytest.mark.parametrize("share", [0.02, 0.04, 0.2])
def test_the_held_out_share_is_that_of_the_text(sizes, share):
    documents = ["".join(f"w{i} " for i in range(n))[:n] for n in sizes]
    held, total = held_out(documents, choose_split(documents, share, 16))
    assert 0.7 * share <= held / total <= 1.3 * share


def test_a_long_document_after_those_looked_at_is_cut_too(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "HEAD", 4000)
    (tmp_path / "d").mkdir()
    for i in range(200):
        (tmp_path / "d" / f"{i:03}.txt").write_text(f"A short text with the number {i} in it.")
    (tmp_path / "d" / "z.txt").write_text(" ".join(f"number {i} of many," for i in range(4000)))
    prepare(config(tmp_path, source=str(tmp_path / "d")), tmp_path / "out")
    assert 0.07 < share_of_tokens(tmp_path / "out") < 0.13


UNSPACED = "".join(map(chr, np.random.default_rng(2).integers(0x4E00, 0x4F00, 9000)))  # Chinese characters


def share_of_tokens(folder):
    splits = json.loads((folder / "index.json").read_text("utf-8"))["splits"]
    return splits["heldout"]["tokens"] / (splits["heldout"]["tokens"] + splits["train"]["tokens"])


@pytest.mark.parametrize("packing", ["continuous", "sentences", "padded"])
@pytest.mark.parametrize("text", ["One sentence follows another. ", "nosentences ", "a line\n\n", UNSPACED])
def test_one_document_is_split_inside_and_says_so(tmp_path, text, packing):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.txt").write_text(text * max(1, 9000 // len(text)), "utf-8")
    done = prepare(config(tmp_path, source=str(tmp_path / "d"), token_len=8, packing=packing), tmp_path / "out")
    assert done.train_rows > done.heldout_rows > 0 and 0.08 < share_of_tokens(tmp_path / "out") < 0.12
    assert "1 document longer than all the text to hold out" in done.note


@pytest.mark.parametrize("after", [2, 6])
def test_interruption_inside_a_document_changes_no_byte(tmp_path, monkeypatch, after):
    monkeypatch.setattr(module, "BATCH", 1500)
    monkeypatch.setattr(split_module, "CHUNK", 2000)
    (tmp_path / "d").mkdir()
    for name, count in {"a": 900, "b": 10, "c": 1200}.items():
        (tmp_path / "d" / f"{name}.txt").write_text(" ".join(f"number {i} of many," for i in range(count)))
    start = interrupt_and_resume(config(tmp_path, source=str(tmp_path / "d")), tmp_path, monkeypatch, after)
    assert after < 6 or start > split_module.START, "finished shards are not made again"


def write_rows(tmp_path, padded=True, count=120):
    """Rows of 16 ids of a tokenizer made here, as JSON lines without text; every third one padded, if asked for."""
    prepare(config(tmp_path), tmp_path / "text")
    pad = Blocks(tmp_path / "text").pad_id
    rng = np.random.default_rng(3)
    rows = [rng.integers(6, 320, 16).tolist() for _ in range(count)]
    for row in rows[::3] if padded else []:
        row[11:] = [pad] * 5
    lines = [json.dumps({"id": f"row {i}", "input_ids": row, "attention_mask": [1] * 16}) for i, row in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return rows, config(tmp_path, source=str(tmp_path / "rows.jsonl"), tokenizer=str(tmp_path / "text"))


@pytest.mark.parametrize("padded", [True, False])
def test_rows_of_ids_are_taken_as_they_are(tmp_path, padded):
    rows, data = write_rows(tmp_path, padded)
    done = prepare(data, tmp_path / "out")
    train, heldout = (Blocks(tmp_path / "out", name) for name in ("train", "heldout"))
    found = [blocks.rows(range(len(blocks))).tolist() for blocks in (train, heldout)]
    assert sorted(found[0] + found[1]) == sorted(rows) and 8 <= len(found[1]) <= 16
    assert all([row for row in rows if row in part] == part for part in found), "the order is kept"
    assert train.index["padded"] is padded and train.index["data"]["packing"] == ("padded" if padded else "continuous")
    assert sum(train.index["splits"][name]["tokens"] for name in ("train", "heldout")) == 120 * 16 - padded * 40 * 5
    assert done.tokenizer == Blocks(tmp_path / "text").index["tokenizer"]
    train.verify()
    assert prepare(data, tmp_path / "out") == replace(done, reused=True)


def test_rows_of_ids_that_do_not_fit_are_refused(tmp_path):
    _, data = write_rows(tmp_path)
    for change, word in {"token_len": 8, "tokenizer": "bpe", "detokenize": "lm1b"}.items():
        with pytest.raises((DataError, UsageError), match=f"data.{change}"):
            prepare(replace(data, **{change: word}), tmp_path / "out")
    rows = (tmp_path / "rows.jsonl").read_text()
    for line, word in {
        json.dumps({"input_ids": [7] * 15 + [320]}): "the id 320",
        json.dumps({"input_ids": [7] * 15}): "Row 121",
        json.dumps({"input_ids": [7] * 15 + [-1]}): "Line 121",
        json.dumps({"text": "Some text."}): "both text and token ids",
    }.items():
        (tmp_path / "rows.jsonl").write_text(rows + line + "\n")
        with pytest.raises(DataError, match=word):
            prepare(data, tmp_path / "out")


def test_interrupted_rows_of_ids_end_with_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BATCH", 200)
    _, data = write_rows(tmp_path)
    assert interrupt_and_resume(data, tmp_path, monkeypatch, 6, shard_bytes=16 * 2 * 10) > split_module.START


def test_a_vocabulary_too_small_or_too_little_text_is_refused(tmp_path):
    prepare(config(tmp_path), tmp_path / "out")
    with pytest.raises(UsageError, match="set it to"):
        prepare(config(tmp_path, tokenizer=str(tmp_path / "out"), vocab_size=300), tmp_path / "other")
    (tmp_path / "b.txt").write_text("Short.\n\nVery short.", "utf-8")
    with pytest.raises(DataError, match="too few for a block of 16"):
        prepare(config(tmp_path, source=str(tmp_path / "b.txt")), tmp_path / "short")


def test_full_disk_is_named(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left on device.*free some space"):
        prepare(config(tmp_path), tmp_path / "out")
