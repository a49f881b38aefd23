"""Texts of other programs from the command line: every figure, one verdict, nothing cut, and texts that are all alike."""

import json
import random
import sys

import pytest
from tiny_evaluation import evaluation

from jpeg_dlm.cli.main import main
from jpeg_dlm.evaluation import metrics
from jpeg_dlm.evaluation.metrics import diversity, training_text
from jpeg_dlm.evaluation.scorer import Scorer
from jpeg_dlm.evaluation.suite import distance_results
from jpeg_dlm.evaluation.texts import ModelSource, file_sources
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.util.errors import MissingPackageError

pytest_plugins = ["tiny_evaluation", "stand_in"]  # fixtures

NOUNS, VERBS = "man dog woman child bird".split(), "runs sits eats waits sings".split()


def sentence(rng):
    noun, other = rng.choice(NOUNS), rng.choice(NOUNS)
    return f"A {noun} {rng.choice(VERBS)} near the {other}{rng.choice(['', ' today', ' with a friend'])}."


def shuffled(text, rng):
    words = text.split()
    return " ".join(rng.sample(words, len(words)))


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def files(tmp_path):
    """Three files of 120 texts: real ones, other real ones, and these with their words shuffled."""
    rng = random.Random(0)
    real, ours = ([sentence(rng) for _ in range(120)] for _ in range(2))
    write(tmp_path / "real.jsonl", real)
    write(tmp_path / "ours.jsonl", ours)
    write(tmp_path / "theirs.jsonl", [shuffled(text, rng) for text in ours])
    return tmp_path


def run(files, byte_gpt2, *names, options=()):
    words = ["evaluate", *(str(files / f"{name}.jsonl") for name in names), "--reference", str(files / "real.jsonl")]
    assert main([*words, "--scorer", f"hf:{byte_gpt2}", "--out", str(files / "out"), "--quiet", *options]) == 0
    return json.loads((files / "out" / "results.json").read_text())


def test_which_file_is_nearer(files, byte_gpt2, capsys):
    """Real text cannot be told from other real text, shuffled words can, and the verdict says which is nearer."""
    result = run(files, byte_gpt2, "theirs", "ours")
    theirs, ours, floor, words = result["distances"]["rows"]
    assert [row["texts"] for row in (theirs, ours, floor, words)] == [120, 120, 60, 120]  # real text in two halves
    for row in (ours, floor):
        assert row["p"] > 0.05 and row["auc_low"] < 0.5 < row["auc_high"] and row["precision"] > 0.8 and row["recall"] > 0.8
    for row in (theirs, words):
        assert row["p"] < 0.01 and row["auc_low"] > 0.6 and row["frechet"] > 2 * ours["frechet"]
    assert ours["mauve_42"] > theirs["mauve_42"] and theirs["energy"] > ours["energy"]
    [verdict] = result["distances"]["notes"]
    assert verdict.startswith("Verdict: ours is nearest to real text (energy distance; than theirs: p = ")
    shown = capsys.readouterr().out
    assert verdict in shown and "| real text against other real text | 60 |" in shown
    before = (files / "out" / "results.md").read_bytes()
    run(files, byte_gpt2, "theirs", "ours")  # continued from what is stored
    assert (files / "out" / "results.md").read_bytes() == before


def test_two_samples_of_one_system_cannot_be_told_apart(files, byte_gpt2):
    rng = random.Random(1)
    write(files / "a.jsonl", [sentence(rng) for _ in range(120)])
    [verdict] = run(files, byte_gpt2, "a", "ours")["distances"]["notes"]
    assert "which may be chance" in verdict


def test_whole_texts_are_compared_but_in_the_papers_protocols(files, byte_gpt2):
    """Real texts three times as long keep all of their tokens, unless a protocol has its own rule."""
    texts = [json.loads(line)["text"] for line in (files / "real.jsonl").read_text().splitlines()]
    long = [f"{a} {b}"[:90] for a, b in zip(texts, reversed(texts), strict=True)]
    write(files / "long.jsonl", long)
    scorer = Scorer(str(byte_gpt2))
    [source] = file_sources([files / "ours.jsonl"], files / "long.jsonl")
    for protocol, cut in (("default", False), ("lm1b", True)):
        asked = evaluation(scorer, protocol, mauve="off")
        entry = asked.entry(source, {})
        assert (entry.stats["real"].tokens < sum(map(len, long)) - len(long)) == cut
        assert entry.limits.mauve_tokens == scorer.context and asked.compared == []


def test_copies_of_one_text_are_flagged(files, byte_gpt2, capsys):
    write(files / "copies.jsonl", ["A man and a woman sit near the river."] * 200)
    rng = random.Random(2)
    few = [sentence(rng) for _ in range(6)]
    write(files / "few.jsonl", [few[i % 6] + " Really." * (i % 40 == 0) for i in range(200)])
    result = run(files, byte_gpt2, "copies", "few", "ours", options=["--mauve", "off"])
    copies, few, ours = result["entries"]
    assert any("different" in sign for sign in copies["degenerate"]) and few["degenerate"] and not ours["degenerate"]
    flagged = [line.split(" (")[0] for line in capsys.readouterr().out.splitlines() if line.endswith("| degenerate? |")]
    assert flagged == ["| copies", "| few"]
    assert "distances" not in result


# ---------------------------------------------------------------- words, and the training text


def test_diversity_by_hand():
    """Pairs: 4 of 5 differ; triples: 3 of 3; no text has four words but the first, which has one."""
    texts = [["a", "b", "c", "d"], ["a", "b", "a"]]
    assert diversity(texts) == pytest.approx(4 / 5)


def test_memorized_by_brute_force(micro, heldout):
    training = training_text(heldout.folder)
    source = ModelSource(micro, "micro", 4, heldout)
    four = lambda words: [tuple(words[i : i + 4]) for i in range(len(words) - 3)]  # noqa: E731
    train = Blocks(heldout.folder, "train")
    ends = {train.pad_id, train.index["eos_id"]} if training.padded else set()
    rows = [[i for i in row if i not in ends] for row in train.rows(range(len(train))).tolist()]
    seen = {gram for row in rows for gram in four(metrics.words_of(training.tokenizer.decode(row), training.padded))}
    texts = [metrics.words_of(text, training.padded) for text in source.real(20).texts.texts]
    texts.append("entirely other words stand here".split())
    all_grams = [gram for words in texts for gram in four(words)]
    assert training.memorized(texts) == pytest.approx(sum(gram in seen for gram in all_grams) / len(all_grams))
    assert training.memorized([["too", "short"]]) == 0.0


def test_what_is_missing_is_said(fake, tmp_path, monkeypatch):
    (tmp_path / "s.txt").write_text("w1 w2 w3\n" * 99)
    [source] = file_sources([tmp_path / "s.txt"], tmp_path / "s.txt")
    asked = evaluation(fake)
    asked.entry(source, {})
    assert distance_results(asked) == {"rows": [], "notes": ["s: distances need at least 100 texts of both kinds, not 99."]}
    find = sys.modules["importlib.util"].find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "sklearn" else find(name))
    with pytest.raises(MissingPackageError, match=r"jpeg-dlm\[eval\]"):
        evaluation(fake, distances=True)
