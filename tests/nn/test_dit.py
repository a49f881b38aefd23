"""The DiT against numbers of the released code and a slow second version written from its description; its context."""

from dataclasses import replace

import pytest
import torch
from micro import perturb
from reference import slow_dit

from jpeg_dlm.methods.jpeg_dlm_config import JpegDlmModel
from jpeg_dlm.nn.dit import Context, DiT, linear_estimate
from jpeg_dlm.nn.layers import scalar_embedding

B, N, D, H, HEADS, DEPTH, FREQ = 3, 5, 6, 24, 3, 2, 8
C = 2 * N  # latents of a context of two blocks
SIZES = JpegDlmModel(
    latent_len=N, latent_dim=D, bottleneck_dim=4, hidden=H, depth=DEPTH, heads=HEADS, freq_dim=FREQ,
    time_tokens=2, sc_tokens=3, mode_tokens=1,  # all different so that none can be confused
)  # fmt: skip


def build(scale=0.2, context=0):
    torch.manual_seed(0)
    return perturb(DiT(SIZES, context * N), scale).eval()


def inputs(rows=B):
    g = torch.Generator().manual_seed(1)
    z, s = torch.randn(rows, N, D, generator=g), torch.randn(rows, N, D, generator=g)
    return z, torch.rand(rows, generator=g), s, 5 * torch.rand(rows, generator=g)


# ---------------------------------------------------------------- numbers of the released code


def test_scalar_embedding():
    expected = [0.9689124, 0.9996875, 0.9999969, 1, 0.2474040, 0.0249974, 0.0025, 0.00025]
    assert scalar_embedding(torch.tensor([0.25]), 8)[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_sizes_of_the_released_network():
    with torch.device("meta"):
        dit = DiT(JpegDlmModel())
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
    dit = build(scale=0.0)
    for rows in (0, B, 1):
        assert torch.equal(dit(*inputs(), decode_rows=rows), torch.zeros(B, N, D))


@torch.no_grad()
def test_one_mixed_pass_equals_two_separate_ones():
    dit = build()
    z, t, s, w = inputs(5)
    mixed = dit(z, t, s, w, decode_rows=2)
    decoded, denoised = dit(z[:2], t[:2], s[:2], w[:2], decode_rows=2), dit(z[2:], t[2:], s[2:], w[2:])
    assert torch.allclose(mixed, torch.cat([decoded, denoised]), atol=1e-5)


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
    sizes = replace(SIZES, latent_len=3, latent_dim=8)
    plain, skip = DiT(sizes), DiT(replace(sizes, denoise_skip=True))
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


# ---------------------------------------------------------------- context


def context(rows=4, seed=2):
    g = torch.Generator().manual_seed(seed)
    return Context(torch.randn(rows, C, D, generator=g), torch.ones(rows, C, dtype=torch.bool))


def test_context_latents_have_the_positions_before_the_first():
    network = build(context=C // N)
    cos, sin = network.rope_cos, network.rope_sin
    assert torch.equal(cos[:6], torch.ones(6, 8)) and len(cos) == 6 + N and len(network.context_cos) == C
    turns = torch.cat([torch.complex(network.context_cos, network.context_sin), torch.complex(cos[6:], sin[6:])])[:, ::2]
    step = turns[1:] * turns[:-1].conj()  # a turn by one position leads from each to the next, as in one long sequence
    torch.testing.assert_close(step, step[:1].expand_as(step))


def test_each_latent_of_the_context_matters_and_its_place_too():
    network, given, before = build(context=C // N), inputs(4), context()
    out = network(*given, memory=network.read(before))
    for place in range(C):
        z = before.z_BCD.clone()
        z[:, place] += 1
        assert (network(*given, memory=network.read(Context(z, before.present_BC))) - out).abs().max() > 1e-4
    swapped = Context(before.z_BCD.flip(1), before.present_BC)
    assert (network(*given, memory=network.read(swapped)) - out).abs().max() > 1e-4


def test_a_memory_is_what_attention_to_one_long_sequence_gives():
    """The layers over context and latents together, under a mask in which the context sees only itself."""
    network, (z, t, s, w), before = build(context=C // N), inputs(4), context()
    seen = []
    network.blocks[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    out = network.states(z, t, s, w, torch.zeros(4).bool(), network.read(before))
    x, size = torch.cat(seen, 1), C + 6 + N
    mask = torch.ones(size, size, dtype=torch.bool)
    mask[:C, C:] = False
    cos, sin = (torch.cat(pair) for pair in ((network.context_cos, network.rope_cos), (network.context_sin, network.rope_sin)))
    for block in network.blocks:
        x, _ = block(x, cos, sin, mask)
    torch.testing.assert_close(x[:, C + 6 :], out)


def test_absent_latents_are_not_seen():
    network, given, before = build(context=C // N), inputs(4), context()
    nothing = network.read(Context(before.z_BCD, torch.zeros_like(before.present_BC)))
    torch.testing.assert_close(network(*given, memory=nothing), network(*given))
    half = before.present_BC.clone()
    half[:, : C // 2] = False
    other = before.z_BCD.clone()
    other[:, : C // 2] = 100.0
    found, expected = (network(*given, memory=network.read(Context(z, half))) for z in (other, before.z_BCD))
    torch.testing.assert_close(found, expected)


def test_a_row_sees_its_own_context_alone():
    network, (z, t, s, w) = build(context=C // N), inputs(4)
    memory = network.read(context())
    rows = torch.tensor([2, 0])
    found = network(z[rows], t[rows], s[rows], w[rows], memory=memory.of(rows))
    torch.testing.assert_close(found, network(z, t, s, w, memory=memory)[rows])
