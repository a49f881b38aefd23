"""Duo: the bound against its plain sum and against entropy, the posterior against Bayes' rule, curriculum and sampler."""

import math
from dataclasses import replace

import pytest
import torch
from micro import micro_model
from torch import nn

from jpeg_dlm.methods.argmax_noise import survival
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.discrete import LogLinear
from jpeg_dlm.methods.duo import (
    CURRICULUM_ALPHAS,
    Duo,
    DuoSampler,
    Noised,
    draw_posterior,
    log_terms,
    nelbo_integrand,
    prior_divergence,
)
from jpeg_dlm.methods.registry import for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.util.rng import RowNoise

B, L, VOCAB = 4, 6, 20
SIZES = {"data__vocab_size": VOCAB, "data__token_len": L, "train__steps": 100, "sampler__steps": 5}


def build(**options) -> Duo:
    return micro_model("duo", **SIZES | options).train()


def tokens(rows=B):
    return torch.randint(0, VOCAB, (rows, L), generator=torch.Generator().manual_seed(7))


def noise(rows=B):
    return RowNoise(0, range(rows))


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def chi_square(x, wanted):
    """Of how often each id is in x."""
    counts = torch.bincount(x.flatten(), minlength=len(wanted))
    assert len(counts) == len(wanted)
    return ((counts - wanted) ** 2 / wanted).sum().item()


def assert_fits(x, wanted):
    """Four deviations of chi-square above its mean at most."""
    cells = len(wanted) - 1
    assert chi_square(x, wanted) < cells + 4 * math.sqrt(2 * cells)


# ---------------------------------------------------------------- the bound


def naive_nelbo(x_theta, x0, x_t, alpha, dalpha):
    """The sum over all ids as the paper writes it, one position at a time."""
    ids = len(x_theta)
    clean = torch.zeros(ids, dtype=x_theta.dtype)
    clean[x0] = 1
    bar, bar_theta = ids * alpha * clean + 1 - alpha, ids * alpha * x_theta + 1 - alpha
    ratio, ratio_theta = bar / bar[x_t], bar_theta / bar_theta[x_t]
    inside = ids / bar[x_t] - ids / bar_theta[x_t] - (ratio * (ratio / ratio_theta).log()).sum()
    return dalpha / (ids * alpha) * inside


def cheap_nelbo(logits_NK, x0_N, x_t_N, alpha, dalpha):
    ids = logits_NK.shape[-1]
    odds_N = torch.full((len(x0_N),), ids * alpha / (1 - alpha), dtype=logits_NK.dtype)
    logs = log_terms(logits_NK, odds_N, x0_N, x_t_N).double()
    return nelbo_integrand(logs, x0_N == x_t_N, double(alpha), double(dalpha), ids)


def positions(ids, n=40):
    g = torch.Generator().manual_seed(ids)
    x0 = torch.randint(0, ids, (n,), generator=g)
    x_t = torch.where(torch.arange(n) % 2 == 0, x0, torch.randint(0, ids, (n,), generator=g))
    return 3 * torch.randn(n, ids, generator=g, dtype=torch.float64), x0, x_t


@pytest.mark.parametrize("alpha", [0.999, 0.9, 0.4, 0.01, 0.001])
@pytest.mark.parametrize(("ids", "dtype", "tolerance"), [(7, torch.float64, 1e-9), (5000, torch.float32, 2e-5)])
def test_the_cheap_form_is_the_plain_sum_zero_for_the_truth_and_else_positive(alpha, ids, dtype, tolerance):
    logits, x0, x_t = positions(ids)
    wanted = torch.stack([naive_nelbo(p, i, j, alpha, -0.7) for p, i, j in zip(logits.softmax(-1), x0, x_t, strict=True)])
    got = cheap_nelbo(logits.to(dtype), x0, x_t, alpha, -0.7)
    assert torch.allclose(got, wanted, rtol=tolerance, atol=tolerance * 1e-2) and (got > 0).all()
    sure = torch.full_like(logits, -1e4).scatter(-1, x0[:, None], 0.0).to(dtype)  # in single precision, weight up to 1000
    assert cheap_nelbo(sure, x0, x_t, alpha, -1.0).abs().max() < (1e-9 if dtype == torch.float64 else 1e-3)


def source(ids=6):
    """A distribution of independent tokens."""
    p = torch.arange(1, ids + 1, dtype=torch.float64) ** 1.5
    return p / p.sum()


def forward_matrix(alpha, ids):
    """q(column | row) of the uniform-state process."""
    return alpha * torch.eye(ids, dtype=torch.float64) + (1 - alpha) / ids


def times_and_weights(n=1000):
    """Midpoint rule after t = v**3, which tames the logarithm at t = 0."""
    v = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    return v**3, 3 * v**2 / n


def entropy(p):
    return -(p * p.log()).sum().item()


def prior_gap(p_x1):
    """KL of a distribution of x_1 from the uniform prior, which no denoiser can avoid."""
    return math.log(p_x1.numel()) - entropy(p_x1)


# ---------------------------------------------------------------- losses


@torch.no_grad()
def slow_loss(method, seen, x0, x_t, alpha_B, dalpha_B):
    """Mean over positions of the plain sum, from the network's own logits."""
    logits = method.backbone(seen, -torch.log(alpha_B).float())
    rows = [
        naive_nelbo(logits[b, i].double().softmax(-1), x0[b, i], x_t[b, i], alpha_B[b], dalpha_B[b])
        for b in range(len(x0))
        for i in range(x0.shape[1])
    ]
    return torch.stack(rows).mean().item()


def test_the_plain_loss():
    method = build(objective__curriculum="none")
    t = 0.999 * noise().stratified("time").double() + 1e-3
    noised = method.noised(tokens(), t, noise())
    assert torch.equal(noised.x_t_BL, noised.seen) and torch.allclose(noised.alpha_B, 1 - 0.999 * t)
    wanted = slow_loss(method, noised.x_t_BL, tokens(), noised.x_t_BL, 1 - 0.999 * t, torch.full_like(t, -0.999))
    assert method.losses(Batch(tokens()), noise())["nelbo"].item() == pytest.approx(wanted, rel=1e-4)


def test_the_loss_of_the_curriculum():
    method = build(objective__gamma_min=-3.0, objective__gamma_max=-0.5, objective__tau=0.1, model__extra_ids=3)
    gamma = -3 + 2.5 * (0.999 * noise().stratified("time").double() + 1e-3)
    w = noise().normal("latent", L, VOCAB + 3) * torch.sigmoid(gamma).sqrt()[:, None, None]
    for b in range(B):
        for i in range(L):
            w[b, i, tokens()[b, i]] += torch.sigmoid(-gamma[b]).sqrt()
    alpha, slope = survival(gamma, VOCAB + 3)
    wanted = slow_loss(method, (w / 0.1).softmax(-1).float(), tokens(), w.argmax(-1), alpha, 2.5 * slope)
    assert method.losses(Batch(tokens()), noise())["nelbo"].item() == pytest.approx(wanted, rel=1e-4)


def test_the_curriculum_is_the_first_half_of_training_and_never_evaluation():
    method = build()
    assert [method.in_curriculum(step) for step in (0, 49, 50, 99)] == [True, True, False, False]
    assert [build(objective__curriculum_steps=7).in_curriculum(step) for step in (6, 7)] == [True, False]
    assert not build(objective__curriculum="none").in_curriculum(0)
    assert not method.eval().in_curriculum(0)


@pytest.mark.parametrize("vocab", [20, 512, 4096])
def test_the_curriculum_spans_the_papers_alphas_for_any_vocabulary(vocab):
    method = build(data__vocab_size=vocab)
    assert survival(double(*method.gammas), vocab)[0].tolist() == pytest.approx(list(CURRICULUM_ALPHAS), abs=1e-9)
    for name, ids in (("lm1b", 30_522), ("owt1024", 50_258)):
        o = for_method(preset(name), "duo").objective
        spanned = survival(double(o.gamma_min, o.gamma_max), ids)[0].tolist()
        assert spanned == pytest.approx(list(CURRICULUM_ALPHAS), abs=4e-3)


@pytest.mark.parametrize("forward", ["noised", "gaussian_noised"])
def test_how_often_a_token_stays(forward):
    """x_t is x0 with alpha and else any id, extra ones too."""
    method = build(model__extra_ids=2)
    rows, ids = 3000, VOCAB + 2
    x0 = torch.full((rows, L), 5)
    noised = getattr(method, forward)(x0, torch.full((rows,), 0.4, dtype=torch.float64), noise(rows))
    assert_fits(noised.x_t_BL, rows * L * forward_matrix(noised.alpha_B[0].item(), ids)[5])


# ---------------------------------------------------------------- with a perfect denoiser


class Oracle(nn.Module):
    """The network that knows rows of two tokens: each token's distribution given the other one's noisy state."""

    def __init__(self, joint_KK):
        super().__init__()
        self.joint_KK = joint_KK

    def states(self, x_B2, sigma_B):
        e_B2K, alpha = nn.functional.one_hot(x_B2, len(self.joint_KK)).double(), torch.exp(-sigma_B.double())[:, None, None]
        first, second = (alpha * e_B2K + (1 - alpha) / len(self.joint_KK)).unbind(1)  # how probable x_t is for each x0
        return torch.stack([second @ self.joint_KK.T, first @ self.joint_KK], 1).clamp_min(1e-30).log()

    def head(self, h):
        return h


def joint(ids=4):
    """Two tokens that depend on each other."""
    p = torch.rand(ids, ids, generator=torch.Generator().manual_seed(1), dtype=torch.float64) ** 4 + 0.02
    return p / p.sum()


def knowing(joint_KK, extra=0) -> Duo:
    method = build(data__vocab_size=max(8, len(joint_KK) - extra), data__token_len=2)
    config = method.config
    model, data = replace(config.model, extra_ids=extra), replace(config.data, vocab_size=len(joint_KK) - extra)
    method.config, method.ids = replace(config, model=model, data=data), len(joint_KK)
    method.backbone = Oracle(joint_KK)
    return method.eval()


def test_the_bound_of_dependent_tokens_is_their_joint_entropy():
    """The whole loss through the method, summed over every (x0, x_t) of two tokens and integrated over time."""
    p, schedule, (t, weight) = joint(), LogLinear(), times_and_weights(300)
    method = knowing(p)
    states = torch.cartesian_prod(*[torch.arange(4)] * 4)
    x0, x_t = states[:, :2], states[:, 2:]
    integral = 0.0
    for alpha, w in zip(schedule.alpha(t), weight, strict=True):
        alpha_B = alpha.expand(len(states))
        nats = method.nelbo(x0, Noised(x_t, x_t, alpha_B, torch.full_like(alpha_B, schedule.eps - 1))).sum(1)
        q = forward_matrix(alpha, 4)
        integral += (w * p[x0[:, 0], x0[:, 1]] * q[x0[:, 0], x_t[:, 0]] * q[x0[:, 1], x_t[:, 1]] * nats).sum().item()
    q_1 = forward_matrix(schedule.eps, 4)
    wanted = entropy(p) + prior_gap(q_1.T @ p @ q_1)
    assert integral + 2 * prior_divergence(schedule.eps, 4) == pytest.approx(wanted, abs=1e-4)
    assert entropy(p.sum(0)) + entropy(p.sum(1)) > wanted + 0.1  # more than the tokens on their own could tell


def test_likelihood_of_dependent_tokens():
    p, rows = joint(), 4000
    x0 = torch.multinomial(p.flatten().float(), rows, replacement=True, generator=torch.Generator().manual_seed(0))
    found = knowing(p).likelihood(Batch(torch.stack([x0 // 4, x0 % 4], 1)), noise(rows))
    error = found.nats_B.std().item() / math.sqrt(rows)
    assert error < 0.05 * entropy(p) and abs(found.nats_B.mean().item() - entropy(p)) < 4 * error
    assert (found.tokens_B == 2).all()


@pytest.mark.parametrize("steps", [1, 4])
def test_independent_tokens_are_sampled_exactly_in_any_number_of_steps(steps):
    """Two extra ids, which the source never has, are there on the way and not at the end."""
    pi = torch.cat([source(8), double(0.0, 0.0)])
    method, rows = knowing(torch.outer(pi, pi), extra=2), 6000
    assert_fits(method.sample(DuoSampler(steps=steps), noise(rows)), 2 * rows * pi[:8])


def test_many_steps_sample_dependent_tokens():
    """In one step the two tokens would not know of each other; in 32 they have their joint distribution."""
    p, rows = joint(), 1500
    one, many = (knowing(p).sample(DuoSampler(steps=steps), noise(rows)) @ torch.tensor([4, 1]) for steps in (1, 32))
    assert_fits(many, rows * p.flatten())
    assert chi_square(one, rows * p.flatten()) > 100


# ---------------------------------------------------------------- the posterior


def bayes_posterior(x_theta, x_t, alpha_t, alpha_s):
    """q(x_s | x_t) with x0 ~ x_theta, by going through all (x0, x_s)."""
    ids = len(x_theta)
    to_s, s_to_t = forward_matrix(alpha_s, ids), forward_matrix(alpha_t / alpha_s, ids)
    joint = double(*[sum(x_theta[x0] * to_s[x0, x_s] for x0 in range(ids)) * s_to_t[x_s, x_t] for x_s in range(ids)])
    return joint / joint.sum()


def swept(logits_K, x_t, alpha_t, alpha_s, draws=20_000):
    """The distribution that `draw_posterior` has, by going evenly through all u."""
    u = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    x_s = draw_posterior(logits_K.expand(draws, -1), torch.full((draws,), x_t), alpha_t, alpha_s, u)
    return torch.bincount(x_s, minlength=len(logits_K)).double() / draws


@pytest.mark.parametrize(("alpha_t", "alpha_s"), [(0.3, 0.45), (0.001, 0.01), (0.9, 0.99), (0.5, 1.0)])
@pytest.mark.parametrize("x_t", [0, 3])
def test_the_posterior_is_bayes_rule(alpha_t, alpha_s, x_t):
    logits = torch.randn(5, generator=torch.Generator().manual_seed(x_t), dtype=torch.float64)
    wanted = bayes_posterior(logits.softmax(-1), x_t, alpha_t, alpha_s)
    assert torch.allclose(swept(logits, x_t, alpha_t, alpha_s), wanted, atol=2e-4)


@pytest.mark.parametrize("x_t", [1, 4])
def test_struck_ids_are_renormalized_away(x_t):
    logits = torch.randn(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = bayes_posterior(logits.softmax(-1), x_t, 0.3, 1.0)[:3]
    logits[3:] = -torch.inf
    got = swept(logits, x_t, 0.3, 1.0)
    assert torch.allclose(got[:3], wanted / wanted.sum(), atol=2e-4) and not got[3:].any()


# ---------------------------------------------------------------- sampling


@pytest.mark.parametrize("options", [{}, {"final": "greedy"}, {"top_p": 0.8}, {"steps": 1}])
def test_extra_ids_are_never_written(options):
    """Even by a network that prefers them; on the way they are there, as for Duo's own."""
    method = build(model__extra_ids=2).eval()
    with torch.no_grad():
        method.backbone.output_layer.linear.bias[VOCAB:] += 6
    seen = []
    handle = method.backbone.vocab_embed.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    x = method.sample(replace(method.config.sampler, **options), RowNoise(1, range(40)))
    handle.remove()
    assert max(int(s.max()) for s in seen) >= VOCAB and 0 <= x.min() and x.max() < VOCAB


def test_the_greedy_tail_takes_the_most_probable_token():
    method = build(model__extra_ids=1).eval()
    seen = []
    handle = method.backbone.output_layer.linear.register_forward_hook(lambda m, args, out: seen.append(out.clone()))
    x = method.sample(DuoSampler(steps=3, final="greedy"), noise())
    handle.remove()
    assert torch.equal(x, seen[-1][:, :VOCAB].argmax(-1).view(B, L))
