"""The average of two models' weights, through `export --blend`."""

from __future__ import annotations

import pytest
import torch
from conftest import perturb

from jpeg_dlm.api import load
from jpeg_dlm.cli.main import main

pytest_plugins = ["stand_in"]  # fixtures


@pytest.fixture
def folder(micro_folders):
    return micro_folders("jpeg-dlm")


@pytest.fixture
def other_folder(folder, tmp_path):
    """The same model with other weights."""
    model = load(folder, "cpu")
    perturb(model.method)
    model.save(tmp_path / "other")
    return tmp_path / "other"


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_every_tensor_lies_between_those_of_the_two(share, folder, other_folder, tmp_path):
    words = ["export", str(folder), "--blend", str(other_folder), "--share", str(share), "--out", str(tmp_path / "new")]
    assert main(words) == 0
    mine, theirs, found = (load(path, "cpu").method.export_state() for path in (folder, other_folder, tmp_path / "new"))
    assert mine.keys() == found.keys()
    for name in mine:
        torch.testing.assert_close(found[name], (1 - share) * mine[name] + share * theirs[name])
    assert any(not torch.equal(mine[name], theirs[name]) for name in mine)


def test_models_of_other_layouts_are_refused(folder, micro_folders, tmp_path, capsys):
    assert main(["export", str(folder), "--blend", str(micro_folders("ar")), "--out", str(tmp_path / "new")]) == 2
    assert "blend two models of one layout" in capsys.readouterr().err and not (tmp_path / "new").exists()
    assert main(["export", str(folder), "--blend", "bundled", "--out", str(tmp_path / "new")]) == 2
    assert main(["export", str(folder), "--blend", "bundled", "--share", "1.5", "--out", str(tmp_path / "new")]) == 2
    assert "between 0 and 1" in capsys.readouterr().err
