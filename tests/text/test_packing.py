"""Rows have exactly L ids, and no id of the text is lost or moved."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from jpeg_dlm.config import DataConfig
from jpeg_dlm.text.packing import RowLayout, end_rows, layout_of, pack_document, sentences
from jpeg_dlm.text.tokenizer import TextTokenizer

EOS, PAD, BOS, LINE = 1, 0, 4, 5
PIECE = st.lists(st.integers(10, 99), min_size=0, max_size=9)
DOCUMENTS = st.lists(st.lists(PIECE, max_size=5), max_size=8)
WIDTH = st.integers(4, 12)


def layout(packing, width, frame=False):
    return RowLayout(packing, width, EOS, PAD, frame, BOS, LINE)


def pack(plan, documents):
    """The rows of all documents."""
    rows, carry = [], []
    for document in documents:
        new, carry = pack_document(plan, carry, document)
        rows += new
    return rows


def stream_of(documents, frame=False):
    """What the rows must hold, by the plainest loop."""
    out = []
    for document in documents:
        words = [i for piece in document for i in piece]
        for piece in document:
            out += piece + ([LINE] if frame and piece else [])
        if words and not frame:
            out.append(EOS)
    return out


@given(DOCUMENTS, WIDTH, st.booleans())
def test_continuous_is_the_stream_cut_into_rows_between_begin_and_end_if_framed(documents, width, frame):
    rows = pack(layout("continuous", width, frame), documents)
    stream, payload = stream_of(documents, frame), width - 2 * frame
    assert all(len(r) == width for r in rows) and len(rows) == len(stream) // payload
    assert not frame or all(r[0] == BOS and r[-1] == EOS for r in rows)
    assert sum((r[1:-1] if frame else r for r in rows), []) == stream[: len(rows) * payload]


@given(DOCUMENTS, WIDTH, st.booleans())
def test_padded_rows_lose_nothing(documents, width, frame):
    rows = pack(layout("padded", width, frame), documents)
    assert all(len(r) == width for r in rows)
    inner = [r[1 : r.index(EOS)] if frame else [i for i in r if i != PAD] for r in rows]
    assert sum(inner, []) == stream_of(documents, frame)


@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=4), st.integers(0, 6))
def test_rows_end_at_the_first_end_behind_what_was_given(rows, kept):
    fixed_L = torch.tensor([7] * kept + [-1] * (6 - kept))
    expected = []
    for row in rows:
        ends = [i for i in range(kept, 6) if row[i] == EOS]
        expected.append(row[: ends[0] + 1] + [PAD] * (5 - ends[0]) if ends else row)
    assert end_rows(torch.tensor(rows), EOS, PAD, fixed_L).tolist() == expected
    if 0 < kept < 6:  # given text may end the row itself
        ended = torch.tensor([[7] * (kept - 1) + [EOS] + row[kept:] for row in rows])
        fixed_L[kept - 1] = EOS
        assert end_rows(ended, EOS, PAD, fixed_L).tolist() == [[7] * (kept - 1) + [EOS] + [PAD] * (6 - kept) for _ in rows]
    if kept == 0:
        assert end_rows(torch.tensor(rows), EOS, PAD).tolist() == expected


@given(DOCUMENTS, WIDTH)
def test_sentence_rows_open_with_a_sentence_and_skip_nothing(documents, width):
    # Number every id, so that a row's place in the stream can be read off it.
    numbers = iter(range(10, 10_000))
    documents = [[[next(numbers) for _ in piece] for piece in document] for document in documents]
    rows = pack(layout("sentences", width), documents)
    stream = stream_of(documents)
    starts = {piece[0] for document in documents for piece in document if piece}
    end = 0  # how much of the stream the rows so far have shown
    for row in rows:
        assert len(row) == width
        at = stream.index(row[0]) if row[0] != EOS else end  # only a rest of an overlong sentence opens with eos
        assert stream[at : at + width] == row and at <= end < at + width
        assert row[0] in starts or at == end
        end = at + width
    left = [p for d in documents for p in d]
    assert len(stream) - end < width + max((len(p) + 1 for p in left), default=0)


def test_sentences_split_where_a_reader_would():
    text = 'Mr. J. Smith went to St. Louis. "Why?" he asked. Nobody knew! In 1990 (see p. 3.) it ended.'
    assert sentences(text) == [
        "Mr. J. Smith went to St. Louis.",
        '"Why?" he asked.',
        "Nobody knew!",
        "In 1990 (see p. 3.) it ended.",
    ]


@given(st.text(alphabet="aB. !?\"')", max_size=80))
def test_sentences_keep_all_words(text):
    assert " ".join(sentences(text)).split() == text.split()


def test_documents_that_do_not_fit_are_left_out_where_rows_hold_whole_ones():
    short, exact, long = [[5, 6]], [[5, 6, 7]], [[5, 6, 7, 8]]
    cut = RowLayout("padded", 4, EOS, PAD)
    whole = RowLayout("padded", 4, EOS, PAD, whole=True)
    assert len(pack(cut, [short, exact, long])) == 4
    assert pack(whole, [short, exact, long]) == [[5, 6, EOS, PAD], [5, 6, 7, EOS]]


@pytest.mark.parametrize(
    ("packing", "frame", "text_row", "beginning"),
    [
        ("continuous", False, [7, 8, EOS, 7, 8, EOS, 7, 8], [7, 8, -1, -1, -1, -1, -1, -1]),
        ("sentences", True, [BOS, 7, 8, LINE, 7, 8, LINE, EOS], [BOS, 7, 8, -1, -1, -1, -1, -1]),
        ("padded", False, [7, 8, EOS, PAD, PAD, PAD, PAD, PAD], [7, 8, -1, -1, -1, -1, -1, -1]),
        ("padded", True, [BOS, 7, 8, LINE, EOS, PAD, PAD, PAD], [BOS, 7, 8, -1, -1, -1, -1, -1]),
    ],
)
def test_a_text_becomes_a_row_of_the_model(packing, frame, text_row, beginning):
    plan = layout(packing, 8, frame)
    assert plan.text_row([7, 8]) == text_row and plan.beginning([7, 8], -1) == beginning
    full = list(range(10, 10 + plan.payload))
    assert plan.text_row(full) == plan.row(full) == ([BOS, *full, EOS] if frame else full)
    assert plan.row(full)[plan.start : plan.start + plan.payload] == full


def test_framed_rows_of_berts_tokenizer_have_cls_everywhere():
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    backend.add_special_tokens(names[:5])
    bert = TextTokenizer(backend)
    cls, sep = 2, 3
    plan, carry, rows = layout_of(DataConfig(token_len=6, frame=True), bert), [], []
    for document in ([5, 6, 7], [8, 9], [10, 11, 12, 5]):  # in MDLM and Duo 101 ends documents, and begins and ends rows
        filled, carry = pack_document(plan, carry, [document])
        rows += filled
    assert rows == [[cls, 5, 6, 7, cls, cls], [cls, 8, 9, cls, 10, cls], [cls, 11, 12, 5, cls, cls]]
    assert layout_of(DataConfig(token_len=6, packing="padded"), bert).text_row([5, 6]) == [5, 6, sep, 0, 0, 0]
