"""FLM and its flow map: states, a slow loss, the algebra of leaps, samplers with perfect denoisers, batch invariance."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import perturb

from jpeg_dlm.accounting.costs import build_weightless
from jpeg_dlm.config import validate
from jpeg_dlm.config_io import from_dict, override, to_dict
from jpeg_dlm.errors import UsageError
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.common.decoding_error import TimeMap
from jpeg_dlm.methods.flm import SOFTCAP, TIME_FLOOR, Flm, leap, split_share
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.rng import RowNoise

B, L, V, H = 4, 6, 20, 16
TINY = {
    "data.vocab_size": V, "data.token_len": L, "model.hidden": H, "model.heads": 2, "model.depth": 2, "model.freq_dim": 8,
    "model.cond_dim": 8, "train.steps": 100, "sampler.steps": 5,
}  # fmt: skip
MAP = {"objective__flow_map": True}


def tiny(**options):
    return validate(override(for_method(preset("smoke"), "flm"), TINY | {k.replace("__", "."): v for k, v in options.items()}))


def build(perturbed=0.1, **options) -> Flm:
    """A tiny model; perturbed, because fresh heads are zero and stop every gradient that would pass through them."""
    method = build_method(tiny(**options))
    assert isinstance(method, Flm)
    return perturb(method, perturbed).train()


def tokens(rows=B):
    return torch.randint(0, V, (rows, L), generator=torch.Generator().manual_seed(7))


def noise(rows=B, step=50):
    return RowNoise(0, range(rows), step)


def sampler(method, **options):
    return override(method.config, {f"sampler.{k}": v for k, v in options.items()}).sampler


# ---------------------------------------------------------------- ids


def test_extra_ids_are_part_of_the_process_but_never_written():
    method = build(model__extra_ids=2).eval()
    assert method.backbone.vocab_embed.embedding.shape == (V + 2, H)
    with torch.no_grad():
        method.backbone.output_layer.linear.bias[V:] = 1e3
    seen = []
    written = method.sample(method.config.sampler, noise(), lambda k, n, t, decode: seen.append(decode()))
    assert max(x.max() for x in [written, *seen]) < V


@pytest.mark.parametrize(("name", "ids", "millions"), [("lm1b", 30_522, 139.29), ("owt1024", 50_258, 169.63)])
def test_sizes_of_the_published_models(name, ids, millions):
    method = build_weightless(for_method(preset(name), "flm"))
    assert method.ids == ids and sum(p.numel() for p in method.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


# ---------------------------------------------------------------- states and the loss


def test_states_lie_on_the_linear_path():
    method = build()
    t = torch.tensor([0.0, 0.3, 0.8, 1.0], dtype=torch.float64)
    z = method.noisy(tokens(), t, noise())
    eps, x = noise().normal("state", L, V), F.one_hot(tokens(), V)
    for b in range(B):
        assert torch.allclose(z[b], (1 - t[b].item()) * eps[b] + t[b].item() * x[b], atol=1e-6)
    assert z.dtype == torch.float32


@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_is_what_it_says(masked):
    method = build()
    mask = torch.arange(L) < torch.tensor([6, 2, 4, 1])[:, None] if masked else None
    got = method.losses(Batch(tokens(), mask), noise())["ce"].item()
    tau = (noise().uniform("time") + torch.arange(B)) / B
    t, eps = TimeMap(V)(tau), noise().normal("state", L, V)
    nll = []
    for b in range(B):
        z = ((1 - t[b]) * eps[b] + t[b] * F.one_hot(tokens()[b], V)).float()[None]
        x = z @ method.backbone.vocab_embed.embedding
        logits = method.backbone.head(method.backbone.states(x, method.backbone.condition(tau[b : b + 1])))
        row = F.cross_entropy(logits[0], tokens()[b], reduction="none")
        nll += row.tolist() if mask is None else row[mask[b]].tolist()
    assert got == pytest.approx(sum(nll) / len(nll), rel=1e-5)


def test_attention_scores_are_capped():
    assert all(block.softcap == SOFTCAP == 50 for block in build().backbone.blocks)


def test_chunks_change_nothing():
    a, b = (build(objective__ce_chunk=chunk).losses(Batch(tokens()), noise())["ce"] for chunk in (0, 5))
    assert a.item() == pytest.approx(b.item(), rel=1e-6)


def test_bf16_training_is_finite_and_close():
    method = build(**MAP)
    full = method.losses(Batch(tokens()), noise())
    with torch.autocast("cpu", torch.bfloat16):
        half = method.losses(Batch(tokens()), noise())
    assert all(half[name].item() == pytest.approx(full[name].item(), rel=0.05) for name in full)


@pytest.mark.parametrize("options", [{}, MAP, MAP | {"objective__diagonal": 1.0}, MAP | {"objective__diagonal": 1e-9}])
def test_every_parameter_gets_a_gradient(options):
    method = build(**options)
    method.total_loss(method.losses(Batch(tokens()), noise())).backward()
    assert [n for n, p in method.named_parameters() if p.grad is None] == []
    groups = method.parameter_groups()
    assert [g.name for g in groups] == ["flow"] and groups[0].parameters.keys() == dict(method.named_parameters()).keys()


@pytest.mark.parametrize("options", [{}, MAP])
def test_training_on_one_word_learns_it(options):
    method = build(perturbed=0, **options)
    optimizer = torch.optim.AdamW(method.parameters(), lr=1e-2)
    history = []
    for step in range(40):
        loss = method.total_loss(method.losses(Batch(torch.full((B, L), 3)), noise(step=step)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    assert history[0] == pytest.approx(math.log(V), abs=1e-4) and sum(history[-10:]) < 0.2 * sum(history[:10])
    assert (method.eval().sample(method.config.sampler, noise()) == 3).all()


# ---------------------------------------------------------------- the algebra of leaps

TIMES = torch.tensor([[0.0, 0.3, 1.0], [0.1, 0.2, 0.9], [0.5, 0.8, 0.81], [0.0, 0.9, 0.95]], dtype=torch.float64)


def exact_leap(z, d, s, t):
    s, t = s[:, None], t[:, None]
    return (1 - t) / (1 - s) * z + (t - s) / (1 - s) * d


def test_a_leap_is_its_formula():
    z, d = torch.randn(2, 4, 5, dtype=torch.float64)
    s, _, t = TIMES.T
    assert torch.allclose(leap(z, d, s, t), exact_leap(z, d, s, t), atol=1e-3)
    wanted = z + ((t - s) / (1 - s + TIME_FLOOR))[:, None] * (d - z)  # a step along (d - z) / (1 - s + 1e-5)
    assert torch.allclose(leap(z, d, s, t), wanted, atol=1e-12)


def test_two_leaps_are_one_with_the_mixed_prediction():
    z, d_su, d_ut = torch.randn(3, 4, 5, dtype=torch.float64)
    s, u, t = TIMES.T
    share = split_share(s, u, t)
    assert (share >= 0).all() and (share <= 1).all() and share[0] == 0  # at t = 1 only the second leap counts
    twice = exact_leap(exact_leap(z, d_su, s, u), d_ut, u, t)
    once = exact_leap(z, share[:, None] * d_su + (1 - share[:, None]) * d_ut, s, t)
    assert torch.allclose(twice, once, atol=1e-12)
    assert torch.allclose(1 - share, (1 - s) * (t - u) / ((1 - u) * (t - s)))


def test_an_interval_of_no_length_gives_no_nan():
    one = torch.ones(1, dtype=torch.float64)
    assert split_share(one, one, one).isfinite().all() and split_share(0.5 * one, 0.5 * one, 0.5 * one).isfinite().all()


def test_the_right_denoiser_is_its_own_target(monkeypatch):
    """For data of one row the exact D is that row at all times, and nothing is left to learn."""
    method = build(**MAP)
    row = F.one_hot(tokens()[:1], V).float()
    monkeypatch.setattr(method, "denoise", lambda z, s, t: row.expand_as(z))
    target = method.map_target(torch.randn(B, L, V), torch.rand(B) / 2, 0.5 + torch.rand(B) / 2)
    assert torch.allclose(target, row.expand(B, L, V), atol=1e-6)


def test_the_flow_maps_loss_is_what_it_says():
    method = build(**MAP)
    n = noise(8)
    x = tokens(8)
    mask = torch.arange(L) < torch.tensor([6, 2, 4, 1, 6, 6, 3, 5])[:, None]
    terms = method.losses(Batch(x, mask), n)
    tau = (n.uniform("time") + torch.arange(8)) / 8
    length, whole, diagonal = (n.uniform(name) for name in ("length", "whole", "diagonal"))
    times, eps = TimeMap(V), n.normal("state", L, V)
    sums, kinds = {"ce": 0.0, "ce_map": 0.0}, set()

    def D(z, s, t):
        net = method.backbone
        c = F.silu(net.sigma_map(torch.tensor([s])) + net.sigma_map_prime(torch.tensor([t])))
        return net.head(net.states(z @ net.vocab_embed.embedding, c)).softmax(-1)

    with torch.no_grad():
        for b in range(8):
            d = 0.0 if diagonal[b] < 0.5 else 1.0 if whole[b] < 1 / 32 else length[b].item()
            s, t = tau[b].item() * (1 - d), tau[b].item() * (1 - d) + d
            u = (s + t) / 2
            gs, gu, gt = (times(torch.tensor(v)).item() for v in (s, u, t))
            z = ((1 - gs) * eps[b] + gs * F.one_hot(x[b], V))[None]
            if d:
                d_su = D(z, s, u)
                d_ut = D((1 - gu) / (1 - gs) * z + (gu - gs) / (1 - gs) * d_su, u, t)
                share = (1 - gt) * (gu - gs) / ((1 - gu) * (gt - gs))
                target = share * d_su + (1 - share) * d_ut
            else:
                target = F.one_hot(x[b : b + 1], V).float()
            row = -(target * D(z, s, t).log()).sum(-1)[0]
            sums["ce_map" if d else "ce"] += row[mask[b]].sum().item()
            kinds.add(d > 0)
    assert kinds == {True, False}
    for name, value in sums.items():
        assert terms[name].item() == pytest.approx(value / int(mask.sum()), rel=1e-3)


def test_intervals_are_drawn_as_configured():
    method = build(**MAP, objective__whole=0.25)
    n = RowNoise(0, range(4000))
    s, t = method.intervals(n.stratified("time"), n)
    on, whole = t == s, (s == 0) & (t == 1)
    assert ((0 <= s) & (s <= t) & (t <= 1)).all()
    assert on.float().mean().item() == pytest.approx(0.5, abs=0.03)
    assert whole.float().mean().item() == pytest.approx(0.125, abs=0.02)
    assert s[on].mean().item() == pytest.approx(0.5, abs=0.03)
    rest = ~on & ~whole
    assert (t - s)[rest].mean().item() == pytest.approx(0.5, abs=0.03)
    assert s[rest].mean().item() == pytest.approx(0.25, abs=0.03)


@torch.no_grad()
def test_a_fresh_flow_map_is_the_flm_of_the_same_weights():
    flm, fmlm = build().eval(), build_method(tiny(**MAP)).eval()
    missing = fmlm.load_state_dict(flm.state_dict(), strict=False).missing_keys
    assert missing and all("sigma_map_prime" in name for name in missing)
    z, s, t = torch.randn(B, L, V), torch.rand(B), torch.rand(B)
    assert torch.equal(fmlm.denoise(z, s, t), flm.denoise(z, s))
    used = build(**MAP).eval()
    assert not torch.allclose(used.denoise(z, s, t), used.denoise(z, s, s))
    assert torch.equal(used.denoise(z, s), used.denoise(z, s, s))


# ---------------------------------------------------------------- sampling


@torch.no_grad()
@pytest.mark.parametrize("step", ["euler", "map"])
def test_the_sampler_follows_its_definition(step):
    method = build(perturbed=0.6, **MAP).eval()
    got = method.sample(sampler(method, step=step), RowNoise(3, [0, 1]))
    z = RowNoise(3, [0, 1]).normal("sample", L, V)
    tau = torch.linspace(0, 1, 6)
    t = TimeMap(V)(tau).float()
    for k in range(5):
        p = method.denoise(z, tau[k].expand(2), tau[k + 1 if step == "map" else k].expand(2))
        z = z + (t[k + 1] - t[k]) * (p - z) / (1 - t[k] + 1e-5)
    assert torch.equal(got, p.argmax(-1)) and len(got.unique()) > 1


@pytest.mark.parametrize("step, steps", [("euler", 1), ("euler", 40), ("map", 1), ("map", 4)])
def test_a_perfect_denoiser_lands_on_the_target(monkeypatch, step, steps):
    method = build(**MAP).eval()
    row, seen = F.one_hot(tokens(), V).float(), []

    def denoise(z, tau, end=None):
        seen.append((z, tau[0].item()))
        return row

    monkeypatch.setattr(method, "denoise", denoise)
    assert torch.equal(method.sample(sampler(method, step=step, steps=steps), noise()), tokens())
    assert len(seen) == steps
    eps = noise().normal("sample", L, V)
    for z, tau in seen:  # every state on the way is on the straight line to the target
        t = method.times(torch.tensor(tau)).item()
        assert torch.allclose(z, (1 - t) * eps + t * row, atol=1e-3)


@pytest.mark.parametrize("step", ["euler", "map"])
def test_a_sample_is_the_same_in_any_batch(step):
    method = build(perturbed=0.5, **MAP).eval()
    options = sampler(method, step=step)
    together = method.sample(options, RowNoise(1, range(6)))
    alone = torch.cat([method.sample(options, RowNoise(1, [i])) for i in range(6)])
    assert torch.equal(alone, together) and len({tuple(row) for row in together.tolist()}) > 3
    assert not torch.equal(method.sample(options, RowNoise(2, range(6))), together)


def test_watching_shows_every_step_and_changes_nothing():
    method = build(perturbed=0.3).eval()
    seen = []
    watched = method.sample(method.config.sampler, noise(2), lambda k, n, t, decode: seen.append((k, n, t, decode())))
    assert torch.equal(watched, method.sample(method.config.sampler, noise(2)))
    assert [k for k, *_ in seen] == [0, 1, 2, 3, 4, 5] and {n for _, n, *_ in seen} == {5}
    assert [t for *_, t, _ in seen] == sorted(t for *_, t, _ in seen) and seen[-1][2] == 1.0
    assert torch.equal(seen[-1][3], watched)


def test_given_rows_move_straight_to_their_tokens():
    """With everything given, each state is the mixture of the first noise and the one-hot rows at its time."""
    method = build().eval()
    seen = []
    denoise = method.denoise
    method.denoise = lambda z, tau, end=None: seen.append((z, tau)) or denoise(z, tau, end)
    given, sampler = tokens(), tiny().sampler
    assert method.sample(sampler, noise(), None, given).equal(given)
    eps = noise().normal("sample", L, method.config.data.vocab_size)
    clean = torch.nn.functional.one_hot(given, method.config.data.vocab_size).float()
    assert len(seen) == sampler.steps
    for z, tau in seen:
        t = method.times(tau.double()).view(-1, 1, 1).float()
        assert torch.allclose(z, t * clean + (1 - t) * eps, atol=1e-4)


# ---------------------------------------------------------------- configuration and files


def test_presets_are_the_comparisons_settings():
    lm1b, owt = (for_method(preset(name), "flm") for name in ("lm1b", "owt1024"))
    assert (lm1b.data.tokenizer, lm1b.data.vocab_size, lm1b.sampler.steps) == ("bert-base-uncased", 30_522, 128)
    assert (owt.data.tokenizer, owt.data.vocab_size, owt.sampler.steps) == ("gpt2", 50_257, 1024)
    with torch.device("meta"):
        network = Flm(lm1b).backbone
    assert sum(p.numel() for p in network.parameters()) == 139_292_986
    assert from_dict(to_dict(owt)) == validate(owt)


def test_leaps_need_a_flow_map():
    with pytest.raises(UsageError, match="flow_map"):
        tiny(sampler__step="map")
    config = tiny(sampler__step="map", sampler__steps=4, **MAP)
    assert config.sampler.label() == "4 map steps" and config.sampler.evaluations(L) == 4
    assert tiny().sampler.label() == "5 steps"


@pytest.mark.parametrize("options", [{}, MAP])
def test_a_published_file_tells_its_config_and_is_read(options):
    source = build(**options)
    tensors = source.export_state()
    assert all(name.startswith("backbone.") for name in tensors)
    config = Flm.config_of(tensors, for_method(preset("smoke"), "flm"))
    assert config.objective.flow_map is bool(options) and config.data.vocab_size == V
    assert (config.model.hidden, config.model.depth, config.model.cond_dim) == (H, 2, 8)
    target = build_method(override(config, {"model.heads": 2}))
    target.import_state(tensors, "file")
    assert all(torch.equal(t, source.state_dict()[n]) for n, t in target.export_state().items())
