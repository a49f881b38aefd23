"""Model folders in fp16, through `export --half`."""

from __future__ import annotations

import pytest
import torch

from jpeg_dlm.api import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.folders.model_folder import halved

pytest_plugins = ["stand_in"]  # fixtures


def test_a_folder_of_half_the_size_holds_the_rounded_weights(micro_folders, tmp_path):
    folder, small = micro_folders("jpeg-dlm"), tmp_path / "half"
    assert main(["export", str(folder), "--half", "--out", str(small)]) == 0
    before, after = (load(path, "cpu").method.export_state() for path in (folder, small))
    for name, t in before.items():
        assert after[name].dtype == t.dtype
        assert torch.equal(after[name], t.half().float() if t.ndim > 1 else t), name
    sizes = [(path / "model.safetensors").stat().st_size for path in (folder, small)]
    assert 0.5 < sizes[1] / sizes[0] < 0.65
    assert main(["verify", str(small)]) == 0
    assert load(small, "cpu").generate(2) == load(small, "cpu").generate(2)


def test_numbers_beyond_the_range_stay_as_they_are():
    large, fine = torch.tensor([[1e5, 1.0]]), torch.tensor([[6e4, 1e-3]])
    found = halved({"large": large, "fine": fine, "vector": fine[0], "ids": torch.tensor([[1, 2]])})
    assert {name: t.dtype for name, t in found.items()} == {
        "large": torch.float32, "fine": torch.float16, "vector": torch.float32, "ids": torch.int64,
    }  # fmt: skip
    assert torch.equal(found["large"], large)


@pytest.mark.parametrize("name", ["onnx", "openvino"])
def test_other_formats_are_refused(name, micro_folders, tmp_path, capsys):
    assert main(["export", str(micro_folders("jpeg-dlm")), "--half", "--format", name, "--out", str(tmp_path / "new")]) == 2
    assert "--half is for safetensors" in capsys.readouterr().err
