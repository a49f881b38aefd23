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
from jpeg_dlm.config_io import from_dict
from jpeg_dlm.errors import DataError, UsageError
from jpeg_dlm.methods.registry import default_config
from jpeg_dlm.text import corpora
from jpeg_dlm.text import prepare as module
from jpeg_dlm.text import split as split_module
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.prepare import prepare
from jpeg_dlm.text.split import choose_split, draw
from jpeg_dlm.text.tokenizer import SPECIALS, TextTokenizer

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
    index = json.loads((tmp_path / "out" / "index.json").read_text("utf-8"))
    kept = []
    for name in ("train", "heldout"):
        blocks = Blocks(tmp_path / "out", name)
        tokenizer = blocks.tokenizer()
        rows = blocks.rows(range(len(blocks))).tolist()
        assert not any(tokenizer.unk_id in row for row in rows)
        kept += [tokenizer.decode(row) for row in rows]
    assert set(kept) == {text for text in texts if "rare" not in text}
    left_out = sum(index["splits"][name]["left_out"] for name in ("train", "heldout"))
    assert left_out == len(texts) - len(kept) and f"{left_out} documents with words outside the vocabulary" in done.note
    with_all = prepare(replace(data, known=False), tmp_path / "all")
    assert with_all.train_rows + with_all.heldout_rows == len(texts)
    assert with_all.note == f"Field 'text' of 200 records, {sum(map(len, texts)) / 1000:.3g} KB."


def test_splits_are_disjoint_whole_documents_and_lose_only_the_tail(tmp_path):
    data = config(tmp_path)
    texts = write_corpus(tmp_path / "a.jsonl")
    done = prepare(data, tmp_path / "out")
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


def test_shard_size_changes_no_row(tmp_path):
    data = config(tmp_path)
    prepare(data, tmp_path / "one")
    prepare(data, tmp_path / "many", shard_bytes=16 * 2 * 7)
    for name in ("train", "heldout"):
        one, many = Blocks(tmp_path / "one", name), Blocks(tmp_path / "many", name)
        assert one.rows(range(len(one))).tolist() == many.rows(range(len(many))).tolist()
    assert len(list((tmp_path / "many").glob("train-*.bin"))) > 10


class Stop(Exception):
    pass


@pytest.mark.parametrize("packing", ["continuous", "sentences", "padded"])
@pytest.mark.parametrize("after", [1, 3, 9])
def test_interrupted_preparation_ends_with_the_same_bytes(tmp_path, monkeypatch, packing, after):
    monkeypatch.setattr(module, "BATCH", 1500)
    monkeypatch.setattr(module, "HEAD", 4000)
    data = config(tmp_path, packing=packing, frame=packing == "padded")
    prepare(data, tmp_path / "whole", shard_bytes=16 * 2 * 30)
    calls = []

    def stop(done, total):
        calls.append(done)
        if len(calls) == after:
            raise Stop

    with pytest.raises(Stop):
        prepare(data, tmp_path / "cut", progress=stop, shard_bytes=16 * 2 * 30)
    assert not (tmp_path / "cut" / "index.json").exists()
    resumed = []
    prepare(data, tmp_path / "cut", progress=lambda done, total: resumed.append(done), shard_bytes=16 * 2 * 30)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert after < 9 or resumed[0] > calls[1], "finished shards are not made again"


CHILD = """
import sys, time
from pathlib import Path
from jpeg_dlm.config import DataConfig
from jpeg_dlm.text import corpora
from jpeg_dlm.text import prepare as module
module.BATCH, module.HEAD = 1500, 4000
data = DataConfig(source=sys.argv[1], vocab_size=320, token_len=16, holdout=0.1)
module.prepare(data, Path(sys.argv[2]), progress=lambda done, total: time.sleep(0.1), shard_bytes=16 * 2 * 30)
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


def test_damaged_state_or_shard_means_starting_over(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BATCH", 1500)
    data = config(tmp_path)
    prepare(data, tmp_path / "whole", shard_bytes=960)
    for victim in ("state.npz", "train-00000.bin"):
        out, calls = tmp_path / victim, []

        def stop(done, total, calls=calls):
            calls.append(done)
            if len(calls) == 9:
                raise Stop

        with pytest.raises(Stop):
            prepare(data, out, progress=stop, shard_bytes=960)
        raw = bytearray((out / victim).read_bytes())
        raw[len(raw) // 2] ^= 255
        (out / victim).write_bytes(raw)
        prepare(data, out, shard_bytes=960)
        assert content(out) == content(tmp_path / "whole")


def test_finished_folder_is_reused_or_refused(tmp_path):
    data, out = config(tmp_path), tmp_path / "out"
    first = prepare(data, out)
    before = content(out)
    assert prepare(replace(data, cache_features=True), out) == replace(first, reused=True)
    for option, value in {"token_len": 8, "packing": "padded", "vocab_size": 300, "frame": True}.items():
        with pytest.raises(DataError, match=f"data.{option}"):
            prepare(replace(data, **{option: value}), out)
    assert content(out) == before
    write_corpus(tmp_path / "a.jsonl", documents=121)
    with pytest.raises(DataError, match="has changed"):
        prepare(data, out)
    (tmp_path / "a.jsonl").unlink()
    assert prepare(data, out).reused


def stand_in(**splits):
    return HubStandIn({"default": {name: [{"text": text} for text in texts] for name, texts in splits.items()}})


@pytest.mark.parametrize("after", [1, 3, 6, 20])
def test_held_out_text_is_the_split_that_the_source_names(tmp_path, monkeypatch, after):
    texts = write_corpus(tmp_path / "a.jsonl", documents=200)
    monkeypatch.setitem(sys.modules, "datasets", stand_in(train=texts[:160], test=texts[160:]))
    data = config(tmp_path, source="hf:own/set:train,test", packing="padded", token_len=128)
    done = prepare(data, tmp_path / "whole")
    for name, documents in {"train": texts[:160], "heldout": texts[160:]}.items():
        blocks = Blocks(tmp_path / "whole", name)
        assert [blocks.tokenizer().decode(row) for row in blocks.rows(range(len(blocks))).tolist()] == documents
    assert done.note.startswith("Field 'text' of 200 records, ")
    # An interruption at any place, also inside the held-out split, changes no byte.
    monkeypatch.setattr(module, "BATCH", 2000)
    calls = 0

    def check():
        nonlocal calls
        calls += 1
        if calls == after:
            raise InterruptedError

    with pytest.raises(DataError, match="Cannot write"):
        prepare(data, tmp_path / "out", shard_bytes=4000, tokenizer=Blocks(tmp_path / "whole").tokenizer(), check=check)
    resumed = prepare(data, tmp_path / "out", shard_bytes=4000, tokenizer=Blocks(tmp_path / "whole").tokenizer())
    assert resumed.note == done.note
    for name in ("train", "heldout"):
        parts = [Blocks(tmp_path / folder, name) for folder in ("whole", "out")]
        assert torch.equal(*(blocks.rows(range(len(blocks))) for blocks in parts))


def test_a_folder_of_another_field_or_another_revision_is_not_reused(tmp_path, monkeypatch):
    texts = write_corpus(tmp_path / "a.jsonl")
    prepare(config(tmp_path), tmp_path / "out")
    assert "field" not in Blocks(tmp_path / "out").index["data"], "as in folders from before fields could be named"
    assert prepare(config(tmp_path), tmp_path / "out").reused
    with pytest.raises(DataError, match="prepared with data.field '', not 'title'"):
        prepare(config(tmp_path, field="title"), tmp_path / "out")
    monkeypatch.setitem(sys.modules, "datasets", stand_in(train=texts[:100], test=texts[100:]))
    data = config(tmp_path, source="lm1b")
    prepare(data, tmp_path / "hub")
    assert prepare(data, tmp_path / "hub").reused
    monkeypatch.setitem(corpora.HUB_SETS, "lm1b", "own/other:train,test")
    with pytest.raises(DataError, match="'lm1b' has changed"):
        prepare(data, tmp_path / "hub")


def test_leftovers_of_other_options_are_cleared(tmp_path):
    data, out = config(tmp_path), tmp_path / "out"
    out.mkdir()
    (out / "train-00009.bin").write_bytes(b"old")
    (out / "notes.txt").write_text("mine")
    prepare(data, out)
    assert not (out / "train-00009.bin").exists() and (out / "notes.txt").exists() and not (out / "state.npz").exists()


def test_framed_lines(tmp_path):
    data = config(tmp_path, frame=True)
    prepare(data, tmp_path / "out")
    rows = Blocks(tmp_path / "out").rows(range(20))
    assert (rows[:, 0] == 4).all() and (rows[:, -1] == 1).all() and (rows == 5).any()


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


def test_padded_rows_have_a_mask(tmp_path):
    prepare(config(tmp_path, packing="padded"), tmp_path / "out")
    blocks = Blocks(tmp_path / "out")
    rows = blocks.rows(range(len(blocks)))
    mask = blocks.mask(rows)
    assert mask is not None and not mask.all() and mask[:, 0].all()
    assert (mask[:, 1:] <= mask[:, :-1]).all(), "padding is at the end only"


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
    "sizes",
    [
        [30_000],
        [9_000] * 4,
        [90_000, *[300] * 30],
        [*[300] * 30, 90_000],
        [2_000] * 20,
        [500] * 200,
        [60_000, 200, 40_000, 100],
    ],
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
    assert done.note.startswith("1 document is longer than all the text to hold out")


def test_one_line_gives_both_parts_and_none_of_its_words_is_cut(tmp_path):
    words = [f"word{i}" for i in range(3000)]
    (tmp_path / "a.txt").write_text(" ".join(words), "utf-8")
    prepare(config(tmp_path, source=str(tmp_path / "a.txt"), packing="padded"), tmp_path / "out")
    seen = {}
    for name in ("train", "heldout"):
        blocks = Blocks(tmp_path / "out", name)
        seen[name] = (
            blocks.tokenizer().decode(blocks.rows(range(len(blocks))).flatten().tolist()).replace("word", " word").split()
        )
    assert sorted(seen["train"] + seen["heldout"]) == sorted(words) and 200 < len(seen["heldout"]) < 400
    runs = sum(f"word{int(w[4:]) + 1}" not in set(seen["heldout"]) for w in seen["heldout"])
    assert 2 <= runs <= 8, "held-out text is stretches of the document, from several places"


def test_earlier_models_keep_the_documents_they_held_out(tmp_path):
    texts = ["word " * n for n in (20, 30, 4000, 20, 50, 30, 40, 20)]
    split = choose_split(texts, 0.3, 8, by="documents")
    assert [p.split == "heldout" for p in split.pieces(texts)] == [draw(i) < 0.3 for i in range(8)]
    assert from_dict({"data": {"holdout": 0.3}}).data.holdout_by == "documents"
    assert default_config().data.holdout_by == "tokens"
    data = config(tmp_path)
    done = prepare(data, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "index.json").read_text("utf-8"))
    del index["data"]["holdout_by"], index["long_documents"]
    (tmp_path / "out" / "index.json").write_text(json.dumps(index))
    assert prepare(data, tmp_path / "out") == replace(done, reused=True)


@pytest.mark.parametrize("after", [2, 6, 11])
def test_interruption_inside_a_document_changes_no_byte(tmp_path, monkeypatch, after):
    monkeypatch.setattr(module, "BATCH", 1500)
    monkeypatch.setattr(split_module, "CHUNK", 2000)
    (tmp_path / "d").mkdir()
    for name, count in {"a": 900, "b": 10, "c": 1200}.items():
        (tmp_path / "d" / f"{name}.txt").write_text(" ".join(f"number {i} of many," for i in range(count)))
    data = config(tmp_path, source=str(tmp_path / "d"))
    prepare(data, tmp_path / "whole", shard_bytes=16 * 2 * 30)
    calls, resumed = [], []

    def stop(done, total):
        calls.append(done)
        if len(calls) == after:
            raise Stop

    with pytest.raises(Stop):
        prepare(data, tmp_path / "cut", progress=stop, shard_bytes=16 * 2 * 30)
    prepare(data, tmp_path / "cut", progress=lambda done, total: resumed.append(done), shard_bytes=16 * 2 * 30)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert resumed[0] > calls[0], "finished shards are not made again"


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
        json.dumps({"input_ids": [7] * 15 + [320]}): "the id 320, but the tokenizer has 320",
        json.dumps({"input_ids": [7] * 15}): "Row 121 .* has 15 ids",
        json.dumps({"input_ids": [7] * 15 + [-1]}): "Line 121",
        json.dumps({"text": "Some text."}): "both text and token ids",
    }.items():
        (tmp_path / "rows.jsonl").write_text(rows + line + "\n")
        with pytest.raises(DataError, match=word):
            prepare(data, tmp_path / "out")


def test_interrupted_rows_of_ids_end_with_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BATCH", 200)
    _, data = write_rows(tmp_path)
    prepare(data, tmp_path / "whole", shard_bytes=16 * 2 * 10)
    calls = []

    def stop():
        calls.append(1)
        if len(calls) == 6:
            raise Stop

    with pytest.raises(Stop):
        prepare(data, tmp_path / "cut", check=stop, shard_bytes=16 * 2 * 10)
    assert (tmp_path / "cut" / "state.npz").exists()
    prepare(data, tmp_path / "cut", shard_bytes=16 * 2 * 10)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_vocabulary_must_fit(tmp_path):
    prepare(config(tmp_path), tmp_path / "out")
    with pytest.raises(UsageError, match="set it to"):
        prepare(config(tmp_path, tokenizer=str(tmp_path / "out"), vocab_size=300), tmp_path / "other")
    again = prepare(config(tmp_path, tokenizer=str(tmp_path / "out")), tmp_path / "other")
    assert again.tokenizer == Blocks(tmp_path / "out").index["tokenizer"]


def test_too_little_text_is_refused(tmp_path):
    (tmp_path / "b.txt").write_text("Short.\n\nVery short.", "utf-8")
    with pytest.raises(DataError, match="too few for a block of 16"):
        prepare(config(tmp_path, source=str(tmp_path / "b.txt")), tmp_path / "out")


def test_full_disk_is_named(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left on device.*free some space"):
        prepare(config(tmp_path), tmp_path / "out")


def test_progress_reaches_the_end(tmp_path):
    seen = []
    prepare(config(tmp_path), tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0 and [d for d, _ in seen] == sorted(d for d, _ in seen)
