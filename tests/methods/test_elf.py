"""ELF: its network, both modes of a row against plain loops, guidance, the two samplers, padding, and published names."""

import math

import pytest
import torch
import torch.nn.functional as F
from micro import micro_model

from jpeg_dlm.config import validate
from jpeg_dlm.flow.path import guidance_scale
from jpeg_dlm.methods import elf
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.elf import Elf
from jpeg_dlm.methods.jpeg_dlm_config import JpegDlmModel
from jpeg_dlm.methods.registry import for_method
from jpeg_dlm.nn.dit import DiT
from jpeg_dlm.presets import PRESETS, preset
from jpeg_dlm.util.rng import RowNoise

B, L, WIDTH, VOCAB = 6, 8, 16, 40
SIZES = {"data__vocab_size": VOCAB, "data__token_len": L, "model__time_tokens": 2, "model__sc_tokens": 3, "sampler__steps": 4}
SIZES |= {"objective__noise_scale": 2.0, "objective__decode_noise_scale": 5.0, "sampler__grid": "random"}  # as published


def build(perturbed=0.1, **options) -> Elf:
    return micro_model("elf", perturbed, **SIZES | options).train()


@pytest.fixture(autouse=True)
def many_decode(monkeypatch):
    monkeypatch.setattr(elf, "DECODE_PROB", 0.4)


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
    sizes = JpegDlmModel(latent_len=L, latent_dim=WIDTH, **vars(m) | {"time_tokens": 2, "sc_tokens": 3})
    dit = DiT(sizes)
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


# ---------------------------------------------------------------- training


@torch.no_grad()
def slow_losses(method, x_BL, n, mask):
    """One row after the other, in the order in which the method is described."""
    h, total = method.encoder(x_BL, mask), mask.sum()
    coin, time, scale, sc = n.uniform("mode"), n.normal("time"), n.uniform("scale"), n.uniform("self_condition")
    share, eps = n.normal("decode_share", L), n.normal("latent", L, WIDTH)
    flow = ce = 0.0
    for i in range(B):
        x, w, off, on = h[i : i + 1], 1.5 * 4 ** scale[i : i + 1] - 1, torch.tensor([False]), torch.tensor([True])
        if coin[i] < 0.4:
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
        if sc[i] < 0.5:
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


def test_the_velocitys_denominator_has_a_floor(monkeypatch):
    monkeypatch.setattr(elf, "SC_PROB", 0.0)
    late = build(objective__time_mean=9.0)  # t = 0.9999
    terms = late.losses(Batch(tokens()), noise())
    monkeypatch.setattr(elf, "V_FLOOR", 0.1)
    half = late.losses(Batch(tokens()), noise())
    assert terms["flow"].item() == pytest.approx(4 * half["flow"].item(), rel=1e-4)


@pytest.mark.parametrize("probability", [1e-9, 0.4, 1 - 1e-9])
def test_every_parameter_has_a_gradient_whatever_the_modes(probability, monkeypatch):
    """Distributed training waits for all of them, also when no row of a batch is in one of the modes."""
    monkeypatch.setattr(elf, "DECODE_PROB", probability)
    method = build()
    method.total_loss(method(Batch(tokens()), noise())).backward()
    assert [n for n, p in method.named_parameters() if p.requires_grad and p.grad is None] == []


def test_guidance_scales():
    """1 + w is log-uniform on [1.5, 6]: median 2, mean 4.5 / ln 4 - 1, a fifth of the scales below 1."""
    u = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    wanted = [0.5, 1.12132, 2, 3.242641, 5]
    assert guidance_scale(u).tolist() == pytest.approx(wanted, rel=1e-5)
    w = guidance_scale((torch.arange(100_000) + 0.5) / 100_000)
    assert w.median().item() == pytest.approx(2, abs=1e-3)
    assert w.mean().item() == pytest.approx(2.246, abs=1e-3)
    assert (w < 1).float().mean().item() == pytest.approx(0.2075, abs=1e-4)


# ---------------------------------------------------------------- sampling


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


@pytest.mark.parametrize("solver, gamma", [("sde", 1.5), ("sde", 0.0), ("euler", 0.0)])
def test_samples_follow_the_description(solver, gamma):
    method = build(perturbed=0.3, sampler__solver=solver, sampler__gamma=gamma).eval()
    sampler = method.config.sampler
    found = method.sample(sampler, noise())
    assert found.shape == (B, L) and len(found.unique()) > 5
    assert torch.equal(found, slow_samples(method, sampler, noise(), gamma))


# ---------------------------------------------------------------- published files and presets


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    base = preset(name)
    config = validate(for_method(base, "elf"))
    assert config.method == "elf" and config.data == base.data and config.encoder == base.encoder and config.rate is None
    assert config.sampler.solver == "euler"
    if name in ("lm1b", "owt1024", "owt128"):
        t = config.train
        assert (t.optimizer, t.lr, t.weight_decay, t.ema, t.clip) == ("muon", 2e-3, 0.0, 0.9999, 1.0)
        assert t.batch * t.accumulation * t.devices == 512
        rows = {"lm1b": 8.3e6, "owt1024": 95_000 / 5 * 512, "owt128": 8 * 95_000 / 5 * 512}[name]  # of an epoch
        assert t.warmup == pytest.approx(0.5 * rows / 512, rel=0.01)
        assert config.sampler.w == 3 and config.encoder.scale == "fixed"
        assert (config.sampler.steps, config.sampler.grid) == (base.sampler.steps, "random")
        assert (config.objective.noise_scale, config.objective.decode_noise_scale) == (2, 5)
    else:
        assert config.sampler.steps == max(32, base.sampler.steps) and config.sampler.grid == "uniform"
        assert config.objective.decode_noise_scale == pytest.approx(5 * (base.encoder.feature_dim / 512) ** 0.5)
        assert config.train.steps == base.train.steps and config.train.batch == base.train.batch
