"""Muon and Nesterov-Adam against plain numpy, the spectrum of Newton-Schulz, groups and rates, and exact resume."""

import numpy as np
import pytest
import torch

from jpeg_dlm import files
from jpeg_dlm.config import TrainConfig
from jpeg_dlm.errors import CheckpointError
from jpeg_dlm.methods.base import ParameterGroup
from jpeg_dlm.training.muon import Muon, newton_schulz, orthogonalize
from jpeg_dlm.training.optim import build_optimizer, set_learning_rates
from jpeg_dlm.training.optimizer_state import load_optimizer_tensors, optimizer_tensors


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- Newton-Schulz


def test_newton_schulz_of_a_published_example():
    found = newton_schulz(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    wanted = torch.tensor([[-0.4675189, 0.5734736], [0.0724320, 0.4094528], [0.6123829, 0.2454319]])
    assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("shape", [(48, 96), (96, 48), (3, 200), (5, 24, 64)])
def test_newton_schulz_is_nearly_orthogonal(shape):
    """The tuned coefficients leave singular values around 1, between about 0.7 and 1.2."""
    values = torch.linalg.svdvals(newton_schulz(gaussian(*shape)))
    assert 0.65 < values.min() and values.max() < 1.25


def test_newton_schulz_keeps_the_singular_vectors():
    x = gaussian(6, 10)
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    inner = u.T @ newton_schulz(x) @ vh.T
    assert torch.allclose(inner, inner.diag().diag(), atol=1e-5)


@pytest.mark.parametrize("rows, columns, factor", [(64, 16, 2.0), (16, 64, 1.0), (20, 20, 1.0)])
def test_the_update_grows_with_fan_out_over_fan_in(rows, columns, factor):
    x = gaussian(rows, columns)
    assert torch.allclose(orthogonalize(x), factor * newton_schulz(x))


def test_a_zero_gradient_moves_nothing():
    assert torch.equal(newton_schulz(torch.zeros(3, 5)), torch.zeros(3, 5))


# ---------------------------------------------------------------- both rules against numpy


def slow_newton_schulz(x):
    """The polynomial on singular values, in float64."""
    u, s, vh = np.linalg.svd(x / np.linalg.norm(x), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    return u @ np.diag(s) @ vh


def slow_ahead(momentum, gradient, beta, n):
    momentum = beta * momentum + (1 - beta) * gradient
    return momentum, beta * momentum / (1 - beta ** (n + 1)) + (1 - beta) * gradient / (1 - beta**n)


@pytest.mark.parametrize("shape", [(8, 3), (3, 8)])
def test_three_steps_of_muon(shape):
    p = torch.nn.Parameter(gaussian(*shape))
    optimizer = Muon([{"params": [p], "matrix": True, "lr": 0.1, "weight_decay": 0.05}])
    slow, momentum = p.detach().double().numpy(), np.zeros(shape)
    for n in (1, 2, 3):
        p.grad = gaussian(*shape, seed=n)
        optimizer.step()
        momentum, ahead = slow_ahead(momentum, p.grad.double().numpy(), 0.95, n)
        update = slow_newton_schulz(ahead) * max(1, shape[0] / shape[1]) ** 0.5
        slow = slow - 0.1 * (update + 0.05 * slow)
        assert np.allclose(p.detach().numpy(), slow, atol=1e-5)


def test_three_steps_of_nesterov_adam():
    p = torch.nn.Parameter(gaussian(1, 4, 5))
    optimizer = Muon([{"params": [p], "lr": 0.1}], betas=(0.9, 0.99))
    slow, m, v = p.detach().double().numpy(), 0.0, 0.0
    for n in (1, 2, 3):
        p.grad = gaussian(1, 4, 5, seed=n)
        optimizer.step()
        g = p.grad.double().numpy()
        m, ahead = slow_ahead(m, g, 0.9, n)
        v = 0.99 * v + 0.01 * g**2
        slow = slow - 0.1 * ahead / (np.sqrt(v / (1 - 0.99**n)) + 1e-8)
        assert np.allclose(p.detach().numpy(), slow, atol=1e-5)


def test_matrices_of_one_shape_do_not_mix():
    def updated(numbers):
        parameters = [torch.nn.Parameter(gaussian(4, 6, seed=i)) for i in numbers]
        for i, p in zip(numbers, parameters, strict=True):
            p.grad = gaussian(4, 6, seed=10 + i)
        Muon([{"params": parameters, "matrix": True, "lr": 0.1}]).step()
        return torch.stack([p.detach() for p in parameters])

    assert torch.allclose(updated([0, 1, 2]), torch.cat([updated([i]) for i in range(3)]), atol=1e-5)


# ---------------------------------------------------------------- groups and rates


def model_and_optimizer(seed=0, **train):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    model.register_parameter("tokens", torch.nn.Parameter(torch.ones(1, 2, 3)))
    config = TrainConfig(optimizer="muon", lr=1e-2, **train)
    names = dict(model.named_parameters())
    return model, build_optimizer([ParameterGroup("flow", names)], config), names


def test_matrices_go_to_muon_and_the_rest_to_adam():
    _, optimizer, names = model_and_optimizer(weight_decay=0.1)
    rule = {id(p): (group["matrix"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    assert {name: rule[id(p)] for name, p in names.items()} == {
        "0.weight": (True, 0.1), "2.weight": (True, 0.1),
        "0.bias": (False, 0.0), "2.bias": (False, 0.0), "tokens": (False, 0.0),
    }  # fmt: skip


def test_the_schedule_sets_every_group():
    _, optimizer, _ = model_and_optimizer()
    assert set_learning_rates(optimizer, 0.5) == {"lr_flow": 5e-3}
    assert {group["lr"] for group in optimizer.param_groups} == {5e-3}


def test_a_vector_in_a_matrix_group_is_refused():
    with pytest.raises(ValueError, match="matrices"):
        Muon([{"params": [torch.nn.Parameter(torch.ones(3))], "matrix": True}])


# ---------------------------------------------------------------- resume


def one_step(model, optimizer, i):
    optimizer.zero_grad()
    model(gaussian(5, 4, seed=i)).square().mean().backward()
    optimizer.step()


def test_state_goes_through_a_file_and_training_goes_on_in_every_bit(tmp_path):
    model, optimizer, names = model_and_optimizer()
    for i in range(3):
        one_step(model, optimizer, i)
    flat = optimizer_tensors(optimizer, names)
    assert {"momentum/0.weight", "step/0.weight", "exp_avg/0.bias", "exp_avg_sq/2.bias", "untouched/tokens"} <= flat.keys()
    files.save_tensors(tmp_path / "o", flat, {})

    copy, fresh, copied = model_and_optimizer(seed=1)
    copy.load_state_dict(model.state_dict())
    load_optimizer_tensors(fresh, copied, files.load_tensors(tmp_path / "o"))
    for i in range(3, 6):
        one_step(model, optimizer, i)
        one_step(copy, fresh, i)
    assert all(torch.equal(names[name], copied[name]) for name in names)
    now, again = optimizer_tensors(optimizer, names), optimizer_tensors(fresh, copied)
    assert now.keys() == again.keys() and all(torch.equal(now[key], again[key]) for key in now)


@pytest.mark.parametrize("lost", ["momentum/0.weight", "exp_avg_sq/0.bias", "step/2.weight"])
def test_lost_state_is_named(lost):
    model, optimizer, names = model_and_optimizer()
    one_step(model, optimizer, 0)
    flat = optimizer_tensors(optimizer, names)
    del flat[lost]
    with pytest.raises(CheckpointError, match=lost.partition("/")[2]):
        load_optimizer_tensors(optimizer, names, flat)
