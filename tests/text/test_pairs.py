"""Pairs: what is read, what is held out, and rows that hold both sides."""

import json
import sys
import zipfile

import pytest
from hub_stand_in import HubStandIn
from hypothesis import given
from hypothesis import strategies as st

from jpeg_dlm.config import DataConfig
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.pairs import TASKS, PairReader, PairSplit, file_pairs, keywords, pair, sides, snli, task, tatoeba
from jpeg_dlm.text.prepare import prepare
from jpeg_dlm.util.errors import DataError, UsageError

LETTERS = st.sampled_from("abcdefgh")


def data(source, **options):
    sizes = {"tokenizer": "words", "vocab_size": 64, "source_len": 12, "token_len": 10, "packing": "padded", "holdout": 0.1}
    return DataConfig(source=str(source), **(sizes | options))


@given(st.lists(st.tuples(LETTERS, LETTERS), max_size=40), st.floats(0.1, 0.9))
def test_no_text_of_a_held_out_pair_is_trained_on(pairs, share):
    documents = [pair(f"s{a}", f"t{b}") for a, b in pairs]
    split = PairSplit(lambda: documents, share)
    parts = {name: {sides(d) for d in documents if split.of(d) == name} for name in ("train", "heldout")}
    for side in (0, 1):
        assert not {p[side] for p in parts["train"]} & {p[side] for p in parts["heldout"]}
    held = {target for _, target in parts["heldout"]}
    assert parts["heldout"] == {sides(d) for d in documents if sides(d)[1] in held}  # all sources of a held-out target


@pytest.mark.parametrize("name", TASKS)
def test_tasks_have_exact_answers(name):
    for source, target in map(sides, task(name, 200)):
        words = source.split()
        if name == "sum":
            a, b = "".join(words).split("+")
            answer = f"{int(a[::-1]) + int(b[::-1]):04}"[::-1]
        else:
            answer = "".join({"copy": words, "reverse": words[::-1], "sort": sorted(words)}[name])
        assert target.replace(" ", "") == answer
    assert list(task(name, 20)) == list(task(name, 20))


def test_a_row_holds_both_sides_and_heldout_text_all_references(tmp_path):
    file = tmp_path / "pairs.tsv"
    lines = [f"a {i // 10 % 10} {i % 10}\tx {i // 10 % 10} {i % 10} {i // 100}\tignored" for i in range(200)]
    file.write_text("\n".join([*lines, f"{'long ' * 20}\tshort", "short\t" + "long " * 20]), "utf-8")
    done = prepare(data(file, vocab_size=200), tmp_path / "out")
    assert "2 pairs" in done.note
    rows = []
    for name in ("train", "heldout"):
        blocks = Blocks(tmp_path / "out", name)
        tokenizer, everything = blocks.tokenizer(), range(len(blocks))
        texts = [[tokenizer.decode(row) for row in part(everything).tolist()] for part in (blocks.sources, blocks.rows)]
        assert blocks.rows(everything).shape == (len(blocks), 10) and blocks.sources(everything).shape == (len(blocks), 12)
        rows.append(set(zip(*texts, strict=True)))
    real = {tuple(line.split("\t")[:2]) for line in lines}
    assert rows[0] | rows[1] <= real and rows[0] and rows[1]
    records = [json.loads(line) for line in (tmp_path / "out" / "heldout.jsonl").read_text("utf-8").splitlines()]
    assert {(r["source"], r["text"]) for r in records} <= rows[1] and len({r["source"] for r in records}) == len(records)
    for record in records:  # also those that are not held out themselves
        assert set(record["references"]) == {target for source, target in real if source == record["source"]}


def test_unknown_words_leave_a_pair_out(tmp_path):
    file = tmp_path / "pairs.tsv"
    file.write_text("".join(f"a {i // 10} {i % 10}\tc {i // 10} {i % 10}\n" for i in range(100)) + "rare a\tc 1\n" * 2, "utf-8")
    done = prepare(data(file, vocab_size=18, known=True), tmp_path / "out")
    assert "2 pairs" in done.note


def test_records_name_their_sides(tmp_path):
    records = {
        "own": ({"source": "a", "target": "b", "n": 1}, PairReader()),
        "elf": ({"input": "a", "output": "b"}, PairReader()),
        "named": ({"translation": {"de": "a", "en": "b"}}, PairReader("translation.de", target="translation.en")),
    }
    for name, (record, reader) in records.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text(json.dumps(record) + "\n", "utf-8")
        assert list(file_pairs(file, reader)) == [pair("a", "b")]
    with pytest.raises(DataError, match="--data.source-field"):
        list(file_pairs(tmp_path / "named.jsonl", PairReader()))
    (tmp_path / "plain.txt").write_text("no tab\n", "utf-8")
    with pytest.raises(DataError, match="tab"):
        list(file_pairs(tmp_path / "plain.txt", PairReader()))
    with pytest.raises(UsageError, match="source-len"):
        prepare(DataConfig(source="snli"), tmp_path / "out")


def test_pairs_of_ids_are_taken_as_they_are(tmp_path):
    """Records of the form of ELF's data sets: their ids end with the end token, and one of these pairs is too long."""
    text = [f"a {i // 10} {i % 10}\tx {i % 10} {i // 10}" for i in range(100)]
    (tmp_path / "pairs.tsv").write_text("\n".join(text), "utf-8")
    prepare(data(tmp_path / "pairs.tsv"), tmp_path / "texts")
    tokenizer = Blocks(tmp_path / "texts").tokenizer()

    def ids(side, repeated=1):
        return tokenizer.encode(side) * repeated + [tokenizer.eos_id]

    records = [{"input": s, "condition_input_ids": ids(s), "input_ids": ids(t)} for s, t in map(sides, text)]
    records.append({"input": "", "condition_input_ids": ids("a", 12), "input_ids": ids("x")})
    file = tmp_path / "ids.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    with pytest.raises(UsageError, match="--data.tokenizer"):
        prepare(data(file), tmp_path / "out")
    done = prepare(data(file, tokenizer=str(tmp_path / "texts" / "tokenizer.json")), tmp_path / "out")
    assert "1 pair " in done.note and done.train_rows + done.heldout_rows == 100
    both = []
    for folder in ("texts", "out"):
        parts = [Blocks(tmp_path / folder, name) for name in ("train", "heldout")]
        both.append({tuple(row) for part in parts for row in part._rows(range(len(part))).tolist()})
        lines = (tmp_path / folder / "heldout.jsonl").read_text("utf-8").splitlines()
        for record in map(json.loads, lines):
            assert f"{record['source']}\t{record['text']}" in text and record["references"] == [record["text"]]
    assert both[0] == both[1]
    file.write_text(json.dumps(records[0] | {"input_ids": [2, 64]}) + "\n", "utf-8")
    with pytest.raises(DataError, match="the id 64"):
        prepare(data(file, tokenizer=str(tmp_path / "texts" / "tokenizer.json")), tmp_path / "other")


def test_named_corpora_are_read_from_their_files(tmp_path):
    with zipfile.ZipFile(tmp_path / "fra-eng.zip", "w") as archive:
        archive.writestr("fra.txt", "Go.\tVa !\tCC-BY\nI'm tired.\tJe suis\u00a0fatigué.\tCC-BY\n")
    assert list(tatoeba("fra")(tmp_path)) == [pair("Va !", "Go."), pair("Je suis fatigué.", "I'm tired.")]
    records = [{"gold_label": "neutral", "sentence1": "A man rides a red bike", "sentence2": "The man is very tired."}]
    (tmp_path / "snli.jsonl").write_text(
        "".join(json.dumps(r | {"gold_label": label}) + "\n" for r in records for label in ("neutral", "-"))
    )
    assert list(snli(tmp_path)) == [pair("neutral: A man rides a red bike.", "The man is very tired.")]
    words = dict(map(reversed, map(sides, keywords(tmp_path))))
    assert set(words["A man rides a red bike."].split()) == {"man", "rides", "red", "bike"}


def test_a_data_set_with_a_held_out_split_keeps_all_its_references(tmp_path, monkeypatch):
    def records(pairs):
        return [{"translation": {"de": source, "en": target}} for source, target in pairs]

    train = [(f"a {i // 10} {i % 10}", f"x {i % 10} {i // 10}") for i in range(60)]
    test = [("a 1 2", "x 1"), ("a 1 2", "x 2"), ("a 3 3", "x 3")]
    splits = {"train": records(train), "test": records(test)}
    monkeypatch.setitem(sys.modules, "datasets", HubStandIn({"default": splits}))
    fields = {"source_field": "translation.de", "target_field": "translation.en"}
    prepare(data("hf:owner/name:train,test", **fields), tmp_path / "out")
    assert (len(Blocks(tmp_path / "out", "train")), len(Blocks(tmp_path / "out", "heldout"))) == (60, 3)
    lines = (tmp_path / "out" / "heldout.jsonl").read_text("utf-8").splitlines()
    assert {(r["source"], *r["references"]) for r in map(json.loads, lines)} == {("a 1 2", "x 1", "x 2"), ("a 3 3", "x 3")}
