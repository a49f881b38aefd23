"""Shared parts of the systems on token ids: schedule, times, reductions, drawing tokens, conditions of a preset."""

from dataclasses import replace

import pytest
import torch

from jpeg_dlm.config import validate
from jpeg_dlm.cost.flops import build_weightless
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.discrete import (
    DiscreteObjective,
    LogLinear,
    draw_tokens,
    reduce_loss,
    sampling_times,
    training_times,
)
from jpeg_dlm.methods.registry import for_method
from jpeg_dlm.options import override
from jpeg_dlm.presets import preset
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


@pytest.mark.parametrize("parts", [1, 4, 8])
def test_one_time_in_each_interval_of_the_global_batch(parts):
    """However a step's 16 rows are split into micro-batches and processes."""
    objective, times = DiscreteObjective(t_min=0.2), torch.zeros(16)
    for part in range(parts):
        times[part::parts] = training_times(RowNoise(1, range(part, 16, parts), 3, total=16), objective)
    assert sorted(((times - 0.2) / 0.8 * 16).int().tolist()) == list(range(16))
    assert torch.equal(times, training_times(RowNoise(1, range(16), 3), objective))


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


# ---------------------------------------------------------------- presets and published checkpoints

EMBEDDINGS = 2 * 768 * 768 + 3  # LangFlow's self-conditioning map and proposal
# Published numbers of parameters with the tokenizers of LM1B and of OpenWebText; SEDD has GPT-2's for both.
PARAMETERS = {
    "ar": (131_912_250, 162_246_482),
    "mdlm": (139_292_986, 169_627_218),
    "sedd": (169_627_218, 169_627_218),
    "duo": (139_292_986, 169_627_218),
    "flm": (139_292_986, 169_627_218),
    "langflow": (139_292_986 + EMBEDDINGS, 169_625_681 + EMBEDDINGS),
}
SPECIAL = {"bert-base-uncased": {"mask_id": 103, "start_id": 101, "extra_ids": 0}, "gpt2": {"mask_id": -1, "start_id": 50_256}}


@pytest.mark.parametrize("corpus", ["lm1b", "owt1024"])
@pytest.mark.parametrize("name", PARAMETERS)
def test_models_of_the_paper_and_what_their_tensors_tell(name, corpus):
    config, bert = validate(for_method(preset(corpus), name)), corpus == "lm1b" and name != "sedd"
    data, train, model = config.data, config.train, config.model
    assert (data.tokenizer, data.vocab_size) == (("bert-base-uncased", 30_522) if bert else ("gpt2", 50_257))
    assert (data.packing, data.frame, data.token_len) == ("continuous", name != "sedd", 128 if corpus == "lm1b" else 1024)
    special = {"extra_ids": int(corpus == "owt1024")} | SPECIAL[data.tokenizer]
    assert all(vars(model)[option] == value for option, value in special.items() if hasattr(model, option))
    assert name == "ar" or config.sampler.steps == data.token_len
    assert train.batch * train.accumulation * train.devices == 512
    assert (train.lr, train.warmup, train.schedule, model.dropout) == (3e-4, 2500, "constant", 0.1)
    assert (train.steps, train.ema, train.ema_warmup) == (1_300_001 if name == "sedd" else 1_000_000, 0.9999, True)
    assert (train.weight_decay, train.beta2) == (0.0, 0.999)
    method = build_weightless(config)
    assert sum(p.numel() for p in method.parameters()) == PARAMETERS[name][corpus == "owt1024"]
    read = type(method).config_of(method.export_state(), for_method(preset("smoke"), name))
    assert (read.data.tokenizer, read.data.vocab_size) == (data.tokenizer, data.vocab_size)
    assert replace(read.model, dropout=0.1) == model


@pytest.mark.parametrize("name", PARAMETERS)
def test_sizes_of_a_checkpoint_of_another_vocabulary(name):
    options = {"data.vocab_size": 699, "model.hidden": 128, "model.depth": 3, "model.heads": 2}
    config = override(for_method(preset("tiny"), name), options | ({"model.start_id": 6} if name == "ar" else {}))
    method, base = build_weightless(config), override(config, {"data.vocab_size": 4096, "model.hidden": 16, "model.depth": 1})
    read = validate(type(method).config_of(method.export_state(), base))
    assert (read.data, read.model) == (config.data, config.model)


def test_a_small_preset_keeps_its_text_and_budget_and_sedds_loss_is_that_of_the_others():
    tiny = preset("tiny")
    for name in PARAMETERS:
        config = for_method(tiny, name)
        assert config.data == tiny.data and config.train.steps == tiny.train.steps
        assert getattr(config.objective, "stratified", True)
    paper = for_method(preset("lm1b"), "sedd").objective
    assert (
        not paper.stratified and paper.reduction == "sequence_sum" and for_method(tiny, "sedd").objective == DiscreteObjective()
    )
