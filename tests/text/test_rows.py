"""Rows against a row that is written down."""

from __future__ import annotations

import pytest
import torch

from jpeg_dlm.text.rows import Layout, end_rows

EOS, PAD, BOS, LINE = 1, 0, 2, 3


@pytest.mark.parametrize(("packing", "frame", "text_row", "beginning"), [
    ("continuous", False, [7, 8, EOS, 7, 8, EOS, 7, 8], [7, 8, -1, -1, -1, -1, -1, -1]),
    ("sentences", True, [BOS, 7, 8, LINE, 7, 8, LINE, EOS], [BOS, 7, 8, -1, -1, -1, -1, -1]),
    ("padded", False, [7, 8, EOS, PAD, PAD, PAD, PAD, PAD], [7, 8, -1, -1, -1, -1, -1, -1]),
    ("padded", True, [BOS, 7, 8, LINE, EOS, PAD, PAD, PAD], [BOS, 7, 8, -1, -1, -1, -1, -1]),
])  # fmt: skip
def test_a_text_becomes_a_row_of_the_model(packing, frame, text_row, beginning):
    layout = Layout(packing, 8, EOS, PAD, frame, BOS, LINE)
    assert layout.text_row([7, 8]) == text_row and layout.beginning([7, 8], -1) == beginning
    full = list(range(10, 10 + layout.payload))
    assert layout.text_row(full) == layout.row(full) == ([BOS, *full, EOS] if frame else full)
    assert layout.row(full)[layout.start : layout.start + layout.payload] == full


def test_rows_end_behind_what_was_given_to_each():
    tokens = torch.tensor([[5, EOS, 6, EOS, 7]] * 3)
    given = torch.tensor([[-1, -1, -1, -1, -1], [-1, -1, 6, -1, -1], [-1, -1, -1, -1, 7]])
    expected = [[5, EOS, PAD, PAD, PAD], [5, EOS, 6, EOS, PAD], [5, EOS, 6, EOS, 7]]
    assert end_rows(tokens, EOS, PAD, given).tolist() == expected
    for row, ended in zip(given, expected, strict=True):
        assert end_rows(tokens[:1], EOS, PAD, row).tolist() == [ended]
