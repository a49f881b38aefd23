"""Held-out likelihood against closed forms of a unigram model, and from the command line for several methods at once."""

import json
import math
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hub_stand_in import HubStandIn

from jpeg_dlm.api import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.evaluation.likelihood import (
    heldout_likelihood,
    heldout_nats,
    text_likelihood,
    text_nats,
    text_rows,
    token_counts,
    unigram_perplexity,
)
from jpeg_dlm.evaluation.texts import ModelSource
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.cleaning import DETOKENIZERS
from jpeg_dlm.text.sources import ZERO_SHOT
from jpeg_dlm.util.console import Console

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
    want, _ = heldout_nats(exact, heldout, n, 1, 0, 8)
    found, _ = heldout_nats(noisy, heldout, n, draws, 0, 8)
    ratios = found / want  # the mean of 2 t: one t in each of 16 equal intervals
    assert (abs(ratios - 1) < 1 / draws).all() and (ratios != 1).all()
    assert len(set(ratios.round(9).tolist())) == n  # rows have random numbers of their own
    again, _ = heldout_nats(noisy, heldout, n, draws, 0, 3)
    other, _ = heldout_nats(noisy, heldout, n, draws, 1, 8)
    assert again == pytest.approx(found, rel=1e-6) and (other != found).all()  # the seed counts, the batch does not


def test_several_methods_in_one_table(micro_folders, corpus_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    words = [
        "evaluate",
        str(micro_folders("ar")),
        str(micro_folders("mdlm")),
        str(micro_folders("flm")),
        "--likelihood",
        "--quiet",
    ]
    words += ["--data", str(corpus_file), "-n", "5", "--likelihood-draws", "3", "--out", str(tmp_path / "out")]
    assert main(words) == 0  # no scorer is named, and none is fetched
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    ar, mdlm, flm = result["likelihood"]
    assert result["entries"] == [] and (ar["kind"], mdlm["kind"], flm["kind"]) == ("exact", "bound", None)
    assert ar["rows"] == mdlm["rows"] == 5 and mdlm["draws"] == 3 and ar["unigram_perplexity"] == mdlm["unigram_perplexity"]
    assert "| exact |" in shown and "| bound |" in shown and "FLM gives no likelihood" in shown
    assert (tmp_path / "out" / "results.md").read_text().strip() == shown.strip()
    assert main(words) == 0 and capsys.readouterr().out == shown


# ---------------------------------------------------------------- all of any text


def text_model(micro_folders, **changes):
    return load(micro_folders("ar", **changes), "cpu")


def counted_ids(rows):
    return [i for row in rows.rows for i in row.ids[row.first : row.end]]


@pytest.mark.parametrize(
    "packing, frame", [("continuous", False), ("continuous", True), ("sentences", False), ("padded", False)]
)
@pytest.mark.parametrize("documents", [["Short."], ["A text of some length. " * 9, "Another one.", "And " * 40]])
def test_every_token_of_a_text_counts_once(micro_folders, tmp_path, packing, frame, documents):
    model = text_model(micro_folders, data__packing=packing, data__frame=frame)
    file = tmp_path / "some.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    rows = text_rows(model, str(file), None, Console(quiet=True))
    tokenizer, layout = model.tokenizer, model.layout
    want = [i for text in documents for i in [*tokenizer.encode(text.strip()), layout.separator]]
    found = counted_ids(rows)
    if frame:
        found = [i for row in rows.rows for i in row.ids[max(1, row.first) : row.end - 1]]  # without the frame
    assert found == want and rows.documents == len(documents)
    assert all(len(row.ids) == layout.token_len for row in rows.rows) or len(documents) == 1
    long = sum(len(tokenizer.encode(text)) >= layout.token_len for text in documents)
    assert rows.cut == (long if packing == "padded" else 0)
    assert counted_ids(text_rows(model, str(file), 1, Console(quiet=True))) == counted_ids(replace(rows, rows=rows.rows[:1]))


def test_the_likelihood_of_a_text_is_the_sum_over_its_tokens(stand_ins, micro_folders, tmp_path):
    model = load(micro_folders("unigram"), "cpu")
    file = tmp_path / "some.txt"
    file.write_text("One line of text.\nAnd another line that is a little longer than the first line was.\n")
    rows = text_rows(model, str(file), None, Console(quiet=True))
    log_p = torch.log_softmax(model.method.scores.detach().double(), -1)
    found, ids = text_likelihood(model, rows), counted_ids(rows)
    assert found["tokens"] == len(ids) and found["nats_per_token"] == pytest.approx(-float(log_p[ids].mean()), rel=1e-5)


@pytest.mark.parametrize("method", ["mdlm", "langflow"])
def test_a_text_has_the_same_likelihood_in_any_batches(micro_folders, tmp_path, method):
    model = load(micro_folders(method), "cpu")
    file = tmp_path / "some.txt"
    file.write_text("This is a text of a few words.\n")
    rows = text_rows(model, str(file), None, Console(quiet=True))
    assert len(rows.rows) > 1 and rows.rows[-1].first > 0
    one, all_at_once = (text_nats(model.method, rows, 1, 0, size)[0] for size in (1, 9))
    assert one == pytest.approx(all_at_once, rel=1e-4)


@pytest.mark.parametrize(
    "name, text, want",
    [
        (
            "wikitext2",
            "The 1 @,@ 000 cats ( all of them ) ran ; then = = slept .",
            "The 1,000 cats (all of them) ran; then == slept .",
        ),
        ("ptb", "he does n't pay $ N N for the bank 's <unk>", "he doesn't pay $1 1 for the bank's ?"),
        ("lambada", " “ Yes , ” she said ", '\n" Yes , " she said'),
        ("arxiv", "we show [ 3 ] that @-@ is , of course , so .", "we show [3] that-is, of course, so."),
        ("lm1b", "It 's a test : yes ; no ? maybe ! ok / fine", "It's a test: yes; no? maybe! ok/fine"),
        ("ag-news", "As it is ( here )", "As it is ( here )"),
    ],
)
def test_zero_shot_sets_are_read_and_detokenized(micro_folders, monkeypatch, name, text, want):
    source, field, rules = ZERO_SHOT[name]
    config = source.rpartition(":")[0].partition("@")[0].split("/")[2:]
    hub = HubStandIn({(config or ["default"])[0]: {source.rpartition(":")[2]: [{field: text, "other": "no"}, {field: ""}]}})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    rows = text_rows(text_model(micro_folders), name, None, Console(quiet=True))
    assert rows.documents == 1 and hub.calls[0][0].count("/") == 1
    assert DETOKENIZERS.get(rules, str)(text) == want


def test_a_prepared_folder_is_scored_whole_and_from_the_command_line(micro_folders, heldout, tmp_path, monkeypatch, capsys):
    train = Blocks(heldout.folder, "train")
    rows = text_rows(text_model(micro_folders), str(heldout.folder), None, Console(quiet=True))
    assert len(rows.rows) == len(train) + len(heldout) and rows.rows[-1].ids == heldout.rows([len(heldout) - 1])[0].tolist()
    file = tmp_path / "mine.txt"
    file.write_text("A text.\nAnother text.\n")
    models = [str(micro_folders(name)) for name in ("ar", "sedd")]
    assert main(["evaluate", *models, "--likelihood", str(file), "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"Likelihood of {file}.") and "ar: 2 documents" in shown and "| bound |" in shown


def test_a_model_in_the_place_of_a_text_is_refused(micro_folders, capsys):
    assert main(["evaluate", "--likelihood", str(micro_folders("ar"))]) == 2
    assert "name models before --likelihood" in capsys.readouterr().err
