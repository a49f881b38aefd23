"""MDLM: its loss by hand, its cache, its ending, and its conditions under each preset."""

import pytest
import torch
from conftest import perturb

from jpeg_dlm.config import validate
from jpeg_dlm.config_io import from_dict, override, to_dict
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.mdlm import Mdlm, MdlmSampler
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.nn.ddit import DDiT
from jpeg_dlm.presets import PRESETS, preset
from jpeg_dlm.rng import RowNoise

VOCAB, L = 12, 8
MICRO = {
    "data.vocab_size": VOCAB, "data.token_len": L, "model.hidden": 16, "model.depth": 1, "model.heads": 2,
    "model.cond_dim": 8, "model.freq_dim": 8, "sampler.steps": 20,
}  # fmt: skip


def build(**options) -> Mdlm:
    config = override(for_method(preset("smoke"), "mdlm"), MICRO | {k.replace("__", "."): v for k, v in options.items()})
    method = build_method(config)
    assert isinstance(method, Mdlm)
    return perturb(method).eval()


def tokens(rows=6):
    return torch.randint(0, VOCAB, (rows, L), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("mask_id", [-1, 4])
@torch.no_grad()
def test_the_loss_is_cross_entropy_over_t_at_masked_positions(mask_id):
    """Token by token, with the network's own logits over all ids but the mask, and noise level 0 as its only level."""
    method = build(model__mask_id=mask_id)
    x0, noise = tokens(), RowNoise(3, range(6), 5)
    if mask_id == 4:
        x0 = torch.where(x0 == 4, 5, x0)
    t = 1e-3 + (1 - 1e-3) * (noise.uniform("time") + torch.arange(6)) / 6
    masked = noise.uniform("mask", L) < 0.999 * t[:, None]
    logits = method.backbone(torch.where(masked, method.mask_id, x0), torch.zeros(6))
    total = 0.0
    for b, i in masked.nonzero().tolist():
        others = [v for v in range(method.vocab) if v != method.mask_id]
        total += (logits[b, i, others].exp().sum().log() - logits[b, i, x0[b, i]]).item() / t[b].item()
    assert masked.any() and not masked.all()
    assert method.losses(Batch(x0), noise)["nelbo"].item() == pytest.approx(total / (6 * L), rel=1e-4)


@torch.no_grad()
def test_the_network_is_not_told_the_time():
    method = build()
    assert torch.equal(method.states(tokens(), torch.full((6,), 0.1)), method.states(tokens(), torch.full((6,), 0.9)))


def test_chances_of_leaving_the_mask():
    """(t - s) / t: at the log-linear schedule a position is as likely to be uncovered in one step as in another."""
    method, stay = build(), 1.0
    t = torch.linspace(1, 1e-5, 5, dtype=torch.float64)
    chances = method.chances(method.config.sampler, t[:-1], t[1:])
    assert torch.allclose(chances, (t[:-1] - t[1:]) / t[:-1])
    for c in chances.tolist():
        assert stay * c == pytest.approx((1 - 1e-5) / 4)
        stay *= 1 - c


@pytest.mark.parametrize("dtype", ["exact", "float64"])
def test_cached_and_uncached_samples_are_the_same(dtype):
    method = build(sampler__race_dtype=dtype)
    cached = override(method.config, {"sampler.cache": True}).sampler
    uncached = override(method.config, {"sampler.cache": False}).sampler
    assert torch.equal(method.sample(cached, RowNoise(1, range(16))), method.sample(uncached, RowNoise(1, range(16))))


@pytest.mark.parametrize("steps", [4, 20, 60])
def test_evaluations_are_those_that_happen(monkeypatch, steps):
    method, rows = build(), []
    states = DDiT.states
    monkeypatch.setattr(DDiT, "states", lambda self, x, c: rows.append(len(x)) or states(self, x, c))
    for cache in (True, False):
        rows.clear()
        sampler = override(method.config, {"sampler.cache": cache, "sampler.steps": steps}).sampler
        method.sample(sampler, RowNoise(1, range(60)))
        assert sum(rows) / 60 == pytest.approx(sampler.evaluations(L), abs=1.1 if not cache else 0.6)
    assert MdlmSampler(steps=10**6).evaluations(L) == L and MdlmSampler(steps=1).evaluations(L) == 1


def test_what_is_left_is_filled_greedily_or_sampled():
    """Few tokens are left at t = 1e-5, so the ending is asked directly."""
    method, h = build(), torch.randn(5000, 16, generator=torch.Generator().manual_seed(1))[:1].expand(5000, 16)
    u = torch.rand(5000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    p = method.weights(h[:1])[0]
    assert (method.finish(MdlmSampler(final="greedy"), h, u) == p.argmax()).all()
    counts = torch.bincount(method.finish(MdlmSampler(final="sampled"), h, u), minlength=VOCAB + 1)
    assert torch.allclose(counts / 5000, p, atol=5 * (0.25 / 5000) ** 0.5) and counts[method.mask_id] == 0


# ---------------------------------------------------------------- presets and published checkpoints


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_has_a_valid_config_that_survives_json(name):
    config = validate(for_method(preset(name), "mdlm"))
    assert config.method == "mdlm" and from_dict(to_dict(config)) == config
    m, dit = config.model, preset(name).model
    assert (m.hidden, m.depth, m.heads) == (dit.hidden, dit.depth, dit.heads)


def test_settings_of_the_paper():
    lm1b, owt = for_method(preset("lm1b"), "mdlm"), for_method(preset("owt1024"), "mdlm")
    assert (lm1b.sampler.steps, owt.sampler.steps) == (128, 1024)
    assert lm1b.model.with_mask(lm1b.data.vocab_size) == (30_522, 103)
    assert owt.model.with_mask(owt.data.vocab_size) == (50_258, 50_257)
    assert lm1b.objective.stratified and lm1b.objective.reduction == "token_mean" and lm1b.model.dropout == 0.1
    assert for_method(preset("smoke"), "mdlm").sampler.steps == 32


@pytest.mark.parametrize(
    ("ids", "wanted"), [(30_522, ("bert-base-uncased", 30_522, 103)), (50_258, ("gpt2", 50_257, -1)), (301, ("bpe", 300, -1))]
)
def test_config_of_a_published_checkpoint(ids, wanted):
    with torch.device("meta"):
        tensors = {f"backbone.{n}": t for n, t in DDiT(ids, 128, 3, 2, 32, 64).state_dict().items()}
    config = validate(Mdlm.config_of(tensors, for_method(preset("tiny"), "mdlm")))
    assert (config.data.tokenizer, config.data.vocab_size, config.model.mask_id) == wanted
    m = config.model
    assert (m.hidden, m.depth, m.heads, m.cond_dim, m.freq_dim) == (128, 3, 2, 32, 64)
    with torch.device("meta"):
        shapes = {n: t.shape for n, t in Mdlm(config).export_state().items()}
    assert shapes == {n: t.shape for n, t in tensors.items()}
