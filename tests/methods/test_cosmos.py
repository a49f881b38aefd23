"""COSMOS: schedule and reverse SDE, both stages against slow versions, statistics, sampling and where rows end."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from jpeg_dlm.config import validate
from jpeg_dlm.config_io import override
from jpeg_dlm.encoders import build_encoder
from jpeg_dlm.errors import CheckpointError, UsageError
from jpeg_dlm.flow.vp import TanSchedule
from jpeg_dlm.folders.model_folder import build_stored
from jpeg_dlm.methods.base import Batch, Method
from jpeg_dlm.methods.cosmos import VARIANCE_FLOOR, Cosmos
from jpeg_dlm.methods.cosmos_codec import CosmosCodec
from jpeg_dlm.methods.cosmos_config import CosmosSampler
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.nn.ddit import rotary_table
from jpeg_dlm.nn.unet_transformer import LlamaBlock, UNetTransformer, time_waves
from jpeg_dlm.presets import preset
from jpeg_dlm.rng import RowNoise

B, VOCAB, L, N, D = 4, 40, 8, 3, 12
TINY = {
    "data.vocab_size": VOCAB, "data.token_len": L, "encoder.kind": "random", "encoder.feature_dim": 16, "encoder.depth": 1,
    "encoder.heads": 2, "encoder.scale": "none", "model.latent_len": N, "model.latent_dim": D, "model.bottleneck_dim": 8,
    "model.codec_layers": 1, "model.codec_heads": 2, "model.proj_dim": 10, "model.hidden": 16, "model.heads": 2,
    "model.depth": 2, "train.precision": "fp32", "train.steps": 100, "sampler.steps": 4,
}  # fmt: skip


def tiny(**options):
    config = for_method(preset("smoke"), "cosmos")
    return validate(override(config, TINY | {name.replace("__", "."): value for name, value in options.items()}))


def perturb(method, size=0.1):
    """A fresh output map is zero and stops every gradient that would pass through it."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in method.parameters():
            p.add_(size * torch.randn(p.shape, generator=g))
    return method


def build_codec(**options) -> CosmosCodec:
    config = Cosmos.first_stage(tiny(**options))
    method = build_method(config, build_encoder(config.encoder, VOCAB))
    assert isinstance(method, CosmosCodec)
    return perturb(method).train()


def build(started=True, **options) -> Cosmos:
    config = tiny(**options)
    method = build_method(config, build_encoder(config.encoder, VOCAB))
    assert isinstance(method, Cosmos)
    perturb(method)
    if started:
        method.start_from(build_codec(**options), [batch(24)])
    return method.train()


def batch(rows=B, seed=7, **kwargs):
    return Batch(torch.randint(2, VOCAB, (rows, L), generator=torch.Generator().manual_seed(seed)), **kwargs)


def noise(rows=B, step=0, **kwargs):
    return RowNoise(0, range(rows), step, **kwargs)


# ---------------------------------------------------------------- schedule


@pytest.mark.parametrize(
    "t, alpha, snr, linear",
    [(0.1, 0.7839483, 1.5945383, 0.5581), (0.2, 0.5241914, 0.3788854, 0.3810), (0.3, 0.3653822, 0.1540736, 0.2819)],
)
def test_the_schedule_has_the_numbers_of_the_paper(t, alpha, snr, linear):
    """The last column is the paper's: the time on the linear path with the same signal-to-noise ratio."""
    a, s = (float(x) for x in TanSchedule(5).alpha_sigma(torch.tensor(t, dtype=torch.float64)))
    assert a == pytest.approx(alpha, abs=1e-6) and a**2 / s**2 == pytest.approx(snr, abs=1e-6)
    assert a / (a + s) == pytest.approx(linear, abs=5e-5)


@pytest.mark.parametrize("d", [1.0, 5.0, 7.0])
def test_schedule_identities(d):
    t = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    schedule = TanSchedule(d)
    alpha, sigma = schedule.alpha_sigma(t)
    assert torch.allclose(alpha**2 + sigma**2, torch.ones_like(t))
    assert torch.allclose((alpha / sigma) ** 2, (d * torch.tan(math.pi * t / 2)) ** -2)
    h, inner = 1e-6, t[t < 0.945]
    log_alpha2 = [schedule.alpha_sigma(inner + x)[0].square().log() for x in (-h, h)]
    assert torch.allclose(schedule.beta(inner), -(log_alpha2[1] - log_alpha2[0]) / (2 * h), rtol=1e-6)
    held = schedule.beta(torch.tensor([0.95, 0.97, 1.0], dtype=torch.float64))
    assert held.isfinite().all() and held[0] == held[1] == held[2]
    ends = [float(x) for x in schedule.alpha_sigma(torch.tensor([0.0, 1.0])) for x in x]
    assert ends == pytest.approx([1, 0, 0, 1], abs=1e-6)


def test_a_reverse_step_has_the_known_numbers():
    mean, std = TanSchedule(5).reverse_step(
        torch.tensor(0.7, dtype=torch.float64), torch.tensor(0.2, dtype=torch.float64), 0.5, -1 / 200
    )
    assert float(mean) == pytest.approx(0.6898137530, abs=1e-9) and std == pytest.approx(0.1738034, abs=1e-7)
    assert float(TanSchedule(5).beta(torch.tensor(0.1, dtype=torch.float64))) == pytest.approx(7.8367756, abs=1e-6)


# ---------------------------------------------------------------- stage one


def test_a_half_has_hidden_tokens_and_a_half_noisy_features():
    method, rows = build_codec(), 400
    h = torch.randn(rows, L, 16, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(L).expand(rows, L) < 6
    seen_h, seen_mask = method.corrupt(h, mask, noise(rows))
    assert torch.equal(seen_h[:200], h[:200]) and torch.equal(seen_mask[200:], mask[200:])
    assert not seen_mask[:, 6:].any()
    hidden = 1 - seen_mask[:200, :6].float().mean()
    assert float(hidden) == pytest.approx(0.3, abs=0.04)  # four deviations of 1,200 coins
    added = (seen_h[200:] - 0.7 * h[200:]) / math.sqrt(1 - 0.7**2)
    assert float(added.mean()) == pytest.approx(0, abs=0.03) and float(added.std()) == pytest.approx(1, abs=0.03)
    assert float((added * h[200:]).mean()) == pytest.approx(0, abs=0.03)


def test_shares_may_leave_rows_alone():
    method = build_codec(objective__mask_share=0.25, objective__noise_share=0.25, objective__mask_prob=1.0)
    h = torch.ones(8, L, 16)
    seen_h, seen = method.corrupt(h, None, noise(8))
    assert [bool(row.any()) for row in seen] == [False, False, *[True] * 6]
    assert [torch.equal(row, h[0]) for row in seen_h] == [True, True, False, False, True, True, True, True]


def test_the_halves_are_those_of_the_whole_batch_however_it_is_split():
    method = build_codec()
    h = torch.randn(B, L, 16, generator=torch.Generator().manual_seed(1))
    whole = method.corrupt(h, None, noise(total=B))
    parts = [method.corrupt(h[i : i + 1], None, RowNoise(0, range(i, i + 1), total=B)) for i in range(B)]
    for together, alone in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("padded", [False, True])
def test_the_codec_loss_is_the_slow_plain_one(padded):
    method = build_codec()
    mask = torch.arange(L).expand(B, L) < torch.tensor([[8], [5], [3], [7]]) if padded else None
    data, draw = batch(mask_BL=mask), noise()
    found = method.losses(data, draw)
    h = method.features(data)
    coins, eps = draw.uniform("token-mask", L), draw.normal("feature", L, 16)
    keep = draw.uniform("latent-mask", N, D)
    ce, feat, count = torch.zeros(()), torch.zeros(()), 0
    for i in range(B):
        real = torch.ones(L, dtype=torch.bool) if mask is None else mask[i]
        seen = real & (coins[i] >= 0.3) if i < B / 2 else real
        row = h[i] if i < B / 2 else 0.7 * h[i] + math.sqrt(0.51) * eps[i]
        z = method.codec.compressor(row[None], seen[None])[0]
        z = torch.where(keep[i] < 0.4, 0.0, z)
        hhat = method.codec.decompressor(z[None])[0]
        log_p = method.codec.lm_head(F.gelu(method.codec.unembed_proj(hhat))).log_softmax(-1)
        for j in real.nonzero().flatten().tolist():
            ce = ce - log_p[j, data.tokens_BL[i, j]]
            feat = feat + ((hhat[j] - h[i, j]) ** 2).mean()
            count += 1
    assert found["ce"].item() == pytest.approx((ce / count).item(), rel=1e-5)
    assert found["feat"].item() == pytest.approx((feat / count).item(), rel=1e-5)


def test_stage_one_trains_all_of_the_codec_and_only_it():
    method = build_codec()
    method.total_loss(method.losses(batch(), noise())).backward()
    assert {name for name, p in method.named_parameters() if p.grad is not None} == set(method.parameter_groups()[0].parameters)
    assert not any(p.requires_grad for name, p in method.named_parameters() if name.startswith("encoder."))
    assert [group.name for group in method.parameter_groups()] == ["codec"]


def test_stage_one_writes_no_text():
    method = build_codec()
    assert not isinstance(method, Method)
    with pytest.raises(UsageError, match=r"'run' is of a stage that writes no text \(COSMOS codec\)"):
        build_stored(method.config, method.export_state(), Path("run"))


# ---------------------------------------------------------------- from stage to stage


def test_statistics_standardize_every_coordinate_of_the_measured_rows():
    method = build(started=False)
    parts = [batch(16, seed=1), batch(9, seed=2)]
    method.start_from(build_codec(), iter(parts))
    z = torch.cat([method.encode(part) for part in parts])
    assert method.latent_mean.shape == (N, D)
    assert torch.allclose(z.mean(0), torch.zeros(N, D), atol=1e-5)
    assert torch.allclose(z.var(0, unbiased=False), torch.ones(N, D), atol=1e-4)
    raw = torch.cat([method.latents(part) for part in parts])
    assert torch.allclose(method.unstandardize(z), raw, atol=1e-5)


def test_a_coordinate_that_never_moves_is_not_blown_up():
    method = build(started=False)
    same = Batch(torch.full((6, L), 5))
    method.start_from(build_codec(), [same])
    assert torch.allclose(method.latent_scale, torch.full((N, D), VARIANCE_FLOOR**-0.5))


def test_what_stage_one_learned_is_taken_over_bit_by_bit():
    stage, method = build_codec(), build(started=False)
    before = copy.deepcopy(method.network.state_dict())
    method.start_from(stage, [batch(8)])
    own = method.codec.state_dict()
    assert all(torch.equal(own[name], value) for name, value in stage.codec.state_dict().items())
    assert all(torch.equal(method.network.state_dict()[name], value) for name, value in before.items())
    stage.eval()
    assert float(method.reconstruction(batch())) == float(stage.reconstruction(batch()))


def test_a_stage_that_is_not_the_codec_of_this_model_is_refused():
    method = build(started=False)
    with pytest.raises(UsageError, match="own first stage"):
        method.start_from(build(), [batch()])
    with pytest.raises(CheckpointError, match="the first stage"):
        method.start_from(build_codec(model__latent_len=2), [batch()])
    with pytest.raises(UsageError, match="two rows"):
        method.start_from(build_codec(), [batch(1)])
    with pytest.raises(UsageError, match="no first stage"):
        build_codec().start_from(method, [batch()])


def test_stage_one_has_its_own_budget_rate_and_clipping():
    config = tiny(objective__codec_steps=30)
    stage = Cosmos.first_stage(config)
    assert (stage.method, stage.train.steps, stage.train.clip) == ("cosmos-codec", 30, 10.0)
    assert Cosmos.first_stage(tiny()).train.steps == 100 and CosmosCodec.first_stage(stage) is None
    assert replace(stage, method="cosmos", train=config.train) == config  # nothing else differs


# ---------------------------------------------------------------- stage two


@pytest.mark.parametrize("sc_prob", [0.0, 1.0])
def test_the_diffusion_loss_is_the_slow_plain_one(sc_prob):
    method = build(objective__sc_prob=sc_prob)
    data, draw = batch(), noise()
    found = method.losses(data, draw)
    raw = method.codec.compressor(method.features(data))
    z = (raw - method.latent_mean) * method.latent_scale
    t, eps = 1e-5 + (1 - 1e-5) * draw.uniform("time"), draw.normal("latent", N, D)
    total = torch.zeros(())
    for i in range(B):
        tan = math.tan(math.pi / 2 * float(t[i]))
        alpha = 1 / math.sqrt(1 + 25 * tan**2)
        z_t = alpha * z[i] + math.sqrt(1 - alpha**2) * eps[i]
        s = method.network(z_t[None], t[i : i + 1], None).detach() if sc_prob else torch.zeros(1, N, D)
        total = total + ((method.network(z_t[None], t[i : i + 1], s)[0] - z[i]) ** 2).mean()
    assert found["x0"].item() == pytest.approx((total / B).item(), rel=1e-4)


def test_the_self_conditioning_coin_is_one_for_the_whole_batch():
    method = build()
    given = []
    method.network.register_forward_hook(lambda module, args, out: given.append(args[2]))
    sides = []
    for step in range(40):
        given.clear()
        method.losses(batch(), noise(step=step))
        sides.append(len(given) - 1)
        assert (given[-1] is not None) == (len(given) == 2)
    assert 8 <= sum(sides) <= 32


@pytest.mark.parametrize("sc_prob", [0.0, 1.0])
def test_the_codec_gets_no_gradient_and_every_weight_of_the_network_does(sc_prob):
    """Distributed training waits for every trainable weight, whichever way the coin falls."""
    method = build(objective__sc_prob=sc_prob)
    method.total_loss(method.losses(batch(), noise())).backward()
    assert [n for n, p in method.named_parameters() if p.requires_grad and p.grad is None] == []
    assert [n for n, p in method.named_parameters() if p.grad is not None and not n.startswith("network.")] == []
    trainable = {n for n, p in method.named_parameters() if p.requires_grad}
    assert trainable == set(method.parameter_groups()[0].parameters)


def test_the_frozen_codec_drops_nothing_in_training():
    method = build(model__dropout=0.5).train()
    assert method.network.training and not method.codec.training
    assert torch.equal(method.encode(batch()), method.encode(batch()))


def test_network_wiring_by_hand():
    """Long skips join layer i with layer depth - 1 - i; an odd depth has a middle layer without one."""
    network = perturb(UNetTransformer(6, 8, 3, 2, 4.0))
    z, t, s = torch.randn(2, 5, 6), torch.tensor([0.2, 0.9]), torch.randn(2, 5, 6)
    time = F.silu(network.time_mlp(time_waves(t, 8)))

    def layer(i, x):
        x = x + network.time_layers[i](time)[:, None] + network.self_cond_layers[i](s)
        return network.blocks[i](x, *rotary_table(5, 4, z.device))

    first = network.in_proj(z)
    last = layer(2, layer(1, layer(0, first)) + first)
    assert torch.allclose(network(z, t, s), network.out_proj(network.output_norm(last)), atol=1e-6)
    assert torch.allclose(network(z, t), network(z, t, torch.zeros_like(z)))


def test_a_block_is_plain_attention_and_swiglu():
    block = perturb(LlamaBlock(8, 2, 4.0))
    x, length = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(2)), 3

    def norm(v, gain):
        return v / v.square().mean(-1, keepdim=True).sqrt() * gain

    def rotated(v, position):
        out = v.clone()
        for pair in range(2):  # heads of 4 channels: pairs (0, 2) and (1, 3)
            angle = position * 10_000.0 ** (-2 * pair / 4)
            a, b = v[pair], v[pair + 2]
            out[pair], out[pair + 2] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
        return out

    q, k, v = (norm(x[0], block.norm_attn.gamma) @ block.qkv.weight.T).chunk(3, dim=-1)
    mixed = torch.zeros(length, 8)
    for head in (slice(0, 4), slice(4, 8)):
        for i in range(length):
            scores = torch.stack([rotated(q[i, head], i) @ rotated(k[j, head], j) / 2 for j in range(length)])
            mixed[i, head] = scores.softmax(0) @ v[:, head]
    y = x[0] + mixed @ block.out.weight.T
    inner = norm(y, block.norm_mlp.gamma)
    gate, up = (inner @ block.gate_up.weight.T).chunk(2, dim=-1)
    assert block.gate_up.out_features == 2 * 4 * 8
    expected = y + (F.silu(gate) * up) @ block.down.weight.T
    assert torch.allclose(block(x, *rotary_table(length, 4, x.device))[0], expected, atol=1e-5)


def test_latents_as_wide_as_the_network_need_no_projection():
    names = {name.split(".")[0] for name, _ in UNetTransformer(8, 8, 2, 2, 4.0).named_parameters()}
    assert names == {"time_mlp", "blocks", "time_layers", "self_cond_layers", "output_norm"}


def test_time_waves():
    expected = [math.cos(0.5), math.cos(0.5 / math.sqrt(10)), math.sin(0.5), math.sin(0.5 / math.sqrt(10))]
    assert time_waves(torch.tensor([0.5]), 4)[0].tolist() == pytest.approx(expected, abs=1e-6)


# ---------------------------------------------------------------- sampling


def sampler_of(method, predict, rows=8, **options):
    method.predict = predict  # type: ignore[method-assign]
    return method.sample_latents(CosmosSampler(**options), noise(rows))


def test_a_perfect_prediction_of_a_point_is_reached():
    method = build()
    point = torch.randn(N, D, generator=torch.Generator().manual_seed(3))
    options = {"steps": 1000, "t_end": 0.002}
    z = sampler_of(method, lambda z, t, s=None: point.expand_as(z), **options)
    assert torch.allclose(z, point.expand_as(z), atol=0.05)
    assert torch.equal(sampler_of(method, lambda z, t, s=None: point.expand_as(z), result="x0", steps=3), point.expand_as(z))


def test_a_gaussian_is_sampled_with_its_mean_and_variance():
    """The clean prediction is the posterior mean, which is known for a Gaussian."""
    method, mu, var = build(), 0.5, 0.36

    def posterior_mean(z, t, s=None):
        alpha, sigma = method.schedule.alpha_sigma(t[:, None, None])
        return mu + var * alpha / (alpha**2 * var + sigma**2) * (z - alpha * mu)

    z = sampler_of(method, posterior_mean, rows=300, steps=400, t_end=0.005)
    assert float(z.mean()) == pytest.approx(mu, abs=0.03) and float(z.var()) == pytest.approx(var, rel=0.06)
    # At COSMOS's own last time the samples are those of the noisy marginal, not of the data.
    alpha, sigma = (float(x) for x in method.schedule.alpha_sigma(torch.tensor(0.05)))
    z = sampler_of(method, posterior_mean, rows=300, steps=200)
    assert float(z.mean()) == pytest.approx(alpha * mu, abs=0.03)
    assert float(z.var()) < alpha**2 * var + sigma**2


def test_the_sampler_steps_and_self_conditions_as_written():
    """Three steps by hand, from the row's own stream of noise."""
    method, options = build().eval(), CosmosSampler(steps=3)
    found = method.sample_latents(options, noise(1))
    draw, s = noise(1).streams("sample"), None
    z, schedule = draw.normal(N, D), method.schedule
    for k, t in enumerate([1.0, 1 - 0.95 / 3, 1 - 2 * 0.95 / 3]):
        s = method.network(z, torch.tensor([t]), s)
        alpha, sigma = schedule.alpha_sigma(torch.tensor(t, dtype=torch.float64))
        beta = schedule.beta(torch.tensor(t, dtype=torch.float64))
        score = (alpha * s - z) / sigma**2
        z = (z - 0.95 / 3 * (-beta / 2 * z - beta * score)).float()
        if k < 2:
            z = z + math.sqrt(beta * 0.95 / 3) * draw.normal(N, D)
    assert torch.allclose(found, z, atol=1e-4)


def test_a_sample_does_not_depend_on_its_neighbors():
    method = build().eval()
    options = method.config.sampler
    together = method.sample_latents(options, noise(5))
    alone = method.sample_latents(options, RowNoise(0, [3]))
    assert torch.allclose(together[3:4], alone, atol=1e-4)
    assert method.sample(options, noise(5)).shape == (5, L)
    assert not torch.allclose(together[0], together[1], atol=1e-2)


def test_watching_sees_every_step_and_changes_nothing():
    method, seen = build().eval(), []
    plain = method.sample(method.config.sampler, noise())
    watched = method.sample(method.config.sampler, noise(), lambda *told: seen.append((*told[:3], told[3]())))
    assert torch.equal(plain, watched) and torch.equal(seen[-1][3], plain)
    assert [row[:2] for row in seen] == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    # from noise to text, as times of the linear path with the noise that COSMOS has at its own times
    own = [1, 0.7625, 0.525, 0.2875]
    alpha, sigma = (x.double() for x in method.schedule.alpha_sigma(torch.tensor(own, dtype=torch.float64)))
    assert [row[2] for row in seen] == pytest.approx([*(alpha / (alpha + sigma)).tolist(), 1.0])
    assert [row[2] for row in seen] == sorted(row[2] for row in seen)
    assert all(row[3].shape == (B, L) for row in seen)


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("name", ["lm1b", "owt1024", "owt128", "tiny", "smoke"])
def test_presets_keep_what_the_comparison_shares(name):
    base = preset(name)
    config, stage = validate(for_method(base, "cosmos")), validate(for_method(base, "cosmos-codec"))
    assert config.method == "cosmos" and stage == Cosmos.first_stage(config)
    assert config.data == base.data and config.rate == base.rate
    assert config.encoder == replace(base.encoder, scale="per_channel")
    shared = ("latent_dim", "bottleneck_dim", "codec_layers", "codec_heads", "proj_dim", "hidden", "depth")
    assert all(getattr(config.model, field) == getattr(base.model, field) for field in shared)
    assert config.sampler.evaluations(128) == 200 and config.sampler.label() == "200 SDE steps"
    small = name in ("tiny", "smoke")
    assert (
        (stage.train.codec_lr == base.train.codec_lr and config.train == base.train)
        if small
        else (stage.train.codec_lr == 2e-4 and config.train.batch * config.train.accumulation * config.train.devices == 512)
    )


@pytest.mark.parametrize(
    "options",
    [
        {"objective__mask_share": 0.7}, {"objective__noise_scale": 1.5}, {"sampler__t_end": 0}, {"sampler__steps": 0},
        {"model__latent_len": 9}, {"model__heads": 3}, {"objective__codec_steps": -1}, {"objective__schedule_d": 0},
    ],
)  # fmt: skip
def test_impossible_options_are_refused(options):
    with pytest.raises(UsageError):
        tiny(**options)


@pytest.mark.parametrize("latent_len, layer", [(8, -1), (4, -2), (1, -1)])
def test_any_rate_and_encoder_layer(latent_len, layer):
    method = build(model__latent_len=latent_len, encoder__layer=layer, encoder__depth=2)
    assert method.encode(batch()).shape == (B, latent_len, D)
    assert math.isfinite(method.losses(batch(), noise())["x0"].item())


def test_exported_tensors_come_back():
    method, other = build().eval(), build(started=False).eval()
    state = method.export_state()
    assert not any(name.startswith("encoder.") for name in state) and any(name.startswith("codec.") for name in state)
    other.import_state({name: value.clone() for name, value in state.items()}, "here")
    assert torch.equal(other.sample(other.config.sampler, noise()), method.sample(method.config.sampler, noise()))
