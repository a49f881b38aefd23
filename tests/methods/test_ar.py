"""The autoregressive system: its likelihood by the chain rule, its sampler by enumeration, caches and prompts."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from micro import micro_model

from jpeg_dlm.methods.ar import Ar, ArSampler, next_token_probabilities
from jpeg_dlm.methods.base import FREE, Batch
from jpeg_dlm.util.rng import RowNoise

B, L, VOCAB = 4, 9, 13
STARTS = [{}, {"model__start_id": 5}, {"model__mask_id": 3}, {"model__mask_id": 3, "model__start_id": 5}]


def build(options=None, scale=0.5) -> Ar:
    return micro_model("ar", scale, **{"data__vocab_size": VOCAB, "data__token_len": L, "model__depth": 2} | (options or {}))


def tokens(rows=B, length=L, method=None):
    x = torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(7))
    if method is not None:  # rows as that model knows them: without its mask, with its start
        x[x == method.mask_id] = 0
        if method.config.model.start_id >= 0:
            x[:, 0] = method.config.model.start_id
    return x


def noise(rows=B, seed=0):
    return RowNoise(seed, range(rows))


def slow_probabilities(method, row, i):
    """p(x_i | x_<i) of one row: the network run on exactly what comes before, the mask's share removed afterwards."""
    start = method.config.model.start_id
    read = [*([method.mask_id] if start == -1 else []), *row[:i].tolist()]
    p = method.backbone(torch.tensor([read]))[0, -1].double().softmax(-1)
    p[method.mask_id] = 0
    return p / p.sum()


# ---------------------------------------------------------------- likelihood


@torch.no_grad()
@pytest.mark.parametrize("options", STARTS)
def test_likelihood_is_the_product_of_next_token_probabilities(options):
    method = build(options)
    x = tokens(method=method)
    first = 0 if method.config.model.start_id == -1 else 1
    wanted = torch.zeros(B, L, dtype=torch.float64)
    for b, i in itertools.product(range(B), range(first, L)):
        wanted[b, i] = -slow_probabilities(method, x[b], i)[x[b, i]].log()
    assert torch.allclose(method.token_nll(x, first).double(), wanted[:, first:], atol=1e-5) and wanted.std() > 0.3
    known = method.likelihood(Batch(x), noise())
    assert torch.allclose(known.nats_B, wanted.sum(1), atol=1e-4) and known.tokens_B.tolist() == [L - first] * B
    assert method.losses(Batch(x), noise())["ce"].item() == pytest.approx(wanted[:, first:].mean().item(), rel=1e-5)


def test_a_literal_mask_in_the_text_does_not_stop_a_run():
    method = build({"model__mask_id": 3})
    loss = method.losses(Batch(torch.full((B, L), 3)), noise())["ce"]
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() and p.grad.abs().max() < 100 for p in method.parameters())


# ---------------------------------------------------------------- drawing a token


def brute_force(logits, sampler):
    """Sets built token by token."""
    if sampler.temperature == 0:
        return [float(i == max(range(len(logits)), key=logits.__getitem__)) for i in range(len(logits))]
    p = {i: math.exp(x / sampler.temperature) for i, x in enumerate(logits)}
    ranked = sorted(p, key=p.__getitem__, reverse=True)[: sampler.top_k or None]
    total, kept = sum(p[i] for i in ranked), []
    for i in ranked:
        if sum(p[j] for j in kept) / total >= sampler.top_p:
            break
        kept.append(i)
    mass = sum(p[i] for i in kept)
    return [p[i] / mass if i in kept else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.0, 0.3, 2.5])
@pytest.mark.parametrize("top_k", [0, 4, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.5, 1e-9])
def test_truncation_against_brute_force(temperature, top_k, top_p):
    sampler = ArSampler(temperature=temperature, top_k=top_k, top_p=top_p)
    logits = 2 * torch.randn(5, 17, generator=torch.Generator().manual_seed(3))
    wanted = torch.tensor([brute_force(row, sampler) for row in logits.double().tolist()], dtype=torch.float64)
    got = next_token_probabilities(logits, sampler)
    assert got.dtype == torch.float64 and torch.allclose(got, wanted, atol=1e-12)


# ---------------------------------------------------------------- sampling


SAMPLERS = [ArSampler(), ArSampler(temperature=0), ArSampler(temperature=0.8, top_k=6), ArSampler(top_p=0.8)]


@torch.no_grad()
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("options", STARTS)
def test_each_token_is_drawn_given_those_before_it(options, sampler):
    """The sampler replayed with the network run anew for each row and token, and the sum of probabilities inverted by hand."""
    method = build(options)
    got = method.sample(sampler, noise(3))
    start = method.config.model.start_id
    for b, row in enumerate(got):
        u = RowNoise(0, [b]).streams("sample").uniform(L)[0].tolist()
        assert start == -1 or row[0] == start
        for i in range(0 if start == -1 else 1, L):
            logits = slow_probabilities(method, row, i).clamp_min(1e-300).log().tolist()
            p = brute_force(logits, sampler)
            assert row[i] == next(v for v in range(len(p)) if sum(p[: v + 1]) > u[i])
    assert got.shape == (3, L)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("options", STARTS)
def test_with_and_without_cache_the_tokens_are_the_same(options, sampler):
    method = build(options)
    plain = replace(sampler, kv_cache=False)
    for given in (None, prompt(tokens(8, method=method), 4), template(method)):
        assert torch.equal(method.sample(sampler, noise(8), fixed_BL=given), method.sample(plain, noise(8), fixed_BL=given))


def test_the_mask_is_never_written():
    for option, mask in ((3, 3), (-1, VOCAB)):
        method = build({"model__mask_id": option})
        with torch.no_grad():
            method.backbone.output_layer.linear.bias[mask] = 50.0
        assert not (method.sample(ArSampler(), noise(32)) == mask).any()


# ---------------------------------------------------------------- given tokens


def prompt(x, length):
    """The first tokens of x given, the rest free."""
    given = torch.full_like(x, FREE)
    given[:, :length] = x[:, :length]
    return given


def template(method, rows=8):
    """Given tokens in the middle and at the end, in places that differ between rows but for two columns."""
    keep = torch.rand(rows, L, generator=torch.Generator().manual_seed(2)) < 0.4
    keep[:, 5:7] = True
    return torch.where(keep, tokens(rows, method=method), FREE)


def test_giving_a_sample_its_own_beginning_changes_nothing():
    method = build()
    out = method.sample(ArSampler(), noise())
    for length in (0, 1, 5, L):
        assert torch.equal(method.sample(ArSampler(), noise(), fixed_BL=prompt(out, length)), out)


def test_a_given_first_token_replaces_the_start():
    method = build({"model__start_id": 5})
    assert method.sample(ArSampler(), noise(), fixed_BL=prompt(torch.full((B, L), 2), 1))[:, 0].tolist() == [2] * B
    given = torch.full((1, L), FREE).expand(B, -1)  # as a caller passes one template for all rows
    assert torch.equal(method.sample(ArSampler(), noise(), fixed_BL=given), method.sample(ArSampler(), noise()))
    assert (given == FREE).all()
