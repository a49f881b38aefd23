"""COSMOS: schedule and reverse SDE, both stages against slow versions, statistics, sampling and where rows end."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from micro import micro_config, micro_model, perturb
from reference import rms, silu, slow_half_attention

from jpeg_dlm.methods import cosmos
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.cosmos import Cosmos, CosmosCodec, CosmosModel, CosmosSampler, alpha_sigma, alpha_sigma_at
from jpeg_dlm.methods.registry import for_method
from jpeg_dlm.nn.layers import SwiGluBlock, rotary_table, scalar_embedding
from jpeg_dlm.nn.unet_transformer import MAX_PERIOD, UNetTransformer
from jpeg_dlm.presets import preset
from jpeg_dlm.util.errors import CheckpointError, UsageError
from jpeg_dlm.util.rng import RowNoise

B, VOCAB, L, N, D = 4, 40, 8, 3, 12
SIZES = {"data__vocab_size": VOCAB, "data__token_len": L, "model__latent_len": N, "model__latent_dim": D, "model__depth": 2}
SIZES |= {"train__steps": 100, "sampler__steps": 4, "encoder__scale": "none"}


def build_codec(**options) -> CosmosCodec:
    return micro_model("cosmos-codec", 0.1, **SIZES | options).train()


def build(started=True, **options) -> Cosmos:
    method = micro_model("cosmos", 0.1, **SIZES | options)
    if started:
        method.start_from(build_codec(**options), [batch(24)])
    return method.train()


def batch(rows=B, seed=7, **kwargs):
    return Batch(torch.randint(2, VOCAB, (rows, L), generator=torch.Generator().manual_seed(seed)), **kwargs)


def noise(rows=B, step=0, **kwargs):
    return RowNoise(0, range(rows), step, **kwargs)


# ---------------------------------------------------------------- schedule


@pytest.mark.parametrize("d", [1.0, 5.0, 7.0])
def test_schedule_identities(d, monkeypatch):
    monkeypatch.setattr(cosmos, "TAN_D", d)
    h = 1e-6
    for t in torch.linspace(0.01, 0.94, 94).tolist():
        alpha, sigma = alpha_sigma_at(t)
        assert alpha**2 + sigma**2 == pytest.approx(1) and sigma / alpha == pytest.approx(d * math.tan(math.pi * t / 2))
        before, after = (2 * math.log(alpha_sigma_at(t + x)[0]) for x in (-h, h))
        assert cosmos.beta(t) == pytest.approx((before - after) / (2 * h), rel=1e-6)
    assert cosmos.beta(0.95) == cosmos.beta(0.97) == cosmos.beta(1.0) < math.inf
    assert [*alpha_sigma_at(0.0), *alpha_sigma_at(1.0)] == pytest.approx([1, 0, 0, 1], abs=1e-6)


# ---------------------------------------------------------------- stage one


def test_the_halves_are_those_of_the_whole_batch_however_it_is_split():
    method = build_codec()
    h = torch.randn(B, L, 16, generator=torch.Generator().manual_seed(1))
    whole = method.corrupt(h, None, noise(total=B))
    parts = [method.corrupt(h[i : i + 1], None, RowNoise(0, range(i, i + 1), total=B)) for i in range(B)]
    for together, alone in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("padded", [False, True])
def test_the_codec_loss_is_the_slow_plain_one(padded):
    method, rows = build_codec(), 12
    mask = torch.arange(L) < torch.tensor([8, 5, 3, 7]).repeat(3)[:, None] if padded else None
    data, draw = batch(rows, mask_BL=mask), noise(rows)
    found = method.losses(data, draw)
    h = method.features(data)
    coins, eps = draw.uniform("token-mask", L), draw.normal("feature", L, 16)
    keep = draw.uniform("latent-mask", N, D)
    ce, feat, count = torch.zeros(()), torch.zeros(()), 0
    for i in range(rows):
        real = torch.ones(L, dtype=torch.bool) if mask is None else mask[i]
        seen = real & (coins[i] >= 0.3) if i < rows / 2 else real
        features = h[i] if i < rows / 2 else 0.7 * h[i] + math.sqrt(0.51) * eps[i]
        z = method.codec.compressor(features[None], seen[None])[0]
        z = torch.where(keep[i] < 0.4, 0.0, z)
        hhat = method.codec.decompressor(z[None])[0]
        log_p = method.codec.lm_head(F.gelu(method.codec.unembed_proj(hhat))).log_softmax(-1)
        for j in real.nonzero().flatten().tolist():
            ce = ce - log_p[j, data.tokens_BL[i, j]]
            feat = feat + ((hhat[j] - h[i, j]) ** 2).mean()
            count += 1
    assert found["ce"].item() == pytest.approx((ce / count).item(), rel=1e-5)
    assert found["feat"].item() == pytest.approx((feat / count).item(), rel=1e-5)


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
    with pytest.raises(CheckpointError, match="the first stage"):
        method.start_from(build_codec(model__latent_len=2), [batch()])
    with pytest.raises(UsageError, match="two rows"):
        method.start_from(build_codec(), [batch(1)])
    with pytest.raises(UsageError):
        build_codec().start_from(method, [batch()])


def test_stage_one_has_its_own_budget_rate_and_clipping():
    config = micro_config("cosmos", **SIZES, objective__codec_steps=30)
    [stage] = Cosmos.stages(config)
    assert (stage.method, stage.train.steps, stage.train.clip) == ("cosmos-codec", 30, 10.0)
    assert Cosmos.stages(micro_config("cosmos", **SIZES))[0].train.steps == 100 and CosmosCodec.stages(stage) == []
    own_encoder = replace(config, encoder=replace(config.encoder, kind="small"))
    assert [before.method for before in Cosmos.stages(own_encoder)] == ["encoder", "cosmos-codec"]
    assert replace(stage, method="cosmos", train=config.train) == config  # nothing else differs


# ---------------------------------------------------------------- stage two


def parameters(method, prefix):
    return {name for name, _ in method.named_parameters() if name.startswith(prefix)}


@pytest.mark.parametrize("sc_prob", [0.0, 1.0])
def test_the_diffusion_loss_is_the_slow_plain_one(sc_prob, monkeypatch):
    monkeypatch.setattr(cosmos, "SC_PROB", sc_prob)
    method = build()
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
    found["x0"].backward()  # the codec gets no gradient, and every weight of the network does, however the coin falls
    assert {n for n, p in method.named_parameters() if p.grad is not None} == parameters(method, "network.")
    assert method.parameter_groups()[0].parameters.keys() == parameters(method, "network.")


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


def test_network_wiring_by_hand():
    """Long skips join layer i with layer depth - 1 - i; an odd depth has a middle layer without one."""
    network = perturb(UNetTransformer(CosmosModel(latent_dim=6, hidden=8, depth=3, heads=2)), 0.1)
    z, t, s = torch.randn(2, 5, 6), torch.tensor([0.2, 0.9]), torch.randn(2, 5, 6)
    time = F.silu(network.time_mlp(scalar_embedding(t, 8, MAX_PERIOD)))

    def layer(i, x):
        x = x + network.time_layers[i](time)[:, None] + network.self_cond_layers[i](s)
        return network.blocks[i](x, *rotary_table(5, 4, z.device))

    first = network.in_proj(z)
    last = layer(2, layer(1, layer(0, first)) + first)
    assert torch.allclose(network(z, t, s), network.out_proj(network.output_norm(last)), atol=1e-6)
    assert torch.allclose(network(z, t), network(z, t, torch.zeros_like(z)))


@torch.no_grad()
def test_a_block_is_plain_attention_and_swiglu():
    block = perturb(SwiGluBlock(8, 2, 32), 0.1).double()
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y = x + slow_half_attention(rms(x, block.norm_attention.weight), block.qkv.weight, block.out.weight, 2)
    gate, up = (rms(y, block.norm_mlp.weight) @ block.gate_up.weight.T).chunk(2, dim=-1)
    assert block.gate_up.out_features == 2 * 4 * 8
    expected = y + (silu(gate) * up) @ block.down.weight.T
    assert torch.allclose(block(x[None], *rotary_table(3, 4, x.device))[0], expected, atol=1e-5)


# ---------------------------------------------------------------- sampling


def sampled(method, predict=None, rows=8, steps=200):
    """The latents that a method samples, which stand for their own tokens."""
    method.network.forward, method.greedy = predict or method.network.forward, lambda z: z
    return method.sample(CosmosSampler(steps), noise(rows))


def test_without_noise_all_texts_are_one():
    method = micro_model("cosmos")
    [scaled] = method.sample(CosmosSampler(3, noise_scale=0.0), noise(6)).unique(dim=0)
    assert len(method.sample(CosmosSampler(3), noise(6)).unique(dim=0)) > 1 and scaled.shape == (12,)


def test_a_gaussian_is_sampled_with_its_mean_and_variance(monkeypatch):
    """The clean prediction is the posterior mean, which is known for a Gaussian."""
    method, mu, var = build(), 0.5, 0.36

    def posterior_mean(z, t, *others):
        alpha, sigma = alpha_sigma(t[:, None, None])
        return mu + var * alpha / (alpha**2 * var + sigma**2) * (z - alpha * mu)

    with monkeypatch.context() as patch:
        patch.setattr(cosmos, "T_END", 0.005)
        z = sampled(method, posterior_mean, rows=300, steps=400)
    assert float(z.mean()) == pytest.approx(mu, abs=0.03) and float(z.var()) == pytest.approx(var, rel=0.06)
    # At COSMOS's own last time the samples are those of the noisy marginal, not of the data.
    alpha, sigma = alpha_sigma_at(0.05)
    z = sampled(method, posterior_mean, rows=300, steps=200)
    assert float(z.mean()) == pytest.approx(alpha * mu, abs=0.03)
    assert float(z.var()) < alpha**2 * var + sigma**2


def test_the_sampler_steps_and_self_conditions_as_written():
    """Three steps by hand, from the row's own stream of noise."""
    method = build().eval()
    latents = sampled(method, rows=1, steps=3)
    draw, s = noise(1).streams("sample"), None
    z = draw.normal(N, D)
    for k, t in enumerate([1.0, 1 - 0.95 / 3, 1 - 2 * 0.95 / 3]):
        s = method.network(z, torch.tensor([t]), s)
        (alpha, sigma), beta = alpha_sigma_at(t), cosmos.beta(t)
        score = (alpha * s - z) / sigma**2
        z = z - 0.95 / 3 * (-beta / 2 * z - beta * score)
        if k < 2:
            z = z + math.sqrt(beta * 0.95 / 3) * draw.normal(N, D)
    assert torch.allclose(latents, z, atol=1e-4)


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("name", ["lm1b", "owt1024", "owt128", "tiny", "smoke"])
def test_presets_keep_what_the_comparison_shares(name):
    base = preset(name)
    config, stage = for_method(base, "cosmos"), for_method(base, "cosmos-codec")
    assert config.method == "cosmos" and stage == Cosmos.stages(config)[-1]
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
