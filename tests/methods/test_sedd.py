"""SEDD-Absorb: score entropy by its own formula, its two solvers, and its relation to MDLM."""

import math

import pytest
import torch
from conftest import perturb

from jpeg_dlm.config import validate
from jpeg_dlm.config_io import from_dict, override, to_dict
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.common.absorbing import step_distribution
from jpeg_dlm.methods.mdlm import Mdlm
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.methods.sedd import Sedd, SeddObjective, SeddSampler
from jpeg_dlm.presets import PRESETS, preset
from jpeg_dlm.rng import RowNoise

VOCAB, L = 12, 8
MICRO = {
    "data.vocab_size": VOCAB, "data.token_len": L, "model.hidden": 16, "model.depth": 1, "model.heads": 2,
    "model.cond_dim": 8, "model.freq_dim": 8, "sampler.steps": 20,
}  # fmt: skip


def build(name="sedd", **options):
    config = override(for_method(preset("smoke"), name), MICRO | {k.replace("__", "."): v for k, v in options.items()})
    method = build_method(config)
    return perturb(method).eval()


def tokens(rows=6):
    return torch.randint(0, VOCAB, (rows, L), generator=torch.Generator().manual_seed(7))


def log_scores(method, x_BL, t_B):
    """SEDD's output (B, L, V): logits, less log(e^sigma - 1) and log(V - 1)."""
    sigma = method.schedule.sigma(t_B)
    return method.backbone(x_BL, sigma) - sigma.expm1().log()[:, None, None] - math.log(method.vocab - 1)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_sum"])
@pytest.mark.parametrize("mask_id", [-1, 4])
@torch.no_grad()
def test_the_loss_is_score_entropy(mask_id, reduction):
    """sigma' [sum_y s_y - r log s_x0 + r (log r - 1)] with r = 1 / (e^sigma - 1), token by token, at independent times."""
    method = build(model__mask_id=mask_id, objective__stratified=False, objective__reduction=reduction)
    x0, noise = tokens(), RowNoise(3, range(6), 5)
    if mask_id == 4:
        x0 = torch.where(x0 == 4, 5, x0)
    t = 1e-3 + (1 - 1e-3) * noise.uniform("time")
    masked = noise.uniform("mask", L) < 0.999 * t[:, None]
    log_s = log_scores(method, torch.where(masked, method.mask_id, x0), t)
    total = 0.0
    for b, i in masked.nonzero().tolist():
        r = 1 / math.expm1(method.schedule.sigma(t[b]).item())
        scores = [log_s[b, i, v].exp().item() for v in range(method.vocab) if v != method.mask_id]
        entropy = sum(scores) - r * log_s[b, i, x0[b, i]].item() + r * (math.log(r) - 1)
        assert entropy > 0
        total += method.schedule.dsigma(t[b]).item() * entropy
    wanted = total / 6 if reduction == "sequence_sum" else total / (6 * L)
    assert method.losses(Batch(x0), noise)["nelbo"].item() == pytest.approx(wanted, rel=1e-4)


def head_giving(method, w):
    """The method, with logits that make its weights w whatever it sees."""
    with torch.no_grad():
        method.backbone.output_layer.linear.weight.zero_()
        method.backbone.output_layer.linear.bias[:VOCAB] = (w * (method.vocab - 1)).log().float()
    return method


@torch.no_grad()
def test_the_cost_is_zero_at_the_true_score_and_mdlms_for_probabilities():
    h = torch.zeros(3, 16)
    x0 = torch.tensor([0, 3, 11])
    certain = torch.full((VOCAB,), 1e-30)
    certain[3] = 1.0
    assert head_giving(build(), certain).cost(h[:1], x0[1:2]).item() == pytest.approx(0, abs=1e-5)
    p = torch.rand(VOCAB, generator=torch.Generator().manual_seed(1))
    p = p / p.sum()
    sedd, mdlm = head_giving(build(), p), head_giving(build("mdlm"), p)  # a constant in MDLM's logits changes nothing
    assert torch.allclose(sedd.cost(h, x0), mdlm.cost(h, x0), atol=1e-5)
    assert torch.allclose(mdlm.cost(h, x0), -p[x0].log(), atol=1e-5)
    # Weights of another sum cost z - 1 - log z more.
    for z in (0.3, 2.0):
        more = head_giving(build(), z * p).cost(h, x0) - mdlm.cost(h, x0)
        assert torch.allclose(more, torch.full((3,), z - 1 - math.log(z)), atol=1e-5)


@torch.no_grad()
def test_a_fresh_network_is_uniform():
    method = build_method(override(for_method(preset("smoke"), "sedd"), MICRO)).eval()
    assert torch.allclose(method.weights(torch.randn(2, 16))[:, :VOCAB], torch.full((2, VOCAB), 1 / VOCAB))
    assert torch.allclose(method.cost(torch.randn(2, 16), torch.tensor([0, 5])), torch.full((2,), math.log(VOCAB)))


@torch.no_grad()
def test_the_network_is_told_the_noise_level():
    method, t = build(), torch.full((6,), 0.4)
    sigma = method.schedule.sigma(t)
    wanted = method.backbone(tokens(), sigma)
    assert torch.allclose(method.backbone.head(method.states(tokens(), t)), wanted)
    assert not torch.allclose(method.backbone.head(method.states(tokens(), 2 * t)), wanted)


@pytest.mark.parametrize("solver", ["euler", "analytic"])
@torch.no_grad()
def test_a_step_is_the_solvers_formula_in_scores(solver):
    """Euler P(y) = dt sigma' s_y; analytic P(y) = (e^(sigma_t - sigma_s) - 1) s_y."""
    method = build()
    t, s = torch.tensor([0.6], dtype=torch.float64), torch.tensor([0.45], dtype=torch.float64)
    x = torch.full((1, L), method.mask_id)
    c = method.chances(SeddSampler(solver=solver), t, s).item()
    q = step_distribution(method.weights(method.states(x, t.float())[0]), c, method.mask_id)
    scores = log_scores(method, x, t.float())[0, :, :VOCAB].exp()
    sigma_t, sigma_s = method.schedule.sigma(t), method.schedule.sigma(s)
    factor = 0.15 * method.schedule.dsigma(t) if solver == "euler" else (sigma_t - sigma_s).exp() - 1
    assert torch.allclose(q[:, :VOCAB], (factor * scores).float(), rtol=1e-4)
    assert torch.allclose(q.sum(-1), torch.ones(L), atol=1e-5)


@torch.no_grad()
def test_the_analytic_step_is_tweedies():
    """Brute force over the ids: staggered scores times the transposed transition matrix of the absorbing process."""
    method = build()
    t, s = torch.tensor([0.6], dtype=torch.float64), torch.tensor([0.45], dtype=torch.float64)
    delta = (method.schedule.sigma(t) - method.schedule.sigma(s)).item()
    x, mask, n = torch.full((1, L), method.mask_id), method.mask_id, method.vocab
    rate = torch.zeros(n, n, dtype=torch.float64)  # columns: from; everything falls into the mask
    rate[range(n), range(n)] = -1.0
    rate[mask, :] += 1.0
    scores = log_scores(method, x, t.float())[0, 0].exp().double()
    scores[mask] = 1
    staggered = torch.linalg.matrix_exp(-delta * rate) @ scores
    wanted = staggered * torch.linalg.matrix_exp(delta * rate)[mask]
    c = method.chances(SeddSampler(), t, s).item()
    q = step_distribution(method.weights(method.states(x, t.float())[0, :1]), c, mask)[0]
    assert torch.allclose(q.double(), wanted, atol=1e-6)


@torch.no_grad()
def test_with_probabilities_a_step_is_mdlms_and_the_solvers_agree():
    """alpha is linear in t: that makes Euler's step, the analytic one and MDLM's the same."""
    p = torch.rand(VOCAB, generator=torch.Generator().manual_seed(1))
    sedd, mdlm = head_giving(build(), p / p.sum()), head_giving(build("mdlm"), p / p.sum())
    t = torch.linspace(1, 1e-5, 9, dtype=torch.float64)
    wanted = mdlm.chances(mdlm.config.sampler, t[:-1], t[1:])
    for solver in ("euler", "analytic"):
        chances = sedd.chances(SeddSampler(solver=solver), t[:-1], t[1:])
        assert torch.allclose(chances, wanted, rtol=1e-9)
        h = torch.zeros(1, 16)
        steps = [step_distribution(m.weights(h), float(chances[3]), VOCAB) for m in (sedd, mdlm)]
        assert torch.allclose(*steps, atol=1e-6)


def test_what_is_left_is_sampled():
    method, h = build(), torch.randn(1, 16, generator=torch.Generator().manual_seed(1)).expand(5000, 16)
    u = torch.rand(5000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    w = method.weights(h[:1])[0]
    counts = torch.bincount(method.finish(SeddSampler(), h, u), minlength=VOCAB + 1)
    assert torch.allclose(counts / 5000, w / w.sum(), atol=5 * (0.25 / 5000) ** 0.5) and counts[method.mask_id] == 0


# ---------------------------------------------------------------- presets and published checkpoints


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_has_a_valid_config_that_survives_json(name):
    config = validate(for_method(preset(name), "sedd"))
    assert config.method == "sedd" and from_dict(to_dict(config)) == config
    assert isinstance(config.objective, SeddObjective) and isinstance(config.sampler, SeddSampler)


@pytest.mark.parametrize(("name", "steps"), [("lm1b", 128), ("owt1024", 1024)])
def test_the_papers_sizes_follow_sedds_own_recipe(name, steps):
    config = for_method(preset(name), "sedd")
    assert (config.data.tokenizer, config.data.frame, config.data.packing) == ("gpt2", False, "continuous")
    assert config.model.with_mask(config.data.vocab_size) == (50_258, 50_257)
    assert config.train.steps == 1_300_001 and config.sampler.steps == steps
    assert not config.objective.stratified and config.objective.reduction == "sequence_sum"


def test_a_small_preset_has_the_loss_of_the_others():
    config = for_method(preset("smoke"), "sedd")
    assert config.objective.stratified and config.objective.reduction == "token_mean"
    assert config.data == preset("smoke").data and config.sampler.label() == "32 analytic steps"
    assert config.sampler.evaluations(16) == 33


def test_both_systems_share_a_layout():
    sedd = build()
    mdlm = Mdlm(sedd.config)
    assert {n: t.shape for n, t in Sedd(sedd.config).state_dict().items()} == {n: t.shape for n, t in mdlm.state_dict().items()}
    assert Sedd.config_of(sedd.export_state(), sedd.config).data.vocab_size == VOCAB
