"""Guidance of samplers of latents without training: the gradient of a loss of token logits moves predicted clean latents.

A guide is any differentiable function `fn(logits_BLV) -> loss_B`. A row's loss must depend on the row alone; 0 or less
means that the row is as wanted. At each step the prediction x is decoded to logits, and x moves against the gradient of
the guide's loss, which is normalized per row; the length of the move falls linearly with t, is proportional to the loss,
and is clipped. After the last step a few more moves refine the latents.
Shapes: B batch, L tokens, N latents, D latent width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from jpeg_dlm.util.errors import UsageError

Guide = Callable[[Tensor], Tensor]  # logits (B, L, V) to one loss per row (B)
Logits = Callable[[Tensor], Tensor]  # clean latents (B, N, D) to logits (B, L, V), differentiable

# Lengths of a move at strength 1, relative to that of latents of unit variance, at t = 0, t = 1 and in refinement. Text is
# decided early, so early moves must be long: with constant ones, given tokens stand in text of something else (measured).
EARLY, LATE, REFINING = 1.3, 0.1, 0.1
REFINEMENTS = 16  # moves after the last step (measured)
FULL_LOSS = 1.0  # from this loss on a move has its full length
SATISFIED = 0.01  # a row with a smaller loss does not move


@dataclass(frozen=True)
class EditSource:
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
        return GuidedDecoder(logits, given_tokens(self.tokens_BL)).refine(self.z_BND)

    def state(self, z_BND: Tensor, eps_BND: Tensor) -> Tensor:
        """Return the state t z + (1 - t) eps."""
        return z_BND.lerp(eps_BND, self.noise)

    def rest(self, grid: Tensor) -> Tensor:
        """Return the part of a grid of times that is left to go."""
        return torch.cat([grid.new_tensor([self.time]), grid[grid > self.time]])


@dataclass(frozen=True)
class Guidance:
    """Wishes for texts beyond given tokens: a guide, the strength of guidance, and a text to begin from.

    `end_id` is the id at which the text of a row ends, for models whose rows end: it shall not stand before a given token.
    """

    guide: Guide | None = None
    strength: float = 1.0
    source: EditSource | None = None
    end_id: int | None = None


@dataclass(frozen=True)
class GuidedDecoder:
    """A guide at work on the latents of one decoder."""

    logits: Logits
    guide: Guide
    strength: float = 1.0

    def nudge(self, x_BND: Tensor, t: float) -> Tensor:
        """Return a prediction of clean latents made at time t, moved towards a lower loss."""
        return self._step(x_BND, EARLY + (LATE - EARLY) * t)[0]

    def refine(self, z_BND: Tensor) -> Tensor:
        """Return final latents after a few more moves; rows that are as wanted stay as they are."""
        for _ in range(REFINEMENTS if self.strength else 0):
            z_BND, moving = self._step(z_BND, REFINING)
            if not moving:
                break
        return z_BND

    def _step(self, x_BND: Tensor, length: float) -> tuple[Tensor, bool]:
        """Return x after one move, and True if any row moved."""
        with torch.inference_mode(False), torch.enable_grad():
            x_BND = x_BND.detach().clone().requires_grad_()  # cloned, as a tensor of inference mode knows no gradient
            loss_B = checked(self.guide(self.logits(x_BND)), len(x_BND))
            (gradient_BND,) = torch.autograd.grad(loss_B.sum(), x_BND)
        loss_B, x_BND = loss_B.detach(), x_BND.detach()
        size_B = gradient_BND.flatten(1).norm(dim=1)
        if not size_B.isfinite().all():
            raise UsageError("The guide has a gradient that is not finite: return a loss that is smooth in the logits.")
        share_B = (loss_B / FULL_LOSS).clamp(0, 1) * (loss_B >= SATISFIED) / size_B.clamp_min(1e-12)
        reach = self.strength * length * math.sqrt(x_BND[0].numel())
        return x_BND - reach * share_B[:, None, None] * gradient_BND, bool((loss_B >= SATISFIED).any())


def guided_decoder(logits: Logits, fixed_BL: Tensor | None, guidance: Guidance | None) -> GuidedDecoder | None:
    """Return what given tokens and a guide ask for together; None if there are neither."""
    guidance = guidance or Guidance()
    guides = [] if fixed_BL is None else [given_tokens(fixed_BL, guidance.end_id)]
    guides += [guidance.guide] if guidance.guide else []
    if len(guides) == 2:  # the sum of both
        guides = [lambda x, pair=tuple(guides): pair[0](x) + pair[1](x)]
    return GuidedDecoder(logits, guides[0], guidance.strength) if guides else None


def keep_fixed(x_BL: Tensor, fixed_BL: Tensor | None) -> Tensor:
    """Return rows with the given ids in place (-1 is free)."""
    return x_BL if fixed_BL is None else torch.where(fixed_BL < 0, x_BL, fixed_BL)


def checked(loss_B: Tensor, rows: int) -> Tensor:
    """Return the loss of a guide, or refuse one that cannot guide."""
    if not isinstance(loss_B, Tensor) or loss_B.shape != (rows,):
        kind = f"shape {tuple(loss_B.shape)}" if isinstance(loss_B, Tensor) else f"a {type(loss_B).__name__}"
        raise UsageError(f"A guide must return one loss per row, a tensor of shape ({rows},), not {kind}.")
    if not loss_B.isfinite().all():
        raise UsageError("The guide returned a loss that is not finite: return real numbers for any logits.")
    if not loss_B.requires_grad:
        raise UsageError("The guide's loss has no gradient: compute it from the logits with differentiable operations.")
    return loss_B


# ---------------------------------------------------------------- guides


def given_tokens(fixed_BL: Tensor, end_id: int | None = None) -> Guide:
    """Return the guide to rows with these ids; the loss is the mean of -log p over given positions (-1 is free).

    With `end_id`, positions before the last given one also count, with -log of the probability of another id than that.
    """
    fixed_BL = fixed_BL.clone()
    kept_BL = fixed_BL >= 0
    before_BL = ~kept_BL & (kept_BL.flip(1).cumsum(1).flip(1) > 0)
    count_B = kept_BL.sum(1).clamp_min(1)

    def loss(logits_BLV: Tensor) -> Tensor:
        nll_BL = F.cross_entropy(logits_BLV.transpose(1, 2), fixed_BL.clamp_min(0), reduction="none") * kept_BL
        if end_id is not None:
            nll_BL = nll_BL - log_other(logits_BLV.log_softmax(-1)[..., end_id]) * before_BL
        return nll_BL.sum(1) / count_B

    return loss


def contains(words: Sequence[Sequence[Sequence[int]]], end_id: int | None = None) -> Guide:
    """Return the guide to rows that contain all words, each at any position and in any of its spellings as token ids.

    The loss is the mean over words of -log of the expected number of places of a word, if tokens were independent. With
    `end_id`, places after an end token do not count.
    """

    def loss(logits_BLV: Tensor) -> Tensor:
        log_p_BLV = logits_BLV.float().log_softmax(-1)
        before_BL = None
        if end_id is not None:  # log of the probability that no end token stands before a position
            open_BL = log_other(log_p_BLV[..., end_id])
            before_BL = F.pad(open_BL.cumsum(1)[:, :-1], (1, 0))
        losses = []
        for spellings in words:
            places = [_log_places(log_p_BLV, before_BL, ids) for ids in spellings]
            losses.append(-torch.cat(places, dim=1).logsumexp(1).clamp_max(0.0))
        return torch.stack(losses).mean(0)

    return loss


def log_other(log_p: Tensor) -> Tensor:
    """Return log(1 - p), bounded where p is nearly 1."""
    return torch.log1p(-log_p.exp().clamp_max(1 - 1e-6))


def _log_places(log_p_BLV: Tensor, before_BL: Tensor | None, ids: Sequence[int]) -> Tensor:
    """Return the log-probability of `ids` at each position where they fit."""
    length = log_p_BLV.shape[1] - len(ids) + 1
    at = sum((log_p_BLV[:, i : i + length, token] for i, token in enumerate(ids)), start=log_p_BLV.new_zeros(()))
    return at if before_BL is None else at + before_BL[:, :length]
