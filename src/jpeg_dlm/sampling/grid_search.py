"""Searches the few times at which a sampler should evaluate the network of a model.

A grid is better the closer its latents are to those of many steps from the same noise. The search is deterministic: it takes
the best of a few families of grids and then moves one time after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from jpeg_dlm.errors import UsageError
from jpeg_dlm.flow.grids import quantile_grid, uniform_grid
from jpeg_dlm.flow.latent_sampler import LatentSampler, Writer
from jpeg_dlm.flow.sampler_config import SamplerConfig, steps_within
from jpeg_dlm.rng import RowNoise

Times = tuple[float, ...]
Error = Callable[[Times], float]
Progress = Callable[[int, int], None]

POWERS = (0.5, 0.7, 1.0, 1.4, 2.0)  # of uniform times (assumed)
NORMALS = ((-1.5, 0.8), (-0.75, 1.0), (0.0, 1.0), (0.0, 1.5), (0.75, 1.0))  # mean and deviation of logit(t) (assumed)
FIRST_MOVE, LAST_MOVE = 0.5, 0.05  # moves of a time as a share of the distance to its neighbor (assumed)
DIGITS = 4  # of a stored time, finer than any move that matters
REFERENCE_STEPS = 128  # uniform Euler steps of the reference (assumed)
SEARCH_SEED = 1 << 20  # no evaluation uses this noise: their seeds count from 0


@dataclass(frozen=True)
class Found:
    """The times, their distance from the reference, and that of the grid from which the search started."""

    times: Times
    error: float
    start_error: float


def families(steps: int) -> Iterator[Times]:
    """Yield initial grids: powers of uniform times, and logit-normal quantiles."""
    for power in POWERS:
        yield rounded((uniform_grid(steps).double() ** power).tolist())
    for mean, std in NORMALS:
        yield rounded(quantile_grid(steps, mean, std).tolist())


def rounded(times: Sequence[float]) -> Times:
    return tuple(round(t, DIGITS) for t in times)


def search(error: Error, steps: int, trials: int, progress: Progress | None = None) -> Found:
    """Return the times with the smallest error found in at most `trials` evaluations of `error`."""
    known: dict[Times, float] = {}

    def measured(times: Times) -> float:
        if times not in known:
            known[times] = error(times) if increasing(times) else float("inf")
            if progress:
                progress(len(known), trials)
        return known[times]

    best = min(list(families(steps))[:trials], key=measured)
    start_error, move = measured(best), FIRST_MOVE
    while move >= LAST_MOVE and len(known) < trials:
        before = best
        for i in range(1, steps):
            for neighbor in (i - 1, i + 1):
                if len(known) < trials:
                    best = min(best, moved(best, i, neighbor, move), key=measured)
        if best == before:
            move /= 2
    return Found(best, measured(best), start_error)


def moved(times: Times, i: int, neighbor: int, share: float) -> Times:
    """Move the i-th time by a share of the distance to a neighbor."""
    return rounded([*times[:i], times[i] + share * (times[neighbor] - times[i]), *times[i + 1 :]])


def increasing(times: Times) -> bool:
    return all(t < u for t, u in zip(times, times[1:], strict=False))


# ---------------------------------------------------------------- for a model


def latent_error(latent: LatentSampler, sampler: SamplerConfig, rows: int, seed: int = SEARCH_SEED) -> Error:
    """Return the error of a grid: mean squared distance of its latents from those of many steps from the same noise."""
    m = latent.config.model
    z = RowNoise(seed, range(rows), 0, latent.device).normal("sample", m.latent_len, m.latent_dim)
    reference = latent.latents(z, uniform_grid(REFERENCE_STEPS).tolist(), replace(sampler, solver="euler"))
    return lambda times: float((latent.latents(z, list(times), sampler) - reference).square().mean())


def tuned(
    writer: Writer, sampler: SamplerConfig, evaluations: int, rows: int, trials: int, progress: Progress | None = None
) -> tuple[SamplerConfig, Found]:
    """Return `sampler` with the times found for its fast solver and scale, and the result of the search."""
    latent = writer.latent_sampler
    if latent is None:
        raise UsageError(f"{writer.title} has no sampling times to tune: use a jpeg-dlm model.")
    if sampler.fast_solver == "sde":
        raise UsageError("Stored times are those of an ODE: tune them for another fast solver than sde.")
    steps = steps_within(evaluations, sampler.fast_solver)
    few = replace(sampler, solver=sampler.fast_solver, w=sampler.fast_w or sampler.w)
    found = search(latent_error(latent, few, rows), steps, trials, progress)
    return replace(sampler, times=found.times), found
