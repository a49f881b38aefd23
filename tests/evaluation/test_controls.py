"""Controls: what a chain can write, what collages are made of, and that they stand in an evaluation as other rows do."""

import json
from collections import Counter

import numpy as np
import pytest
from conftest import made_up_text
from refusals import refusal

from jpeg_dlm.cli.main import main
from jpeg_dlm.evaluation.controls import CONTROLS, Control, WordChain, collage_of_parts, collage_of_pieces
from jpeg_dlm.evaluation.texts import ModelSource

pytest_plugins = ["tiny_evaluation", "stand_in"]  # fixtures


def grams(texts, size):
    """All pieces of `size` words, with borders before and after each text."""
    padded = [["<"] * (size - 1) + list(words) + [">"] for words in texts]
    return [tuple(words[i : i + size]) for words in padded for i in range(len(words) - size + 1)]


TEXTS = [text.split() for text in ("a b a c", "a b b", "b a c a", "c a b a b", "a b a b c c")] * 2


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_a_chain_writes_what_follows_as_often_as_it_does(order):
    """Every piece of order + 1 words was read; what follows a context has the frequencies counted by hand."""
    written = [text.split() for text in WordChain(TEXTS, order).write(4000)]
    read, found = Counter(grams(TEXTS, order + 1)), Counter(grams([w for w in written if len(w) < 6], order + 1))
    assert set(found) <= set(read) and max(map(len, written)) <= 6
    begin = ("<",) * order
    starts = Counter(tuple(grams([words], order + 1)[0]) for words in written)
    for gram, count in read.items():
        if gram[:-1] == begin:
            assert starts[gram] / 4000 == pytest.approx(count / len(TEXTS), abs=0.04)


def test_a_chain_is_repeated_by_its_seed():
    assert WordChain(TEXTS, 2, 1).write(20) == WordChain(TEXTS, 2, 1).write(20) != WordChain(TEXTS, 2, 2).write(20)


def test_collages():
    words = [[f"{i}.{j}" for j in range(5 + i % 3)] for i in range(12)]
    made = [text.split() for text in collage_of_pieces(words, np.random.default_rng(0), 3)]
    assert list(map(len, made)) == list(map(len, words)) and made != words
    pieces = {tuple(w[i : i + 3]) for w in words for i in range(len(w) - 2)}
    assert all(tuple(text[i : i + 3]) in pieces for text in made for i in range(0, len(text) - 2, 3))
    texts = ["a b c d", "e f g", "One. Two.", "Three! Four?", "h"]
    made = collage_of_parts(texts, np.random.default_rng(1))
    assert Counter(" ".join(made).split()) == Counter(" ".join(texts).split())
    assert {made[2].split()[0], made[3].split()[0]} == {"One.", "Three!"}  # sentences keep their places
    assert {made[i].split()[0] for i in (0, 1, 4)} == {"a", "e", "h"}


def test_controls_are_made_of_texts_that_are_not_compared_with(micro, heldout):
    source = ModelSource(micro, "micro", 4, heldout)
    n = len(heldout) // 2
    others = source.texts(heldout.rows(range(n, 2 * n)), False).texts
    for kind in CONTROLS:
        control = Control(kind, source)
        texts = control.write(0, n, {}, False)
        assert len(texts.texts) == len(texts.ids) == n and texts == control.write(0, n, {}, False)
        if kind in ("ngrams", "repeats", "copies", "parts"):
            assert {w for t in texts.texts for w in t.split()} <= {w for t in others for w in t.split()}
    assert Control("copies", source).write(0, n, {}, False).texts == [max(others, key=len)] * n


def test_controls_from_the_command_line(byte_gpt2, micro_folders, corpus_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    words = ["evaluate", str(micro_folders()), "-n", "4", "--steps", "1", "--scorer", f"hf:{byte_gpt2}", "--quiet"]
    assert main([*words, "--data", str(corpus_file), "--controls", "--out", str(tmp_path / "out")]) == 0
    entries = json.loads((tmp_path / "out" / "results.json").read_text())["entries"]
    assert [entry["name"] for entry in entries[1:]] == ["tokens by frequency", *CONTROLS.values()]
    assert len({json.dumps(entry["stats"]["real"]) for entry in entries}) == 1  # all beside the same real text
    shown = capsys.readouterr().out
    [row] = [line for line in shown.splitlines() if line.startswith(f"| {CONTROLS['copies']}")]
    assert "degenerate?" in row and "only 25% of texts are different" in shown
    (tmp_path / "t.txt").write_text(made_up_text(documents=2))
    words = ["evaluate", tmp_path / "t.txt", "--reference", tmp_path / "t.txt", "--controls"]
    assert "name a checkpoint" in refusal(capsys, words, 2)
