"""Shared parts of the systems on token ids: schedule, times, reductions, drawing tokens, conditions of a preset."""

import pytest
import torch

from jpeg_dlm.config import TrainConfig
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.discrete import (
    DiscreteObjective,
    LogLinear,
    draw_tokens,
    reduce_loss,
    sampling_times,
    training_times,
    with_mask,
)
from jpeg_dlm.methods.registry import for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.training.data import BatchStream
from jpeg_dlm.util.rng import RowNoise

# ---------------------------------------------------------------- schedule and times


def test_the_log_linear_schedule():
    schedule = LogLinear()
    t = torch.tensor([0.4, 0.75])
    assert schedule.sigma(t).tolist() == pytest.approx([0.510159, 1.383299], abs=1e-6)  # of the public code
    assert schedule.dsigma(t).tolist() == pytest.approx([1.663891, 3.984048], abs=1e-6)
    assert schedule.alpha(t).tolist() == pytest.approx([1 - 0.999 * 0.4, 1 - 0.999 * 0.75])
    assert torch.allclose(schedule.time(schedule.alpha(t)), t)


def test_derivatives_of_the_schedule():
    schedule = LogLinear()
    t = torch.linspace(0.01, 0.99, 30, dtype=torch.float64, requires_grad=True)
    for f, df in ((schedule.alpha, schedule.dalpha), (schedule.sigma, schedule.dsigma)):
        (slope,) = torch.autograd.grad(f(t).sum(), t)
        assert torch.allclose(slope, df(t.detach()))
    assert torch.allclose(schedule.sigma(t), -schedule.alpha(t).log())


@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), (1, 4), (2, 2), (4, 1)])
def test_one_time_in_each_interval_of_the_global_batch(world, accumulation):
    """However a step's 16 rows are split into micro-batches and processes."""
    train = TrainConfig(batch=16 // world // accumulation, accumulation=accumulation)
    objective, times = DiscreteObjective(t_min=0.2), {}
    for rank in range(world):
        stream = BatchStream.__new__(BatchStream)  # only its arithmetic: there is no text behind it
        stream.train, stream.rank, stream.world = train, rank, world
        stream.order = type("Order", (), {"rows": lambda self, first, n: torch.arange(first, first + n)})()
        for micro in range(accumulation):
            places, _ = stream.row_numbers(3, micro)
            noise = RowNoise(1, places, 3, total=stream.rows_per_step)
            times |= dict(zip(places, training_times(noise, objective).tolist(), strict=True))
    assert sorted(int((t - 0.2) / 0.8 * 16) for t in times.values()) == list(range(16))
    whole = training_times(RowNoise(1, range(16), 3), objective).tolist()
    assert [times[place] for place in range(16)] == pytest.approx(whole)


def test_sampling_times_are_even_and_end_just_above_zero():
    assert sampling_times(4).tolist() == pytest.approx([1, 0.7500025, 0.500005, 0.2500075, 1e-5], abs=1e-12)


# ---------------------------------------------------------------- reductions and draws


def test_reductions_count_real_tokens_only():
    nll = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    padded, full = Batch(nll, torch.tensor([[1, 1, 0], [1, 0, 0]])), Batch(nll)
    assert reduce_loss(nll, padded, "token_mean") == pytest.approx((1 + 2 + 8) / 3)
    assert reduce_loss(nll[:, 1:], padded, "token_mean", first=1) == pytest.approx(2)
    assert reduce_loss(nll, padded, "sequence_sum") == pytest.approx((1 + 2 + 8) / 2)
    assert reduce_loss(nll, full, "token_mean") == pytest.approx(63 / 6)
    assert reduce_loss(nll, full, "sequence_sum") == pytest.approx(63 / 2)


def test_drawing_inverts_the_cumulative_sum():
    p = torch.tensor([0.0, 2.0, 0.0, 1.0, 1.0, 0.0])  # not normalized
    u = torch.tensor([0.0, 0.25, 0.4999, 0.5, 0.7499, 0.75, 0.9999])
    assert draw_tokens(p.expand(7, 6), u).tolist() == [1, 1, 1, 3, 3, 4, 4]


def test_a_token_without_probability_is_never_drawn():
    """Not even by the largest uniform number, which times the sum rounds to the sum."""
    p = torch.rand(500, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p[:, ::4] = 0
    for u in (0.0, 1 - 2**-53, 1.0):
        drawn = draw_tokens(p, torch.full((500,), u, dtype=torch.float64))
        assert p.gather(1, drawn[:, None]).min() > 0


# ---------------------------------------------------------------- conditions of a preset


def test_tokenizers_and_budget_of_the_paper():
    for name, wanted in (("lm1b", ("bert-base-uncased", 30_522, 103, 128)), ("owt1024", ("gpt2", 50_257, -1, 1024))):
        config = for_method(preset(name), "mdlm")
        data, train = config.data, config.train
        assert (data.tokenizer, data.vocab_size, config.model.mask_id, data.token_len) == wanted
        assert (data.packing, data.frame, config.sampler.steps) == ("continuous", True, data.token_len)
        assert train.batch * train.accumulation * train.devices == 512
        assert (train.steps, train.lr, train.warmup, train.schedule) == (1_000_000, 3e-4, 2500, "constant")
        assert (train.ema, train.ema_warmup, train.weight_decay, train.beta2) == (0.9999, True, 0.0, 0.999)


def test_the_mask_gets_a_row_unless_the_tokenizer_has_one():
    assert with_mask(-1, 50_257) == (50_258, 50_257) and with_mask(103, 30_522) == (30_522, 103)
