"""Rows against a row that is written down."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models

from jpeg_dlm.config import DataConfig
from jpeg_dlm.text.packing import step
from jpeg_dlm.text.rows import Layout, end_rows, layout_of
from jpeg_dlm.text.tokenizer import TextTokenizer

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


def test_framed_rows_of_berts_tokenizer_have_cls_everywhere():
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    backend.add_special_tokens(names[:5])
    bert = TextTokenizer(backend)
    cls, sep = 2, 3
    layout, carry, rows = layout_of(DataConfig(token_len=6, frame=True), bert), [], []
    for document in ([5, 6, 7], [8, 9], [10, 11, 12, 5]):  # in MDLM and Duo 101 ends documents, and begins and ends rows
        filled, carry = step(layout, carry, [document])
        rows += filled
    assert rows == [[cls, 5, 6, 7, cls, cls], [cls, 8, 9, cls, 10, cls], [cls, 11, 12, 5, cls, cls]]
    assert layout_of(DataConfig(token_len=6, packing="padded"), bert).text_row([5, 6]) == [5, 6, sep, 0, 0, 0]
