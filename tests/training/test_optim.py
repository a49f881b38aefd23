"""Who gets which update: Muon for hidden matrices, weight decay for maps; state in checkpoints; the moving average."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from micro import micro_model
from torch.optim import AdamW, Muon

from jpeg_dlm.config import TrainConfig
from jpeg_dlm.methods.registry import names
from jpeg_dlm.training.optim import (
    NOT_DECAYED,
    WeightEma,
    apply_gradients,
    build_optimizers,
    load_optimizer_state,
    optimizer_state,
    schedule_factor,
)
from jpeg_dlm.util.errors import CheckpointError


def named(method):
    return {name: p for group in method.parameter_groups() for name, p in group.parameters.items()}


def optimizers_of(method, **train):
    return build_optimizers(method.parameter_groups(), method.hidden_matrices(), replace(method.config.train, **train))


def updated_by(optimizers, parameters) -> dict[str, type]:
    kinds = {p: type(o) for o in optimizers for group in o.param_groups for p in group["params"]}
    return {name: kinds[p] for name, p in parameters.items()}


@pytest.mark.parametrize("method", names("system"))
def test_muon_updates_hidden_matrices_only(method):
    """Not gates of one number, position tables, embeddings, learned tokens, heads, norms or biases."""
    model = micro_model(method)
    kinds = updated_by(optimizers_of(model, optimizer="muon"), named(model))
    assert set(kinds.values()) == {AdamW, Muon}
    matrices = {name: p for name, p in named(model).items() if kinds[name] is Muon}
    assert all(p.ndim == 2 and min(p.shape) > 1 for p in matrices.values())
    assert not [name for name in matrices if name.endswith((*NOT_DECAYED, "lm_head.weight"))]
    assert set(updated_by(optimizers_of(model, optimizer="adamw"), named(model)).values()) == {AdamW}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_that_is_not_finite_changes_nothing_and_state_is_restored_exactly(optimizer):
    model, twin = micro_model("jpeg-dlm"), micro_model("jpeg-dlm")
    optimizers, others = optimizers_of(model, optimizer=optimizer), optimizers_of(twin, optimizer=optimizer)
    parameters, generator = named(model), torch.Generator().manual_seed(0)

    def step(number: float, *of) -> None:
        gradients = {name: number * torch.randn(p.shape, generator=generator) for name, p in parameters.items()}
        for which, model in of:
            for name, p in named(model).items():
                p.grad = gradients[name].clone()
            finite = torch.tensor(number == number)
            apply_gradients(which, finite)

    step(1.0, (optimizers, model))
    state = {name: t.clone() for name, t in optimizer_state(optimizers, parameters).items()}
    weights = {name: p.detach().clone() for name, p in parameters.items()}
    step(float("nan"), (optimizers, model))
    assert all(torch.equal(weights[name], p) for name, p in parameters.items())
    assert all(torch.equal(t, optimizer_state(optimizers, parameters)[name]) for name, t in state.items())

    twin.load_state_dict(model.state_dict())
    load_optimizer_state(others, named(twin), state)
    step(1.0, (optimizers, model), (others, twin))
    assert all(torch.equal(p, named(twin)[name]) for name, p in parameters.items())
    other = optimizers_of(twin, optimizer="muon" if optimizer == "adamw" else "adamw")
    with pytest.raises(CheckpointError):
        load_optimizer_state(other, named(twin), state)


def test_the_schedules():
    train = TrainConfig(steps=100, warmup=10, lr_floor=0.2)
    for schedule, half in (("constant", 1.0), ("cosine", 0.6), ("linear", 0.6)):
        t = replace(train, schedule=schedule)
        assert schedule_factor(0, t) == pytest.approx(0.1) and schedule_factor(9, t) == 1.0
        assert schedule_factor(55, t) == pytest.approx(half)
    assert schedule_factor(100, replace(train, schedule="cosine")) == pytest.approx(0.2)


def test_the_moving_average():
    p = torch.nn.Parameter(torch.ones(3))
    ema = WeightEma({"w": p}, decay=0.9)
    with torch.no_grad():
        p.fill_(2.0)
    ema.update(1)
    assert torch.allclose(ema.shadow["w"], torch.tensor(1.1))
    ema.swap()
    assert torch.allclose(p, torch.tensor(1.1)) and torch.equal(ema.shadow["w"], torch.full((3,), 2.0))
    warm = WeightEma({"w": p}, decay=0.9, warmup=True)
    with torch.no_grad():
        p.fill_(0.0)
    warm.update(1)
    assert torch.allclose(warm.shadow["w"], torch.tensor(1.1 * 2 / 11))
