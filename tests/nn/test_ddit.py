"""The shared transformer against the published sizes and names, and against a slow second version of it."""

import math
from dataclasses import replace

import pytest
import torch

from jpeg_dlm.nn.ddit import CausalTransformer, DDiT, DditConfig, capped_attention

B, L, V, H, HEADS, DEPTH, COND, FREQ = 3, 7, 11, 24, 3, 2, 10, 8
SIZES = DditConfig(H, DEPTH, HEADS, cond_dim=COND, freq_dim=FREQ)


def perturb(network):
    """Away from zero heads and gates and unit norms, so that every parameter matters."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=g))
    return network.eval()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def ddit(softcap=0.0, dropout=0.0):
    return perturb(DDiT(V, replace(SIZES, dropout=dropout), softcap))


def causal():
    return perturb(CausalTransformer(V, SIZES))


def tokens(rows=B, length=L):
    return torch.randint(0, V, (rows, length), generator=torch.Generator().manual_seed(1))


def sigma(rows=B):
    return torch.tensor([0.05, 1.2, 6.9])[:rows]


# ---------------------------------------------------------------- published sizes and names


def count(network):
    return sum(p.numel() for p in network.parameters())


def on_meta(build):
    with torch.device("meta"):
        return build()


@pytest.mark.parametrize(
    ("build", "parameters"),
    [
        (lambda: DDiT(50_258, DditConfig()), 169_627_218),
        (lambda: DDiT(50_257, DditConfig()), 169_625_681),
        (lambda: DDiT(30_522, DditConfig()), 139_292_986),
        (lambda: DDiT(50_258, DditConfig(hidden=1024, depth=24, heads=16)), 424_477_010),
        (lambda: CausalTransformer(50_258, DditConfig()), 162_246_482),
        (lambda: CausalTransformer(30_522, DditConfig()), 131_912_250),
    ],
)
def test_published_numbers_of_parameters(build, parameters):
    assert count(on_meta(build)) == parameters


BLOCK = ["norm1.weight", "attn_qkv.weight", "attn_out.weight", "norm2.weight"]
BLOCK += ["mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias"]
ENDS = ["vocab_embed.embedding", "output_layer.norm_final.weight", "output_layer.linear.weight", "output_layer.linear.bias"]
MODULATION = ["adaLN_modulation.weight", "adaLN_modulation.bias"]
LEVEL = ["sigma_map.mlp.0.weight", "sigma_map.mlp.0.bias", "sigma_map.mlp.2.weight", "sigma_map.mlp.2.bias"]


def test_names_are_those_of_published_checkpoints():
    plain = {f"blocks.{i}.{name}" for i in range(DEPTH) for name in BLOCK} | set(ENDS)
    assert set(causal().state_dict()) == plain
    modulated = {f"blocks.{i}.{name}" for i in range(DEPTH) for name in MODULATION}
    modulated |= {f"output_layer.{name}" for name in MODULATION}
    assert set(ddit().state_dict()) == plain | modulated | set(LEVEL)


# ---------------------------------------------------------------- a slow second version


def slow_norm(x, gain):
    mean = sum(x) / len(x)
    variance = sum((x - mean) ** 2) / len(x)
    return (x - mean) / torch.sqrt(variance + 1e-5) * gain


def slow_rotate(x, position):
    """Channel i and channel i + half are the two parts of a complex number that turns with the position."""
    half = len(x) // 2
    numbers = torch.complex(x[:half], x[half:])
    turned = numbers * torch.exp(1j * position * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half))
    return torch.cat([turned.real, turned.imag])


def slow_attention(x_LH, qkv, out, is_causal, cap):
    width = H // HEADS
    mixed = torch.zeros(len(x_LH), H, dtype=torch.float64)
    for head in range(HEADS):
        rows = [slice(part * H + head * width, part * H + (head + 1) * width) for part in range(3)]
        q, k = ([slow_rotate(qkv[r] @ x, i) for i, x in enumerate(x_LH)] for r in rows[:2])
        v = [qkv[rows[2]] @ x for x in x_LH]
        for i in range(len(x_LH)):
            seen = i + 1 if is_causal else len(x_LH)
            scores = torch.stack([q[i] @ k[j] / math.sqrt(width) for j in range(seen)])
            weights = torch.exp(cap * torch.tanh(scores / cap) if cap else scores)
            mixed[i, head * width : (head + 1) * width] = sum(w * u for w, u in zip(weights / weights.sum(), v, strict=False))
    return mixed @ out.T


def slow_gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + torch.exp(-x))


def slow_network(network, ids, level=None, cap=0.0):
    """Logits of one row in float64, position by position, from the published description and the weights by name."""
    p = {name: t.double() for name, t in network.state_dict().items()}
    c = None
    if level is not None:
        angles = [level * math.exp(-math.log(10_000) * i / (FREQ // 2)) for i in range(FREQ // 2)]
        waves = torch.tensor([*map(math.cos, angles), *map(math.sin, angles)], dtype=torch.float64)
        inner = silu(p["sigma_map.mlp.0.weight"] @ waves + p["sigma_map.mlp.0.bias"])
        c = silu(p["sigma_map.mlp.2.weight"] @ inner + p["sigma_map.mlp.2.bias"])

    def modulation(prefix, parts, neutral):
        if c is None:
            return neutral
        return (p[f"{prefix}.adaLN_modulation.weight"] @ c + p[f"{prefix}.adaLN_modulation.bias"]).split(H)[:parts]

    x = p["vocab_embed.embedding"][ids]
    for b in range(DEPTH):
        w = {name: p[f"blocks.{b}.{name}"] for name in BLOCK}
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation(f"blocks.{b}", 6, (0, 0, 1, 0, 0, 1))
        normed = torch.stack([slow_norm(row, w["norm1.weight"]) * (1 + scale1) + shift1 for row in x])
        x = x + gate1 * slow_attention(normed, w["attn_qkv.weight"], w["attn_out.weight"], level is None, cap)
        normed = torch.stack([slow_norm(row, w["norm2.weight"]) * (1 + scale2) + shift2 for row in x])
        inner = slow_gelu(normed @ w["mlp.0.weight"].T + w["mlp.0.bias"])
        x = x + gate2 * (inner @ w["mlp.2.weight"].T + w["mlp.2.bias"])
    shift, scale = modulation("output_layer", 2, (0, 0))
    normed = torch.stack([slow_norm(row, p["output_layer.norm_final.weight"]) * (1 + scale) + shift for row in x])
    return normed @ p["output_layer.linear.weight"].T + p["output_layer.linear.bias"]


def assert_agree(fast, slow):
    assert slow.std() > 0.3  # the comparison means something
    assert torch.allclose(fast.double(), slow, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("cap", [0.0, 0.5])
def test_a_slow_version_with_the_same_weights_agrees(cap):
    network = ddit(softcap=cap)
    fast = network(tokens(), sigma())
    assert_agree(fast, torch.stack([slow_network(network, tokens()[i], sigma()[i].item(), cap) for i in range(B)]))


@torch.no_grad()
def test_a_slow_causal_version_with_the_same_weights_agrees():
    network = causal()
    assert_agree(network(tokens()), torch.stack([slow_network(network, row) for row in tokens()]))


def test_capped_scores():
    q, k, v = torch.randn(3, 2, HEADS, L, 8, generator=torch.Generator().manual_seed(0)) * 4
    out = capped_attention(q, k, v, 2.0)
    for b, h, i in ((0, 0, 0), (1, 2, 6), (1, 1, 3)):
        weights = [math.exp(2 * math.tanh(float(q[b, h, i] @ k[b, h, j]) / math.sqrt(8) / 2)) for j in range(L)]
        wanted = sum(w / sum(weights) * v[b, h, j] for j, w in enumerate(weights))
        assert torch.allclose(out[b, h, i], wanted, atol=1e-5)
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert torch.allclose(capped_attention(q, k, v, 1e4), plain, atol=1e-4) and not torch.allclose(out, plain, atol=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = capped_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), 50.0)
    exact = capped_attention(*(x.bfloat16().float() for x in (q, k, v)), 50.0)
    assert torch.allclose(rounded.float(), exact, rtol=0.02, atol=0.02)  # scores in bf16 would be off by 0.1


# ---------------------------------------------------------------- properties


def test_a_fresh_network_gives_zero_logits():
    assert not DDiT(V, SIZES)(tokens(), sigma()).any()
    assert not CausalTransformer(V, SIZES)(tokens()).any()


@torch.no_grad()
def test_distributions_are_read_as_the_mean_of_rows():
    network = ddit()
    p = torch.rand(B, L, V, generator=torch.Generator().manual_seed(0)).softmax(-1)
    mean = sum(p[..., v, None] * network.vocab_embed.embedding[v] for v in range(V))
    assert torch.allclose(network.vocab_embed(p), mean, atol=1e-5)
    one_hot = torch.nn.functional.one_hot(tokens(), V)
    assert torch.allclose(network(one_hot.double(), sigma()), network(tokens(), sigma()), atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(network.vocab_embed(one_hot.float()), network.vocab_embed(tokens()))


@torch.no_grad()
@pytest.mark.parametrize("parts", [[1] * 7, [7], [4, 1, 1, 1], [1, 3, 1, 2], [2, 5], [6, 1]])
def test_reading_in_parts_with_a_cache_is_reading_at_once(parts):
    network = causal()
    cache = network.new_cache(B, L + 2)
    states = torch.cat([network.states(part, cache) for part in tokens().split(parts, dim=1)], dim=1)
    assert torch.allclose(states, network.states(tokens()), atol=1e-5)
    assert [c.length for c in cache] == [L] * DEPTH


@torch.no_grad()
def test_the_sensitive_parts_stay_full_precision_under_autocast():
    network = ddit()
    kinds = {}
    for name in ("sigma_map.mlp.2", "blocks.0.norm1", "output_layer.norm_final", "blocks.0.attn_out"):
        network.get_submodule(name).register_forward_hook(lambda m, i, out, name=name: kinds.update({name: out.dtype}))
    exact = network(tokens(), sigma())
    with torch.autocast("cpu", torch.bfloat16):
        out = network(tokens(), sigma())
    assert kinds.pop("blocks.0.attn_out") == torch.bfloat16 and set(kinds.values()) == {torch.float32}
    assert torch.allclose(out.float(), exact, atol=0.1 * exact.std().item() + 0.05)
