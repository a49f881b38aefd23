"""The DiT against numbers of the released code and against a slow second version written from its description."""

import math

import pytest
import torch
from reference import slow_dit

from jpeg_dlm.nn.dit import DiT, linear_estimate, rope_table, scalar_embedding
from jpeg_dlm.nn.lean import rotate

B, N, D, H, HEADS, DEPTH, FREQ = 3, 5, 6, 24, 3, 2, 8
TOKENS = (2, 3, 1)  # time, scale and mode tokens, all different so that none can be confused


def build(perturbed=True, dropout=0.0):
    torch.manual_seed(0)
    dit = DiT(N, D, 4, H, DEPTH, HEADS, 4.0, FREQ, *TOKENS, dropout)
    if perturbed:  # away from zero heads, unit norms and zero biases, so that every parameter matters
        with torch.no_grad():
            for p in dit.parameters():
                p.add_(0.2 * torch.randn_like(p))
    return dit.eval()


def inputs(rows=B):
    g = torch.Generator().manual_seed(1)
    z, s = torch.randn(rows, N, D, generator=g), torch.randn(rows, N, D, generator=g)
    return z, torch.rand(rows, generator=g), s, 5 * torch.rand(rows, generator=g)


# ---------------------------------------------------------------- numbers of the released code


def test_scalar_embedding():
    expected = [0.9689124, 0.9996875, 0.9999969, 1, 0.2474040, 0.0249974, 0.0025, 0.00025]
    assert scalar_embedding(torch.tensor([0.25]), 8)[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_rotary_table():
    cos, sin = rope_table(0, 2, 8)
    assert cos[1, :4].tolist() == pytest.approx([0.5403023, 0.5403023, 0.9950042, 0.9950042], abs=1e-6)
    assert sin[1, :4].tolist() == pytest.approx([0.8414710, 0.8414710, 0.0998334, 0.0998334], abs=1e-6)
    assert cos[0].tolist() == [1] * 8 and sin[0].tolist() == [0] * 8


def test_the_prefix_is_not_rotated_and_latents_count_from_zero():
    cos, sin = rope_table(12, 6, 8)
    assert cos.shape == sin.shape == (18, 8)
    assert torch.equal(cos[:13], torch.ones(13, 8)) and torch.equal(sin[:13], torch.zeros(13, 8))
    plain_cos, plain_sin = rope_table(0, 6, 8)
    assert torch.equal(cos[12:], plain_cos) and torch.equal(sin[12:], plain_sin)
    x = torch.randn(18, 8)
    assert torch.equal(rotate(x, cos, sin)[:13], x[:13])


def test_rotation_turns_neighboring_pairs():
    cos, sin = rope_table(0, 4, 8)
    x = torch.randn(4, 8)
    pairs = torch.view_as_complex(x.view(4, 4, 2).contiguous())
    angle = torch.outer(torch.arange(4.0), 10_000.0 ** (-torch.arange(4.0) / 4))
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    assert torch.allclose(rotate(x, cos, sin), turned, atol=1e-5)


def test_sizes_of_the_released_network():
    with torch.device("meta"):
        dit = DiT(32, 512, 128, 768, 12, 12, 4.0, 256, 4, 4, 4, 0.0)
    assert sum(p.numel() for p in dit.parameters()) == 88_113_408
    assert dit.blocks[0].mlp.w12.weight.shape == (4096, 768) and dit.blocks[0].mlp.w3.weight.shape == (768, 2048)
    assert not any("rope" in name for name in dit.state_dict())


# ---------------------------------------------------------------- a slow second version


@torch.no_grad()
@pytest.mark.parametrize("decode", [False, True])
def test_a_slow_version_with_the_same_weights_agrees(decode):
    dit = build()
    z, t, s, w = inputs()
    fast = dit(z, t, s, w, decode_rows=B if decode else 0)
    p = dit.state_dict()
    slow = torch.stack([slow_dit(p, HEADS, z[i], t[i].item(), s[i], w[i].item(), decode) for i in range(B)])
    assert slow.std() > 0.1  # the comparison means something
    assert torch.allclose(fast, slow, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- properties


def test_a_fresh_network_predicts_zero_in_both_modes():
    dit = build(perturbed=False)
    for rows in (0, B, 1):
        assert torch.equal(dit(*inputs(), decode_rows=rows), torch.zeros(B, N, D))


def test_initial_weights():
    torch.manual_seed(0)
    dit = DiT(4, 64, 64, 96, 1, 2, 4.0, 64, 4, 4, 4, 0.0)
    bound = math.sqrt(6 / (96 + 96))  # xavier-uniform
    weight = dit.blocks[0].attn.proj.weight
    assert weight.abs().max() <= bound and weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    for module in dit.modules():
        if isinstance(module, torch.nn.Linear) and module.bias is not None:
            assert not module.bias.any()
    for p in (dit.t_embedder.mlp_0.weight, dit.sc_embedder.mlp_2.weight, dit.mode_tokens, dit.t_emb_tokens):
        assert p.std().item() == pytest.approx(0.02, rel=0.2)


@torch.no_grad()
def test_one_mixed_pass_equals_two_separate_ones():
    dit = build()
    z, t, s, w = inputs(5)
    mixed = dit(z, t, s, w, decode_rows=2)
    decoded, denoised = dit(z[:2], t[:2], s[:2], w[:2], decode_rows=2), dit(z[2:], t[2:], s[2:], w[2:])
    assert torch.allclose(mixed, torch.cat([decoded, denoised]), atol=1e-5)


@torch.no_grad()
def test_no_self_conditioning_is_self_conditioning_on_zeros():
    dit = build()
    z, t, s, w = inputs()
    assert torch.equal(dit(z, t, None, w), dit(z, t, torch.zeros_like(s), w))
    assert not torch.allclose(dit(z, t, None, w), dit(z, t, s, w), atol=1e-3)


@torch.no_grad()
def test_time_scale_mode_and_order_all_matter():
    dit = build()
    z, t, s, w = inputs()
    base = dit(z, t, s, w)
    reordered = dit(z.flip(1), t, s.flip(1), w).flip(1)
    for other in (dit(z, t + 0.3, s, w), dit(z, t, s, w + 1), dit(z, t, s, w, decode_rows=B), reordered):
        assert not torch.allclose(base, other, atol=1e-4)


def test_mode_tokens_get_no_gradient_in_denoise_mode():
    dit = build()
    z, t, s, w = inputs()
    dit(z, t, s, w).square().sum().backward()
    assert not dit.mode_tokens.grad.any() and dit.decode_head.linear.weight.grad is None
    dit(z, t, s, w, decode_rows=B).square().sum().backward()
    assert dit.mode_tokens.grad.any()


def test_dropout_works_only_in_training():
    dit = build(dropout=0.5)
    z, t, s, w = inputs()
    assert torch.equal(dit(z, t, s, w), dit(z, t, s, w))
    dit.train()
    assert not torch.equal(dit(z, t, s, w), dit(z, t, s, w))


@torch.no_grad()
def test_inputs_and_heads_stay_full_precision_under_autocast():
    dit = build()
    z, t, s, w = inputs()
    kinds = {}
    for name in ("self_cond_proj", "t_embedder.mlp_2", "denoise_head.linear", "blocks.0.attn.proj"):
        dit.get_submodule(name).register_forward_hook(lambda m, i, out, name=name: kinds.update({name: out.dtype}))
    with torch.autocast("cpu", torch.bfloat16):
        out = dit(z, t, s, w)
    assert out.dtype == torch.float32
    assert kinds.pop("blocks.0.attn.proj") == torch.bfloat16
    assert set(kinds.values()) == {torch.float32}
    assert torch.allclose(out, dit(z, t, s, w), atol=0.1 * out.std().item() + 0.05)


@pytest.mark.parametrize("t", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_linear_estimate_is_the_regression_of_data_on_what_is_seen(t):
    z, eps = torch.randn(2, 200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seen = t * z + (1 - t) * eps
    slope = (seen @ z) / (seen @ seen)
    c_skip, c_out = linear_estimate(torch.tensor([t], dtype=torch.float64))
    assert c_skip.item() == pytest.approx(slope.item(), abs=1e-2)
    assert c_out.item() == pytest.approx((z - slope * seen).std().item(), abs=1e-2)


def test_the_skip_adds_the_linear_estimate_to_denoised_rows_alone():
    torch.manual_seed(0)
    sizes = (3, 8, 4, 16, 2, 2, 4.0, 8, 1, 1, 1, 0.0)
    plain, skip = DiT(*sizes), DiT(*sizes, denoise_skip=True)
    for head in (plain.denoise_head, plain.decode_head):
        torch.nn.init.normal_(head.linear.weight)
    skip.load_state_dict(plain.state_dict())
    z, t, w = torch.randn(4, 3, 8), torch.tensor([1.0, 0.0, 0.4, 1.0]), torch.ones(4)
    without, found = plain(z, t, None, w, decode_rows=1), skip(z, t, None, w, decode_rows=1)
    assert torch.equal(found[0], without[0])
    assert torch.allclose(found[1], without[1])  # all noise: nothing is known of the data, whose deviation is 1
    assert torch.allclose(found[3], z[3])  # no noise: the data is seen
    variance = 0.4**2 + 0.6**2
    assert torch.allclose(found[2], 0.4 / variance * z[2] + 0.6 / variance**0.5 * without[2], atol=1e-6)
