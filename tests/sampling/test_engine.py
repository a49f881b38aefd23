"""The engine, a rearrangement of Algorithm 2, agrees with the method itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import MICRO, assert_same_tokens, perturb

from jpeg_dlm.cli.main import main
from jpeg_dlm.config import Config, validate
from jpeg_dlm.config_io import override
from jpeg_dlm.errors import UsageError
from jpeg_dlm.flow.grids import make_grid
from jpeg_dlm.methods.base import FREE
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.nn.dit import Context
from jpeg_dlm.presets import preset
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.sampling.engine import Engine, accelerated
from jpeg_dlm.sampling.engine_decoder import FastDecoder
from jpeg_dlm.sampling.sampler import sample_batches

# Two blocks, since the last one is special, and two codec layers, since the first one is.
SMALL = MICRO | {"model.depth": 2, "model.codec_layers": 2, "sampler.grid": "quantile"}


def config(**changes: object) -> Config:
    return validate(override(preset("smoke"), SMALL | {name.replace("__", "."): value for name, value in changes.items()}))


def made(**changes: object) -> JpegDlm:
    torch.manual_seed(0)
    method = perturb(JpegDlm(config(**changes)).eval(), 0.1)  # more would be chaotic: rounding would grow
    with torch.no_grad():
        method.decompressor.pos_emb.weight.mul_(4)  # so that places differ in their tokens
    method.latent_mean.copy_(torch.linspace(-1, 1, len(method.latent_mean)))
    method.latent_scale.copy_(torch.linspace(0.5, 2, len(method.latent_scale)))
    return method


@torch.no_grad()
def latents(sampler, method: JpegDlm, z, grid):
    """Where the solver ends, by the method and by the engine."""
    noise = RowNoise(0, range(len(z)))
    return (writer.latents(z, grid.tolist(), sampler, noise=noise) for writer in (method.latent_sampler, accelerated(method)))


@pytest.mark.parametrize("solver", ["euler", "heun", "multistep", "sde"])
@pytest.mark.parametrize("grid", ["quantile", "random", "uniform"])
def test_latents_and_tokens_are_those_of_the_method(solver, grid):
    method = made()
    sampler = replace(method.config.sampler, solver=solver, grid=grid, steps=4)
    noise = RowNoise(0, range(5))
    z = noise.normal("sample", 3, 16)
    times = make_grid(grid, 4, -1.5, 0.8, torch.Generator().manual_seed(1))
    expected, found = latents(sampler, method, z, times)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    tokens = method.latent_sampler.integrate(z, times, sampler, noise=noise)
    assert_same_tokens(accelerated(method).integrate(z, times, sampler, noise=noise), tokens)
    assert len(tokens.unique()) > 5  # agreement says something


@pytest.mark.parametrize(
    "changes",
    [
        {"model__shared": False},
        {"model__decode_residual": True},
        {"model__denoise_skip": True},
        {"model__position_scale": 1.0},
        {"model__depth": 1, "model__codec_layers": 1},
        {"model__time_tokens": 1, "model__sc_tokens": 2, "model__mode_tokens": 3, "model__heads": 4},
        {"model__context_blocks": 2, "data__packing": "padded"},
        {"model__codec": "causal", "encoder__causal": True},
        {"model__codec": "causal", "encoder__causal": True, "model__shared": False},
    ],
    ids=lambda changes: ",".join(changes),
)
@pytest.mark.parametrize("batch", [1, 5])
def test_every_variant_of_the_network_agrees(changes, batch):
    method = made(**changes)
    sampler, noise = method.config.sampler, RowNoise(3, range(batch))
    assert_same_tokens(accelerated(method).sample(sampler, noise), method.sample(sampler, noise))


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("shared", [True, False])
def test_blocks_after_a_context_are_those_of_the_method(scale, shared):
    method = made(model__context_blocks=2, data__packing="padded", model__shared=shared, model__denoise_skip=True)
    noise, sampler = RowNoise(1, range(4)), method.config.sampler
    present = torch.tensor([[0, 0], [0, 1], [1, 1], [1, 1]]).bool().repeat_interleave(3, 1)
    context = Context(noise.normal("context", 6, 16), present)
    z, times = noise.normal("sample", 3, 16), make_grid("quantile", 4, -1.5, 0.8, torch.Generator())
    writers = [writer.after(context, scale) for writer in (method.latent_sampler, accelerated(method))]
    expected, found = (writer.latents(z, times.tolist(), sampler) for writer in writers)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    alone = method.latent_sampler.latents(z, times.tolist(), sampler)
    near = (expected - alone).abs().amax((1, 2)) < 1e-5
    assert near.tolist() == [True, False, False, False]  # where nothing is present, nothing is seen
    assert_same_tokens(writers[1].sample(sampler, noise), writers[0].sample(sampler, noise))


def test_logits_in_chunks_give_the_same_tokens(monkeypatch):
    method = made()
    sampler, noise = method.config.sampler, RowNoise(0, range(3))
    whole = accelerated(method).sample(sampler, noise)
    monkeypatch.setattr("jpeg_dlm.config.LOGITS_AT_ONCE", 7 * 300)  # seven rows of 300 ids
    sizes = []
    engine, argmax = accelerated(method), torch.Tensor.argmax
    monkeypatch.setattr(torch.Tensor, "argmax", lambda x, *a: sizes.append(len(x)) or argmax(x, *a))
    assert_same_tokens(engine.sample(sampler, noise), whole)
    assert sizes == [7] * 5 + [1]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_a_sample_does_not_depend_on_its_batch(dtype):
    engine = accelerated(made(), dtype)
    sampler = engine.config.sampler
    together = torch.cat(list(sample_batches(engine, 5, sampler, seed=2)))
    apart = torch.cat(list(sample_batches(engine, 5, sampler, seed=2, batch=2)))
    assert_same_tokens(together, apart)


@pytest.mark.parametrize("grid", ["random", "quantile"])
def test_the_released_protocol_draws_the_same_numbers(grid):
    method = made()
    sampler = replace(method.config.sampler, grid=grid, protocol="released")
    by_method, by_engine = (torch.cat(list(sample_batches(m, 4, sampler, 0, 3))) for m in (method, accelerated(method)))
    assert_same_tokens(by_method, by_engine)


@pytest.mark.parametrize("grid", ["stored", "uniform"])
def test_the_released_protocol_refuses_grids_that_it_never_had(grid):
    method = made()
    sampler = replace(method.config.sampler, grid=grid, times=(0.0, 0.5, 1.0), steps=2, protocol="released")
    with pytest.raises(UsageError, match="random .* or quantile"):
        list(sample_batches(method, 1, sampler))


@pytest.mark.parametrize(("dtype", "error"), [("bf16", 0.1), ("int8", 0.1)])
def test_reduced_precision_stays_close(dtype, error):
    method = made()
    z = RowNoise(0, range(4)).normal("sample", 3, 16)
    exact, reduced = (accelerated(method, d).denoiser([0.2], 3.0)(z, 0.2, None) for d in ("fp32", dtype))
    assert reduced.dtype == torch.float32
    difference = (reduced - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 1e-4 < difference < error  # reduced it is


def test_what_the_watcher_sees_and_what_is_returned_can_be_used():
    method = made()
    seen: list[tuple[int, float]] = []
    for writer in (method, accelerated(method)):
        seen.append([])
        tokens = writer.sample(
            method.config.sampler, RowNoise(0, range(2)), lambda k, n, t, decode: seen[-1].append((k, n, t, decode()))
        )
        tokens[0, 0] = 7  # a tensor of inference mode would refuse
    assert [s[:3] for s in seen[0]] == [s[:3] for s in seen[1]] and len(seen[0]) == method.config.sampler.steps + 1
    assert_same_tokens(*(torch.cat([s[3] for s in found]) for found in seen))


def test_weights_are_those_of_the_time_it_was_made():
    method = made()
    sampler, noise = method.config.sampler, RowNoise(0, range(2))
    engine, before = accelerated(method), method.sample(method.config.sampler, noise)
    with torch.no_grad():
        for p in method.parameters():
            p.mul_(-1.5)
    assert_same_tokens(engine.sample(sampler, noise), before)
    assert not torch.equal(method.sample(sampler, noise), before)


def test_given_tokens_guide_it_as_they_guide_the_method():
    method, noise = made(), RowNoise(0, range(4))
    given = torch.full((4, 12), FREE)
    given[:, 2:7] = torch.arange(20).view(4, 5)
    engine = accelerated(method)
    assert engine.supports == method.supports
    found = engine.sample(config().sampler, noise, given_BL=given)
    assert found[:, 2:7].equal(given[:, 2:7])
    assert_same_tokens(found, method.sample(config().sampler, noise, given_BL=given))


def test_queries_are_prepared_once_for_all_samples():
    method = made()
    decoder: FastDecoder = Engine(method).decoder
    assert decoder.own_first.shape == (1, 12, 3 * 16)
    d = method.decompressor
    with torch.no_grad():
        queries = d.query_gate(d.query_ffn(d.base_query))[0] + d.position_scale * d.pos_emb.weight
        q = d.layers[0].attn.to_q(d.layers[0].attn.norm_latents(queries))
    torch.testing.assert_close(decoder.queries, queries)
    torch.testing.assert_close(decoder.own_first[0, :, :16], q)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_compiled_it_gives_the_same_tokens(dtype):
    method = made()
    sampler, noise = method.config.sampler, RowNoise(0, range(2))
    plain, compiled = (accelerated(method, dtype, c).sample(sampler, noise) for c in (False, True))
    assert (plain == compiled).float().mean() > (0.99 if dtype == "fp32" else 0.8)


# ---------------------------------------------------------------- command line


def test_generate_takes_a_dtype_and_tells_its_price(capsys):
    assert main(["generate", "-n", "2", "--steps", "2", "--device", "cpu", "--tokens"]) == 0
    exact = capsys.readouterr().out
    assert main(["generate", "-n", "2", "--steps", "2", "--device", "cpu", "--tokens", "--dtype", "fp32"]) == 0
    out, err = capsys.readouterr()
    assert out == exact and "against fp32" not in err
    assert main(["generate", "-n", "2", "--steps", "2", "--device", "cpu", "--tokens", "--dtype", "int8"]) == 0
    out, err = capsys.readouterr()
    assert "int8 against fp32: " in err and "% of the tokens of the first 2 texts" in err
    assert len(out.splitlines()) == 2
