"""transformers' Llama with weights of llama.cpp against a slow second version that reads them as they are."""

import pytest
import torch
from reference import made_up_llama, slow_llama

from jpeg_dlm.nn.llama import build_llama, llama_sizes, llama_state

HEADS, KV_HEADS, BASE, EPS = 4, 2, 1000.0, 1e-5


def build(tensors):
    state = llama_state(tensors, HEADS, KV_HEADS)
    return build_llama(llama_sizes(state, HEADS, KV_HEADS) | {"rope_theta": BASE, "rms_norm_eps": EPS}, state)


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_log_probabilities_equal_the_slow_version(tied):
    tensors = made_up_llama(96, 32, 48, 2, HEADS, KV_HEADS, tied)
    model = build(tensors)
    tokens = torch.randint(0, 96, (3, 11), generator=torch.Generator().manual_seed(1))
    found = model(tokens).logits.log_softmax(-1)
    for row, x in zip(found, tokens, strict=True):
        expected = slow_llama(tensors, HEADS, KV_HEADS, BASE, EPS, x).log_softmax(-1)
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=1e-4)
    assert not any(p.requires_grad for p in model.parameters())


def test_building_draws_no_random_numbers():
    before = torch.get_rng_state()
    build(made_up_llama(96, 32, 48, 2, HEADS, KV_HEADS, True))
    assert torch.equal(torch.get_rng_state(), before)


def test_missing_spare_and_misshapen_tensors_are_refused():
    tensors = made_up_llama(96, 32, 48, 2, HEADS, KV_HEADS, True)
    wrong = {name: tensor for name, tensor in tensors.items() if name != "blk.1.ffn_up.weight"}
    for change in (wrong, tensors | {"blk.0.attn_v.weight": torch.ones(8, 32)}, tensors | {"rope_freqs.weight": torch.ones(4)}):
        with pytest.raises((RuntimeError, KeyError)):
            build(change)
