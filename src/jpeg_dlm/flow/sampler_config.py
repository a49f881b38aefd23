"""Options of Algorithm 2. This module never imports torch, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from jpeg_dlm.config import Checks, Config, opt
from jpeg_dlm.errors import UsageError

FAST_EVALUATIONS = 12  # network evaluations of the fast sampler, including the decode evaluation


@dataclass(frozen=True)
class SamplerConfig:
    """Options of Algorithm 2, which turns noise into tokens."""

    steps: int = opt(32, "K, solver steps (paper: 32, OWT-128 64)")
    solver: Literal["euler", "heun", "multistep", "sde"] = opt(
        "euler", "ODE solver, or 'sde' for Euler steps that each add fresh noise first (paper: Euler)"
    )
    grid: Literal["quantile", "random", "uniform", "stored"] = opt(
        "quantile", "placement of the K+1 times (released); 'stored' uses `times`"
    )
    w: float = opt(3.0, "self-conditioning guidance scale (paper: 3 on LM1B and OWT-128, 2 on OWT-1024)")
    gamma: float = opt(1.5, "distance that 'sde' goes back in time, in steps (ELF: 1.5 at 32 steps)")
    grid_mean: float = opt(-1.5, "mean of logit(t) of the grid (released)")
    grid_std: float = opt(0.8, "deviation of logit(t) of the grid (released)")
    protocol: Literal["default", "released"] = opt(
        "default", "'released' draws random numbers in the order and the batches of the authors' code"
    )
    times: tuple[float, ...] = opt((), "K+1 times from 0 to 1, found by `jpeg-dlm tune` and stored with a model")
    fast_solver: Literal["euler", "heun", "multistep", "sde"] = opt("multistep", "solver of the fast sampler (measured)")
    fast_gamma: float = opt(2.0, "gamma of the fast sampler, if it is 'sde' (ELF: 2 at 8 and 16 steps)")
    fast_w: float = opt(0.0, "guidance scale of the fast sampler; 0 is w")

    def checks(self, config: Config) -> Checks:
        times = self.times
        return [
            (self.steps >= 1, "sampler.steps must be at least 1"),
            (self.w > 0 and self.grid_std > 0, "sampler.w and sampler.grid_std must be positive"),
            (self.gamma >= 0 and self.fast_gamma >= 0, "sampler.gamma and sampler.fast_gamma must not be negative"),
            (
                self.solver != "sde" or self.protocol == "default",
                "sampler.solver 'sde' is not in the released protocol: choose euler",
            ),
            (self.fast_w >= 0, "sampler.fast_w must not be negative"),
            (
                not times or (len(times) > 1 and times[0] == 0 and times[-1] == 1),
                "sampler.times must begin with 0 and end with 1",
            ),
            (all(t < u for t, u in pairwise(times)), "sampler.times must increase"),
            (
                self.grid != "stored" or self.protocol == "default",
                "sampler.grid 'stored' is not in the released protocol: choose another grid",
            ),
            (
                self.grid != "stored" or bool(times),
                "sampler.grid 'stored' needs sampler.times: find them with  jpeg-dlm tune, or choose another grid",
            ),
            (
                self.grid != "stored" or self.steps == len(times) - 1,
                f"sampler.grid 'stored' has {len(times) - 1} steps, not {self.steps}: leave sampler.steps at that, or choose "
                "another grid",
            ),
        ]

    def fast(self) -> SamplerConfig:
        """Return the fast sampler: the stored times, or as many steps of the grid as `FAST_EVALUATIONS` allow.

        Stored times are those of an ODE, so 'sde' does without them. Quantiles replace random times, which leave gaps. A
        sampler that is already as fast is returned unchanged.
        """
        times = () if self.fast_solver == "sde" else self.times
        if not times and self.evaluations(0) <= FAST_EVALUATIONS:
            return self
        gamma = self.fast_gamma if self.fast_solver == "sde" else self.gamma
        sampler = replace(self, solver=self.fast_solver, w=self.fast_w or self.w, gamma=gamma, protocol="default")
        if times:
            return replace(sampler, grid="stored", steps=len(self.times) - 1)
        grid = "quantile" if self.grid == "random" else self.grid
        return replace(sampler, grid=grid, steps=steps_within(FAST_EVALUATIONS, self.fast_solver))

    def label(self) -> str:
        """Return the name in tables."""
        return f"{self.steps} {self.solver} steps"

    def evaluations(self, token_len: int) -> int:
        """Return the network evaluations of one sample: K (Heun: two per step except the last) and the decode evaluation."""
        return (2 * self.steps - 1 if self.solver == "heun" else self.steps) + 1


def steps_within(evaluations: int, solver: str) -> int:
    """Return the largest number of steps that fits into `evaluations`, including the decode evaluation."""
    steps = evaluations // 2 if solver == "heun" else evaluations - 1
    if steps < 1:
        raise UsageError("A sampler needs at least 2 network evaluations: one step and the decode evaluation.")
    return steps
