"""MDLM and SEDD: losses by hand, the bound against brute force, the law of a step, and why float32 races are biased."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from micro import micro_model

from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.masked_diffusion import MaskedDiffusion, MdlmSampler, RowCache
from jpeg_dlm.nn.ddit import DDiT
from jpeg_dlm.util.rng import RowNoise

METHODS = ["mdlm", "sedd"]
VOCAB, L = 12, 6


def build(name: str = "mdlm", scale: float = 0.3, **options) -> MaskedDiffusion:
    return micro_model(name, scale, **{"data__vocab_size": VOCAB, "data__token_len": L, "sampler__steps": 8} | options)


def tokens(rows: int = 4) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, L), generator=torch.Generator().manual_seed(7))


def places(mask_BL: torch.Tensor) -> torch.Tensor:
    return mask_BL.flatten().nonzero().squeeze(1)


def logit_offset(method: MaskedDiffusion) -> float:
    """SEDD's weights are e^logit / (V - 1)."""
    return math.log(method.vocab - 1) if method.title == "SEDD-Absorb" else 0.0


def saying(method: MaskedDiffusion, w: torch.Tensor) -> MaskedDiffusion:
    """The method, with the weights w (one for each token) at every position whatever it sees."""
    with torch.no_grad():
        head = method.backbone.output_layer.linear
        head.weight.zero_()
        head.bias[[v for v in range(method.vocab) if v != method.mask_id]] = w.log().float() + logit_offset(method)
    return method


def some_distribution(n: int = VOCAB) -> torch.Tensor:
    p = torch.rand(n, generator=torch.Generator().manual_seed(1))
    return p / p.sum()


def oracle(name: str, joint: torch.Tensor) -> MaskedDiffusion:
    """A method with the exact conditionals of a joint distribution of three tokens in place of its network."""
    n, method = len(joint), build(name, data__vocab_size=8, data__token_len=3)
    method.config = replace(method.config, data=replace(method.config.data, vocab_size=n))
    method.vocab, method.mask_id = n + 1, n
    table = torch.zeros(n + 1, n + 1, n + 1, 3, n)  # seen tokens, position -> distribution
    for seen in itertools.product(range(n + 1), repeat=3):
        p = torch.zeros_like(joint)
        where = tuple(slice(None) if v == n else slice(v, v + 1) for v in seen)
        p[where] = joint[where] / joint[where].sum()
        table[seen] = torch.stack([p.sum([j for j in range(3) if j != i]) for i in range(3)])
    logits = torch.cat([table.log() + logit_offset(method), torch.zeros(n + 1, n + 1, n + 1, 3, 1)], -1)
    method.states, method.backbone.head = lambda x_BL, t_B: logits[tuple(x_BL.T)], torch.clone
    return method


def some_joint() -> torch.Tensor:
    """Three tokens of three values that depend on each other: the marginals are far from it."""
    p = torch.rand(3, 3, 3, generator=torch.Generator().manual_seed(2)) ** 4
    return p / p.sum()


# ---------------------------------------------------------------- losses


@pytest.mark.parametrize("mask_id", [-1, 4])
@torch.no_grad()
def test_mdlms_loss_is_cross_entropy_over_t_at_masked_positions(mask_id):
    """Token by token, with the network's own logits over all ids but the mask, and noise level 0 as its only level."""
    method, noise = build(model__mask_id=mask_id), RowNoise(3, range(6), 5)
    x0 = torch.where(tokens(6) == mask_id, 5, tokens(6))
    t = 1e-3 + (1 - 1e-3) * (noise.uniform("time") + torch.arange(6)) / 6
    masked = noise.uniform("mask", L) < 0.999 * t[:, None]
    logits = method.backbone(torch.where(masked, method.mask_id, x0), torch.zeros(6))
    total, others = 0.0, [v for v in range(method.vocab) if v != method.mask_id]
    for b, i in masked.nonzero().tolist():
        total += (logits[b, i, others].exp().sum().log() - logits[b, i, x0[b, i]]).item() / t[b].item()
    assert masked.any() and not masked.all()
    assert method.losses(Batch(x0), noise)["nelbo"].item() == pytest.approx(total / (6 * L), rel=1e-4)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_sum"])
@pytest.mark.parametrize("mask_id", [-1, 4])
@torch.no_grad()
def test_sedds_loss_is_score_entropy(mask_id, reduction):
    """sigma' [sum_y s_y - r log s_x0 + r (log r - 1)] with r = 1 / (e^sigma - 1), token by token, at independent times."""
    options = {"model__mask_id": mask_id, "objective__stratified": False, "objective__reduction": reduction}
    method, noise = build("sedd", **options), RowNoise(3, range(6), 5)
    x0 = torch.where(tokens(6) == mask_id, 5, tokens(6))
    t = 1e-3 + (1 - 1e-3) * noise.uniform("time")
    masked, sigma = noise.uniform("mask", L) < 0.999 * t[:, None], method.schedule.sigma(t)
    logits = method.backbone(torch.where(masked, method.mask_id, x0), sigma)
    log_s = logits - sigma.expm1().log()[:, None, None] - math.log(method.vocab - 1)
    total = 0.0
    for b, i in masked.nonzero().tolist():
        r = 1 / math.expm1(sigma[b].item())
        scores = [log_s[b, i, v].exp().item() for v in range(method.vocab) if v != method.mask_id]
        entropy = sum(scores) - r * log_s[b, i, x0[b, i]].item() + r * (math.log(r) - 1)
        assert entropy > 0
        total += method.schedule.dsigma(t[b]).item() * entropy
    expected = total / 6 if reduction == "sequence_sum" else total / (6 * L)
    assert method.losses(Batch(x0), noise)["nelbo"].item() == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def test_costs_of_both_systems_agree_on_probabilities():
    h, x0, p = torch.zeros(3, 16), torch.tensor([0, 3, 11]), some_distribution()
    sedd, mdlm = saying(build("sedd"), p), saying(build("mdlm"), p)
    assert torch.allclose(mdlm.cost(h, x0), -p[x0].log(), atol=1e-5)
    assert torch.allclose(sedd.cost(h, x0), mdlm.cost(h, x0), atol=1e-5)
    for z in (0.3, 2.0):  # weights of another sum cost z - 1 - log z more
        more = saying(build("sedd"), z * p).cost(h, x0) - mdlm.cost(h, x0)
        assert torch.allclose(more, torch.full((3,), z - 1 - math.log(z)), atol=1e-5)
    fresh = micro_model("sedd", 0.0, data__vocab_size=VOCAB)  # an untrained SEDD finds all tokens equally likely
    assert torch.allclose(fresh.weights(torch.randn(2, 16))[:, :VOCAB], torch.full((2, VOCAB), 1 / VOCAB))


# ---------------------------------------------------------------- the bound


@pytest.mark.parametrize("name", METHODS)
def test_with_the_true_conditionals_the_bound_is_the_likelihood(name):
    """Whatever the order in which tokens are uncovered, exact conditionals multiply to the joint: -log p(x), row by row."""
    joint, repeats = some_joint(), 80
    rows = torch.tensor(list(itertools.product(range(3), repeat=3))).repeat(repeats, 1)
    likelihood = oracle(name, joint).likelihood(Batch(rows), RowNoise(0, range(len(rows))))
    nats = likelihood.nats_B.view(repeats, 27).double()
    assert ((nats.mean(0) + joint.flatten().log()).abs() < 5 * nats.std(0) / math.sqrt(repeats)).all()
    assert likelihood.tokens_B.tolist() == [3] * len(rows)


def integrand(method, x0, t):
    """sum over sets of masked positions of P(set) x costs (time, L), with weight 1 / t; for times above 1 the share masked
    goes on to 1 while the network sees t = 1."""
    total = torch.zeros(len(t), len(x0), dtype=torch.float64)
    share = 1 - method.schedule.alpha(t)
    for masked in itertools.product([False, True], repeat=len(x0)):
        masked_L = torch.tensor(masked)
        n = int(masked_L.sum())
        probability = share**n * (1 - share) ** (len(x0) - n)
        costs = method.costs(x0.expand(len(t), -1), places(masked_L.expand(len(t), -1)), t.clamp_max(1).float())
        total += (probability / t)[:, None] * costs.double()
    return total


@pytest.mark.parametrize("name", METHODS)
@torch.no_grad()
def test_bound_and_training_loss_equal_the_integral(name):
    """For a network that is anything but right, by quadrature over time and every set of masked positions."""
    method = build(name, 0.3, data__token_len=3)
    x0, rows, points = torch.tensor([1, 5, 2]), 3000, 100
    batch, middle = Batch(x0.expand(rows, 3)), (torch.arange(points, dtype=torch.float64) + 0.5) / points
    end = 1 / 0.999  # where the last token is masked
    expected = (integrand(method, x0, middle * end).mean(0) * end).sum()
    nats = method.likelihood(batch, RowNoise(0, range(rows))).nats_B.double()
    assert abs(nats.mean() - expected) < 5 * nats.std() / math.sqrt(rows)
    t_min = method.config.objective.t_min
    expected = integrand(method, x0, t_min + (1 - t_min) * middle).mean()
    losses = [method.losses(batch, RowNoise(seed, range(rows)))["nelbo"].item() for seed in range(8)]
    assert sum(losses) / 8 == pytest.approx(expected.item(), rel=0.05)  # of one: a deviation of 4% (measured)


def test_the_bound_spreads_its_times_over_the_whole_batch(monkeypatch):
    """As many rows as tokens mask every number of tokens once, also in parts; more noise goes with more masks."""
    method, calls = build("sedd"), []

    def costs(x, places, t):
        calls.append(((places // L).bincount(minlength=len(x)), t))
        return torch.ones(x.shape)

    monkeypatch.setattr(method, "costs", costs)
    for rows in (range(0, 2), range(2, L)):
        nats_B = method.likelihood(Batch(tokens(len(rows))), RowNoise(0, rows, total=L)).nats_B
        assert nats_B.tolist() == pytest.approx([L / n * L for n in calls[-1][0].tolist()])
    assert sorted(torch.cat([n for n, _ in calls]).tolist()) == list(range(1, L + 1))
    method.likelihood(Batch(tokens(600)), RowNoise(1, range(600)))
    n, t = calls[-1]
    for k in range(1, L + 1):  # the k-th smallest of L uniform numbers has mean k / (L + 1) and deviation below 0.2
        assert t[n == k].mean().item() == pytest.approx(k / (L + 1), abs=5 * 0.2 / math.sqrt(100))


@pytest.mark.parametrize("name", METHODS)
def test_a_step_in_which_nothing_is_masked_has_gradients(name):
    """Distributed training waits for them."""
    method = build(name).train()
    method.costs(tokens(), places(torch.zeros(4, L, dtype=torch.bool)), torch.ones(4)).sum().backward()
    assert [n for n, p in method.named_parameters() if p.grad is None] == []


# ---------------------------------------------------------------- one step


def step_law(w_NV: torch.Tensor, c: float, mask_id: int) -> torch.Tensor:
    """P(y) = c w_y and P(mask) = 1 - c sum_y w_y."""
    q_NV = c * w_NV
    q_NV[:, mask_id] = 0
    q_NV[:, mask_id] = 1 - q_NV.sum(-1)
    return q_NV


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("mask_id", [-1, 3])
@torch.no_grad()
def test_a_step_has_its_law(name, mask_id):
    """Chi-square over the mask and the tokens."""
    method = build(name, model__mask_id=mask_id)
    saying(method, some_distribution(method.vocab - 1))
    x, h, c = torch.full((100, 200), method.mask_id), torch.zeros(100, 200, 16), 0.4
    counts = torch.bincount(method.step(x, h, c, RowNoise(5, range(100)).streams("sample")).flatten(), minlength=method.vocab)
    law, cells = step_law(method.weights(h[0, :1]), c, method.mask_id)[0].double(), method.vocab - 1
    assert law[method.mask_id] == pytest.approx(0.6) and law.sum() == pytest.approx(1)
    right, wrong = (float(((counts - wanted) ** 2 / wanted).sum()) for wanted in (x.numel() * law, x.numel() * law.roll(1)))
    assert right < cells + 5 * math.sqrt(2 * cells) and wrong > 1000  # the test would see another law


def test_weights_above_one_always_leave_the_mask():
    """SEDD's weights may sum to more than 1 / c: a position then leaves for sure, and to tokens in proportion."""
    method = saying(build("sedd"), torch.tensor([8.0, 1.0] * 6))
    x, h = torch.full((50, 20), method.mask_id), torch.zeros(50, 20, 16)
    with torch.no_grad():
        counts = torch.bincount(method.step(x, h, 0.1, RowNoise(5, range(50)).streams("sample")).flatten(), minlength=13)
    assert counts[method.mask_id] == 0 and 0.8 < counts[:12:2].sum() / counts.sum() < 0.97


@torch.no_grad()
def test_the_chances_are_those_of_every_published_step():
    """(t - s) / t for MDLM; alpha is linear in t, so SEDD's Euler step dt sigma' s_y and its analytic one agree with it."""
    method, t = build("sedd"), torch.linspace(1, 1e-5, 9, dtype=torch.float64)
    t, s = t[:-1], t[1:]
    sigma_t, sigma_s = method.schedule.sigma(t), method.schedule.sigma(s)
    chances = method.chances(t, s)
    assert torch.allclose(chances, (t - s) / t)
    assert torch.allclose(chances, (t - s) * method.schedule.dsigma(t) / sigma_t.expm1())
    assert torch.allclose(chances, (sigma_t - sigma_s).expm1() / sigma_t.expm1())


@torch.no_grad()
def test_sedds_step_is_tweedies():
    """Brute force over the ids: staggered scores times the transposed transition matrix of the absorbing process."""
    method, t, s = build("sedd"), torch.tensor([0.6], dtype=torch.float64), torch.tensor([0.45], dtype=torch.float64)
    sigma, x, mask, n = method.schedule.sigma(t), torch.full((1, L), method.mask_id), method.mask_id, method.vocab
    delta = (sigma - method.schedule.sigma(s)).item()
    rate = torch.zeros(n, n, dtype=torch.float64)  # columns: from; everything falls into the mask
    rate[range(n), range(n)] = -1.0
    rate[mask, :] += 1.0
    scores = method.backbone(x, sigma.float())[0, 0].double().exp() / sigma.expm1() / (n - 1)
    scores[mask] = 1
    expected = torch.linalg.matrix_exp(-delta * rate) @ scores * torch.linalg.matrix_exp(delta * rate)[mask]
    law = step_law(method.weights(method.states(x, t.float())[0, :1]), method.chances(t, s).item(), mask)[0]
    assert torch.allclose(law.double(), expected, atol=1e-6)


@pytest.mark.parametrize("k", [0.3, 1.0, 5.0])
def test_a_float32_race_would_suppress_rare_tokens(k):
    """The public samplers draw argmax q / E with exponential E from uniform numbers of torch.rand.

    In float32 they are multiples of 2^-24, so E never falls below about 2^-24, but a token must beat the mask's q / E. A token
    of weight k 2^-24 against a mask of weight 1 is drawn 1 / (k (e^(1/k) - 1)) times as often as it should, in float64 exactly.
    The chance is counted, not sampled: only the largest uniform numbers let the token win, so all of those, against evenly
    spaced quantiles of the mask's number.
    """
    u = torch.rand(10_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(u * 2**24, (u * 2**24).round())
    reach, quantiles = 64, 1000
    mask_u = (torch.arange(quantiles, dtype=torch.float64) + 0.5) / quantiles

    def share(dtype, token_u):
        u = torch.cartesian_prod(token_u, mask_u).to(dtype)
        q = torch.tensor([k * 2**-24, 1.0], dtype=dtype)
        return ((q / (1e-10 - (u + 1e-10).log())).argmax(-1) == 0).double().mean().item() * reach / k

    float32_u = 1 - (1 + torch.arange(reach, dtype=torch.float64)) * 2**-24  # every one that torch.rand can give there
    float64_u = 1 - (torch.arange(reach * 8, dtype=torch.float64) + 0.5) / 8 * 2**-24
    assert share(torch.float32, float32_u) == pytest.approx(1 / (k * (math.exp(1 / k) - 1)), rel=0.03)
    assert share(torch.float64, float64_u) == pytest.approx(1.0, rel=0.02)


# ---------------------------------------------------------------- samplers


@pytest.mark.parametrize(("name", "options"), [("mdlm", {}), ("mdlm", {"cache": False}), ("sedd", {})])
@pytest.mark.parametrize("mask_id", [-1, 0, 5])
def test_no_mask_is_left(name, options, mask_id):
    """Wherever its id lies, and also when a single step leaves all to the last evaluation."""
    method = build(name, model__mask_id=mask_id)
    for steps in (1, 5):
        out = method.sample(replace(method.config.sampler, steps=steps, **options), RowNoise(0, range(40)))
        assert out.shape == (40, L) and not (out == method.mask_id).any() and len(out.unique()) > 4


@pytest.mark.parametrize("name", METHODS)
def test_many_steps_give_the_joint_distribution_and_one_step_only_the_marginals(name):
    joint = some_joint()
    method = oracle(name, joint)
    product = torch.einsum("a,b,c->abc", *(joint.sum([j for j in range(3) if j != i]) for i in range(3)))

    def distance(steps, law, rows=1000):
        out = method.sample(replace(method.config.sampler, steps=steps), RowNoise(3, range(rows)))
        counts = torch.bincount(out @ torch.tensor([9, 3, 1]), minlength=27)
        return 0.5 * (counts / rows - law.flatten()).abs().sum().item()

    # 1000 samples of 27 cells are off by about 0.06 in total variation.
    assert distance(40, joint) < 0.1 and distance(1, product) < 0.1
    assert distance(1, joint) > 0.2 and 0.5 * (joint - product).abs().sum() > 0.25


def test_rows_are_computed_again_only_where_that_matters_and_never_in_place():
    seen, mask = [], 9
    cache = RowCache(lambda x, t: seen.append(x.tolist()) or x[..., None].float() * 10, mask_id=mask)
    first = cache(torch.tensor([[mask, mask], [mask, 1], [mask, mask]]), 0.9)
    kept = first.clone()
    assert cache(torch.tensor([[mask, mask], [mask, 1], [mask, mask]]), 0.6) is first and len(seen) == 1
    second = cache(torch.tensor([[mask, 3], [2, 1], [mask, mask]]), 0.3)  # changed, full, as before
    assert second[0].flatten().tolist() == [90, 30] and seen[1:] == [[[mask, 3]]]
    assert torch.equal(first, kept)  # a watcher of an earlier step may decode it later


@pytest.mark.parametrize("steps", [4, 60])
def test_evaluations_are_those_that_happen_and_a_cache_changes_no_sample(monkeypatch, steps):
    method, rows, samples, states = build(), [], [], DDiT.states
    monkeypatch.setattr(DDiT, "states", lambda self, x, c: rows.append(len(x)) or states(self, x, c))
    for cache in (True, False):
        rows.clear()
        sampler = MdlmSampler(steps, cache)
        samples.append(method.sample(sampler, RowNoise(1, range(60))))
        assert sum(rows) / 60 == pytest.approx(sampler.evaluations(L), abs=0.6 if cache else 1.1)
    assert torch.equal(*samples)
    assert MdlmSampler(steps=10**6).evaluations(L) == L and MdlmSampler(steps=1).evaluations(L) == 1


@pytest.mark.parametrize("name", METHODS)
def test_what_is_left_is_sampled_or_the_most_probable(name):
    """Few tokens are left at t = 1e-5, so the ending is asked directly."""
    method, h = build(name), torch.randn(1, 16, generator=torch.Generator().manual_seed(1)).expand(5000, 16)
    u = torch.rand(5000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        w = method.weights(h[:1])[0]
        last = method.last_tokens(h, u)
    if name == "mdlm":
        assert (last == w.argmax()).all()
    else:
        counts = torch.bincount(last, minlength=VOCAB + 1)
        assert torch.allclose(counts / 5000, w / w.sum(), atol=5 * (0.25 / 5000) ** 0.5) and counts[method.mask_id] == 0
