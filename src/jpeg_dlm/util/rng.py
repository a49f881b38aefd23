"""Random numbers addressed by (seed, purpose, counters): resuming needs no saved state, and batches do not matter.

Rows of a batch get theirs from Philox, a counter-based generator (Salmon et al. 2011): a number is a function of its address,
so one operation draws those of all rows. On the host that is NumPy's Philox4x64-10. Training on an accelerator uses
Philox4x32-10 in tensor operations, whose number does not depend on the rows, and never waits for the host.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Law = Literal["normal", "uniform", "uniform64"]

WORD = 0xFFFFFFFF
PHILOX_M = (0xD2511F53, 0xCD9E8D57)  # multipliers and key increments of Philox4x32 (Salmon et al. 2011)
PHILOX_W = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
MOST_COUNTERS = 1 << 24  # of one pass on an accelerator, whose temporary tensors then take 0.8 GB at most


def derive_seed(seed: int, purpose: str, *counters: int) -> int:
    """Return a 63-bit seed for an address; distinct addresses have unrelated seeds."""
    text = "/".join([str(seed), purpose, *map(str, counters)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *counters: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a new generator for one address."""
    return torch.Generator(device=device).manual_seed(derive_seed(seed, purpose, *counters))


@dataclass(frozen=True)
class RowNoise:
    """Noise for a batch whose rows have global numbers `rows` at step `step`."""

    seed: int
    rows: Sequence[int]
    step: int = 0
    device: torch.device | str = "cpu"
    total: int = 0  # rows of the whole batch over all processes and micro-batches; 0: only these rows
    host: bool = True  # draw on the host, which gives the same numbers for every device, and copy them
    copies: int = 1  # concatenated copies of the batch, with independent numbers

    def normal(self, purpose: str, *shape: int) -> Tensor:
        """Draw standard normal numbers of shape (B, *shape); a row depends only on its global number."""
        return self._draw("normal", purpose, shape)

    def uniform(self, purpose: str, *shape: int) -> Tensor:
        """Draw uniform numbers on [0, 1) of shape (B, *shape)."""
        return self._draw("uniform", purpose, shape)

    def stratified(self, purpose: str) -> Tensor:
        """Draw uniform numbers on [0, 1) of shape (B), one of the whole batch in each of `total` equal intervals."""
        return (self.uniform(purpose) + self.places_B) / (self.total or len(self.rows))

    def repeated(self, copies: int) -> RowNoise:
        """Return noise for `copies` concatenated copies of the batch; the first copy draws the same as this noise."""
        return self if copies == 1 else replace(self, copies=copies)

    def streams(self, purpose: str) -> RowStreams:
        """Return streams that draw other numbers at each call, for samplers with many steps."""
        return RowStreams(self, purpose)

    def shared(self, purpose: str) -> torch.Generator:
        """Return a CPU generator shared by the whole batch and all processes."""
        return generator(self.seed, purpose, self.step)

    def shared_normal(self, purpose: str, *shape: int) -> Tensor:
        """Draw standard normal numbers of this shape that the whole batch and all processes share."""
        return replace(self, rows=range(1), copies=1).normal(purpose, *shape)[0]

    @property
    def on_host(self) -> RowNoise:
        """The noise of the host for the same rows, for numbers that decide how much work there is."""
        return replace(self, device="cpu", host=True)

    def coins(self, purpose: str, probability: float) -> np.ndarray:
        """Draw True with a probability for each row (B), on the host: a device would have to be asked how many there are."""
        return (self.on_host.uniform(purpose) < probability).numpy()

    def shared_coin(self, purpose: str, probability: float) -> bool:
        """Draw True with a probability, once for the whole batch and all processes."""
        return bool(replace(self, rows=range(1), copies=1).coins(purpose, probability)[0])

    @cached_property
    def rows_B(self) -> Tensor:
        """The rows' global numbers, on the device."""
        if isinstance(self.rows, range):  # made on the device: a copy would wait
            return torch.arange(self.rows.start, self.rows.stop, self.rows.step, device=self.device)
        return torch.tensor(self.rows, dtype=torch.int64, device=self.device)

    @property
    def places_B(self) -> Tensor:
        """The rows' places in the whole batch, over all processes and micro-batches."""
        return (self.rows_B % (self.total or len(self.rows))).repeat(self.copies)

    def _draw(self, law: Law, purpose: str, shape: tuple[int, ...]) -> Tensor:
        numbers = math.prod(shape)
        count = numbers * 2 if law == "uniform64" else numbers
        purposes = [purpose, *(f"{purpose}#{copy}" for copy in range(1, self.copies))]  # of the copies of the batch
        keys = [derive_seed(self.seed, p, self.step) for p in purposes]
        words = [host_words(key, self.rows, count) if self.host else device_words(key, self.rows_B, count) for key in keys]
        return torch.cat([LAWS[law](w) for w in words])[:, :numbers].to(self.device).view(-1, *shape)


@dataclass
class RowStreams:
    """A sequence of draws for each row of a batch; a row's numbers never depend on other rows."""

    noise: RowNoise
    purpose: str
    draws: int = 0

    def uniform(self, *shape: int) -> Tensor:
        """Draw uniform numbers on [0, 1) of shape (B, *shape) in float64, which resolves rare events."""
        return self._next("uniform64", shape)

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normal numbers of shape (B, *shape)."""
        return self._next("normal", shape)

    def _next(self, law: Law, shape: tuple[int, ...]) -> Tensor:
        self.draws += 1
        return self.noise._draw(law, f"{self.purpose}@{self.draws}", shape)


def chosen_rows(chosen: np.ndarray, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return a choice of rows made on the host as a mask (B) and as row numbers (N) on a device."""
    return on_device(torch.from_numpy(chosen), device), on_device(torch.from_numpy(np.flatnonzero(chosen)), device)


def on_device(t: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor of the host to a device without waiting for the device."""
    return t.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else t.to(device)


# ---------------------------------------------------------------- laws


def normal_of(words_B2M: Tensor) -> Tensor:
    """Return two standard normal numbers per pair of words as (B, 2M), by the transform of Box and Muller."""
    first, second = words_B2M.unbind(1)
    radius = (first & 0x7FFFFFFF).float().add_(1).mul_(2.0**-31).log_().mul_(-2).sqrt_()
    angle = second.float().mul_(math.pi * 2.0**-31)
    out = torch.empty(words_B2M.shape, device=words_B2M.device)
    torch.mul(radius, angle.cos(), out=out[:, 0])
    torch.mul(radius, angle.sin_(), out=out[:, 1])
    return out.flatten(1)


def uniform_of(words_B2M: Tensor) -> Tensor:
    """Return a number on [0, 1) with 24 bits per word as (B, 2M)."""
    return words_B2M.flatten(1).bitwise_right_shift(8).bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)


def uniform64_of(words_B2M: Tensor) -> Tensor:
    """Return a number on [0, 1) with 53 bits per pair of words as (B, M), in float64."""
    first, second = words_B2M.unbind(1)
    high = (first & 0x7FFFFFFF).double().mul_(2.0**22)
    return (high + (second >> 10).bitwise_and_(0x3FFFFF)).mul_(2.0**-53)


LAWS = {"normal": normal_of, "uniform": uniform_of, "uniform64": uniform64_of}

# ---------------------------------------------------------------- Philox


def host_words(key: int, rows: Sequence[int], count: int) -> Tensor:
    """Return at least `count` 32-bit words per row as two halves (B, 2, *); rows that follow each other are one call."""
    blocks = -(-count // 8)  # a block has four words of 64 bits
    parts = [np.random.Philox(key=key, counter=first * blocks).random_raw(number * blocks * 4) for first, number in _runs(rows)]
    words = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return torch.from_numpy(words.view(np.int32)).view(len(rows), 2, -1)


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first row, number of rows) of the runs of consecutive rows."""
    if isinstance(rows, range) and rows.step == 1:
        return iter([(rows.start, len(rows))])
    parts = np.split(np.asarray(rows), np.flatnonzero(np.diff(rows) != 1) + 1)
    return ((int(part[0]), len(part)) for part in parts)


def device_words(key: int, rows_B: Tensor, count: int) -> Tensor:
    """Return at least `count` words per row as (B, 2, *) by operations on the rows' device."""
    blocks = -(-count // 4)
    counters = torch.zeros(4, len(rows_B), blocks, dtype=torch.int64, device=rows_B.device)
    counters[0] = torch.arange(blocks, device=rows_B.device)
    counters[2], counters[3] = (rows_B & WORD)[:, None], (rows_B >> 32)[:, None]
    parts = [philox(part, key) for part in counters.flatten(1).split(MOST_COUNTERS, dim=1)]
    words = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return words.view(2, 2, len(rows_B), blocks).permute(2, 0, 1, 3).reshape(len(rows_B), 2, -1)


def philox(counters_4N: Tensor, key: int) -> Tensor:
    """Return Philox4x32-10 of each column of counters, 32-bit words in int64, as int32 (4, N)."""
    x0, x1, x2, x3 = counters_4N.clone().unbind()
    keys = [key & WORD, key >> 32]
    for _ in range(PHILOX_ROUNDS):
        p, q = x0 * PHILOX_M[0], x2 * PHILOX_M[1]  # only the low word of x1 and x3 counts from here on
        torch.bitwise_right_shift(q, 32, out=x0).bitwise_xor_(x1).bitwise_xor_(keys[0]).bitwise_and_(WORD)
        torch.bitwise_right_shift(p, 32, out=x2).bitwise_xor_(x3).bitwise_xor_(keys[1]).bitwise_and_(WORD)
        x1, x3 = q, p
        keys = [(k + w) & WORD for k, w in zip(keys, PHILOX_W, strict=True)]
    return torch.stack([x0, x1, x2, x3]).to(torch.int32)
