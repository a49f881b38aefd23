"""ELF: its network, both modes of a row against plain loops, guidance, the two samplers, padding, and published names."""

import math

import pytest
import torch
import torch.nn.functional as F

from jpeg_dlm import files
from jpeg_dlm.config import validate
from jpeg_dlm.config_io import override
from jpeg_dlm.encoders import build_encoder
from jpeg_dlm.errors import CheckpointError, UsageError
from jpeg_dlm.flow.path import guidance_scale, guided_target
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.elf import Elf, euler_step, step_back
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.nn.dit import DiT
from jpeg_dlm.presets import PRESETS, preset
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.training.optim import build_optimizer

B, L, WIDTH, VOCAB = 6, 8, 16, 40
TINY = {
    "data.vocab_size": VOCAB, "data.token_len": L, "encoder.kind": "random", "encoder.feature_dim": WIDTH, "encoder.depth": 1,
    "encoder.heads": 2, "encoder.scale": "none", "model.bottleneck_dim": 8, "model.proj_dim": 10, "model.hidden": 24,
    "model.heads": 2, "model.depth": 2, "model.freq_dim": 8, "model.time_tokens": 2, "model.sc_tokens": 3,
    "objective.decode_prob": 0.4, "objective.noise_scale": 2.0, "objective.decode_noise_scale": 5.0, "sampler.steps": 4,
    "sampler.grid": "random", "sampler.w": 3.0,
}  # fmt: skip


def tiny(**options):
    return override(for_method(preset("smoke"), "elf"), TINY | {k.replace("__", "."): v for k, v in options.items()})


def build(perturbed=0.1, **options) -> Elf:
    """A tiny model; perturbed, because a fresh head is zero and predicts nothing."""
    config = tiny(**options)
    method = build_method(config, build_encoder(config.encoder, VOCAB))
    assert isinstance(method, Elf)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in method.dit.parameters():
            p.add_(perturbed * torch.randn(p.shape, generator=g))
    return method.train()


def tokens(rows=B):
    return torch.randint(2, VOCAB, (rows, L), generator=torch.Generator().manual_seed(7))


def noise(rows=B, step=0):
    return RowNoise(0, range(rows), step)


# ---------------------------------------------------------------- network


@pytest.mark.parametrize("name", ["lm1b", "owt1024", "owt128"])
def test_published_number_of_parameters(name):
    with torch.device("meta"):
        method = Elf(for_method(preset(name), "elf"))
    assert sum(p.numel() for p in method.parameters()) == 104_579_940


@torch.no_grad()
def test_the_network_is_jpeg_dlms_up_to_the_heads():
    method = build()
    m = method.config.model
    dit = DiT(L, WIDTH, m.bottleneck_dim, m.hidden, m.depth, m.heads, m.mlp_ratio, m.freq_dim, 2, 3, m.mode_tokens, 0.0)
    dit.load_state_dict(method.dit.state_dict(), strict=False)
    z, s, t, w = noise().normal("z", L, WIDTH), noise().normal("s", L, WIDTH), noise().uniform("t"), noise().uniform("w")
    decode = torch.arange(B) < 2
    xhat, hidden = method.dit(z, t, s, w, decode)
    both = dit(z, t, s, w, decode_rows=2)
    torch.testing.assert_close(xhat[2:], both[2:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(dit.decode_head(hidden[:2]), both[:2], atol=1e-5, rtol=1e-5)

    x = hidden @ method.dit.proj.weight.T + method.dit.proj.bias
    x = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert torch.allclose(method.dit.logits(hidden), x @ method.dit.unembed.weight.T + method.dit.unembed.bias, atol=1e-5)


def test_a_fresh_network_predicts_zero_and_draws_its_unembedding():
    method = build(perturbed=0.0)
    xhat, hidden = method.dit(torch.ones(1, L, WIDTH), torch.ones(1), None, torch.ones(1), torch.zeros(1, dtype=torch.bool))
    assert not xhat.any() and method.dit.logits(hidden).std() > 0


# ---------------------------------------------------------------- training


@torch.no_grad()
def slow_losses(method, x_BL, n, mask):
    """One row after the other, in the order in which the method is described."""
    o, h, total = method.config.objective, method.encoder(x_BL, mask), mask.sum()
    coin, time, scale, sc = n.uniform("mode"), n.normal("time"), n.uniform("scale"), n.uniform("self_condition")
    share, eps = n.normal("decode_share", L), n.normal("latent", L, WIDTH)
    flow = ce = 0.0
    for i in range(B):
        x, w, off, on = h[i : i + 1], 1.5 * 4 ** scale[i : i + 1] - 1, torch.tensor([False]), torch.tensor([True])
        if coin[i] < o.decode_prob:
            z = torch.zeros(1, L, WIDTH)
            for j in range(L):
                keep = torch.sigmoid(0.8 + 0.8 * share[i, j])
                z[0, j] = keep * x[0, j] + (1 - keep) * 5.0 * eps[i, j]
            logits = method.dit.logits(method.dit(z, torch.ones(1), None, w, on)[1])[0]
            ce += (F.cross_entropy(logits, x_BL[i], reduction="none") * mask[i]).sum()
            continue
        t = torch.sigmoid(-1.5 + 0.8 * time[i : i + 1])
        z = t * x + (1 - t) * 2.0 * eps[i]
        v, s = (x - z) / max(1 - t, 0.05), None
        if sc[i] < o.sc_prob:
            first = method.dit(z, t, None, w, off)[0]
            second = method.dit(z, t, first, w, off)[0]
            v = v + (1 - 1 / w) * ((second - z) / max(1 - t, 0.05) - (first - z) / max(1 - t, 0.05))
            s = first
        vhat = (method.dit(z, t, s, w, off)[0] - z) / max(1 - t, 0.05)
        flow += (((vhat - v) ** 2).mean(-1)[0] * mask[i]).sum()
    return flow / total, ce / total


@pytest.mark.parametrize("step", [2, 3, 5])
@torch.no_grad()
def test_losses_follow_the_description(step):
    method, n = build(), noise(step=step)
    decodes = n.uniform("mode") < 0.4
    assert decodes.any() and not decodes.all()
    mask = torch.arange(L) < torch.tensor([8, 3, 5, 8, 1, 6])[:, None]
    found = method.losses(Batch(tokens(), mask), n)
    flow, ce = slow_losses(method, tokens(), n, mask)
    assert found["flow"].item() == pytest.approx(flow.item(), rel=1e-4)
    assert found["ce"].item() == pytest.approx(ce.item(), rel=1e-4)
    assert method.total_loss(found).item() == pytest.approx((flow + ce).item(), rel=1e-4)
    chunked = build(objective__ce_chunk=5).losses(Batch(tokens(), mask), n)
    assert chunked["ce"].item() == pytest.approx(ce.item(), rel=1e-4)


def test_the_velocitys_denominator_has_a_floor():
    late = build(objective__time_mean=9.0, objective__sc_prob=0.0)  # t = 0.9999
    terms = late.losses(Batch(tokens()), noise())
    half = build(objective__time_mean=9.0, objective__sc_prob=0.0, objective__v_floor=0.1).losses(Batch(tokens()), noise())
    assert terms["flow"].item() == pytest.approx(4 * half["flow"].item(), rel=1e-4)


def test_cached_features_take_the_place_of_the_encoder():
    method = build()
    cached = Batch(tokens(), None, method.features(Batch(tokens())))
    wanted = method.losses(Batch(tokens()), noise())
    method.encoder = None
    found = method.losses(cached, noise())
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(ValueError, match="encoder"):
        method.losses(Batch(tokens()), noise())


@pytest.mark.parametrize("probability", [1e-9, 0.4, 1 - 1e-9])
def test_every_parameter_has_a_gradient_whatever_the_modes(probability):
    """Distributed training waits for all of them, also when no row of a batch is in one of the modes."""
    method = build(objective__decode_prob=probability)
    method.total_loss(method(Batch(tokens()), noise())).backward()
    assert [n for n, p in method.named_parameters() if p.requires_grad and p.grad is None] == []
    assert [n for n, p in method.named_parameters() if n.startswith("encoder.") and p.requires_grad] == []
    (group,) = method.parameter_groups()
    assert group.parameters.keys() == {n for n, p in method.named_parameters() if p.requires_grad}


def test_guidance_scales():
    """1 + w is log-uniform on [1.5, 6]: median 2, mean 4.5 / ln 4 - 1, a fifth of the scales below 1."""
    o = tiny().objective
    u = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    wanted = [0.5, 1.12132, 2, 3.242641, 5]
    assert guidance_scale(u, o.w_min, o.w_max).tolist() == pytest.approx(wanted, rel=1e-5)
    w = guidance_scale((torch.arange(100_000) + 0.5) / 100_000, o.w_min, o.w_max)
    assert w.median().item() == pytest.approx(2, abs=1e-3)
    assert w.mean().item() == pytest.approx(2.246, abs=1e-3)
    assert (w < 1).float().mean().item() == pytest.approx(0.2075, abs=1e-4)


def test_scales_below_one_push_away_from_the_self_conditioned_prediction():
    x, second, first = torch.tensor([[0.4]]), torch.tensor([[0.9]]), torch.tensor([[0.6]])
    assert guided_target(x, second, first, torch.tensor([3.0])).item() == pytest.approx(0.6)
    assert guided_target(x, second, first, torch.tensor([0.5])).item() == pytest.approx(0.1)
    method, z, t = build(), noise().normal("z", L, WIDTH), torch.full((B,), 0.3)
    x, rows = noise().normal("x", L, WIDTH), torch.arange(3)
    s, away = method.self_condition(x, z, t, torch.full((B,), 0.5), rows)
    off = torch.zeros(B, dtype=torch.bool)
    second = method.dit(z, t, s, torch.full((B,), 0.5), off)[0]
    assert torch.allclose(away[:3], (x - (second - s))[:3], atol=1e-5)
    assert torch.equal(away[3:], x[3:]) and not s[3:].any() and s[:3].any()


def test_it_learns_tokens_with_muon():
    method = build(perturbed=0.0, train__optimizer="muon", train__lr=3e-2, objective__decode_noise_scale=1.0)
    optimizer = build_optimizer(method.parameter_groups(), method.config.train)
    data = Batch(tokens(16))
    start = method.losses(data, noise(16))
    for step in range(80):
        optimizer.zero_grad()
        method.total_loss(method(data, noise(16, step))).backward()
        optimizer.step()
    end = method.losses(data, noise(16))
    assert end["ce"].item() < 0.5 * start["ce"].item() and end["flow"].item() < start["flow"].item()
    assert method.reconstruction(data) > 0.8


# ---------------------------------------------------------------- sampling


def test_one_step_back_and_forth():
    """z .5, x 1.2, t .3 to .4, gamma 1.5, unit noise -.7 at scale 2: t_b .255, z_b .215, result .4067114."""
    z, t = step_back(torch.tensor(0.5), 0.3, 0.4, 1.5, torch.tensor(2 * -0.7))
    assert (z.item(), t) == pytest.approx((0.215, 0.255))
    assert euler_step(z, torch.tensor(1.2), t, 0.4, 0.05).item() == pytest.approx(0.4067114)
    z, t = step_back(torch.tensor(0.5), 0.3, 0.9, 4.0, torch.tensor(7.0))
    assert (z.item(), t) == (7.0, 0.0)  # the share that is kept is never negative


@torch.no_grad()
def slow_samples(method, sampler, n, gamma):
    rows = len(n.rows)
    g = n.shared("grid")
    grid = [0.0, *torch.sigmoid(0.8 * torch.randn(sampler.steps - 1, generator=g) - 1.5).sort().values.tolist(), 1.0]
    z, streams = 2.0 * n.normal("sample", L, WIDTH), n.streams("sde")
    s, w, off = torch.zeros_like(z), torch.full((rows,), sampler.w), torch.zeros(rows, dtype=torch.bool)
    for k in range(sampler.steps):
        t, u = grid[k], grid[k + 1]
        if k < sampler.steps - 1:
            a = 1 - gamma * (u - t)
            z, t = a * z + (1 - a) * 2.0 * streams.normal(L, WIDTH), a * t
        s = method.dit(z, torch.full((rows,), t), s, w, off)[0]
        z = z + (u - t) * (s - z) / (1 - t)
    return method.dit.logits(method.dit(z, torch.ones(rows), torch.zeros_like(z), w, ~off)[1]).argmax(-1)


@pytest.mark.parametrize("solver, gamma", [("sde", 1.5), ("sde", 0.0), ("ode", 0.0)])
def test_samples_follow_the_description(solver, gamma):
    method = build(perturbed=0.3, sampler__solver=solver, sampler__gamma=gamma).eval()
    sampler = method.config.sampler
    found = method.sample(sampler, noise())
    assert found.shape == (B, L) and len(found.unique()) > 5
    assert torch.equal(found, slow_samples(method, sampler, noise(), gamma))


@pytest.mark.parametrize("grid", ["random", "quantile", "uniform"])
@pytest.mark.parametrize("solver", ["ode", "sde"])
def test_a_perfect_predictor_is_followed_to_its_features(solver, grid, monkeypatch):
    method = build(sampler__solver=solver, sampler__grid=grid, sampler__steps=16)
    x, seen = torch.randn(B, L, WIDTH), []
    monkeypatch.setattr(method, "predict", lambda z, t, s, w: seen.append((t, z)) or x)
    monkeypatch.setattr(method, "greedy", lambda z, w: z)
    assert torch.allclose(method.sample(method.config.sampler, noise()), x, atol=1e-5)
    assert len(seen) == 16 and seen[0][0] == 0 and seen[0][1].std().item() == pytest.approx(2, rel=0.1)
    if solver == "ode":  # every state is t x and noise of deviation 2 (1 - t)
        assert [(z - t * x).std().item() for t, z in seen] == pytest.approx([2 * (1 - t) for t, _ in seen], rel=0.1)


@pytest.mark.parametrize("solver", ["ode", "sde"])
def test_a_sample_is_the_same_in_any_batch(solver):
    method = build(perturbed=0.3, sampler__solver=solver).eval()
    together = method.sample(method.config.sampler, RowNoise(3, range(5)))
    alone = [method.sample(method.config.sampler, RowNoise(3, [i])) for i in range(5)]
    assert torch.equal(together, torch.cat(alone))
    assert len({tuple(row) for row in together.tolist()}) == 5


def test_watching_a_sample():
    method, seen = build().eval(), []
    final = method.sample(method.config.sampler, noise(2), lambda k, n, t, decode: seen.append((k, n, t, decode())))
    assert [(k, n) for k, n, _, _ in seen] == [(k, 4) for k in range(5)]
    assert seen[0][2] == 0 and seen[-1][2] == 1 and torch.equal(seen[-1][3], final)
    assert all(rows.shape == (2, L) for *_, rows in seen)
    assert method.config.sampler.evaluations(L) == 5 and method.config.sampler.label() == "4 ODE steps"


def test_reconstruction_counts_real_tokens(monkeypatch):
    method, guess = build(), tokens()
    guess[:, :2] += 1
    monkeypatch.setattr(method, "greedy", lambda z, w: guess)
    assert method.reconstruction(Batch(tokens())).item() == pytest.approx(6 / 8)
    mask = (torch.arange(L) < 4).expand(B, L)
    assert method.reconstruction(Batch(tokens(), mask)).item() == pytest.approx(2 / 4)


# ---------------------------------------------------------------- published files and presets


def test_published_names_and_shapes():
    shapes = {name: tuple(t.shape) for name, t in build().export_state().items()}
    names = {
        "t_emb_tokens",
        "self_cond_cfg_tokens",
        "mode_tokens",
        "proj_kernel",
        "proj_bias",
        "unembed_kernel",
        "unembed_bias",
    }
    both = ("weight", "bias")
    names |= {"text_proj.proj1.weight", "final_layer.norm_final.weight"}
    names |= {f"{m}.{k}" for m in ("self_cond_proj", "text_proj.proj2", "final_layer.linear") for k in both}
    names |= {f"{e}.{m}.{k}" for e in ("t_embedder", "self_cond_cfg_embedder") for m in ("mlp_0", "mlp_2") for k in both}
    for i in range(2):
        block = ["norm1.weight", "norm2.weight", "attn.q_norm.weight", "attn.k_norm.weight"]
        block += [f"{m}.{k}" for m in ("attn.qkv", "attn.proj", "mlp.w12", "mlp.w3") for k in both]
        names |= {f"blocks.{i}.{n}" for n in block}
    assert shapes.keys() == names
    assert shapes["proj_kernel"] == (24, 10) and shapes["unembed_kernel"] == (10, VOCAB)


def test_a_published_file_is_read_back(tmp_path):
    method = build(perturbed=0.3).eval()
    files.save_tensors(tmp_path / "elf", method.export_state(), {})
    tensors = files.load_tensors(tmp_path / "elf")
    config = Elf.config_of(tensors, override(for_method(preset("owt1024"), "elf"), {"data.token_len": L}))
    other = Elf(config)
    other.import_state(tensors, "elf")
    assert config.model.heads == 2 and config.model.time_tokens == 2 and config.model.sc_tokens == 3
    own = method.state_dict()
    assert all(torch.equal(t, own[name]) for name, t in other.state_dict().items())
    sampler = method.config.sampler
    assert torch.equal(other.eval().sample(sampler, noise()), method.sample(sampler, noise()))
    del tensors["unembed_kernel"]
    with pytest.raises(CheckpointError, match="unembed_kernel"):
        Elf.config_of(tensors, config)
    tensors["blocks.0.attn.q_norm.weight"] = torch.zeros(0)
    with pytest.raises(CheckpointError, match="q_norm.*has the shape"):
        Elf.config_of(tensors | {"unembed_kernel": torch.zeros(2, 2)}, config)


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    base = preset(name)
    config = validate(for_method(base, "elf"))
    assert config.method == "elf" and config.data == base.data and config.encoder == base.encoder and config.rate is None
    assert config.sampler.solver == "ode"
    if name in ("lm1b", "owt1024", "owt128"):
        t = config.train
        assert (t.optimizer, t.lr, t.weight_decay, t.ema, t.clip) == ("muon", 2e-3, 0.0, 0.9999, 1.0)
        assert t.batch * t.accumulation * t.devices == 512
        rows = {"lm1b": 8.3e6, "owt1024": 95_000 / 5 * 512, "owt128": 8 * 95_000 / 5 * 512}[name]  # of an epoch
        assert t.warmup == pytest.approx(0.5 * rows / 512, rel=0.01)
        assert config.sampler.w == 3 and config.encoder.std == 0.2
        assert (config.sampler.steps, config.sampler.grid) == (base.sampler.steps, "random")
        assert (config.objective.noise_scale, config.objective.decode_noise_scale) == (2, 5)
    else:
        assert config.sampler.steps == max(32, base.sampler.steps) and config.sampler.grid == "uniform"
        assert config.objective.decode_noise_scale == pytest.approx(5 * (base.encoder.feature_dim / 512) ** 0.5)
        assert config.train.steps == base.train.steps and config.train.batch == base.train.batch


@pytest.mark.parametrize("option, value", [
    ("objective.decode_prob", 0), ("objective.noise_scale", 0), ("objective.v_floor", 0), ("sampler.gamma", -1),
    ("sampler.steps", 0), ("model.heads", 5), ("model.freq_dim", 7),
])  # fmt: skip
def test_impossible_options_are_refused(option, value):
    with pytest.raises(UsageError):
        validate(override(tiny(), {option: value}))
