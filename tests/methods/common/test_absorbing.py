"""Masked diffusion: the distribution of one step, the bound against brute force, and tokens that samplers must keep."""

import itertools
import math

import pytest
import torch

from jpeg_dlm.config_io import override
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.common.absorbing import Absorbing, RowCache, race, step_distribution
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.rng import RowNoise

METHODS = ["mdlm", "sedd"]
VOCAB, L = 12, 6
MICRO = {
    "data.vocab_size": VOCAB, "data.token_len": L, "model.hidden": 16, "model.depth": 1, "model.heads": 2,
    "model.cond_dim": 8, "model.freq_dim": 8, "sampler.steps": 8,
}  # fmt: skip


def places(mask_BL):
    return mask_BL.flatten().nonzero().squeeze(1)


def build(name: str, perturbed: float = 0.3, **options) -> Absorbing:
    """A tiny model; perturbed, because a fresh head is zero and its logits say nothing."""
    config = override(for_method(preset("smoke"), name), MICRO | {k.replace("__", "."): v for k, v in options.items()})
    method = build_method(config)
    assert isinstance(method, Absorbing)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in method.parameters():
            p.add_(perturbed * torch.randn(p.shape, generator=g))
    return method.eval()


def sampler_of(method, **options):
    return override(method.config, {f"sampler.{k}": v for k, v in options.items()}).sampler


def tokens(rows=4, length=L, vocab=VOCAB):
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(7))


def saying(method, p):
    """The method, with the probabilities p (one for each token) at every position whatever it sees."""
    with torch.no_grad():
        method.backbone.output_layer.linear.weight.zero_()
        scale = math.log(method.vocab - 1) if method.title == "SEDD-Absorb" else 0.0
        bias = torch.zeros(method.vocab)
        bias[[v for v in range(method.vocab) if v != method.mask_id]] = p.log().float() + scale
        method.backbone.output_layer.linear.bias.copy_(bias)
    return method


def oracle(method, joint):
    """The method, with the exact conditionals of a joint distribution of three tokens in place of its network."""

    n = len(joint)  # the values 0..n-1, and n for the mask
    table = torch.zeros(n + 1, n + 1, n + 1, 3, n)  # seen tokens, position -> distribution
    for seen in itertools.product(range(n + 1), repeat=3):
        p = torch.zeros_like(joint)
        places = tuple(slice(None) if v == n else slice(v, v + 1) for v in seen)
        p[places] = joint[places] / joint[places].sum()
        table[seen] = torch.stack([p.sum([j for j in range(3) if j != i]) for i in range(3)])
    scale = math.log(method.vocab - 1) if method.title == "SEDD-Absorb" else 0.0
    logits = torch.cat([table.log() + scale, torch.zeros(n + 1, n + 1, n + 1, 3, 1)], -1)
    method.states, method.backbone.head = lambda x_BL, t_B: logits[tuple(x_BL.T)], torch.clone
    return method


def some_joint():
    """Three tokens of three values that depend on each other: the marginals are far from it."""
    p = torch.rand(3, 3, 3, generator=torch.Generator().manual_seed(2)) ** 4
    return p / p.sum()


def chi_square(counts, p):
    """Pearson's statistic; with k cells its mean is k - 1 and its variance 2 (k - 1)."""
    expected = p.double() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


# ---------------------------------------------------------------- one step


@pytest.mark.parametrize("c", [1e-4, 0.3, 1.0])
def test_rows_of_a_step_sum_to_one(c):
    w = torch.rand(20, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q = step_distribution(w, c, mask_id=4)
    tokens_ = [v for v in range(9) if v != 4]
    assert torch.allclose(q.sum(-1), torch.ones(20, dtype=torch.float64)) and torch.allclose(q[:, tokens_], c * w[:, tokens_])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", ["exact", "float64", "float32"])
@pytest.mark.parametrize("mask_id", [-1, 3])
@torch.no_grad()
def test_every_way_of_drawing_has_the_law_of_the_step(name, dtype, mask_id):
    """Chi-square over the mask and the tokens; none is rare enough here for float32 to fail."""
    method = build(name, model__mask_id=mask_id)
    p = torch.rand(method.vocab - 1, generator=torch.Generator().manual_seed(1))
    method, c, p = saying(method, p / p.sum()), 0.4, p / p.sum()
    x = torch.full((100, 200), method.mask_id)
    h = torch.zeros(100, 200, 16)
    out = method.step(sampler_of(method, race_dtype=dtype), x, h, c, RowNoise(5, range(100)).streams("sample"))
    counts = torch.bincount(out.flatten(), minlength=method.vocab).double()
    law = step_distribution(method.weights(h[0, :1]), c, method.mask_id)[0]
    assert law[method.mask_id] == pytest.approx(0.6) and law.sum() == pytest.approx(1)
    cells = method.vocab - 1
    assert chi_square(counts, law) < cells + 5 * math.sqrt(2 * cells)
    assert chi_square(counts, law.roll(1)) > 1000  # the test would see another law


def test_weights_above_one_always_leave_the_mask():
    """SEDD's weights may sum to more than 1 / c: a position then leaves for sure, and to tokens in proportion."""
    method = saying(build("sedd"), torch.tensor([8.0, 1.0] * 6))
    x, h = torch.full((50, 20), method.mask_id), torch.zeros(50, 20, 16)
    for dtype in ("exact", "float64"):
        out = method.step(sampler_of(method, race_dtype=dtype), x, h, 0.1, RowNoise(5, range(50)).streams("sample"))
        counts = torch.bincount(out.flatten(), minlength=13)
        assert counts[method.mask_id] == 0 and 0.8 < counts[:12:2].sum() / counts.sum() < 0.97


@pytest.mark.parametrize("k", [0.3, 0.5, 1.0, 2.0, 5.0])
def test_a_float32_race_suppresses_rare_tokens(k):
    """A token of weight k 2^-24 against a mask of weight 1: in float32 it wins with f(k) of its share, in float64 with all.

    The chance is counted, not sampled: only the largest uniform numbers let the token win, so all of those, against evenly
    spaced quantiles of the mask's number.
    """
    reach, quantiles = 64, 1000
    mask_u = (torch.arange(quantiles, dtype=torch.float64) + 0.5) / quantiles

    def share(dtype, token_u):
        u = torch.cartesian_prod(token_u, mask_u).to(dtype)
        wins = race(torch.tensor([k * 2**-24, 1.0], dtype=dtype).expand_as(u), u) == 0
        return wins.double().mean().item() * reach / k

    float32_u = 1 - (1 + torch.arange(reach, dtype=torch.float64)) * 2**-24  # every one that torch.rand can give there
    float64_u = 1 - (torch.arange(reach * 8, dtype=torch.float64) + 0.5) / 8 * 2**-24
    assert share(torch.float32, float32_u) == pytest.approx(1 / (k * (math.exp(1 / k) - 1)), rel=0.03)
    # The 1e-10 in E is 0.0017 in units of 2^-24, and is all that float64 leaves of the bias.
    assert share(torch.float64, float64_u) == pytest.approx(1.0, rel=0.02)


def test_uniform_float32_numbers_are_multiples_of_two_to_the_minus_24():
    u = torch.rand(10_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(u * 2**24, (u * 2**24).round()) and not torch.equal(u * 2**23, (u * 2**23).round())


def test_rows_are_computed_again_only_where_that_matters():
    seen = []

    def states(x):
        seen.append(x.tolist())
        return x[..., None].float() * 10

    cache, mask = RowCache(states, mask_id=9), 9
    x = torch.tensor([[mask, mask], [mask, 1], [mask, mask]])
    assert cache(x)[2, 0] == 90 and cache(x.clone()).shape == (3, 2, 1) and len(seen) == 1
    x = torch.tensor([[mask, 3], [2, 1], [mask, mask]])  # changed, full, as before
    assert cache(x)[0].flatten().tolist() == [90, 30] and seen[1:] == [[[mask, 3]]]


# ---------------------------------------------------------------- the bound


@pytest.mark.parametrize("name", METHODS)
def test_with_the_true_conditionals_the_bound_is_the_likelihood(name):
    """Whatever the order in which tokens are uncovered, exact conditionals multiply to the joint: -log p(x), row by row."""
    joint = some_joint()
    method = oracle(build(name, data__vocab_size=3, data__token_len=3), joint)
    rows = torch.tensor(list(itertools.product(range(3), repeat=3)))
    repeats = 80
    found = method.likelihood(Batch(rows.repeat(repeats, 1)), RowNoise(0, range(27 * repeats)))
    nats = found.nats_B.view(repeats, 27).double()
    error = nats.std(0) / math.sqrt(repeats)
    assert ((nats.mean(0) + joint.flatten().log()).abs() < 5 * error).all()
    assert found.tokens_B.tolist() == [3] * 27 * repeats


@pytest.mark.parametrize("name", METHODS)
def test_independent_tokens_cost_their_entropy(name):
    """The optimal denoiser of independent tokens is their distribution: the mean bound is the entropy, and exact at once
    for equal probabilities."""
    p = torch.rand(VOCAB, generator=torch.Generator().manual_seed(1))
    p = p / p.sum()
    method = saying(build(name), p)
    x = torch.multinomial(p, 1000 * L, replacement=True, generator=torch.Generator().manual_seed(2)).view(1000, L)
    nats = method.likelihood(Batch(x), RowNoise(0, range(1000))).nats_B
    entropy = -(p * p.log()).sum() * L
    assert abs(nats.mean() - entropy) < 5 * nats.std() / math.sqrt(1000)
    even = saying(build(name), torch.full((VOCAB,), 1 / VOCAB))
    nats = even.likelihood(Batch(tokens()), RowNoise(0, range(4))).nats_B
    assert torch.allclose(nats, torch.full((4,), L * math.log(VOCAB)))


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
    method = build(name, data__token_len=3, perturbed=0.6)
    x0, rows, points = torch.tensor([1, 5, 2]), 3000, 100
    batch, noise = Batch(x0.expand(rows, 3)), RowNoise(0, range(rows))
    middle = (torch.arange(points, dtype=torch.float64) + 0.5) / points

    end = 1 / 0.999  # where the last token is masked
    wanted = (integrand(method, x0, middle * end).mean(0) * end).sum()
    nats = method.likelihood(batch, noise).nats_B.double()
    assert abs(nats.mean() - wanted) < 5 * nats.std() / math.sqrt(rows)

    t_min = method.config.objective.t_min
    wanted = integrand(method, x0, t_min + (1 - t_min) * middle).mean()
    losses = [method.losses(batch, RowNoise(seed, range(rows)))["nelbo"].item() for seed in range(8)]
    assert sum(losses) / 8 == pytest.approx(wanted.item(), rel=0.05)  # of one: a deviation of 4% (measured)


def test_the_bound_spreads_its_times_over_the_whole_batch(monkeypatch):
    """As many rows as tokens mask every number of tokens once, also in parts; more noise goes with more masks."""
    method, seen = build("sedd"), []

    def costs(x, places, t):
        seen.append(((places // L).bincount(minlength=len(x)), t))
        return torch.ones(x.shape)

    monkeypatch.setattr(method, "costs", costs)
    for rows in (range(0, 2), range(2, L)):
        found = method.likelihood(Batch(tokens(len(rows))), RowNoise(0, rows, total=L))
        assert found.nats_B.tolist() == pytest.approx([L / n * L for n in seen[-1][0].tolist()])
    assert sorted(torch.cat([n for n, _ in seen]).tolist()) == list(range(1, L + 1))
    many = method.likelihood(Batch(tokens(600)), RowNoise(1, range(600)))
    n, t = seen[-1]
    assert len(many.nats_B) == 600 and 0 <= t.min() and t.max() <= 1
    for k in range(1, L + 1):  # the k-th smallest of L uniform numbers has mean k / (L + 1) and deviation below 0.2
        assert t[n == k].mean().item() == pytest.approx(k / (L + 1), abs=5 * 0.2 / math.sqrt(100))


@pytest.mark.parametrize("name", METHODS)
@torch.no_grad()
def test_only_real_tokens_count(name):
    method = build(name)
    mask = torch.arange(L) < torch.tensor([6, 3, 5, 1])[:, None]
    found = method.likelihood(Batch(tokens(), mask), RowNoise(0, range(4)))
    whole = method.likelihood(Batch(tokens()), RowNoise(0, range(4)))
    assert found.tokens_B.tolist() == [6, 3, 5, 1] and whole.tokens_B.tolist() == [6] * 4
    assert found.nats_B[0] == whole.nats_B[0] and (found.nats_B <= whole.nats_B).all()
    costs = method.costs(tokens(), places(torch.ones(4, L, dtype=torch.bool)), torch.ones(4))
    only = method.costs(tokens(), places(mask), torch.ones(4))
    assert (costs != 0).all() and torch.equal(only != 0, mask)


@pytest.mark.parametrize("name", METHODS)
def test_every_parameter_gets_a_gradient(name):
    """Distributed training waits for it, also in a step in which by chance nothing is masked."""
    method = build(name).train()
    nothing = method.costs(tokens(), places(torch.zeros(4, L, dtype=torch.bool)), torch.ones(4)).sum()
    for loss in (nothing, method.total_loss(method.losses(Batch(tokens()), RowNoise(0, range(4))))):
        method.zero_grad(set_to_none=True)
        loss.backward()
        assert [n for n, p in method.named_parameters() if p.grad is None] == []
    assert all(p.grad.isfinite().all() for p in method.parameters())
    (group,) = method.parameter_groups()
    assert group.name == "flow" and set(group.parameters) == {n for n, _ in method.named_parameters()}
    assert all(name.startswith("backbone.") for name in method.state_dict())


@pytest.mark.parametrize("name", METHODS)
def test_the_loss_needs_neither_all_logits_nor_full_precision(name):
    method, batch, noise = build(name), Batch(tokens(64)), RowNoise(0, range(64))
    whole = method.losses(batch, noise)["nelbo"].item()
    assert build(name, objective__ce_chunk=5).losses(batch, noise)["nelbo"].item() == pytest.approx(whole, rel=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert method.losses(batch, noise)["nelbo"].item() == pytest.approx(whole, rel=0.05)
    parts = [
        method.losses(Batch(tokens(64)[first : first + 16]), RowNoise(0, range(first, first + 16), total=64))["nelbo"]
        for first in range(0, 64, 16)
    ]
    assert sum(parts).item() / 4 == pytest.approx(whole, rel=1e-5)


# ---------------------------------------------------------------- samplers

SAMPLERS = [
    *(("mdlm", {"race_dtype": d, "cache": c, "final": f}) for d, c, f in (
        ("exact", True, "greedy"), ("exact", False, "sampled"), ("float64", True, "sampled"), ("float32", True, "greedy"),
    )),
    *(("sedd", {"race_dtype": d, "solver": s}) for d, s in (
        ("exact", "analytic"), ("exact", "euler"), ("float64", "analytic"), ("float32", "euler"),
    )),
]  # fmt: skip
each_sampler = pytest.mark.parametrize(("name", "options"), SAMPLERS)


@each_sampler
def test_given_tokens_survive(name, options):
    method = build(name)
    given = tokens(5)
    given[torch.rand(5, L, generator=torch.Generator().manual_seed(0)) < 0.6] = -1
    given[0], given[1] = tokens(1)[0], -1  # nothing to fill, everything to fill
    out = method.sample(sampler_of(method, **options), RowNoise(0, range(5)), given_BL=given)
    assert torch.equal(out[given >= 0], given[given >= 0]) and out.max() < VOCAB and out.min() >= 0
    free = given < 0
    assert not torch.equal(out[free], method.sample(sampler_of(method, **options), RowNoise(1, range(5)), None, given)[free])


@each_sampler
@pytest.mark.parametrize("mask_id", [-1, 0, 5])
def test_no_mask_is_left(name, options, mask_id):
    """Wherever its id lies, and also when a single step leaves all to the last evaluation."""
    method = build(name, model__mask_id=mask_id)
    for steps in (1, 5):
        out = method.sample(sampler_of(method, steps=steps, **options), RowNoise(0, range(40)))
        assert out.shape == (40, L) and not (out == method.mask_id).any() and len(out.unique()) > 4


@each_sampler
def test_a_sample_is_the_same_in_any_batch(name, options):
    method = build(name)
    sampler = sampler_of(method, **options)
    together = method.sample(sampler, RowNoise(1, range(6)))
    alone = torch.cat([method.sample(sampler, RowNoise(1, [i])) for i in range(6)])
    assert torch.equal(alone, together) and torch.equal(method.sample(sampler, RowNoise(1, [4, 1])), together[[4, 1]])
    assert len({tuple(row) for row in together.tolist()}) == 6
    assert not torch.equal(method.sample(sampler, RowNoise(2, range(6))), together)


@each_sampler
def test_watching_shows_tokens_at_every_step_and_changes_nothing(name, options):
    method, seen = build(name), []
    sampler = sampler_of(method, **options)
    watched = method.sample(sampler, RowNoise(1, [0, 1]), lambda k, n, t, decode: seen.append((k, n, t, decode().clone())))
    assert torch.equal(watched, method.sample(sampler, RowNoise(1, [0, 1])))
    assert [k for k, *_ in seen] == list(range(9)) and {n for _, n, *_ in seen} == {8}
    times = [t for *_, t, _ in seen]
    assert times == sorted(times) and times[0] == 0.0 and times[-1] == 1.0
    assert all(x.shape == (2, L) and x.max() < VOCAB for *_, x in seen) and torch.equal(seen[-1][3], watched)


@pytest.mark.parametrize("name", METHODS)
def test_many_steps_give_the_joint_distribution_and_one_step_only_the_marginals(name):
    joint = some_joint()
    method = oracle(build(name, data__vocab_size=3, data__token_len=3), joint)
    marginals = [joint.sum([j for j in range(3) if j != i]) for i in range(3)]
    product = torch.einsum("a,b,c->abc", *marginals)

    def distance(steps, law, rows=1000):
        out = method.sample(sampler_of(method, steps=steps), RowNoise(3, range(rows)))
        counts = torch.bincount(out @ torch.tensor([9, 3, 1]), minlength=27)
        return 0.5 * (counts / rows - law.flatten()).abs().sum().item()

    # 1000 samples of 27 cells are off by about 0.06 in total variation.
    assert distance(40, joint) < 0.1 and distance(1, product) < 0.1
    assert distance(1, joint) > 0.2 and 0.5 * (joint - product).abs().sum() > 0.25


@pytest.mark.parametrize("name", METHODS)
def test_training_finds_which_tokens_there_are(name):
    method = build(name, perturbed=0).train()
    optimizer = torch.optim.AdamW(method.parameters(), lr=2e-2)
    coins = torch.randint(0, 2, (32, L), generator=torch.Generator().manual_seed(0))
    batch, history = Batch(2 + 5 * coins), []
    for step in range(50):
        loss = method.losses(batch, RowNoise(0, range(32), step))["nelbo"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    assert history[0] == pytest.approx(math.log(VOCAB), rel=0.3)
    assert sum(history[-10:]) / 10 < 1.2 * math.log(2)
    sampled = method.eval().sample(sampler_of(method), RowNoise(0, range(8)))
    assert ((sampled == 2) | (sampled == 7)).float().mean() > 0.9
