"""Muon for matrices and Nesterov-Adam for all other parameters, as in ELF.

The momentum of a matrix is replaced by the nearest semi-orthogonal matrix, so all its directions move equally fast
(Newton-Schulz iteration, Jordan et al. 2024). Both rules use Nesterov momentum with bias correction: after gradient g of
step n, with m <- b m + (1 - b) g, the direction is b m / (1 - b**(n + 1)) + (1 - b) g / (1 - b**n).

Each process updates its part of a sharded parameter; only the iteration gathers whole matrices. `torch.optim.Muon` has neither
this bias correction nor a rule for vectors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from jpeg_dlm.training.parts import divided_like, local, whole_from

MOMENTUM = 0.95  # of matrices (ELF)
NS_STEPS = 5  # Newton-Schulz steps (ELF)
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steep at zero; singular values end between about 0.7 and 1.2 (ELF, Jordan et al.)
NS_EPS = 1e-8  # assumed: a zero gradient stays zero
ADAM_EPS = 1e-8  # ELF

MATRIX_SLOTS = frozenset({"step", "momentum"})
ADAM_SLOTS = frozenset({"step", "exp_avg", "exp_avg_sq"})


class Muon(Optimizer):
    """Groups with `matrix: True` hold two-dimensional parameters (out, in) and follow Muon, the others Nesterov-Adam."""

    def __init__(self, param_groups: list[dict[str, Any]], betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self.betas = betas
        self.found_inf: Tensor | None = None  # 1 on the device: leave weights and state as they are, as AdamW does
        self.counts: dict[Tensor, int] = {}  # updates of each parameter
        super().__init__(param_groups, {"lr": 1e-3, "weight_decay": 0.0, "matrix": False})
        if any(p.ndim != 2 for group in self.param_groups if group["matrix"] for p in group["params"]):
            raise ValueError("Muon updates matrices only: set matrix=False for groups with other parameters")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            gradients = [local(p.grad) for p in parameters]
            steps = [self._advance(p, group["matrix"]) for p in parameters]
            weights = list(map(local, parameters))
            rule = self._matrix_update if group["matrix"] else self._adam_update
            update = rule(parameters, gradients, steps)
            if group["weight_decay"]:
                torch._foreach_add_(update, weights, alpha=group["weight_decay"])
            self._add(weights, update, -group["lr"])

    def _add(self, tensors: list[Tensor], changes: list[Tensor], factor: float) -> None:
        """Add changes times a factor, or nothing if the step is not finite, which the device decides."""
        if self.found_inf is not None:
            # As integers, since a factor of 0 would not remove NaN.
            torch._foreach_mul_([c.view(torch.int32) for c in changes], (self.found_inf == 0).int())
        torch._foreach_add_(tensors, changes, alpha=factor)

    def slots(self, parameter: Tensor) -> frozenset[str]:
        """Return the names of the state of a parameter after its first update."""
        matrix = any(p is parameter for group in self.param_groups if group["matrix"] for p in group["params"])
        return MATRIX_SLOTS if matrix else ADAM_SLOTS

    def _advance(self, parameter: Tensor, matrix: bool) -> int:
        """Count an update of a parameter, applied or not, and return its number from 1."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for slot in (MATRIX_SLOTS if matrix else ADAM_SLOTS) - {"step"}:
                state[slot] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if parameter not in self.counts:
            self.counts[parameter] = int(state["step"])
        state["step"] += 1
        self.counts[parameter] += 1
        return self.counts[parameter]

    def _matrix_update(self, parameters: list[Tensor], gradients: list[Tensor], steps: list[int]) -> list[Tensor]:
        parts = self._nesterov([local(self.state[p]["momentum"]) for p in parameters], gradients, MOMENTUM, steps)
        ahead = [whole_from(part, p) for part, p in zip(parts, parameters, strict=True)]
        update = list(ahead)
        places: dict[torch.Size, list[int]] = {}
        for i, x in enumerate(ahead):
            places.setdefault(x.shape, []).append(i)
        for same in places.values():  # layers of one shape go through the iteration as one batch
            for i, x in zip(same, orthogonalize(torch.stack([ahead[i] for i in same])), strict=True):
                update[i] = local(divided_like(x, parameters[i]))
        return update

    def _adam_update(self, parameters: list[Tensor], gradients: list[Tensor], steps: list[int]) -> list[Tensor]:
        beta1, beta2 = self.betas
        squares = [local(self.state[p]["exp_avg_sq"]) for p in parameters]
        self._add(squares, list(torch._foreach_sub(torch._foreach_mul(gradients, gradients), squares)), 1 - beta2)
        scale = torch._foreach_div(squares, [1 - beta2**n for n in steps])
        torch._foreach_sqrt_(scale)
        torch._foreach_add_(scale, ADAM_EPS)
        update = self._nesterov([local(self.state[p]["exp_avg"]) for p in parameters], gradients, beta1, steps)
        torch._foreach_div_(update, scale)
        return update

    def _nesterov(self, momenta: list[Tensor], gradients: list[Tensor], beta: float, steps: list[int]) -> list[Tensor]:
        """Update the momenta with gradients of updates number `steps`; return the bias-corrected Nesterov direction."""
        self._add(momenta, list(torch._foreach_sub(gradients, momenta)), 1 - beta)
        ahead = list(torch._foreach_mul(momenta, [beta / (1 - beta ** (n + 1)) for n in steps]))
        torch._foreach_add_(ahead, torch._foreach_mul(gradients, [(1 - beta) / (1 - beta**n) for n in steps]))
        return ahead


def orthogonalize(x: Tensor) -> Tensor:
    """Return approximate polar factors U V^T of matrices (..., out, in), times sqrt(max(1, out / in)).

    The factor makes the outputs of a wide layer change as much as those of a square one (ELF).
    """
    rows, columns = x.shape[-2:]
    return newton_schulz(x) * max(1.0, rows / columns) ** 0.5


def newton_schulz(x: Tensor) -> Tensor:
    """Iterate in fp32; each step maps every singular value s to a s + b s**3 + c s**5 (ELF)."""
    a, b, c = NS_COEFFICIENTS
    x = x.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # the Gram matrix of the shorter side is the smaller one
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + NS_EPS)
    for _ in range(NS_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
