"""What `new-system` refuses and writes; tests/test_packaging.py installs, trains and samples what it writes."""

import ast

import pytest
from refusals import refusal

from jpeg_dlm.cli.main import main
from jpeg_dlm.cli.new_system import TEMPLATE


@pytest.mark.parametrize("name", ["Chain", "a--b", "a-", "9x", "x_y", "../x", "a b", "", "x" * 41, "mdlm", "jpeg-dlm", "all"])
def test_a_bad_name_is_refused(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert f"'{name}'" in refusal(capsys, ["new-system", name], 2) and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["json", "torch", "class", "none", "tensor", "method"])
def test_a_name_that_would_hide_a_module_or_class_is_refused(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "choose another" in refusal(capsys, ["new-system", name], 2) and not [*tmp_path.iterdir()]


def test_a_folder_that_exists_stays(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chain").mkdir()
    (tmp_path / "chain" / "mine.py").write_text("mine")
    assert "already exists" in refusal(capsys, ["new-system", "chain"], 1)
    assert [path.name for path in tmp_path.rglob("*")] == ["chain", "mine.py"]


def test_names_of_two_words_become_those_of_a_module_and_classes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new-system", "two-words"]) == 0 and "--method two-words" in capsys.readouterr().out
    folder = tmp_path / "two-words"
    assert {path.name for path in folder.iterdir()} == {"pyproject.toml", "two_words.py", "test_two_words.py"}
    assert 'two-words = "two_words:TwoWords"' in (folder / "pyproject.toml").read_text()
    classes = [node.name for node in ast.parse((folder / "two_words.py").read_text()).body if isinstance(node, ast.ClassDef)]
    assert classes == ["TwoWordsModel", "TwoWordsObjective", "TwoWordsSampler", "TwoWords"]
    assert not any("toy" in path.read_text().lower() for path in folder.iterdir())


def test_the_toy_itself_can_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["new-system", "toy"]) == 0
    assert (tmp_path / "toy" / "toy.py").read_text() == (TEMPLATE / "toy_system.py").read_text()
