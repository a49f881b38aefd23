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

    def sample(self, sampler, noise, watch=None, given_BL=None):
        assert self.weight.dtype == torch.float32 and not self.training and not torch.is_grad_enabled()
        self.log.append((self.name, len(noise.rows), noise.rows[0]))
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
    assert len(throughput_table(result).rows) == 2


def test_a_real_method(micro):
    s = micro.config.sampler
    subjects = [
        Subject(f"micro {k}", micro.method, replace(s, steps=k), micro.config.data.token_len, micro.config.preset, "test")
        for k in (1, 3)
    ]
    result = measure(subjects, batch=2, repeats=1, warmup=0)
    assert [row["sampler"]["steps"] for row in result["rows"]] == [1, 3]
    assert all(row["texts_per_second"] > 0 for row in result["rows"])


def test_autocast_and_progress(micro, monkeypatch):
    seen, told = [], []
    inner = micro.method.sample
    monkeypatch.setattr(micro.method, "sample", lambda *a: (seen.append(torch.is_autocast_enabled("cpu")), inner(*a))[1])
    subject = Subject("micro", micro.method, micro.config.sampler, 12, "smoke", "test")
    for dtype, name in (("fp32", "float32"), ("bf16", "bfloat16 autocast")):
        report = lambda done, total: told.append((done, total))  # noqa: E731
        assert measure([subject], 1, 2, 1, dtype=dtype, progress=report)["dtype"] == name
    assert seen == [False] * 3 + [True] * 3 and told == [(1, 3), (2, 3), (3, 3)] * 2


def test_the_papers_speed_is_that_of_the_system(micro_folders):
    from jpeg_dlm.api import load

    ar = load(micro_folders("ar"), "cpu")
    subjects = [
        Subject("ar", ar.method, replace(ar.config.sampler, kv_cache=cache), 12, preset, "test")
        for preset in ("lm1b", "owt1024", "smoke")
        for cache in (False, True)
    ]
    rows = measure(subjects, 1, 1, 0)["rows"]
    assert [row["paper_speed"] for row in rows] == [1.0, 1.62, 1.0, 7.14, None, None]
    assert rows[0]["title"] == "AR" and rows[0]["evaluations"] == 12
