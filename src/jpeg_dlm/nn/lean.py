"""Fused norm-linear and activation-linear layers with hand-written gradients: same results, less time and memory.

They recompute normed tensors and activations in backward and keep only the outputs of matrix products (selective
recomputation, Korthikanti et al. 2022). `torch.compile` and exporters, which fuse by themselves, see the plain formula.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jpeg_dlm.nn.precision import fp32_island


def rms_norm(x: Tensor, gain: Tensor, eps: float, rope: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Return fp32 x / sqrt(mean(x^2) + eps) * gain over the last axis, rotated by the cosines and sines of `rope`, if any."""
    if _is_traced():
        y = F.rms_norm(x.float(), x.shape[-1:], gain, eps)
        return y if rope is None else rotate(y, *rope)
    cis = None if rope is None else torch.complex(*(table[..., ::2] for table in rope))
    return _RmsNorm.apply(x, gain, eps, cis)  # pyright: ignore[reportReturnType]


def norm_linear(x: Tensor, gain: Tensor, eps: float, *maps: tuple[Tensor, Tensor | None]) -> tuple[Tensor, ...]:
    """Return W rms_norm(x) + b for each (W, b) of `maps`, without keeping the normed tensor."""
    if _is_traced():
        n = rms_norm(x, gain, eps)
        return tuple(F.linear(n, weight, bias) for weight, bias in maps)
    return _NormLinear.apply(x, gain, eps, *(p for pair in maps for p in pair))  # pyright: ignore[reportReturnType]


def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return W gelu(x) + b, keeping only x for backward."""
    if _is_traced():
        return F.linear(F.gelu(x), weight, bias)
    return _GeluLinear.apply(x, weight, bias)  # pyright: ignore[reportReturnType]


def swiglu_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return W (silu(gate) * up) + b for x = [gate, up], keeping only x for backward."""
    if _is_traced():
        gate, up = x.chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, weight, bias)
    return _SwigluLinear.apply(x, weight, bias)  # pyright: ignore[reportReturnType]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of the last axis; the tables hold each angle twice."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * cos + torch.stack([-odd, even], dim=-1).flatten(-2) * sin


def _is_traced() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


# ---------------------------------------------------------------- norm


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + eps) without allocating a tensor of squares."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _turned(x: Tensor, cis: Tensor) -> Tensor:
    """Apply `rotate` to a contiguous x in place, as one complex product."""
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(cis)).flatten(-2)


def _norm_gradients(g: Tensor, unit: Tensor, inverse: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and gain for y = gain * unit, unit = inverse * x, given the gradient g of y."""
    product = g * unit
    along = (product @ gain).div_(gain.shape[0]).unsqueeze(-1)
    dgain = product.flatten(0, -2).sum(0)
    dx = torch.mul(g, gain, out=product).addcmul_(unit, along, value=-1).mul_(inverse)
    return dx, dgain


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float, cis: Tensor | None) -> Tensor:
        x32 = x.float()
        inverse = _inverse_rms(x32, eps)
        ctx.save_for_backward(x, gain, inverse, cis)
        y = torch.mul(x32, inverse, out=torch.empty(x.shape, device=x.device)).mul_(gain)
        return y if cis is None else _turned(y, cis)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, gain, inverse, cis = ctx.saved_tensors
        with fp32_island(g):
            if cis is not None:
                g = _turned(g.clone(memory_format=torch.contiguous_format), cis.conj())
            dx, dgain = _norm_gradients(g, x.float() * inverse, inverse, gain)
        return dx.to(x.dtype), dgain, None, None


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float, *maps: Tensor | None) -> tuple[Tensor, ...]:
        x32 = x.float()
        inverse = _inverse_rms(x32, eps)
        ctx.save_for_backward(x, gain, inverse, *maps[::2])
        ctx.has_bias = [bias is not None for bias in maps[1::2]]
        n = (x32 * inverse).mul_(gain)
        return tuple(F.linear(n, w, b) for w, b in zip(maps[::2], maps[1::2], strict=True))  # pyright: ignore[reportArgumentType]

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, gain, inverse, *weights = ctx.saved_tensors
        dn, maps = None, []
        with fp32_island(x):
            unit = x.float() * inverse
            n = (unit * gain).to(gs[0].dtype).flatten(0, -2)
            for g, weight, has_bias in zip(gs, weights, ctx.has_bias, strict=True):
                part, *dmap = _linear_gradients(g.flatten(0, -2), n, weight, has_bias)
                dn = part.float() if dn is None else dn.add_(part)
                maps += dmap
            assert dn is not None
            dx, dgain = _norm_gradients(dn.view(x.shape), unit, inverse, gain)
        return dx.to(x.dtype), dgain, None, *maps


# ---------------------------------------------------------------- activation


def _linear_gradients(g: Tensor, x: Tensor, weight: Tensor, has_bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, W and b for y = W x + b, given the gradient g of y; x and g have one row axis."""
    dx = g @ weight.to(g.dtype)
    dweight = (g.T @ x).to(weight.dtype)
    return dx, dweight, g.sum(0).to(weight.dtype) if has_bias else None


class _GeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return F.linear(F.gelu(x), weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        with fp32_island(x):
            active = F.gelu(x).to(g.dtype).flatten(0, -2)
            dactive, dweight, dbias = _linear_gradients(g.flatten(0, -2), active, weight, ctx.has_bias)
            dx = torch.ops.aten.gelu_backward(dactive.to(x.dtype).view(x.shape), x)
        return dx, dweight, dbias


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        gate, up = x.chunk(2, dim=-1)
        return F.linear(F.silu(gate).mul_(up), weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        with fp32_island(x):
            gate, up = x.chunk(2, dim=-1)
            silu = F.silu(gate)
            active = (silu * up).to(g.dtype).flatten(0, -2)
            dactive, dweight, dbias = _linear_gradients(g.flatten(0, -2), active, weight, ctx.has_bias)
            dactive = dactive.to(x.dtype).view(gate.shape)
            dup = silu.mul_(dactive)
            dgate = torch.ops.aten.silu_backward(dactive.mul_(up), gate)
        return torch.cat([dgate, dup], dim=-1), dweight, dbias
