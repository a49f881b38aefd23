"""The precision of training."""

import pytest
import torch

from jpeg_dlm.util.cpu import training_precision


@pytest.mark.parametrize("has_bf16", [False, True])
def test_auto_is_bf16_where_there_are_instructions_for_it(has_bf16, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    assert training_precision("auto", "cpu") == ("bf16" if has_bf16 else "fp32")
    assert (training_precision("auto", "cuda"), training_precision("auto", "mps")) == ("bf16", "fp32")
    assert [training_precision(p, device) for p in ("fp32", "bf16") for device in ("cpu", "cuda")] == ["fp32"] * 2 + [
        "bf16"
    ] * 2
