"""Throughput with a simulated clock: counted rounds, turns, medians and ratios."""

from dataclasses import replace

import pytest
import torch

from jpeg_dlm.evaluation.throughput import Subject, measure, throughput_table

pytest_plugins = ["tiny_evaluation", "stand_in"]  # fixtures


class Timed(torch.nn.Module):
    """A method that takes as long as it is told to."""

    title = "JPEG-DLM"

    def __init__(self, name, seconds, log, clock):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.name, self.seconds, self.log, self.clock = name, list(seconds), log, clock

    @property
    def device(self):
        return self.weight.device

    def sample(self, sampler, noise, watch=None, fixed_BL=None):
        assert self.weight.dtype == torch.float32 and not self.training and not torch.is_grad_enabled()
        self.log.append((self.name, len(noise.rows), noise.rows[0]))
        self.clock[0] += self.seconds.pop(0)


def test_turns_medians_and_ratios(micro):
    log, clock = [], [0.0]
    a = Timed("a", [99, 2, 4, 2], log, clock)
    b = Timed("b", [99, 1, 1, 4], log, clock)
    config = replace(micro.config, data=replace(micro.config.data, token_len=10))
    presets = ((a, "lm1b"), (b, "tiny"))
    subjects = [Subject(m.name, m, replace(config, preset=name), "test") for m, name in presets]  # type: ignore[arg-type]
    result = measure(subjects, batch=8, repeats=3, warmup=1, clock=lambda: clock[0])
    assert [name for name, _, _ in log] == ["a", "b"] * 4 and {n for _, n, _ in log} == {8}
    first, second = result["rows"]
    assert first["seconds"] == [2, 4, 2] and first["texts_per_second"] == 4 and first["tokens_per_second"] == 40
    assert first["ratio"] == 1 and second["ratio"] == pytest.approx(2) and second["ratio_range"] == [0.5, 4]
    assert first["paper_speed"] == 9.13 and second["paper_speed"] is None
    assert len(throughput_table(result).rows) == 2
