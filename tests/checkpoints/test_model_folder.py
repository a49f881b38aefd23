"""Model folders through `export`: the average of two models' weights, and weights in fp16."""

from __future__ import annotations

import pytest
import torch
from micro import perturb

from jpeg_dlm.api import load
from jpeg_dlm.checkpoints.model_folder import halved
from jpeg_dlm.cli.main import main


@pytest.fixture
def folder(micro_folders):
    return micro_folders("jpeg-dlm")


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_every_blended_tensor_lies_between_those_of_the_two(share, folder, tmp_path):
    model = load(folder, "cpu")
    perturb(model.method)
    model.save(tmp_path / "other")
    words = ["export", str(folder), "--blend", str(tmp_path / "other"), "--share", str(share), "--out", str(tmp_path / "new")]
    assert main(words) == 0
    mine, theirs, mixed = (load(path, "cpu").method.export_state() for path in (folder, tmp_path / "other", tmp_path / "new"))
    assert mine.keys() == mixed.keys() and any(not torch.equal(mine[name], theirs[name]) for name in mine)
    for name in mine:
        torch.testing.assert_close(mixed[name], (1 - share) * mine[name] + share * theirs[name])


def test_models_of_other_layouts_are_not_blended(folder, micro_folders, tmp_path):
    for other in (str(micro_folders("ar")), "bundled"):
        assert main(["export", str(folder), "--blend", other, "--out", str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists()


def test_a_folder_of_half_the_size_holds_the_rounded_weights(folder, tmp_path):
    small = tmp_path / "half"
    assert main(["export", str(folder), "--half", "--out", str(small)]) == 0
    before, after = (load(path, "cpu").method.export_state() for path in (folder, small))
    for name, t in before.items():
        assert torch.equal(after[name], t.half().float() if t.ndim > 1 else t), name
    sizes = [(path / "model.safetensors").stat().st_size for path in (folder, small)]
    assert 0.5 < sizes[1] / sizes[0] < 0.65 and main(["verify", str(small)]) == 0


def test_numbers_beyond_the_range_of_fp16_stay_as_they_are():
    large, fine = torch.tensor([[1e5, 1.0]]), torch.tensor([[6e4, 1e-3]])
    rounded = halved({"large": large, "fine": fine, "vector": fine[0], "ids": torch.tensor([[1, 2]])})
    assert [t.dtype for t in rounded.values()] == [torch.float32, torch.float16, torch.float32, torch.int64]
    assert torch.equal(rounded["large"], large)
