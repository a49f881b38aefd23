"""Infilling: templates, what is measured, and the command, on the smallest models."""

from __future__ import annotations

import json

import torch

from jpeg_dlm.cli.main import main
from jpeg_dlm.evaluation import tasks as infill
from jpeg_dlm.evaluation.table import Column, Table
from jpeg_dlm.evaluation.tasks import is_text, templates
from jpeg_dlm.text.packing import RowLayout
from jpeg_dlm.util.files import parse_json

pytest_plugins = ["stand_in", "tiny_evaluation"]  # fixtures

EOS, PAD, BOS = 1, 0, 2


def test_templates_hide_runs_of_text_and_nothing_else():
    layout = RowLayout("padded", 40, EOS, PAD, True, BOS, 3)
    rows = torch.tensor([layout.text_row(list(range(10, 10 + n))) for n in (30, 12)] * 50)
    given = templates(rows, layout, seed=0)
    text = is_text(rows, layout)
    assert text.sum(1).tolist() == [31, 13] * 50  # with the line token
    assert (given[~text & (rows != EOS)] == -1).all() and (given[rows == EOS] == EOS).all()  # the end of a row is given
    assert (given[given >= 0] == rows[given >= 0]).all() and 0.4 < (given[text] >= 0).float().mean() < 0.6
    for row, real in zip(given.tolist(), text.tolist(), strict=True):
        inside = "".join("x" if i >= 0 else "_" for i, t in zip(row, real, strict=True) if t)
        assert max(map(len, inside.replace("x", " ").split())) <= 4 and max(map(len, inside.replace("_", " ").split())) <= 4
    assert templates(rows[:7], layout, seed=0).equal(given[:7]) and not templates(rows, layout, seed=1).equal(given)


def test_the_command_fills_in_and_scores(micro_folders, corpus_file, byte_gpt2, tmp_path, capsys):
    models = [str(micro_folders(name)) for name in ("jpeg-dlm", "mdlm")]
    words = ["evaluate", *models, "--task", "infill", "--scorer", f"hf:{byte_gpt2}", "-n", "6", "--quiet"]
    words += ["--data", str(corpus_file), "--steps", "1,2"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(row["sampler"]["steps"], row["seed"]) for row in found["infill"]] == [(1, 0), (2, 0)] * 2
    ours, masked = found["infill"][::2]
    table = Table.from_json(found["tables"][0])  # points of the sweep can be told apart in the table too
    assert len({row[:3] for row in table.rows[:2]}) == 2 and table.columns[1:3] == (Column("sampler"), Column("seed"))
    assert ours["kept"] == masked["kept"] == 1.0 and 0 <= ours["decoded"] <= 1 and masked["decoded"] is None
    assert ours["n"] == 6 and ours["given"] + ours["hidden"] == 6 * 12
    for row in (ours, masked):
        assert all(1 < score["low"] <= score["perplexity"] <= score["high"] for score in row["scores"].values())
    said = capsys.readouterr().out
    assert "100.0%" in said and "real text" in said and "holes filled from other texts" in said
    assert main([*words, "--out", str(tmp_path / "out")]) == 0  # continues with what is there
    (tmp_path / "texts.txt").write_text("One text.\nAnother one.\n")
    assert main(["evaluate", str(tmp_path / "texts.txt"), "--task", "infill", "--quiet"]) == 2
    assert "--task infill needs models" in capsys.readouterr().err


def test_results_are_numbers_where_nothing_is_hidden(micro_folders, corpus_file, byte_gpt2, tmp_path, monkeypatch):
    monkeypatch.setattr(infill, "templates", lambda rows_NL, layout, seed: rows_NL)
    words = ["evaluate", str(micro_folders()), "--task", "infill", "--scorer", f"hf:{byte_gpt2}", "-n", "2", "--quiet"]
    assert main([*words, "--data", str(corpus_file), "--out", str(tmp_path / "out")]) == 0
    found = parse_json((tmp_path / "out" / "results.json").read_text())["infill"][0]  # refuses NaN
    assert found["hidden"] == 0 and found["recovered"] == 0.0 and found["kept"] == 1.0
