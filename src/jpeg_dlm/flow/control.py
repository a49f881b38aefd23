"""Control of samplers of latents without training: the gradient of a loss of token logits moves predicted clean latents.

At each step the prediction x is decoded to logits, and x moves against the gradient of the guide's loss. The gradient is
normalized per row; the length of the move falls linearly with t, is proportional to the loss, and is clipped. After the
last step a few more moves refine the latents. Shapes: B batch, L tokens, N latents, D latent width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from jpeg_dlm.errors import UsageError
from jpeg_dlm.flow.guides import Guide, all_of, given_tokens

Logits = Callable[[Tensor], Tensor]  # clean latents (B, N, D) to logits (B, L, V), differentiable

# Lengths of a move at strength 1, relative to that of latents of unit variance, at t = 0, t = 1 and in refinement. Text is
# decided early, so early moves must be long: with constant ones, given tokens stand in text of something else (measured).
EARLY, LATE, REFINING = 1.3, 0.1, 0.1
REFINEMENTS = 16  # moves after the last step (measured)
FULL_LOSS = 1.0  # from this loss on a move has its full length
SATISFIED = 0.01  # a row with a smaller loss does not move


@dataclass(frozen=True)
class Origin:
    """A text to begin from instead of noise: its clean latents, its ids (-1 where they do not matter), the share of noise."""

    z_BND: Tensor
    tokens_BL: Tensor
    noise: float

    @property
    def time(self) -> float:
        """The time t = 1 - noise of the linear path."""
        return 1 - self.noise

    def clean(self, logits: Logits) -> Tensor:
        """Return the latents, refined so that they decode to the text where the codec alone would lose tokens."""
        return Steering(logits, given_tokens(self.tokens_BL)).refined(self.z_BND)

    def state(self, z_BND: Tensor, eps_BND: Tensor) -> Tensor:
        """Return the state t z + (1 - t) eps."""
        return z_BND.lerp(eps_BND, self.noise)

    def rest(self, grid: Tensor) -> Tensor:
        """Return the part of a grid of times that is left to go."""
        return torch.cat([grid.new_tensor([self.time]), grid[grid > self.time]])


@dataclass(frozen=True)
class Control:
    """Wishes for texts beyond given tokens: a guide, the strength of guidance, and a text to begin from.

    `end_id` is the id at which the text of a row ends, for models whose rows end: it shall not stand before a given token.
    """

    guide: Guide | None = None
    strength: float = 1.0
    origin: Origin | None = None
    end_id: int | None = None


@dataclass(frozen=True)
class Steering:
    """A guide at work on the latents of one decoder."""

    logits: Logits
    guide: Guide
    strength: float = 1.0

    def moved(self, x_BND: Tensor, t: float) -> Tensor:
        """Return a prediction of clean latents made at time t, moved towards a lower loss."""
        return self._step(x_BND, EARLY + (LATE - EARLY) * t)[0]

    def refined(self, z_BND: Tensor) -> Tensor:
        """Return final latents after a few more moves; rows that are as wanted stay as they are."""
        for _ in range(REFINEMENTS if self.strength else 0):
            z_BND, moving = self._step(z_BND, REFINING)
            if not moving:
                break
        return z_BND

    def _step(self, x_BND: Tensor, length: float) -> tuple[Tensor, bool]:
        """Return x after one move, and True if any row moved."""
        with torch.inference_mode(False), torch.enable_grad():
            x_BND = x_BND.detach().clone().requires_grad_()  # cloned, as the engine's tensors know no gradient
            loss_B = checked(self.guide(self.logits(x_BND)), len(x_BND))
            (gradient_BND,) = torch.autograd.grad(loss_B.sum(), x_BND)
        loss_B, x_BND = loss_B.detach(), x_BND.detach()
        size_B = gradient_BND.flatten(1).norm(dim=1)
        if not size_B.isfinite().all():
            raise UsageError("The guide has a gradient that is not finite: return a loss that is smooth in the logits.")
        share_B = (loss_B / FULL_LOSS).clamp(0, 1) * (loss_B >= SATISFIED) / size_B.clamp_min(1e-12)
        reach = self.strength * length * math.sqrt(x_BND[0].numel())
        return x_BND - reach * share_B[:, None, None] * gradient_BND, bool((loss_B >= SATISFIED).any())


def steering(logits: Logits, given_BL: Tensor | None, control: Control | None) -> Steering | None:
    """Return what given tokens and a guide ask for together; None if there are neither."""
    control = control or Control()
    guides = [] if given_BL is None else [given_tokens(given_BL, control.end_id)]
    guides += [control.guide] if control.guide else []
    return Steering(logits, all_of(guides), control.strength) if guides else None


def keep_given(x_BL: Tensor, given_BL: Tensor | None) -> Tensor:
    """Return rows with the given ids in place (-1 is free)."""
    return x_BL if given_BL is None else torch.where(given_BL < 0, x_BL, given_BL)


def checked(loss_B: Tensor, rows: int) -> Tensor:
    """Return the loss of a guide, or refuse one that cannot guide."""
    if not isinstance(loss_B, Tensor) or loss_B.shape != (rows,):
        found = f"shape {tuple(loss_B.shape)}" if isinstance(loss_B, Tensor) else f"a {type(loss_B).__name__}"
        raise UsageError(f"A guide must return one loss per row, a tensor of shape ({rows},), not {found}.")
    if not loss_B.isfinite().all():
        raise UsageError("The guide returned a loss that is not finite: return real numbers for any logits.")
    if not loss_B.requires_grad:
        raise UsageError("The guide's loss has no gradient: compute it from the logits with differentiable operations.")
    return loss_B
