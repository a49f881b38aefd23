"""Spans of the causal codec and its masks, beside their definition written position by position."""

import pytest
import torch

from jpeg_dlm.nn.spans import (
    complete_spans,
    compressor_mask,
    decompressor_mask,
    sequence_mask,
    span_ends,
    token_spans,
)

SIZES = [(8, 3), (16, 4), (12, 12), (7, 5), (5, 1), (1024, 96)]


@pytest.mark.parametrize(("length", "latents"), SIZES)
def test_spans_cover_all_tokens_in_order(length, latents):
    ends = span_ends(length, latents)
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    assert ends[-1] == length and max(sizes) - min(sizes) <= 1 and min(sizes) >= 1
    assert all((n + 1) * length / latents - 1 < end <= (n + 1) * length / latents for n, end in enumerate(ends))
    assert token_spans(length, latents).tolist() == [n for n, size in enumerate(sizes) for _ in range(size)]


@pytest.mark.parametrize(("length", "latents"), SIZES[:5])
def test_masks_are_their_definition(length, latents):
    ends = span_ends(length, latents)
    span = [next(n for n, end in enumerate(ends) if i < end) for i in range(length)]
    down, up, both = compressor_mask(length, latents), decompressor_mask(length, latents), sequence_mask(2, latents)
    for n in range(latents):
        assert down[n].tolist() == [m <= n for m in range(latents)] + [i < ends[n] for i in range(length)]
        assert both[2 + n].tolist() == [True, True] + [m <= n for m in range(latents)]
    for i in range(length):
        assert up[i].tolist() == [m <= span[i] for m in range(latents)] + [j < ends[span[i]] for j in range(length)]
    assert both[:2].tolist() == [[True, True] + [False] * latents] * 2


def test_a_span_is_complete_if_it_and_all_before_it_are_given():
    given = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 1, 1, 1, 1], [1] * 8, [0] * 8, [1, 1, 1, 1, 0, 1, 1, 1]])
    there, held = complete_spans(given.bool(), 3)  # spans of 2, 3 and 3 tokens
    assert there.int().tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0], [1, 0, 0]]
    assert held.sum(1).tolist() == [5, 0, 8, 0, 2] and held[4].tolist() == [True] * 2 + [False] * 6
