"""LangFlow against its definitions: the process, the posterior, the proposal, the step, a slow loss, the sampler."""

import math

import pytest
import torch
import torch.nn.functional as F

from jpeg_dlm.config import validate
from jpeg_dlm.config_io import from_dict, override, to_dict
from jpeg_dlm.errors import CheckpointError, UsageError
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.langflow import (
    MIN_SCALE,
    GumbelProposal,
    LangFlow,
    alpha_sigma,
    ddim_step,
    row_means,
    skip_scale,
)
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.training.optim import build_optimizer, schedule_factor, set_learning_rates

B, L, V, H = 4, 6, 20, 16
TINY = {
    "data.vocab_size": V, "data.token_len": L, "model.hidden": H, "model.heads": 2, "model.depth": 2, "model.freq_dim": 8,
    "model.cond_dim": 8, "train.steps": 100, "sampler.steps": 5,
}  # fmt: skip


def tiny(**options):
    return validate(
        override(for_method(preset("smoke"), "langflow"), TINY | {k.replace("__", "."): v for k, v in options.items()})
    )


def build(perturbed=0.1, **options) -> LangFlow:
    """A tiny model; perturbed, because fresh heads are zero and stop every gradient that would pass through them."""
    method = build_method(tiny(**options))
    assert isinstance(method, LangFlow)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in method.backbone.parameters():
            p.add_(perturbed * torch.randn(p.shape, generator=g))
    return method.train()


def tokens(rows=B):
    return torch.randint(0, V, (rows, L), generator=torch.Generator().manual_seed(7))


def noise(rows=B, step=50):
    return RowNoise(0, range(rows), step)


GAMMAS = torch.tensor([-6.0, -1.0, 0.0, 2.6412, 4.7, 14.532], dtype=torch.float64)

# ---------------------------------------------------------------- the process


def test_the_process_keeps_variance_and_gamma_is_the_log_ratio():
    alpha, sigma = alpha_sigma(GAMMAS)
    assert torch.allclose(alpha**2 + sigma**2, torch.ones_like(GAMMAS))
    assert torch.allclose(2 * (sigma / alpha).log(), GAMMAS)


def test_skip_scale_is_alpha_over_sigma_squared():
    alpha, sigma = alpha_sigma(GAMMAS)
    assert torch.allclose(skip_scale(GAMMAS), alpha / sigma**2)
    assert skip_scale(torch.tensor([-80.0, 200.0])).isfinite().all()


def test_a_step_is_ddim():
    g = torch.Generator().manual_seed(1)
    z, x = torch.randn(2, 3, 5, generator=g, dtype=torch.float64), torch.randn(2, 3, 5, generator=g, dtype=torch.float64)
    for t, s in ((14.0, 5.0), (5.0, 4.9), (3.0, -9.0)):
        (a_t, a_s), (s_t, s_s) = (pair.tolist() for pair in alpha_sigma(torch.tensor([t, s], dtype=torch.float64)))
        eps = (z - a_t * x) / s_t
        assert torch.allclose(ddim_step(z, x, t, s), a_s * x + s_s * eps, atol=1e-12)


def test_a_step_with_the_truth_stays_on_the_path():
    g = torch.Generator().manual_seed(2)
    x, eps = torch.randn(3, 4, generator=g), torch.randn(3, 4, generator=g)
    alpha, sigma = alpha_sigma(torch.tensor([6.0, 3.0]))
    moved = ddim_step(alpha[0] * x + sigma[0] * eps, x, 6.0, 3.0)
    assert moved.dtype == torch.float32 and torch.allclose(moved, alpha[1] * x + sigma[1] * eps, atol=1e-6)


# ---------------------------------------------------------------- the proposal


def proposal(loc=4.723, scale=0.852, entropy=7.02):
    return GumbelProposal(loc, scale, entropy)


def test_bounds_are_the_released_ones():
    q = torch.tensor([0.0, 1e-5, 1 - 1e-5, 1.0], dtype=torch.float64)
    assert proposal().quantile(q).tolist() == pytest.approx([2.6412, 2.6412, 14.5320, 14.5320], abs=1e-4)


def test_quantiles_invert_the_distribution():
    q = torch.tensor([1e-4, 0.1, 0.5, 0.99], dtype=torch.float64)
    p = proposal()
    gamma = p.quantile(q)
    assert (torch.exp(-torch.exp(-(gamma - 4.723) / 0.852))).tolist() == pytest.approx(q.tolist(), rel=1e-5)
    assert gamma[2].item() == pytest.approx(torch.distributions.Gumbel(4.723, 0.852).icdf(torch.tensor(0.5)).item(), rel=1e-5)
    assert torch.allclose(p.predicted_loss(gamma), 7.02 * q, rtol=1e-5) and not gamma.requires_grad


def test_the_proposal_finds_the_curve_of_the_loss():
    """With losses that follow a Gumbel curve, its own loss is least there, and descending finds it."""
    true, p = proposal(3.5, 0.6, 2.5), proposal(4.2, 0.852, 3.5)
    gamma = torch.linspace(1, 8, 200)
    target = true.predicted_loss(gamma).detach()
    method = build()
    method.proposal = p
    assert method.proposal_loss(target, gamma) > 0.1
    optimizer = torch.optim.Adam(p.parameters(), lr=0.03)
    for _ in range(400):
        optimizer.zero_grad()
        method.proposal_loss(target, gamma).backward()
        optimizer.step()
        p.project()
    assert [x.item() for x in (p.loc, p.scale, p.entropy)] == pytest.approx([3.5, 0.6, 2.5], abs=0.02)


@pytest.mark.parametrize("name, low, high", [("loc", 3.0, 4.0), ("scale", 0.4, 0.8), ("entropy", 2.0, 3.0)])
def test_the_proposals_gradient_points_to_the_curve(name, low, high):
    true = {"loc": 3.5, "scale": 0.6, "entropy": 2.5}
    gamma = torch.linspace(1, 8, 200)
    target = proposal(**true).predicted_loss(gamma).detach()
    method = build()
    for value, sign in ((low, -1), (high, 1)):
        method.proposal = proposal(**(true | {name: value}))
        method.proposal_loss(target, gamma).backward()
        assert math.copysign(1, getattr(method.proposal, name).grad.item()) == sign


def test_a_step_too_far_is_taken_back():
    method = build()
    with torch.no_grad():
        method.proposal.scale.fill_(-0.3)
        method.proposal.entropy.fill_(-1.0)
    method.after_step(0, 100)
    assert method.proposal.scale.item() == pytest.approx(MIN_SCALE) and method.proposal.entropy.item() == 0


def test_narrow_models_start_at_less_noise_and_the_released_size_at_the_released_one():
    assert tiny().objective.gumbel_loc < 4
    for name in ("lm1b", "owt1024"):  # one set of values for both vocabularies
        released = for_method(preset(name), "langflow").objective
        assert (released.gumbel_loc, released.gumbel_scale, released.gumbel_entropy) == (4.723, 0.852, 7.02)
        assert (released.proposal_weight, released.proposal_rate) == (1.0, 1.0)


# ---------------------------------------------------------------- the denoiser


def test_embeddings_are_normalized():
    E = build().backbone.embeddings()
    assert E.shape == (V, H) and torch.allclose(E.norm(dim=1), torch.full((V,), math.sqrt(H)))


@torch.no_grad()
def test_a_fresh_network_gives_the_posterior_of_the_noise():
    """A zero head leaves the skip logits, which are Bayes' rule with all tokens equally likely."""
    method = build_method(tiny()).eval()
    E = method.backbone.embeddings()
    gamma, z = torch.tensor([1.0, 3.0]), torch.randn(2, L, H)
    x, best = method.guess(method.states(z, gamma, torch.zeros_like(z)), E)
    alpha, sigma = alpha_sigma(gamma)
    for b in range(2):
        for i in range(L):
            p = torch.softmax(-((z[b, i] - alpha[b] * E) ** 2).sum(1) / (2 * sigma[b] ** 2), 0)
            assert torch.allclose(x[b, i], p @ E, atol=1e-4) and best[b, i] == p.argmax()


@torch.no_grad()
def test_little_noise_is_decoded_without_error():
    method = build(perturbed=0.01).eval()
    E = method.backbone.embeddings()
    gamma = torch.full((B,), -4.0)
    alpha, sigma = alpha_sigma(gamma[0])
    z = alpha * E[tokens()] + sigma * torch.randn(B, L, H)
    x, best = method.guess(method.states(z, gamma, torch.zeros_like(z)), E)
    assert torch.equal(best, tokens()) and torch.allclose(x, E[tokens()], atol=1e-2)


@torch.no_grad()
def test_self_conditioning_starts_without_effect_and_then_has_one():
    z, x = torch.randn(2, 2, L, H)
    fresh = build_method(tiny()).backbone
    assert torch.equal(fresh.conditioned(z, x), z)
    used = build().backbone
    weight = used.self_cond_proj.weight
    assert torch.allclose(used.conditioned(z, x), z + z @ weight[:, :H].T + x @ weight[:, H:].T, atol=1e-6)


# ---------------------------------------------------------------- the loss


def slow_losses(method, batch, n, skip):
    """One position at a time."""
    E = F.normalize(method.backbone.vocab_embed.embedding, dim=1) * math.sqrt(H)
    loc, scale, entropy = (p.item() for p in (method.proposal.loc, method.proposal.scale, method.proposal.entropy))
    q = (n.uniform("time") + torch.arange(B)) / B
    gamma = (loc - scale * torch.log(-torch.log(q.double()))).float()
    eps, coin = n.normal("state", L, H), n.uniform("self_condition")
    ce, rows = [], []
    for b in range(B):
        a, s = math.sqrt(1 / (1 + math.exp(gamma[b]))), math.sqrt(1 / (1 + math.exp(-gamma[b])))
        z = torch.stack([a * E[batch.tokens_BL[b, i]] + s * eps[b, i] for i in range(L)])[None]

        def logits(x, z=z, b=b, a=a, s=s):
            inputs = z + method.backbone.self_cond_proj(torch.cat([z, x], -1))
            h = method.backbone.states(inputs, method.backbone.condition(gamma[b : b + 1]))
            return method.backbone.head(h) + skip * a / s**2 * z @ E.T

        x = torch.zeros_like(z)
        if coin[b] < method.config.objective.sc_prob:
            x = (logits(x).softmax(-1) @ E).detach()
        nll = F.cross_entropy(logits(x)[0], batch.tokens_BL[b], reduction="none")
        real = torch.ones(L, dtype=torch.bool) if batch.mask_BL is None else batch.mask_BL[b]
        ce += nll[real].tolist()
        rows.append((nll[real].mean().item() - entropy * math.exp(-math.exp(-(gamma[b].item() - loc) / scale))) ** 2)
    return sum(ce) / len(ce), sum(rows) / len(rows)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("step, skip", [(0, 0.0), (25, 0.5), (50, 1.0)])
def test_losses_are_what_they_say(masked, step, skip):
    method = build(objective__sc_prob=0.5)  # 100 steps: the skip logits fade in over 50
    mask = torch.arange(L) < torch.tensor([6, 2, 4, 1])[:, None] if masked else None
    batch, n = Batch(tokens(), mask), noise(step=step)
    assert (n.uniform("self_condition") < 0.5).unique().tolist() == [False, True] or step != 50
    terms = method.losses(batch, n)
    with torch.no_grad():
        ce, own = slow_losses(method, batch, n, skip)
    assert terms["ce"].item() == pytest.approx(ce, rel=1e-4)
    assert terms["proposal"].item() == pytest.approx(own, rel=1e-4)


def test_skip_logits_are_whole_outside_training():
    method = build()
    assert [method.skip_weight(k) for k in (0, 25, 50, 1000)] == [0, 0.5, 1, 1]
    assert build(objective__skip_ramp=4).skip_weight(1) == 0.25
    assert method.eval().skip_weight(0) == 1


def test_chunks_change_nothing():
    whole, parts = build(objective__sc_prob=1.0), build(objective__sc_prob=1.0, objective__ce_chunk=5)
    a, b = (m.losses(Batch(tokens()), noise()) for m in (whole, parts))
    assert a["ce"].item() == pytest.approx(b["ce"].item(), rel=1e-6)
    for m, terms in ((whole, a), (parts, b)):
        m.total_loss(terms).backward()
    for p, r in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.allclose(p.grad, r.grad, atol=1e-6)
    assert torch.equal(whole.sample(whole.config.sampler, noise()), parts.sample(parts.config.sampler, noise()))


@pytest.mark.parametrize("sc_prob, step", [(0.0, 0), (1.0, 50)])
def test_every_parameter_gets_a_gradient(sc_prob, step):
    method = build(objective__sc_prob=sc_prob)
    method.total_loss(method.losses(Batch(tokens()), noise(step=step))).backward()
    assert [n for n, p in method.named_parameters() if p.grad is None] == []
    assert all(p.grad != 0 for p in method.proposal.parameters())
    groups = method.parameter_groups()
    assert [(g.name, g.factor) for g in groups] == [("flow", 1.0), ("proposal", method.config.objective.proposal_rate)]
    assert {n for g in groups for n in g.parameters} == dict(method.named_parameters()).keys()


def test_network_and_proposal_do_not_move_each_other():
    method = build()
    terms = method.losses(Batch(tokens()), noise())
    terms["ce"].backward(retain_graph=True)
    assert all(p.grad is None for p in method.proposal.parameters())
    method.zero_grad(set_to_none=True)
    terms["proposal"].backward()
    assert all(p.grad is None for p in method.backbone.parameters())


def test_row_means_leave_padding_out():
    x, mask = torch.arange(8.0).view(2, 4), torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    assert row_means(x, mask).tolist() == [0.5, 0] and row_means(x, None).tolist() == [1.5, 5.5]


def test_bf16_training_is_finite_and_close():
    method = build()
    full = method.losses(Batch(tokens()), noise())["ce"]
    with torch.autocast("cpu", torch.bfloat16):
        half = method.losses(Batch(tokens()), noise())["ce"]
    assert half.item() == pytest.approx(full.item(), rel=0.05)


def test_training_on_one_word_learns_it():
    method = build(perturbed=0)
    optimizer = torch.optim.AdamW(method.parameters(), lr=1e-2)
    history = []
    for step in range(40):
        terms = method.losses(Batch(torch.full((B, L), 3)), noise(step=step))
        optimizer.zero_grad()
        method.total_loss(terms).backward()
        optimizer.step()
        method.after_step(step, 100)
        history.append(terms["ce"].item())
    assert history[0] == pytest.approx(math.log(V), abs=1e-4) and sum(history[-10:]) < 0.2 * sum(history[:10])
    assert (method.eval().sample(method.config.sampler, noise()) == 3).all()


# ---------------------------------------------------------------- context

COUNTED, STARTS = 32, 64  # ids, rows per step


def counted_rows(seed, rows=STARTS):
    """Rows that count upward from any id, modulo the number of ids: a neighbor tells all, a token by itself nothing."""
    starts = torch.randint(0, COUNTED, (rows, 1), generator=torch.Generator().manual_seed(seed))
    return (starts + torch.arange(8)) % COUNTED


def trained_on_counting(steps=250, **options):
    """Train with the optimizer, rates and clipping of a run."""
    sizes = {"data__vocab_size": COUNTED, "data__token_len": 8, "model__hidden": 32, "train__steps": steps, "train__lr": 4e-3}
    method = build(perturbed=0, **(sizes | options))
    train = method.config.train
    optimizer = build_optimizer(method.parameter_groups(), train)
    for step in range(steps):
        set_learning_rates(optimizer, schedule_factor(step, train))
        terms = method.losses(Batch(counted_rows(step)), RowNoise(0, range(STARTS), step, total=STARTS))
        optimizer.zero_grad()
        method.total_loss(terms).backward()
        torch.nn.utils.clip_grad_norm_(method.parameters(), train.clip)
        optimizer.step()
        method.after_step(step, steps)
    return method.eval()


@torch.no_grad()
def beyond_the_token(method, q):
    """Return the loss at the q-quantile of the proposal minus that of Bayes' rule for each token by itself, in nats."""
    rows = counted_rows(10_000, 512)
    E, gamma = method.backbone.embeddings(), method.proposal.quantile(torch.tensor(q)).float().expand(len(rows))
    alpha, sigma = alpha_sigma(gamma[0])
    z = alpha * E[rows] + sigma * torch.randn(*rows.shape, E.shape[1], generator=torch.Generator().manual_seed(5))
    found = method.logits(method.states(z, gamma, torch.zeros_like(z)), E)
    alone = -(torch.cdist(z, alpha * E[None]) ** 2) / (2 * sigma**2)  # all ids are equally frequent
    losses = [F.cross_entropy(x.flatten(0, 1), rows.flatten()).item() for x in (found, alone)]
    return losses[0] - losses[1]


def test_a_short_training_learns_context():
    method = trained_on_counting()
    gaps = [beyond_the_token(method, q) for q in (0.3, 0.5, 0.7)]
    assert max(gaps) < -0.3, gaps


def test_a_proposal_with_its_own_rate_follows_the_loss_sooner():
    """From a start that is far off, in a few steps; its gradient does not take the network's share of the clipped norm."""

    def misfit(**options):
        method = trained_on_counting(steps=60, objective__gumbel_loc=5.0, **options).train()
        return method.losses(Batch(counted_rows(10_000)), RowNoise(0, range(STARTS), 60, total=STARTS))["proposal"].item()

    assert misfit() < 0.5 * misfit(objective__proposal_rate=1.0, objective__proposal_weight=1.0)


# ---------------------------------------------------------------- sampling


@torch.no_grad()
def test_the_sampler_follows_its_definition():
    method = build(perturbed=0.3).eval()
    got = method.sample(method.config.sampler, RowNoise(3, [0, 1]))
    E, p = method.backbone.embeddings(), method.proposal
    z, x = RowNoise(3, [0, 1]).normal("sample", L, H), torch.zeros(2, L, H)
    q = [1 - 1e-5 - k * (1 - 2e-5) / 4 for k in range(5)]
    gamma = [p.loc.item() - p.scale.item() * math.log(-math.log(v)) for v in q]
    for k in range(5):
        g = torch.full((2,), gamma[k])
        h = method.backbone.states(method.backbone.conditioned(z, x), method.backbone.condition(g))
        logits = method.backbone.head(h) + skip_scale(g)[0] * z @ E.T
        x = logits.softmax(-1) @ E
        if k < 4:
            (a, a1), (s, s1) = alpha_sigma(torch.tensor(gamma[k : k + 2]))
            z = a1 * x + s1 * (z - a * x) / s
    assert torch.equal(got, logits.argmax(-1)) and len(got.unique()) > 1


def test_a_perfect_denoiser_lands_on_the_target(monkeypatch):
    method = build().eval()
    seen = []

    def guess(states, E):
        seen.append(states[..., H:])
        return E[tokens()], tokens()

    monkeypatch.setattr(method, "guess", guess)
    assert torch.equal(method.sample(method.config.sampler, noise()), tokens())
    last = method.proposal.quantile(torch.zeros(())).float()
    z, (alpha, sigma) = seen[-1] / skip_scale(last), alpha_sigma(last)
    eps = (z - alpha * method.backbone.embeddings()[tokens()]) / sigma
    assert eps.std().item() == pytest.approx(1, abs=0.1)  # the noise that is left is the noise it began with
    assert torch.allclose(eps, noise().normal("sample", L, H), atol=0.05)


def test_a_sample_is_the_same_in_any_batch():
    method = build(perturbed=0.5).eval()
    together = method.sample(method.config.sampler, RowNoise(1, range(6)))
    alone = torch.cat([method.sample(method.config.sampler, RowNoise(1, [i])) for i in range(6)])
    assert torch.equal(alone, together) and len({tuple(row) for row in together.tolist()}) > 3
    assert not torch.equal(method.sample(method.config.sampler, RowNoise(2, range(6))), together)


@pytest.mark.parametrize("steps", [1, 5])
def test_watching_shows_every_step_and_changes_nothing(steps):
    method = build(perturbed=0.3).eval()
    sampler = override(method.config, {"sampler.steps": steps}).sampler
    seen = []
    watched = method.sample(sampler, noise(2), lambda k, n, t, decode: seen.append((k, n, t, decode())))
    assert torch.equal(watched, method.sample(sampler, noise(2)))
    assert [k for k, *_ in seen] == list(range(steps + 1)) and {n for _, n, *_ in seen} == {steps}
    assert [t for *_, t, _ in seen] == sorted(t for *_, t, _ in seen) and seen[-1][2] == 1.0
    assert torch.equal(seen[-1][3], watched) and sampler.evaluations(L) == steps and str(steps) in sampler.label()


def test_given_embeddings_keep_their_noise_until_they_are_clean():
    """With everything given, the state is alpha E[x] + sigma eps of the first noise at each step, so nothing else is said."""
    method = build().eval()
    seen = []
    states = method.states
    method.states = lambda z, gamma, x: seen.append((z, gamma)) or states(z, gamma, x)
    given = tokens()
    assert method.sample(tiny().sampler, noise(), None, given).equal(given)
    eps = noise().normal("sample", L, method.config.model.hidden)
    clean = method.backbone.embeddings()[given]
    for z, gamma in seen[1:]:
        alpha, sigma = alpha_sigma(gamma[0])
        alpha_0, sigma_0 = alpha_sigma(seen[0][1][0])
        assert torch.allclose(z, alpha * clean + sigma * (eps - alpha_0 * clean) / sigma_0, atol=1e-3)


# ---------------------------------------------------------------- configuration and files


def test_presets_are_the_comparisons_settings():
    lm1b, owt = (for_method(preset(name), "langflow") for name in ("lm1b", "owt1024"))
    assert (lm1b.data.tokenizer, lm1b.data.vocab_size, lm1b.sampler.steps) == ("bert-base-uncased", 30_522, 128)
    assert (owt.data.tokenizer, owt.data.vocab_size, owt.sampler.steps) == ("gpt2", 50_257, 1024)
    assert (owt.train.lr, owt.train.warmup, owt.train.steps, owt.model.dropout) == (3e-4, 2500, 1_000_000, 0.1)
    with torch.device("meta"):
        size = sum(p.numel() for p in LangFlow(owt).parameters())
    assert size == 169_625_681 + 2 * 768 * 768 + 3  # the shared transformer, the self-conditioning map, the proposal
    assert from_dict(to_dict(lm1b)) == validate(lm1b)


def published(vocab):
    tensors = {k: torch.zeros(vocab, H) if "vocab_embed" in k else v for k, v in build().state_dict().items()}
    return tensors


def test_a_published_file_tells_its_config():
    base = for_method(preset("smoke"), "langflow")
    for vocab, tokenizer, length in ((50_257, "gpt2", 1024), (30_522, "bert-base-uncased", 128)):
        config = LangFlow.config_of(published(vocab), base)
        assert (config.data.tokenizer, config.data.vocab_size, config.data.token_len) == (tokenizer, vocab, length)
        assert (config.model.hidden, config.model.depth, config.model.cond_dim, config.model.freq_dim) == (H, 2, 8, 8)
    with pytest.raises(CheckpointError):
        LangFlow.config_of({}, base)


def test_a_published_file_is_read_with_its_rotary_constant():
    source, target = build(), build(perturbed=0)
    tensors = source.state_dict()
    assert {"proposal.loc", "proposal.scale", "proposal.entropy", "backbone.self_cond_proj.weight"} <= tensors.keys()
    target.import_state(tensors, "file")
    assert all(torch.equal(t, source.state_dict()[n]) for n, t in target.export_state().items())


@pytest.mark.parametrize("option", ["gumbel_scale", "gumbel_entropy", "proposal_weight"])
def test_impossible_options_are_refused(option):
    with pytest.raises(UsageError, match=option):
        tiny(**{f"objective__{option}": 0.0})
