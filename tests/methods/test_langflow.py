"""LangFlow against its definitions: the posterior, the proposal, a slow loss, the sampler."""

import math

import pytest
import torch
import torch.nn.functional as F
from micro import micro_config, micro_model

from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.langflow import MIN_SCALE, LangFlow, alpha_sigma, skip_scale
from jpeg_dlm.methods.registry import for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.util.rng import RowNoise

B, L, V, H = 4, 6, 20, 16
SIZES = {"data__vocab_size": V, "data__token_len": L, "model__depth": 2, "train__steps": 100, "sampler__steps": 5}


def build(scale=0.1, **options) -> LangFlow:
    """A micro model whose proposal is as configured."""
    method = micro_model("langflow", scale, **SIZES | options).train()
    method.proposal = micro_model("langflow", 0, **SIZES | options).proposal
    return method


def tokens(rows=B):
    return torch.randint(0, V, (rows, L), generator=torch.Generator().manual_seed(7))


def noise(rows=B, step=50):
    return RowNoise(0, range(rows), step)


# ---------------------------------------------------------------- the proposal


def test_a_step_too_far_is_taken_back():
    method = build()
    with torch.no_grad():
        method.proposal.scale.fill_(-0.3)
        method.proposal.entropy.fill_(-1.0)
    method.after_step(0, 100)
    assert method.proposal.scale.item() == pytest.approx(MIN_SCALE) and method.proposal.entropy.item() == 0


def test_narrow_models_start_at_less_noise_and_the_released_size_at_the_released_one():
    assert micro_config("langflow").objective.gumbel_loc < 4
    for name in ("lm1b", "owt1024"):  # one set of values for both vocabularies
        released = for_method(preset(name), "langflow").objective
        assert (released.gumbel_loc, released.gumbel_scale, released.gumbel_entropy) == (4.723, 0.852, 7.02)
        assert (released.proposal_weight, released.proposal_rate) == (1.0, 1.0)


# ---------------------------------------------------------------- the denoiser


@torch.no_grad()
def test_a_fresh_network_gives_the_posterior_of_the_noise():
    """A zero head leaves the skip logits, which are Bayes' rule with all tokens equally likely."""
    method = build(0).eval()
    E = method.backbone.embeddings()
    gamma, z = torch.tensor([1.0, 3.0]), torch.randn(2, L, H)
    x, best = method.guess(method.states(z, gamma, torch.zeros_like(z)), E)
    alpha, sigma = alpha_sigma(gamma)
    for b in range(2):
        for i in range(L):
            p = torch.softmax(-((z[b, i] - alpha[b] * E) ** 2).sum(1) / (2 * sigma[b] ** 2), 0)
            assert torch.allclose(x[b, i], p @ E, atol=1e-4) and best[b, i] == p.argmax()


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
            h = method.backbone.embedded_states(inputs, gamma[b : b + 1])
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


def test_network_and_proposal_do_not_move_each_other():
    method = build()
    terms = method.losses(Batch(tokens()), noise())
    terms["ce"].backward(retain_graph=True)
    assert all(p.grad is None for p in method.proposal.parameters())
    method.zero_grad(set_to_none=True)
    terms["proposal"].backward()
    assert all(p.grad is None for p in method.backbone.parameters())


# ---------------------------------------------------------------- sampling


@torch.no_grad()
def test_the_sampler_follows_its_definition():
    method = build(scale=0.3).eval()
    got = method.sample(method.config.sampler, RowNoise(3, [0, 1]))
    E, p = method.backbone.embeddings(), method.proposal
    z, x = RowNoise(3, [0, 1]).normal("sample", L, H), torch.zeros(2, L, H)
    q = [1 - 1e-5 - k * (1 - 2e-5) / 4 for k in range(5)]
    gamma = [p.loc.item() - p.scale.item() * math.log(-math.log(v)) for v in q]
    for k in range(5):
        g = torch.full((2,), gamma[k])
        h = method.backbone.embedded_states(method.backbone.conditioned(z, x), g)
        logits = method.backbone.head(h) + skip_scale(g)[0] * z @ E.T
        x = logits.softmax(-1) @ E
        if k < 4:
            (a, a1), (s, s1) = alpha_sigma(torch.tensor(gamma[k : k + 2]))
            z = a1 * x + s1 * (z - a * x) / s
    assert torch.equal(got, logits.argmax(-1)) and len(got.unique()) > 1


def test_given_embeddings_keep_their_noise_until_they_are_clean():
    """With everything given, the state is alpha E[x] + sigma eps of the first noise at each step, so nothing else is said."""
    method = build().eval()
    seen = []
    states = method.states
    method.states = lambda z, gamma, x: seen.append((z, gamma)) or states(z, gamma, x)
    given = tokens()
    assert method.sample(method.config.sampler, noise(), None, given).equal(given)
    eps = noise().normal("sample", L, method.config.model.hidden)
    clean = method.backbone.embeddings()[given]
    for z, gamma in seen[1:]:
        alpha, sigma = alpha_sigma(gamma[0])
        alpha_0, sigma_0 = alpha_sigma(seen[0][1][0])
        assert torch.allclose(z, alpha * clean + sigma * (eps - alpha_0 * clean) / sigma_0, atol=1e-3)


def test_the_likelihood_of_a_perfect_model_of_single_tokens_is_theirs():
    """Skip logits account for the noisy embeddings, so a head that knows token frequencies alone is the optimal denoiser."""
    method, draws = micro_model("langflow"), 256
    generator = torch.Generator().manual_seed(0)
    scores = 1.5 * torch.randn(300, generator=generator)
    with torch.no_grad():
        method.backbone.output_layer.linear.weight.zero_()
        method.backbone.output_layer.linear.bias.copy_(scores)
    log_p = scores.log_softmax(-1).double()
    tokens = torch.multinomial(log_p.exp(), draws * 4, replacement=True, generator=generator).view(draws, 4)
    excess = method.likelihood(Batch(tokens), RowNoise(0, range(draws))).nats_B + log_p[tokens].sum(1)
    assert abs(excess.mean()) < 3 * excess.std() / draws**0.5 and excess.std() < 8
    # A source costs nothing, and changes nothing for such a model.
    given = Batch(tokens, torch.tensor([[False, True, True, True]]).expand(draws, 4), source_len=1)
    excess = method.likelihood(given, RowNoise(0, range(draws))).nats_B + log_p[tokens[:, 1:]].sum(1)
    assert abs(excess.mean()) < 3 * excess.std() / draws**0.5
