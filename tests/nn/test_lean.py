"""Hand-written gradients against autograd's own, in fp32 and under bf16 autocast; they keep less memory."""

import pytest
import torch
import torch.nn.functional as F

from jpeg_dlm.nn.dit import rope_table
from jpeg_dlm.nn.lean import gelu_linear, norm_linear, rms_norm, rotate, swiglu_linear

B, S, HEADS, D, O = 3, 5, 2, 8, 6  # noqa: E741
EPS = 1e-6


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def plain_norm(x, gain, eps=EPS):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def rope():
    return tuple(table[:, None] for table in rope_table(2, S - 2, D))


CASES = {
    "norm": (lambda x, g: rms_norm(x, g, EPS), plain_norm, [(B, S, D), (D,)]),
    "rotated norm": (
        lambda x, g: rms_norm(x, g, EPS, rope()), lambda x, g: rotate(plain_norm(x, g), *rope()), [(B, S, HEADS, D), (D,)],
    ),
    "norm of a strided view": (
        lambda x, g: rms_norm(x.unbind(2)[1], g, EPS, rope()),
        lambda x, g: rotate(plain_norm(x[:, :, 1], g), *rope()), [(B, S, 3, HEADS, D), (D,)],
    ),
    "norm and linear": (
        lambda x, g, w, b: norm_linear(x, g, EPS, (w, b))[0],
        lambda x, g, w, b: F.linear(plain_norm(x, g), w, b), [(B, S, D), (D,), (O, D), (O,)],
    ),
    "norm and two linears": (
        lambda x, g, w, v, b: torch.cat(norm_linear(x, g, EPS, (w, None), (v, b)), -1),
        lambda x, g, w, v, b: torch.cat([F.linear(plain_norm(x, g), w), F.linear(plain_norm(x, g), v, b)], -1),
        [(B, S, D), (D,), (O, D), (2 * O, D), (2 * O,)],
    ),
    "gelu and linear": (gelu_linear, lambda x, w, b: F.linear(F.gelu(x), w, b), [(B, S, D), (O, D), (O,)]),
    "swiglu and linear": (
        swiglu_linear,
        lambda x, w, b: F.linear(F.silu(x[..., :D]) * x[..., D:], w, b), [(B, S, 2 * D), (O, D), (O,)],
    ),
}  # fmt: skip


def both(name, autocast):
    fast, plain, shapes = CASES[name]
    results = []
    for f in (fast, plain):
        inputs = [seeded(*shape, seed=i) for i, shape in enumerate(shapes)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = f(*inputs)
            upstream = seeded(*y.shape, seed=9).detach().to(y.dtype)
            gradients = torch.autograd.grad(y, inputs, upstream)  # within autocast, as the trainer does it
        results.append((y, gradients))
    return results


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_autograd(name):
    (y, gradients), (wanted, expected) = both(name, autocast=False)
    assert torch.allclose(y, wanted, atol=1e-5)
    for got, want in zip(gradients, expected, strict=True):
        assert got.shape == want.shape and torch.allclose(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_types_and_values_under_autocast(name):
    (y, gradients), (wanted, expected) = both(name, autocast=True)
    assert y.dtype == wanted.dtype and torch.allclose(y, wanted, atol=0.1, rtol=0.05)
    for got, want in zip(gradients, expected, strict=True):
        assert got.dtype == want.dtype == torch.float32
        assert (got - want).norm() < 0.02 * want.norm()  # a few roundings to 8 bits of mantissa


@pytest.mark.parametrize("name", CASES)
def test_the_traced_formula_is_the_same(name, monkeypatch):
    fast, _, shapes = CASES[name]
    inputs = [seeded(*shape, seed=i) for i, shape in enumerate(shapes)]
    eager = fast(*inputs)
    monkeypatch.setattr("jpeg_dlm.nn.lean._is_traced", lambda: True)
    assert torch.allclose(fast(*inputs), eager, atol=1e-5)


def test_a_norm_and_an_activation_keep_their_input_alone():
    def kept(f, *inputs):
        sizes = {}
        given = {x.untyped_storage().data_ptr() for x in inputs}

        def pack(t):
            sizes[t.untyped_storage().data_ptr()] = t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = f(*inputs)  # noqa: F841 - alive, so that no storage is used again
        return sum(size for place, size in sizes.items() if place not in given)

    x, gain, w, b = seeded(B, S, D), seeded(D), seeded(O, D), seeded(O)
    assert kept(lambda *a: norm_linear(a[0], a[1], EPS, (a[2], a[3])), x, gain, w, b) == B * S  # the inverse RMS
    assert kept(lambda *a: F.linear(F.rms_norm(a[0], (D,), a[1], EPS), a[2], a[3]), x, gain, w, b) > B * S * D
    assert kept(gelu_linear, x, w, b) == 0 and kept(swiglu_linear, seeded(B, S, 2 * D), w, b) == 0
