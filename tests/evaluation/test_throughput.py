"""Throughput with a clock that the test moves: which rounds count, turns, medians and ratios."""

from dataclasses import replace

import pytest
import torch

from jpeg_dlm.evaluation.throughput import Subject, measure, throughput_table

pytest_plugins = ["tiny_evaluation"]  # fixtures


class Timed(torch.nn.Module):
    """A method that takes as long as it is told to."""

    def __init__(self, name, seconds, log, clock):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.name, self.seconds, self.log, self.clock = name, list(seconds), log, clock

    def sample(self, n, sampler, noise, watch=None):
        assert self.weight.dtype == torch.float32 and not self.training and not torch.is_grad_enabled()
        self.log.append((self.name, n, noise.rows[0]))
        self.clock[0] += self.seconds.pop(0)


def test_turns_medians_and_ratios(micro):
    log, clock, sampler = [], [0.0], micro.config.sampler
    a = Timed("a", [99, 2, 4, 2], log, clock)
    b = Timed("b", [99, 1, 1, 4], log, clock)
    subjects = [Subject(m.name, m, sampler, 10, "lm1b" if m is a else "tiny", "test") for m in (a, b)]  # type: ignore[arg-type]
    result = measure(subjects, batch=8, repeats=3, warmup=1, clock=lambda: clock[0])
    assert [name for name, _, _ in log] == ["a", "b"] * 4 and {n for _, n, _ in log} == {8}
    first, second = result["rows"]
    assert first["seconds"] == [2, 4, 2] and first["texts_per_second"] == 4 and first["tokens_per_second"] == 40
    assert first["ratio"] == 1 and second["ratio"] == pytest.approx(2) and second["ratio_range"] == [0.5, 4]
    assert first["paper_speed"] == 9.13 and second["paper_speed"] is None
    assert len(throughput_table(result).splitlines()) == 6


def test_a_real_method(micro):
    s = micro.config.sampler
    subjects = [
        Subject(f"micro {k}", micro.method, replace(s, steps=k), micro.config.data.token_len, micro.config.preset, "test")
        for k in (1, 3)
    ]
    result = measure(subjects, batch=2, repeats=1, warmup=0)
    assert [row["sampler"]["steps"] for row in result["rows"]] == [1, 3]
    assert all(row["texts_per_second"] > 0 for row in result["rows"])
