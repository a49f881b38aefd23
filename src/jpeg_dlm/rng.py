"""Random numbers addressed by (seed, purpose, counters), never by hidden state.

A generator is made from what it is for, so resuming a run needs no saved random state, and sample i of seed s is the
same in any batch and on any number of processes. `RowNoise` is how methods draw: one generator per row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def derive_seed(seed: int, purpose: str, *counters: int) -> int:
    """A 63-bit seed from its address; distinct addresses give unrelated seeds."""
    text = "/".join([str(seed), purpose, *map(str, counters)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *counters: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator for one address."""
    return torch.Generator(device=device).manual_seed(derive_seed(seed, purpose, *counters))


@dataclass(frozen=True)
class RowNoise:
    """Noise for a batch whose rows have global numbers `rows` at step `step`."""

    seed: int
    rows: Sequence[int]
    step: int = 0
    device: torch.device | str = "cpu"

    def normal(self, purpose: str, *shape: int) -> Tensor:
        """Standard normal of shape (B, *shape); row i depends on its global number alone."""
        return self._draw(torch.randn, purpose, shape)

    def uniform(self, purpose: str, *shape: int) -> Tensor:
        """Uniform on [0, 1) of shape (B, *shape)."""
        return self._draw(torch.rand, purpose, shape)

    def shared(self, purpose: str) -> torch.Generator:
        """A CPU generator common to the whole batch and to every process."""
        return generator(self.seed, purpose, self.step)

    def _draw(self, kind, purpose: str, shape: tuple[int, ...]) -> Tensor:  # noqa: ANN001 - torch.randn or torch.rand
        out = torch.empty(len(self.rows), *shape, device=self.device)
        for i, row in enumerate(self.rows):
            g = generator(self.seed, purpose, self.step, row, device=self.device)
            out[i] = kind(shape, generator=g, device=self.device)
        return out
