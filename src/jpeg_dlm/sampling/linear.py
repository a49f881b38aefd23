"""Linear layers prepared once for sampling: fp32, bf16, or int8 with a scale for each output channel and each row.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Dtype = Literal["fp32", "bf16", "int8"]
DTYPES: tuple[Dtype, ...] = ("fp32", "bf16", "int8")
BYTE = 127  # largest magnitude of a symmetric 8-bit number
SEVEN_BITS = 63  # and of a 7-bit one
ZERO_POINT = 128  # where 0 lies among unsigned bytes
FEW_ROWS = 400  # for which packed weights are faster (measured: 1.3x with 44 rows, 1.05x with 352, 0.9x with 704)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / RMS of the last axis; through the norm it is one pass over x (measured: `rms_norm` takes twice as long)."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """The last axis scaled to RMS 1, without a gain."""
    return x * inverse_rms(x, eps)


class DenseLinear(nn.Module):
    """y = x W^T + b, without a copy of what is given. On a CPU few rows meet a W that is packed when the first of them come."""

    weight_NK: Tensor
    bias_N: Tensor | None

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight_NK", weight_NK.to(dtype).contiguous())
        self.register_buffer("bias_N", None if bias_N is None else bias_N.to(dtype))
        self.can_pack = weight_NK.device.type == "cpu" and torch.backends.mkldnn.is_available()
        self.packed: Tensor | None = None

    def forward(self, x_MK: Tensor) -> Tensor:
        x_MK = x_MK.to(self.weight_NK.dtype)
        return self.packed_product(x_MK) if self.packs(x_MK) else F.linear(x_MK, self.weight_NK, self.bias_N)

    def of_unit_rms(self, x_MK: Tensor, eps: float) -> Tensor:
        """linear(unit_rms(x))."""
        return self(unit_rms(x_MK, eps))

    def add_to(self, x_MN: Tensor, h_MK: Tensor) -> Tensor:
        """x + linear(h), written over the residual stream x; the plain product in fp32 does the addition itself."""
        if self.weight_NK.dtype != x_MN.dtype or self.packs(h_MK):
            return x_MN.add_(self(h_MK))
        x_MN.addmm_(h_MK, self.weight_NK.t())
        return x_MN if self.bias_N is None else x_MN.add_(self.bias_N)

    def packs(self, x_MK: Tensor) -> bool:
        return self.can_pack and len(x_MK) <= FEW_ROWS

    def packed_product(self, x_MK: Tensor) -> Tensor:
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight_NK, len(x_MK))
        return torch.ops.mkldnn._linear_pointwise(x_MK, self.packed, self.bias_N, "none", [], "")


class Int8Linear(nn.Module):
    """Integer products of quantized rows and quantized channels, scaled back to fp32.

    Every row of x has its own scale, found when it comes, so a row does not depend on its neighbors.
    """

    scale_N: Tensor
    bias_N: Tensor
    zeros_N: Tensor
    offset_K: Tensor

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        super().__init__()
        self.on_cpu = weight_NK.device.type == "cpu"
        q_NK, scale_N = quantize_channels(weight_NK.float(), weight_levels(weight_NK.device))
        self.register_buffer("scale_N", scale_N)
        self.register_buffer("bias_N", torch.zeros_like(scale_N) if bias_N is None else bias_N.float().clone())
        if self.on_cpu:
            self.register_buffer("zeros_N", torch.zeros(len(scale_N), dtype=torch.int32))
            self.register_buffer("offset_K", torch.full(weight_NK.shape[1:], ZERO_POINT + 0.5))
            self.packed = torch.ops.onednn.qlinear_prepack(q_NK, None)
        else:
            self.packed = q_NK.t()

    def forward(self, x_MK: Tensor) -> Tensor:
        scale_M1 = row_scales(x_MK)
        return torch.addcmul(self.bias_N, self.product(x_MK, scale_M1), scale_M1)

    def of_unit_rms(self, x_MK: Tensor, eps: float) -> Tensor:
        """linear(unit_rms(x)): a row has the same whole numbers before and after its norm, so the norm joins its scale."""
        scale_M1 = row_scales(x_MK)
        return torch.addcmul(self.bias_N, self.product(x_MK, scale_M1), scale_M1 * inverse_rms(x_MK, eps))

    def add_to(self, x_MN: Tensor, h_MK: Tensor) -> Tensor:
        """x + linear(h), written over the residual stream x."""
        return x_MN.add_(self(h_MK))

    def product(self, x_MK: Tensor, scale_M1: Tensor) -> Tensor:
        """x W^T in units of each row's scale."""
        if not self.on_cpu:
            return self.integer_product((x_MK / scale_M1).round().to(torch.int8), 0)
        # The packed product wants unsigned rows; their common zero point is subtracted inside. A tensor of offsets and the
        # detour by 16 bits are vectorized where a number and the direct way are not: a quarter of the time (measured).
        u_MK = torch.addcmul(self.offset_K, x_MK, scale_M1.reciprocal()).to(torch.int16).to(torch.uint8)
        return self.integer_product(u_MK, ZERO_POINT)

    def integer_product(self, q_MK: Tensor, zero_point: int) -> Tensor:
        """(q - zero point) W^T in the units of each channel's scale."""
        if self.on_cpu:
            return torch.ops.onednn.qlinear_pointwise(
                q_MK, 1.0, zero_point, self.packed, self.scale_N, self.zeros_N, None, 1.0, 0, torch.float32, "none", [], ""
            )
        return torch._int_mm(q_MK, self.packed) * self.scale_N


def keep_from_compiler(module: nn.Module) -> None:
    """Products of prepared weights stay as they are: inductor's form of them wants weights that are constants of its graph."""
    for layer in module.modules():
        for product in ("packed_product", "integer_product"):
            if hasattr(layer, product):
                setattr(layer, product, torch.compiler.disable(getattr(layer, product)))


@functools.cache
def weight_levels(device: torch.device) -> int:
    """Without VNNI a CPU adds two products in 16 bits, which 7-bit weights cannot overflow: 2 * 255 * 63 < 2**15.

    Found by a product of the largest numbers: instructions that the CPU has may be switched off for oneDNN.
    """
    if device.type != "cpu":
        return BYTE
    packed = torch.ops.onednn.qlinear_prepack(torch.full((16, 16), BYTE, dtype=torch.int8), None)
    y = torch.ops.onednn.qlinear_pointwise(
        torch.full((1, 16), 255, dtype=torch.uint8), 1.0, 0, packed, torch.ones(16), torch.zeros(16, dtype=torch.int32), None,
        1.0, 0, torch.float32, "none", [], "",
    )  # fmt: skip
    return BYTE if bool((y == 16 * 255 * BYTE).all()) else SEVEN_BITS


def quantize_channels(weight_NK: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Symmetric int8 weights and the scale of each output channel."""
    scale_N = weight_NK.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / levels
    return (weight_NK / scale_N[:, None]).round().to(torch.int8), scale_N


def row_scales(x_MK: Tensor) -> Tensor:
    """The scale of each row that maps its largest magnitude to 127."""
    largest = torch.maximum(x_MK.amax(1, keepdim=True), x_MK.amin(1, keepdim=True).neg_())
    return largest.clamp_min_(1e-30).mul_(1 / BYTE)


AnyLinear = DenseLinear | Int8Linear
MakeLinear = Callable[[Tensor, Any], AnyLinear]  # from a weight (N, K) and a bias (N) or None


def linear_maker(dtype: Dtype) -> MakeLinear:
    """What turns weights into layers of this type."""
    if dtype == "int8":
        return Int8Linear
    return bf16_linear if dtype == "bf16" else full_precision


def computes_in_bf16(device: torch.device) -> bool:
    """Whether bf16 products have instructions there; a CPU without them emulates them a hundred times slower (measured)."""
    return device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def bf16_linear(weight_NK: Tensor, bias_N: Tensor | None) -> DenseLinear:
    """In bf16, or where that would be emulated in fp32 with weights rounded to bf16."""
    if computes_in_bf16(weight_NK.device):
        return DenseLinear(weight_NK, bias_N, torch.bfloat16)
    return full_precision(weight_NK.bfloat16().float(), None if bias_N is None else bias_N.bfloat16().float())


def full_precision(weight_NK: Tensor, bias_N: Tensor | None) -> DenseLinear:
    """A layer that stays fp32 in every mode."""
    return DenseLinear(weight_NK, bias_N, torch.float32)
