"""Token cross-entropy that does not keep the logits of a large vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jpeg_dlm.config import logit_rows
from jpeg_dlm.nn.layers import autocast_device, fp32_island


def token_nll(project: Callable[[Tensor], Tensor], h_BLF: Tensor, tokens_BL: Tensor, chunk: int = 0) -> Tensor:
    """Return -log p(token) at every position (B, L), with logits = project(h) of `chunk` positions at a time (0: all)."""

    def nll(part: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(project(part).float(), target, reduction="none")

    return in_parts(nll, chunk, h_BLF.flatten(0, 1), tokens_BL.flatten()).view(tokens_BL.shape)


@torch.no_grad()
def most_probable(project: Callable[[Tensor], Tensor], h_BLF: Tensor, vocab: int) -> Tensor:
    """Return argmax project(h) (B, L), with the logits of few positions at a time."""
    parts = h_BLF.flatten(0, 1).split(logit_rows(0, vocab))
    return torch.cat([project(part).argmax(-1) for part in parts]).view(h_BLF.shape[:2])


def in_parts(f: Callable[..., Tensor], size: int, *inputs: Tensor) -> Tensor:
    """Apply f to `size` rows at a time (0: all) and recompute each part in backward, so that no logits are kept."""
    if size <= 0 or len(inputs[0]) <= size:
        return f(*inputs)
    parts = zip(*(x.split(size) for x in inputs), strict=True)
    return torch.cat([checkpoint(f, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])


def linear_cross_entropy(
    x_RF: Tensor, weight_VF: Tensor, bias_V: Tensor, target_R: Tensor, share_R: Tensor, chunk: int = 0
) -> Tensor:
    """Return the sum over rows of share * -log softmax(W x + b)[target], computed `chunk` rows at a time (0: automatic).

    Since shares are known beforehand, the gradients are computed together with the loss, chunk by chunk: no logits are kept
    for backward or recomputed there. Products have autocast's type; the softmax and all sums are in fp32.
    """
    return _LinearCrossEntropy.apply(  # pyright: ignore[reportReturnType]
        x_RF, weight_VF, bias_V, target_R, share_R, logit_rows(chunk, len(weight_VF))
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RF: Tensor, weight_VF: Tensor, bias_V: Tensor, target_R: Tensor, share_R: Tensor, chunk: int
    ) -> Tensor:
        device = autocast_device(x_RF)
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_RF.dtype
        x, weight, bias = (p.detach().to(dtype) for p in (x_RF, weight_VF, bias_V))
        wide = torch.promote_types(dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=x.device)
        ctx.gradients = gradients = None
        if any(ctx.needs_input_grad):
            ctx.gradients = gradients = (torch.empty_like(x_RF), torch.zeros_like(weight_VF), torch.zeros_like(bias_V))
        with fp32_island(x):
            for begin in range(0, len(x), chunk):
                rows = slice(begin, begin + chunk)
                share_R1, target_R1 = share_R[rows, None].to(wide), target_R[rows, None]
                logits = torch.addmm(bias, x[rows], weight.T).to(wide)
                peak, picked = logits.amax(1, keepdim=True), logits.gather(1, target_R1)
                p = logits.sub_(peak).exp_()  # in place from here on: the logits turn into their gradient
                total = p.sum(1, keepdim=True)
                loss += (share_R1 * (total.log() + peak - picked)).sum()
                if gradients is None:
                    continue
                g = p.mul_(share_R1 / total).scatter_add_(1, target_R1, -share_R1).to(dtype)
                dx, dweight, dbias = gradients
                dx[rows] = g @ weight
                dbias += g.sum(0)
                if g.dtype == dweight.dtype:
                    torch.addmm(dweight, g.T, x[rows], out=dweight)
                else:
                    dweight += g.T @ x[rows]
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("backward through this loss was already called")
        return *(d.mul_(g) for d in gradients), None, None, None  # in place: these are the largest tensors of a step
