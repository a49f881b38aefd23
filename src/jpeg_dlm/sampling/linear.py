"""Linear layers prepared for sampling: fp32, bf16, or int8 with a scale per output channel and per row.

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
SEVEN_BITS = 63  # the same of a 7-bit number
ZERO_POINT = 128  # unsigned byte that represents 0
LEAST_ROWS = 17  # that an integer product takes on CUDA
FEW_ROWS = 400  # up to which packed weights are faster (measured: 1.3x with 44 rows, 1.05x with 352, 0.9x with 704)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return 1 / RMS of the last axis in one pass over x (measured: `rms_norm` takes twice as long)."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """Scale the last axis to RMS 1, without a gain."""
    return x * inverse_rms(x, eps)


class DenseLinear(nn.Module):
    """y = x W^T + b, without copying W; on a CPU, small batches use a packed W, made at the first one."""

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
        """Return linear(unit_rms(x))."""
        return self(unit_rms(x_MK, eps))

    def add_to(self, x_MN: Tensor, h_MK: Tensor) -> Tensor:
        """Add linear(h) to the residual stream x in place; in fp32 without packing, in one operation."""
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

    The scale of every row of x is computed from that row alone, so rows do not depend on each other.
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
        y_MN = self.product(x_MK, scale_M1)
        return torch.addcmul(self.bias_N, y_MN, scale_M1, out=y_MN)

    def of_unit_rms(self, x_MK: Tensor, eps: float) -> Tensor:
        """Return linear(unit_rms(x)); normalizing a row does not change its quantized values, only its scale."""
        scale_M1 = row_scales(x_MK)
        y_MN = self.product(x_MK, scale_M1)
        return torch.addcmul(self.bias_N, y_MN, scale_M1.mul_(inverse_rms(x_MK, eps)), out=y_MN)

    def add_to(self, x_MN: Tensor, h_MK: Tensor) -> Tensor:
        """Add linear(h) to the residual stream x in place, in the pass that scales it back."""
        scale_M1 = row_scales(h_MK)
        return x_MN.addcmul_(self.product(h_MK, scale_M1), scale_M1).add_(self.bias_N)

    def product(self, x_MK: Tensor, scale_M1: Tensor) -> Tensor:
        """Return x W^T divided by each row's scale."""
        if not self.on_cpu:
            return self.integer_product((x_MK / scale_M1).round().to(torch.int8), 0)
        # The packed product takes unsigned rows and subtracts their common zero point itself. A tensor of offsets and the
        # conversion via int16 are vectorized, a scalar and the direct conversion are not: a quarter of the time (measured).
        u_MK = torch.addcmul(self.offset_K, x_MK, scale_M1.reciprocal()).to(torch.int16).to(torch.uint8)
        return self.integer_product(u_MK, ZERO_POINT)

    def integer_product(self, q_MK: Tensor, zero_point: int) -> Tensor:
        """Return (q - zero point) W^T, scaled by each channel's scale."""
        if self.on_cpu:
            return torch.ops.onednn.qlinear_pointwise(
                q_MK, 1.0, zero_point, self.packed, self.scale_N, self.zeros_N, None, 1.0, 0, torch.float32, "none", [], ""
            )
        rows = len(q_MK)
        q_MK = F.pad(q_MK, (0, 0, 0, max(0, LEAST_ROWS - rows)))
        return torch._int_mm(q_MK, self.packed)[:rows] * self.scale_N


def keep_from_compiler(module: nn.Module) -> None:
    """Exclude products of prepared weights from compilation: inductor requires their weights to be graph constants."""
    for layer in module.modules():
        for product in ("packed_product", "integer_product"):
            if hasattr(layer, product):
                setattr(layer, product, torch.compiler.disable(getattr(layer, product)))


@functools.cache
def weight_levels(device: torch.device) -> int:
    """Return the largest magnitude of quantized weights: 127, or 63 on a CPU without VNNI.

    Such a CPU adds two products in 16 bits, which 7-bit weights cannot overflow: 2 * 255 * 63 < 2**15. This is tested by
    a product of the largest numbers, because oneDNN may be barred from instructions that the CPU has.
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
    """Return symmetric int8 weights and the scale of each output channel."""
    scale_N = weight_NK.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / levels
    return (weight_NK / scale_N[:, None]).round().to(torch.int8), scale_N


def row_scales(x_MK: Tensor) -> Tensor:
    """Return the scale of each row that maps its largest magnitude to 127."""
    largest = torch.maximum(x_MK.amax(1, keepdim=True), x_MK.amin(1, keepdim=True).neg_())
    return largest.clamp_min_(1e-30).mul_(1 / BYTE)


AnyLinear = DenseLinear | Int8Linear
MakeLinear = Callable[[Tensor, Any], AnyLinear]  # from a weight (N, K) and a bias (N) or None


def linear_maker(dtype: Dtype) -> MakeLinear:
    """Return the function that builds layers of this type from weights."""
    if dtype == "int8":
        return Int8Linear
    return bf16_linear if dtype == "bf16" else full_precision


def computes_in_bf16(device: torch.device) -> bool:
    """Return True if a device has bf16 instructions; a CPU without them emulates them, a hundred times slower (measured)."""
    return device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def bf16_linear(weight_NK: Tensor, bias_N: Tensor | None) -> DenseLinear:
    """Build a bf16 layer; where bf16 would be emulated, an fp32 layer with weights rounded to bf16."""
    if computes_in_bf16(weight_NK.device):
        return DenseLinear(weight_NK, bias_N, torch.bfloat16)
    return full_precision(weight_NK.bfloat16().float(), None if bias_N is None else bias_N.bfloat16().float())


def full_precision(weight_NK: Tensor, bias_N: Tensor | None) -> DenseLinear:
    """Build an fp32 layer."""
    return DenseLinear(weight_NK, bias_N, torch.float32)
