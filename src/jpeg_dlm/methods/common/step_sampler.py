"""What the options of samplers with a number of steps have in common. This module never imports torch."""

from __future__ import annotations

from jpeg_dlm.config import Checks, Config


class StepSampler:
    """A sampler that evaluates its network once per step."""

    steps: int

    def checks(self, config: Config) -> Checks:
        return [(self.steps >= 1, "sampler.steps must be at least 1")]

    def label(self) -> str:
        """Return the name in tables."""
        return f"{self.steps} steps"

    def evaluations(self, token_len: int) -> int:
        """Return the network evaluations of one sample."""
        return self.steps
