"""Shared parts of the systems on token ids: schedule, times, reductions, drawing tokens, conditions of a preset."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from jpeg_dlm.config import TrainConfig, validate
from jpeg_dlm.errors import CheckpointError, UsageError
from jpeg_dlm.methods.common.discrete import (
    DditConfig,
    DiscreteObjective,
    LogLinear,
    ddit_sizes,
    ddit_training,
    draw_tokens,
    paper_data,
    reduce_loss,
    sampling_times,
    training_times,
)
from jpeg_dlm.methods.registry import for_method
from jpeg_dlm.nn.ddit import DDiT
from jpeg_dlm.presets import preset
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.training.data import BatchStream
from jpeg_dlm.training.optim import WeightEma

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


def test_the_weight_of_a_masked_token_is_one_over_t():
    schedule, t = LogLinear(), torch.tensor([1e-3, 0.02, 0.3, 0.9, 1.0])
    assert torch.allclose(schedule.dsigma(t) / schedule.sigma(t).expm1() * t, torch.ones(5), rtol=1e-4)
    assert torch.allclose(-schedule.dalpha(t) / (1 - schedule.alpha(t)) * t, torch.ones(5), rtol=1e-4)


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


def test_independent_times_leave_intervals_empty():
    t = training_times(RowNoise(0, range(64)), DiscreteObjective(stratified=False))
    assert len({int(x * 64) for x in t.tolist()}) < 60 and 1e-3 <= t.min() and t.max() <= 1


def test_sampling_times_are_even_and_end_just_above_zero():
    times = sampling_times(4)
    assert times == pytest.approx([1, 0.7500025, 0.500005, 0.2500075, 1e-5], abs=1e-12)


# ---------------------------------------------------------------- reductions and draws


def test_reductions_count_real_tokens_only():
    nll = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert reduce_loss(nll, mask, "token_mean") == pytest.approx((1 + 2 + 8) / 3)
    assert reduce_loss(nll, mask, "sequence_sum") == pytest.approx((1 + 2 + 8) / 2)
    assert reduce_loss(nll, None, "token_mean") == pytest.approx(63 / 6)
    assert reduce_loss(nll, None, "sequence_sum") == pytest.approx(63 / 2)


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
    data, mask_id = paper_data(preset("lm1b"))
    assert (data.tokenizer, data.vocab_size, mask_id, data.token_len) == ("bert-base-uncased", 30_522, 103, 128)
    data, mask_id = paper_data(preset("owt1024"))
    assert (data.tokenizer, data.vocab_size, mask_id, data.token_len) == ("gpt2", 50_257, -1, 1024)
    assert all((d.packing, d.frame) == ("continuous", True) for d in (data, paper_data(preset("lm1b"))[0]))
    assert paper_data(preset("lm1b"), "gpt2")[0].vocab_size == 50_257
    for name in ("lm1b", "owt1024"):
        train = ddit_training(preset(name))
        assert train.batch * train.accumulation * train.devices == 512
        assert (train.steps, train.lr, train.warmup, train.schedule) == (1_000_000, 3e-4, 2500, "constant")
        assert (train.ema, train.ema_warmup, train.weight_decay, train.beta2) == (0.9999, True, 0.0, 0.999)


def test_a_small_preset_keeps_data_budget_and_rate():
    base = preset("tiny")
    train = ddit_training(base)
    assert paper_data(base) == (base.data, -1)
    assert (train.steps, train.batch, train.lr) == (base.train.steps, base.train.batch, base.train.lr)


def test_the_mask_gets_a_row_unless_the_tokenizer_has_one():
    assert DditConfig(mask_id=-1).with_mask(50_257) == (50_258, 50_257)
    assert DditConfig(mask_id=103).with_mask(30_522) == (30_522, 103)


@pytest.mark.parametrize(("vocab", "total"), [(50_258, 169_627_218), (30_522, 139_292_986)])
def test_sizes_are_read_from_a_published_checkpoint(vocab, total):
    with torch.device("meta"):
        tensors = {f"backbone.{name}": t for name, t in DDiT(vocab).state_dict().items()}
    assert sum(t.numel() for t in tensors.values()) == total  # of the public code
    assert ddit_sizes(tensors) == (vocab, {"hidden": 768, "depth": 12, "heads": 12, "cond_dim": 128, "freq_dim": 256})
    del tensors["backbone.vocab_embed.embedding"]
    with pytest.raises(CheckpointError, match="vocab_embed.embedding"):
        ddit_sizes(tensors)


@pytest.mark.parametrize(
    ("group", "options", "match"),
    [
        ("model", {"mask_id": 512}, "mask_id"),
        ("model", {"heads": 5}, "divisible"),
        ("model", {"dropout": 1.0}, "dropout"),
        ("model", {"freq_dim": 7}, "freq_dim"),
        ("model", {"cond_dim": 0}, "(?i)sizes"),
        ("objective", {"t_min": 0.0}, "t_min"),
        ("sampler", {"steps": 0}, "steps"),
    ],
)
def test_what_cannot_work_is_refused(group, options, match):
    config = for_method(preset("smoke"), "mdlm")
    assert config.data.vocab_size == 512
    with pytest.raises(UsageError, match=match):
        validate(replace(config, **{group: replace(getattr(config, group), **options)}))


# ---------------------------------------------------------------- the average of the weights


def test_the_average_warms_up():
    """Update n decays by (1 + n) / (10 + n): 2/11 first; 0.9999 takes over at n = 89,990."""
    weight = nn.Parameter(torch.ones(1))
    ema = WeightEma({"w": weight}, 0.9999, warmup=True)
    with torch.no_grad():
        weight.fill_(0.0)
    for n, decay in ((1, 2 / 11), (2, 3 / 12), (10**6, 0.9999)):
        before = ema.shadow["w"].item()
        ema.update(n)
        assert ema.shadow["w"].item() == pytest.approx(decay * before, rel=1e-6)
