"""Held-out likelihood against closed forms of a unigram model, and from the command line for several methods at once."""

import json
import math
from collections import Counter

import pytest
import torch

from jpeg_dlm.api import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.evaluation.likelihood import heldout_likelihood, row_nats, token_counts, unigram_perplexity
from jpeg_dlm.evaluation.texts import ModelSource
from jpeg_dlm.text.blocks import Blocks

pytest_plugins = ["tiny_evaluation", "stand_in"]  # fixtures


def real_ids(blocks, n):
    """The tokens that count, row by row."""
    rows = blocks.rows(range(n))
    mask = blocks.mask(rows)
    return [row.tolist() if mask is None else row[mask[i]].tolist() for i, row in enumerate(rows)]


def test_an_exact_likelihood_is_the_closed_form(stand_ins, micro_folders, heldout):
    model = load(micro_folders("unigram"), "cpu")
    n = min(9, len(heldout))
    found = heldout_likelihood(ModelSource(model, "u", 4, heldout), n, draws=5)
    log_p = torch.log_softmax(model.method.scores.detach().double(), -1).tolist()
    rows = real_ids(heldout, n)
    nats = -sum(log_p[i] for row in rows for i in row)
    tokens = sum(map(len, rows))
    characters = sum(len(model.tokenizer.decode(row)) for row in heldout.rows(range(n)).tolist())
    assert found["kind"] == "exact" and found["draws"] == 1 and (found["rows"], found["tokens"]) == (n, tokens)
    assert found["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert found["nats_per_token"] == pytest.approx(nats / tokens, rel=1e-5)
    assert found["bits_per_character"] == pytest.approx(nats / math.log(2) / characters, rel=1e-5)
    assert found["perplexity_low"] < found["perplexity"] < found["perplexity_high"]


def test_the_unigram_beside_it_is_counted_on_training_text_with_one_added(heldout):
    train = Blocks(heldout.folder, "train")
    counts = Counter(i for row in real_ids(train, len(train)) for i in row)
    total = sum(counts.values()) + heldout.vocab_size
    seen = [i for row in real_ids(heldout, 7) for i in row]
    nats = -math.fsum(math.log((counts[i] + 1) / total) for i in seen)
    assert unigram_perplexity(heldout, 7) == pytest.approx(math.exp(nats / len(seen)), rel=1e-12)
    assert token_counts(train).tolist() == [counts[i] for i in range(heldout.vocab_size)]


def test_every_row_sees_all_times_evenly(stand_ins, micro_folders, heldout):
    """A row that saw the same interval in each draw would be off by up to its whole likelihood."""
    exact, noisy = (load(micro_folders(name), "cpu").method for name in ("unigram", "noisy"))
    noisy.load_state_dict(exact.state_dict())
    n, draws = min(20, len(heldout)), 16
    want, _ = row_nats(exact, heldout, n, 1, 0, 8)
    found, _ = row_nats(noisy, heldout, n, draws, 0, 8)
    ratios = found / want  # the mean of 2 t: one t in each of 16 equal intervals
    assert (abs(ratios - 1) < 1 / draws).all() and (ratios != 1).all()
    assert len(set(ratios.round(9).tolist())) == n  # rows have random numbers of their own
    again, _ = row_nats(noisy, heldout, n, draws, 0, 3)
    other, _ = row_nats(noisy, heldout, n, draws, 1, 8)
    assert again == pytest.approx(found, rel=1e-6) and (other != found).all()  # the seed counts, the batch does not


def test_several_methods_in_one_table(micro_folders, corpus_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    words = ["evaluate", str(micro_folders("ar")), str(micro_folders("mdlm")), str(micro_folders()), "--likelihood", "--quiet"]
    words += ["--data", str(corpus_file), "-n", "5", "--likelihood-draws", "3", "--out", str(tmp_path / "out")]
    assert main(words) == 0  # no scorer is named, and none is fetched
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    ar, mdlm, jpeg = result["likelihood"]
    assert result["entries"] == [] and (ar["kind"], mdlm["kind"], jpeg["kind"]) == ("exact", "bound", None)
    assert ar["rows"] == mdlm["rows"] == 5 and mdlm["draws"] == 3 and ar["unigram_perplexity"] == mdlm["unigram_perplexity"]
    assert "| exact |" in shown and "| bound |" in shown and "JPEG-DLM gives no likelihood" in shown
    assert (tmp_path / "out" / "results.md").read_text().strip() == shown.strip()
    assert main(words) == 0 and capsys.readouterr().out == shown
