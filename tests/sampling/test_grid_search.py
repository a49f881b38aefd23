"""The search for sampling times, against ODEs whose solution is known, and stored times on their way through files."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from conftest import MICRO, perturb

from jpeg_dlm.api import Model, load
from jpeg_dlm.cli.main import main
from jpeg_dlm.config import validate
from jpeg_dlm.config_io import from_dict, override, to_dict
from jpeg_dlm.errors import UsageError
from jpeg_dlm.flow.grids import uniform_grid
from jpeg_dlm.flow.sampler_config import FAST_EVALUATIONS, SamplerConfig, steps_within
from jpeg_dlm.flow.solvers import SOLVERS
from jpeg_dlm.folders.model_folder import ModelParts, write_model
from jpeg_dlm.methods.registry import build_method, default_config, for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.sampling.grid_search import families, latent_error, search, tuned

SIGMA = 0.1  # deviation of the Gaussian data below


def gaussian_error(solver: str, sigma: float = SIGMA):
    """For data N(0, sigma**2) in one dimension the flow multiplies noise by sigma: the reference is exact."""
    z = torch.linspace(-2, 2, 9, dtype=torch.float64)

    def predict(z: torch.Tensor, t: float) -> torch.Tensor:
        """E[x | z] on the path z = t x + (1 - t) eps."""
        return z * t * sigma**2 / (t**2 * sigma**2 + (1 - t) ** 2)

    return lambda times: float((SOLVERS[solver](predict, z, list(times), None) - sigma * z).square().mean())


@pytest.mark.parametrize("solver", ["euler", "heun", "multistep"])
def test_the_found_times_beat_the_families_they_start_from(solver):
    error = gaussian_error(solver)
    found = search(error, 6, 300)
    assert found.error == error(found.times)
    assert found.start_error == min(map(error, families(6)))
    assert found.error < 0.5 * found.start_error
    assert found.error < 0.2 * error(tuple(uniform_grid(6).tolist()))
    assert found.times[0] == 0 and found.times[-1] == 1 and all(t < u for t, u in pairwise(found.times))


def test_the_only_inner_time_is_the_one_that_a_fine_scan_finds():
    error = gaussian_error("euler", sigma=0.5)
    scanned = min((error((0.0, t, 1.0)), t) for t in torch.linspace(0.001, 0.999, 999).tolist())
    found = search(error, 2, 200)
    assert found.error == pytest.approx(scanned[0], rel=0.02, abs=1e-6)
    assert found.times[1] == pytest.approx(scanned[1], abs=0.02)


def test_a_quadratic_with_a_known_minimum():
    wanted = (0.0, 0.07, 0.31, 0.93, 1.0)
    found = search(lambda times: sum((a - b) ** 2 for a, b in zip(times, wanted, strict=True)), 4, 400)
    assert found.times == pytest.approx(wanted, abs=0.02)


def test_the_search_stops_in_time_reports_and_repeats_itself():
    calls, told = [], []

    def error(times):
        calls.append(times)
        return math.fsum(abs(t - 0.2) for t in times)

    found = search(error, 5, 37, lambda done, total: told.append((done, total)))
    assert len(calls) <= 37 and len(set(calls)) == len(calls)
    assert told[-1][0] <= 37 and {total for _, total in told} == {37}
    assert search(error, 5, 37) == found


def test_one_step_has_nothing_to_search():
    assert search(lambda times: float(len(times)), 1, 50).times == (0.0, 1.0)


# ---------------------------------------------------------------- stored times


TIMES = (0.0, 0.125, 0.5, 1.0)


@pytest.fixture(scope="module")
def model() -> Model:
    config = validate(override(preset("smoke"), MICRO | {"encoder.kind": "random"}))
    method = perturb(build_method(config)).eval()
    return Model(ModelParts(method, config, origin=None, tokenizer=None, encoder=None))  # type: ignore[arg-type]


def test_the_error_of_a_model_is_zero_for_the_reference_itself(model, monkeypatch):
    monkeypatch.setattr("jpeg_dlm.sampling.grid_search.REFERENCE_STEPS", 7)
    error = latent_error(model.codec, replace(model.config.sampler, solver="euler"), rows=3)
    assert error(tuple(uniform_grid(7).tolist())) == 0
    assert error((0.0, 0.9, 1.0)) > 0


def test_tuned_times_are_no_worse_than_uniform_ones_and_fit_the_evaluations(model):
    for solver, evaluations in (("euler", 4), ("multistep", 5), ("heun", 6)):
        sampler, found = tuned(model.method, replace(model.config.sampler, fast_solver=solver), evaluations, 4, 30)
        error = latent_error(model.codec, sampler.fast(), rows=4)
        uniform = uniform_grid(len(sampler.times) - 1).tolist()
        assert error(sampler.times) == pytest.approx(found.error) and found.error <= error(tuple(uniform)) + 1e-6
        assert sampler.fast().evaluations(model.config.data.token_len) <= evaluations
        validate(replace(model.config, sampler=sampler.fast()))
        assert replace(sampler, times=()) == replace(model.config.sampler, fast_solver=solver)


@pytest.mark.parametrize("solver", ["euler", "heun", "multistep"])
@pytest.mark.parametrize("times", [(), TIMES])
def test_evaluations_are_as_many_as_the_network_is_called(model, solver, times, monkeypatch):
    sampler = validate(replace(model.config, sampler=SamplerConfig(times=times, fast_solver=solver))).sampler.fast()
    calls = []
    forward = model.method.dit.forward
    monkeypatch.setattr(model.method.dit, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    model.sample(2, **{name: value for name, value in to_dict(sampler).items() if name != "protocol"})
    assert len(calls) == sampler.evaluations(12) <= FAST_EVALUATIONS


def test_the_most_steps_within_evaluations():
    for solver in ("euler", "heun", "multistep"):
        for evaluations in range(2, 40):
            steps = steps_within(evaluations, solver)
            assert SamplerConfig(steps=steps, solver=solver).evaluations(1) <= evaluations
            assert SamplerConfig(steps=steps + 1, solver=solver).evaluations(1) > evaluations
    with pytest.raises(UsageError, match="at least 2"):
        steps_within(1, "euler")


def test_the_fast_sampler_has_its_own_scale_and_keeps_the_rest():
    sampler = SamplerConfig(steps=64, w=3.0, fast_w=2.0, fast_solver="heun", times=TIMES)
    fast = sampler.fast()
    assert (fast.steps, fast.solver, fast.grid, fast.w, fast.times) == (3, "heun", "stored", 2.0, TIMES)
    assert replace(sampler, fast_w=0.0).fast().w == 3.0
    plain = {grid: SamplerConfig(grid=grid).fast() for grid in ("uniform", "quantile", "random")}
    assert [fast.grid for fast in plain.values()] == ["uniform", "quantile", "quantile"]
    assert {fast.evaluations(1) for fast in plain.values()} == {FAST_EVALUATIONS}
    assert fast.fast() == fast and SamplerConfig(steps=2).fast() == SamplerConfig(steps=2)
    noisy = SamplerConfig(solver="sde", gamma=0.5, fast_solver="sde", times=TIMES).fast()  # stored times are those of an ODE
    assert (noisy.solver, noisy.gamma, noisy.grid, noisy.evaluations(1)) == ("sde", 2.0, "quantile", FAST_EVALUATIONS)
    assert SamplerConfig(gamma=0.5).fast().gamma == 0.5 and noisy.fast() == noisy


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"times": (0.0, 0.5, 0.5, 1.0)}, "must increase"),
        ({"times": (0.0, 0.7, 0.5, 1.0)}, "must increase"),
        ({"times": (0.1, 0.5, 1.0)}, "begin with 0 and end with 1"),
        ({"times": (0.0, 0.5)}, "begin with 0 and end with 1"),
        ({"times": (0.0,)}, "begin with 0 and end with 1"),
        ({"grid": "stored"}, "jpeg-dlm tune"),
        ({"grid": "stored", "times": TIMES, "steps": 8}, "has 3 steps, not 8"),
        ({"grid": "stored", "times": TIMES, "steps": 3, "protocol": "released"}, "released protocol"),
        ({"fast_w": -1.0}, "fast_w"),
    ],
)
def test_times_that_cannot_be_are_refused(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        validate(default_config(sampler=SamplerConfig(**options)))


def test_times_go_through_json_and_the_command_line():
    config = default_config(sampler=SamplerConfig(times=TIMES, steps=3, grid="stored"))
    assert from_dict(to_dict(config)) == config
    assert override(default_config(), {"sampler.times": "0,0.125, 0.5,1"}).sampler.times == TIMES
    assert override(config, {"sampler.times": ""}).sampler.times == ()
    for wrong in ("0,half,1", 0.5, [0, None, 1], {"a": 1}, [[0, 1]], [True]):
        with pytest.raises(UsageError, match=r"sampler\.times"):
            override(config, {"sampler.times": wrong})


def test_times_of_a_stochastic_solver_are_not_tuned(model):
    with pytest.raises(UsageError, match="those of an ODE"):
        tuned(model.method, replace(model.config.sampler, fast_solver="sde"), 5, 2, 3)


@torch.no_grad()
def test_a_model_folder_keeps_its_times_and_samples_with_them(model, tmp_path):
    stored = replace(model.config, sampler=replace(model.config.sampler, times=TIMES, fast_solver="euler"))
    folder = write_model(replace(model.parts, config=stored), tmp_path / "model")
    back = load(folder, "cpu")
    assert back.config.sampler == stored.sampler
    fast = {name: getattr(back.config.sampler.fast(), name) for name in ("steps", "solver", "grid")}
    tokens = back.sample(3, **fast)
    m, w = back.config.model, torch.full((3,), stored.sampler.w)
    method, predictions = back.method, [None]  # each evaluation is conditioned on the one before
    z = RowNoise(0, range(3)).normal("sample", m.latent_len, m.latent_dim)
    for t, u in itertools.pairwise(TIMES):
        predictions.append(method.dit(z, torch.full((3,), t), predictions[-1], w))
        z = z + (u - t) * (predictions[-1] - z) / (1 - t)
    assert tokens.equal(method.greedy(method.decode_latents(z, w)))


def test_fast_is_an_option_of_sampling_and_of_the_command(model, tmp_path, capsys):
    stored = replace(model.config, sampler=replace(model.config.sampler, times=TIMES, fast_solver="heun"))
    write_model(replace(model.parts, config=stored), tmp_path / "model")
    back = load(tmp_path / "model", "cpu")
    assert back.sampler_options(fast=True) == stored.sampler.fast()
    assert back.sampler_options(fast=True, w=1.5).w == 1.5 and back.sampler_options() == stored.sampler
    tokens = back.sample(2, steps=3, solver="heun", grid="stored")
    assert back.sample(2, fast=True).equal(tokens)
    assert main(["generate", str(tmp_path / "model"), "--fast", "-n", "2", "--tokens", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines() == [" ".join(map(str, row)) for row in tokens.tolist()]


def test_tune_writes_a_new_folder_and_overwrites_nothing(model, tmp_path, capsys):
    write_model(model.parts, tmp_path / "model")
    words = ["tune", str(tmp_path / "model"), "--out", str(tmp_path / "fast"), "--evaluations", "5", "--rows", "2"]
    assert main([*words, "--trials", "12", "--solver", "euler", "--device", "cpu"]) == 0
    assert "--fast" in capsys.readouterr().out
    found = load(tmp_path / "fast", "cpu").config.sampler
    assert len(found.times) == 5 and found.fast_solver == "euler" and found.fast().evaluations(12) == 5
    assert load(tmp_path / "model", "cpu").config.sampler.times == ()
    assert main([*words, "--trials", "12"]) == 2
    assert "already exists" in capsys.readouterr().err


def test_tune_refuses_other_methods_and_too_few_evaluations(tmp_path, capsys):
    config = validate(override(preset("smoke"), MICRO | {"encoder.kind": "random"}))
    ar = for_method(config, "ar")
    write_model(ModelParts(build_method(ar), ar, tmp_path, None, None), tmp_path / "ar")
    assert main(["tune", str(tmp_path / "ar"), "--out", str(tmp_path / "fast"), "--device", "cpu"]) == 2
    assert "use a jpeg-dlm model" in capsys.readouterr().err
    write_model(ModelParts(build_method(config), config, tmp_path, None, None), tmp_path / "plain")
    assert main(["tune", str(tmp_path / "plain"), "--out", str(tmp_path / "f"), "--evaluations", "1", "--device", "cpu"]) == 2
    assert "at least 2" in capsys.readouterr().err
