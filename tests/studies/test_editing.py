"""The study of edits on the smallest model: shares against rows that are compared here, table and picture."""

from __future__ import annotations

import json

from jpeg_dlm.api import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.studies.editing import NOISES

pytest_plugins = ["stand_in"]  # fixtures


def test_the_study_counts_kept_tokens(micro_folders, corpus_file, tmp_path, capsys):
    folder = micro_folders("jpeg-dlm")
    words = ["study", "editing", str(folder), "-n", "4", "--data", str(corpus_file), "--out", str(tmp_path), "--quiet"]
    assert main(words) == 0
    (row,) = json.loads((tmp_path / "study-editing.json").read_text())["rows"]
    assert len(row["kept"]) == len(NOISES) and all(0 <= share <= 1 for share in row["kept"]) and row["texts"] == 4
    model = load(folder, "cpu")
    ids = [model.tokenizer.encode(text) for text in row["original"]]
    assert len(ids) == 4 and all(ids)
    free = model.sample(4)  # with noise alone a text is a new one
    assert row["edited"][-1] == model.to_text(free)
    assert (tmp_path / "study-editing.png").stat().st_size > 1000 and "noise 0.4" in capsys.readouterr().out
