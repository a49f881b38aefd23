"""The shared transformer against the published size, and against a slow second version of it."""

import math

import pytest
import torch
from micro import perturb
from reference import affine, silu, slow_half_attention, under

from jpeg_dlm.nn.ddit import CausalTransformer, DDiT, DditConfig, capped_attention

B, L, V, H, HEADS, DEPTH, FREQ = 3, 7, 11, 24, 3, 2, 8
TOKENS, SIGMA = torch.randint(0, V, (B, L), generator=torch.Generator().manual_seed(1)), torch.tensor([0.05, 1.2, 6.9])
SIZES = DditConfig(H, DEPTH, HEADS, 0.0, cond_dim=10, freq_dim=FREQ)


def ddit(softcap=0.0):
    torch.manual_seed(0)
    return perturb(DDiT(V, SIZES, softcap)).eval()


def causal():
    torch.manual_seed(0)
    return perturb(CausalTransformer(V, SIZES)).eval()


def test_the_number_of_parameters_of_the_medium_size():
    """Those of the small size are in tests/methods/test_discrete.py."""
    with torch.device("meta"):
        network = DDiT(50_258, DditConfig(hidden=1024, depth=24, heads=16))
    assert sum(p.numel() for p in network.parameters()) == 424_477_010


# ---------------------------------------------------------------- a slow second version


def slow_norm(x, gain):
    x = x - x.mean(-1, keepdim=True)
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * gain


def slow_gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def slow_network(network, ids, level=None, cap=0.0):
    """Logits of one row in float64, position by position, from the published description and the weights by name."""
    p = {name: t.double() for name, t in network.state_dict().items()}
    c = None
    if level is not None:
        angles = [level * math.exp(-math.log(10_000) * i / (FREQ // 2)) for i in range(FREQ // 2)]
        waves = torch.tensor([*map(math.cos, angles), *map(math.sin, angles)], dtype=torch.float64)
        c = silu(affine(p, "sigma_map.mlp.2", silu(affine(p, "sigma_map.mlp.0", waves))))

    def modulation(prefix, neutral):
        return neutral if c is None else affine(p, f"{prefix}.adaLN_modulation", c).split(H)

    x = p["vocab_embed.embedding"][ids]
    for b in range(DEPTH):
        w = under(p, f"blocks.{b}.")
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation(f"blocks.{b}", (0, 0, 1, 0, 0, 1))
        normed = slow_norm(x, w["norm1.weight"]) * (1 + scale1) + shift1
        x = x + gate1 * slow_half_attention(normed, w["attn_qkv.weight"], w["attn_out.weight"], HEADS, level is None, cap)
        normed = slow_norm(x, w["norm2.weight"]) * (1 + scale2) + shift2
        x = x + gate2 * affine(w, "mlp.2", slow_gelu(affine(w, "mlp.0", normed)))
    shift, scale = modulation("output_layer", (0, 0))
    return affine(p, "output_layer.linear", slow_norm(x, p["output_layer.norm_final.weight"]) * (1 + scale) + shift)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["plain", "capped", "causal"])
def test_a_slow_version_with_the_same_weights_agrees(kind):
    cap = 0.5 if kind == "capped" else 0.0
    network = causal() if kind == "causal" else ddit(cap)
    fast = network(TOKENS) if kind == "causal" else network(TOKENS, SIGMA)
    levels = [None] * B if kind == "causal" else SIGMA.tolist()
    slow = torch.stack([slow_network(network, row, level, cap) for row, level in zip(TOKENS, levels, strict=True)])
    assert slow.std() > 0.3  # the comparison means something
    assert torch.allclose(fast.double(), slow, atol=1e-5, rtol=1e-5)


def test_scores_are_capped_in_full_precision():
    q, k, v = torch.randn(3, 2, HEADS, L, 8, generator=torch.Generator().manual_seed(0)) * 4
    with torch.autocast("cpu", torch.bfloat16):
        rounded = capped_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), 50.0)
    exact = capped_attention(*(x.bfloat16().float() for x in (q, k, v)), 50.0)
    assert torch.allclose(rounded.float(), exact, rtol=0.02, atol=0.02)  # scores in bf16 would be off by 0.1


# ---------------------------------------------------------------- properties


def test_a_fresh_network_gives_zero_logits():
    assert not DDiT(V, SIZES)(TOKENS, SIGMA).any()
    assert not CausalTransformer(V, SIZES)(TOKENS).any()


@torch.no_grad()
def test_distributions_are_read_as_the_mean_of_rows():
    network = ddit()
    p = torch.rand(B, L, V, generator=torch.Generator().manual_seed(0)).softmax(-1)
    mean = sum(p[..., v, None] * network.vocab_embed.embedding[v] for v in range(V))
    assert torch.allclose(network.vocab_embed(p), mean, atol=1e-5)
    one_hot = torch.nn.functional.one_hot(TOKENS, V)
    assert torch.allclose(network(one_hot.double(), SIGMA), network(TOKENS, SIGMA), atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(network.vocab_embed(one_hot.float()), network.vocab_embed(TOKENS))


@torch.no_grad()
def test_the_sensitive_parts_stay_full_precision_under_autocast():
    network = ddit()
    kinds = {}
    for name in ("sigma_map.mlp.2", "blocks.0.norm1", "output_layer.norm_final", "blocks.0.attn_out"):
        network.get_submodule(name).register_forward_hook(lambda m, i, out, name=name: kinds.update({name: out.dtype}))
    exact = network(TOKENS, SIGMA)
    with torch.autocast("cpu", torch.bfloat16):
        out = network(TOKENS, SIGMA)
    assert kinds.pop("blocks.0.attn_out") == torch.bfloat16 and set(kinds.values()) == {torch.float32}
    assert torch.allclose(out.float(), exact, atol=0.1 * exact.std().item() + 0.05)
