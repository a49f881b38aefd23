"""ODE solvers against closed forms: constant and linear predictions, and Gaussian data whose exact flow is known."""

import math

import pytest
import torch

from jpeg_dlm.flow.grids import quantile_grid, uniform_grid
from jpeg_dlm.flow.solvers import SOLVERS, euler, heun, multistep, stochastic, stochastic_times, velocity

GRIDS = {"uniform": uniform_grid(7), "quantile": quantile_grid(7, -1.5, 0.8)}


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_a_constant_prediction_is_reached_exactly(solver, grid):
    z, x = double(3, 4), double(3, 4) + 2
    assert torch.allclose(solver(lambda z, t: x, z, grid.tolist(), None), x, atol=1e-12)
    # and on the way the state lies on the straight line between noise and prediction
    states = []
    solver(lambda z, t: x, z, grid.tolist(), lambda k, t, state, prediction: states.append((t, state)))
    for t, state in states:
        assert torch.allclose(state, (1 - t) * z + t * x, atol=1e-12)


def linear_solution(z0, a, b, t):
    """dz/dt = (a + b t - z) / (1 - t), z(0) = z0: the general solution is a + b + (1 - t) (C + b ln(1 - t))."""
    return a + b + (1 - t) * (z0 - a - b + b * math.log(1 - t))


def test_the_linear_solution_solves_the_equation():
    z0, a, b, h = 0.3, -0.7, 1.9, 1e-6
    for t in (0.0 + h, 0.3, 0.8):
        slope = (linear_solution(z0, a, b, t + h) - linear_solution(z0, a, b, t - h)) / (2 * h)
        assert slope == pytest.approx((a + b * t - linear_solution(z0, a, b, t)) / (1 - t), abs=1e-8)


def test_multistep_is_exact_for_a_prediction_linear_in_time_except_at_the_ends():
    """From any state of its own after the first step, the exact flow leads to its next states, up to the last step."""
    a, b = double(4), double(4) + 1
    states = []
    grid = quantile_grid(9, -1.5, 0.8).tolist()
    multistep(lambda z, t: a + b * t, double(4), grid, lambda k, t, z, x: states.append((t, z)))
    (t1, z1), rest = states[1], states[2:]
    # the flow through (t1, z1): solve for the constant C of the general solution
    c = (z1 - a - b) / (1 - t1) - b * math.log(1 - t1)
    for t, z in rest:
        assert torch.allclose(z, a + b + (1 - t) * (c + b * math.log(1 - t)), atol=1e-12)
    assert states[1][0] > 0 and len(rest) == 7


def test_multistep_holds_its_first_prediction_and_extends_its_last_by_no_more_than_a_step():
    calls = []

    def predict(z, t):
        calls.append(t)
        return torch.tensor([1.0 + 5 * t], dtype=torch.float64)

    z0 = torch.zeros(1, dtype=torch.float64)
    one = multistep(predict, z0, [0.0, 1.0])
    assert one.item() == 1.0
    two = multistep(predict, z0, [0.0, 0.5, 1.0])
    assert two.item() == pytest.approx(1 + 5 * 1.0)  # the prediction for t = 1, wherever the state was
    long = multistep(predict, z0, [0.0, 0.2, 1.0])
    assert long.item() == pytest.approx(1 + 5 * 0.4)  # as far beyond 0.2 as the past lies before it
    assert calls == [0.0, 0.0, 0.5, 0.0, 0.2]


# Data N(0, s^2): the posterior mean is x(z, t) = t s^2 z / c(t)^2 with c(t)^2 = t^2 s^2 + (1 - t)^2, the variance of
# z_t, and the exact flow only rescales: z(t) = z(0) c(t).
S = 1.7


def scale(t):
    return math.sqrt((t * S) ** 2 + (1 - t) ** 2)


def posterior_mean(z, t):
    return t * S**2 * z / scale(t) ** 2


def error(solver, steps):
    """Largest distance from the exact flow at t = 0.8, which leaves out the singular end."""
    z0 = double(16)
    grid = [0.8 * i / steps for i in range(steps + 1)]
    return (solver(posterior_mean, z0, grid, None) - z0 * scale(0.8)).abs().max().item()


@pytest.mark.parametrize(("solver", "order"), [(euler, 1), (heun, 2), (multistep, 2)])
def test_orders_of_convergence_on_gaussian_data(solver, order):
    errors = [error(solver, n) for n in (40, 80, 160)]
    for coarse, fine in zip(errors, errors[1:], strict=False):
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.15)


def test_second_order_is_closer_for_the_same_number_of_evaluations():
    assert error(multistep, 32) < 0.25 * error(euler, 32)
    assert error(heun, 16) < 0.25 * error(euler, 32)


@pytest.mark.parametrize(("name", "evaluations"), [("euler", 6), ("heun", 11), ("multistep", 6)])
def test_evaluations_times_and_reports(name, evaluations):
    seen, told = [], []
    grid = uniform_grid(6).tolist()

    def predict(z, t):
        seen.append(t)
        return z * 0

    SOLVERS[name](predict, torch.ones(2), grid, lambda k, t, z, x: told.append((k, t)))
    assert len(seen) == evaluations and max(seen) < 1  # never where the velocity has no meaning
    assert told == list(enumerate(grid[:-1]))


def test_velocity_is_the_papers():
    x, z = double(3), double(3) * 2
    assert torch.equal(velocity(x, z, 0.75), (x - z) / (1 - 0.75))


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_the_argument_is_left_alone(solver):
    z = double(3)
    kept = z.clone()
    solver(lambda z, t: z * 0.5, z, uniform_grid(3).tolist(), None)
    assert torch.equal(z, kept)


def test_a_stochastic_step_goes_back_and_then_forth():
    """The numbers are those of ELF's sampler: z 0.5, x 1.2, from 0.3 to 0.4 with gamma 1.5 and noise -1.4."""
    seen = []
    solve = stochastic(1.5, lambda: torch.tensor(-1.4, dtype=torch.float64))
    grid = [0.3, 0.4, 1.0]

    def predict(z, t):
        seen.append((float(z), t))
        return torch.tensor(1.2, dtype=torch.float64)

    assert float(solve(predict, torch.tensor(0.5, dtype=torch.float64), grid, None)) == pytest.approx(1.2)
    assert seen[0] == (pytest.approx(0.215), pytest.approx(0.255))
    assert seen[1] == (pytest.approx(0.4067114), 0.4)  # the last step has no noise
    assert stochastic_times(grid, 1.5) == pytest.approx([0.255, 0.4, 1.0])


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_without_a_step_back_the_stochastic_solver_is_euler(grid):
    z, A = double(3, 4), double(4, 4) / 4
    fresh = torch.Generator().manual_seed(1)
    solve = stochastic(0.0, lambda: torch.randn(3, 4, dtype=torch.float64, generator=fresh))
    assert torch.equal(solve(lambda z, t: z @ A, z, grid.tolist(), None), euler(lambda z, t: z @ A, z, grid.tolist(), None))


def test_stochastic_times_are_those_of_the_evaluations():
    seen, grid = [], GRIDS["quantile"].tolist()
    stochastic(1.5, lambda: torch.zeros(()))(lambda z, t: seen.append(t) or z, torch.zeros(()), grid, None)
    assert seen == stochastic_times(grid, 1.5)[:-1]
