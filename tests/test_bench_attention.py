"""The benchmark of attention: both forms compute the same, and every length has its ratio."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import attention


def test_forms_agree_and_lengths_have_ratios():
    q, k, v = torch.randn(3, 2, 4, 16, 48, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    theirs, ours = (form(q, k, v) for form in attention.FORMS.values())
    assert (theirs - ours).abs().max() < 0.05
    found = attention.measure(short=True)
    assert [row["length"] for row in found["rows"]] == [16, 128] and min(found["ratios"].values()) > 0
    assert all(f"| {row['length']} | {row['bf16']:.2f} | {row['ours']:.2f} |" in found["markdown"] for row in found["rows"])
