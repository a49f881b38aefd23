"""JPEG-DLM's training step: Algorithm 1 by hand, which loss moves what, statistics, the target network and ablations."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from micro import micro_config, micro_model

from jpeg_dlm.methods import jpeg_dlm
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.methods.jpeg_dlm_networks import swap_tokens
from jpeg_dlm.methods.registry import build_method
from jpeg_dlm.methods.regularizers import VARIANCE_FLOOR, latent_regularizers
from jpeg_dlm.presets import preset
from jpeg_dlm.training.sharding import repeated_layers
from jpeg_dlm.util.rng import RowNoise

B, VOCAB = 4, 40
SIZES = {"data__vocab_size": VOCAB, "data__token_len": 8, "model__latent_dim": 12, "train__steps": 100, "sampler__steps": 4}
SIZES |= {"model__decode_residual": False, "model__position_scale": 0.0, "sampler__grid": "quantile"}  # as in the paper


def build(perturbed=0.1, **options) -> JpegDlm:
    return micro_model("jpeg-dlm", perturbed, **SIZES | options).train()


FROZEN_STEP = 50  # later than the tenth of 100 steps in which the statistics move


def with_statistics(method):
    """Latent statistics that are not the identity."""
    g = torch.Generator().manual_seed(5)
    method.update_statistics(0.5 + 1.5 * torch.randn(9, 3, 12, generator=g))
    return method


def tokens(rows=B, length=8):
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(7))


def batch(rows=B, **kwargs):
    return Batch(tokens(rows), **kwargs)


def noise(rows=B, step=0):
    return RowNoise(0, range(rows), step)


def losses(method, data=None, step=FROZEN_STEP):
    return method.losses(data or batch(), noise(step=step))


# ---------------------------------------------------------------- which loss moves which module


def moved(method, loss) -> set[str]:
    method.zero_grad(set_to_none=True)
    loss.backward(retain_graph=True)
    with_gradient = [name for name, p in method.named_parameters() if p.grad is not None and p.grad.any()]
    return {name.split(".")[0] for name in with_gradient}


@pytest.mark.parametrize("shared", [True, False])
def test_which_loss_moves_which_module(shared):
    """The last paragraph of the paper's Method; with separate networks the decode branch has its own."""
    method = build(model__shared=shared, objective__ce_time_min=0.0)
    terms = losses(method)
    decode_network = "dit" if shared else "predictor"
    assert {name: moved(method, loss) for name, loss in terms.items()} == {
        "jep": {"compressor", decode_network},
        "flow": {"dit"},
        "feat": {"compressor", decode_network, "decompressor"},
        "ce": {"compressor", decode_network, "decompressor", "unembed_proj", "lm_head"},
        "ce_noisy": {"dit", "decompressor", "unembed_proj", "lm_head"},
        "sigreg": {"compressor"},
        "var": {"compressor"},
        "cov": {"compressor"},
    }


def test_total_loss_is_the_papers_weighted_sum():
    method = build(objective__sigreg_weight=0.1)
    terms = losses(method)
    main = terms["jep"] + terms["flow"] + terms["feat"] + terms["ce"]
    wanted = main + 0.1 * terms["sigreg"] + 0.2 * terms["var"] + 0.002 * terms["cov"]
    assert method.total_loss(terms).item() == pytest.approx(wanted.item(), rel=1e-6)


# ---------------------------------------------------------------- the step as in Algorithm 1, slowly


@torch.no_grad()
def test_losses_follow_algorithm_1(monkeypatch):
    monkeypatch.setattr(jpeg_dlm, "SC_PROB", 0.0)
    method = with_statistics(build())
    n, o, x = noise(), method.config.objective, tokens()
    terms = method.eval().losses(Batch(x), n)
    mean, std = method.latent_mean, 1 / method.latent_scale

    h = method.encoder(x)
    z_tgt = (method.target(h) - mean) / std
    z_c = (method.compressor(h + o.sigma * n.normal("feature", 8, 16)) - mean) / std
    t = torch.sigmoid(-1.5 + 0.8 * n.normal("time"))
    z_t = t[:, None, None] * z_tgt + (1 - t)[:, None, None] * n.normal("latent", 3, 12)
    w = 1.5 * 4 ** n.uniform("scale") - 1
    zhat_tgt = method.dit(z_c, torch.ones(B), None, w, decode_rows=B)
    hhat = method.decompressor(zhat_tgt * std + mean)
    logits = method.lm_head(F.gelu(method.unembed_proj(hhat)))

    assert terms["jep"].item() == pytest.approx(((zhat_tgt - z_tgt) ** 2).mean().item(), rel=1e-5)
    assert terms["flow"].item() == pytest.approx(((method.dit(z_t, t, None, w) - z_tgt) ** 2).mean().item(), rel=1e-5)
    assert terms["feat"].item() == pytest.approx(((hhat - h) ** 2).mean().item(), rel=1e-5)
    log_p = logits.log_softmax(-1).gather(-1, x[..., None])
    assert terms["ce"].item() == pytest.approx(-log_p.mean().item(), rel=1e-5)


def test_weights_come_from_the_seed_and_leave_the_global_state_alone():
    torch.manual_seed(5)
    first = build_method(micro_config()).state_dict()
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), drawn)
    second, other = build_method(micro_config()).state_dict(), build_method(micro_config(train__seed=43)).state_dict()
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


# ---------------------------------------------------------------- standardization


def test_the_first_batch_sets_the_statistics_and_later_ones_move_them():
    method = build()
    first, second = torch.randn(5, 3, 12) * 2 + 1, torch.randn(5, 3, 12) * 0.5 - 1
    method.update_statistics(first)
    rows = first.flatten(0, 1)
    assert torch.allclose(method.latent_mean, rows.mean(0), atol=1e-5)
    assert torch.allclose(method.latent_scale, 1 / rows.std(0, unbiased=False), rtol=1e-4)
    z = method.standardize(first).flatten(0, 1)
    assert torch.allclose(z.mean(0), torch.zeros(12), atol=1e-5)
    assert torch.allclose(z.var(0, unbiased=False), torch.ones(12), atol=1e-4)

    method.update_statistics(second)
    later = second.flatten(0, 1)
    assert torch.allclose(method.latent_mean, 0.99 * rows.mean(0) + 0.01 * later.mean(0), atol=1e-5)
    assert torch.allclose(method.unstandardize(method.standardize(first)), first, atol=1e-5)
    variance = 0.99 * rows.var(0, unbiased=False) + 0.01 * later.var(0, unbiased=False)
    assert torch.allclose(method.latent_scale**-2, variance, rtol=1e-4)


def test_a_dead_channel_is_not_blown_up():
    method = build()
    method.update_statistics(torch.ones(5, 3, 12))
    assert method.latent_scale.max().item() == pytest.approx(VARIANCE_FLOOR**-0.5)


def test_statistics_move_only_in_training_and_only_before_they_freeze():
    method = build(objective__standardize_steps=3)
    for step, count in ((0, 1), (2, 2), (3, 2), (50, 2)):
        method.losses(batch(), noise(step=step))
        assert int(method.latent_updates) == count
    method.eval()
    method.losses(batch(), noise(step=0))
    assert int(method.latent_updates) == 2
    method.train()
    method.encode(batch())
    assert int(method.latent_updates) == 2


@pytest.mark.parametrize(("steps", "given", "freeze"), [(100, 0, 10), (15, 0, 2), (1_000_000, 0, 2000), (100, 7, 7)])
def test_when_the_statistics_freeze(steps, given, freeze):
    assert build(train__steps=steps, objective__standardize_steps=given).standardize_steps == freeze


# ---------------------------------------------------------------- target network


def test_the_target_starts_as_a_copy_and_follows():
    method = build(perturbed=0, objective__target_ema_start=0.996, objective__target_ema_end=0.999)
    for own, target in zip(method.compressor.parameters(), method.target.parameters(), strict=True):
        assert torch.equal(own, target) and own.data_ptr() != target.data_ptr()
    before = copy.deepcopy(method.target.state_dict())
    with torch.no_grad():
        for p in method.compressor.parameters():
            p.add_(1.0)
    method.after_step(50, 101)
    for name, after in method.target.state_dict().items():
        wanted = 0.9975 * before[name] + 0.0025 * method.compressor.state_dict()[name]
        assert torch.allclose(after, wanted, atol=1e-6)


# ---------------------------------------------------------------- sampling


def test_a_model_without_encoder_samples_but_says_that_it_cannot_encode():
    method = JpegDlm(micro_config(**SIZES)).eval()
    assert method.sample(method.config.sampler, RowNoise(0, [0])).shape == (1, 8)
    with pytest.raises(ValueError, match="without its text encoder"):
        method.encode(batch())


# ---------------------------------------------------------------- ablations


def compared(**options):
    base = with_statistics(build())
    changed = build(**options)
    changed.load_state_dict(base.state_dict(), strict=False)
    return losses(base), losses(changed)


def differing(a, b):
    return {name for name in a if name in b and not math.isclose(a[name].item(), b[name].item(), rel_tol=1e-5)}


@pytest.mark.parametrize(
    ("option", "value", "terms"),
    [
        ("objective__sigma", 0.1, {"jep", "feat", "ce", "sigreg", "var", "cov"}),
        ("model__decode_residual", True, {"jep", "feat", "ce"}),
        ("model__shared", False, {"jep", "feat", "ce"}),
        ("model__denoise_skip", True, {"flow"}),
        ("objective__time_uniform", 0.3, {"flow"}),
        ("objective__flow_draws", 3, {"flow"}),
    ],
)
def test_an_option_of_one_branch_leaves_the_other_alone(option, value, terms):
    assert differing(*compared(**{option: value})) == terms


def test_only_late_rows_enter_the_noisy_token_loss():
    method = build(objective__ce_time_min=0.2)
    t = torch.tensor([0.1, 0.2, 0.7, 0.19])
    zhat = torch.randn(B, 3, 12)
    mask = torch.arange(8) < torch.tensor([8, 3, 5, 1])[:, None]
    logits = method.project(method.decompressor(method.unstandardize(zhat)))
    nll = -logits.log_softmax(-1).gather(-1, tokens()[..., None]).squeeze(-1)
    total = sum(nll[b, i] for b in range(B) for i in range(8) if t[b] >= 0.2 and mask[b, i])
    hhat = method.decompressed(zhat)
    loss = method.token_loss(hhat, batch(mask_BL=mask), t >= 0.2)
    assert loss.item() == pytest.approx(total.item() / (3 + 5), rel=1e-5)  # the real tokens of the two late rows
    assert method.token_loss(hhat, batch(mask_BL=mask), t >= 1) == 0


@pytest.mark.parametrize("name, vectors", [("lm1b", 12_288), ("owt1024", 12_288), ("owt128", 1_536), ("tiny", 4 * 32)])
def test_the_factor_of_sigreg(name, vectors):
    """SIGReg of vectors that are all zero is 0.402047577 for each (LeJEPA's code)."""
    o, z = preset(name).objective, torch.zeros(4, 32, 12)
    rows = RowNoise(0, range(4), 0, torch.device("cpu"), 6144)  # four of the rows of a step
    assert latent_regularizers(z, o, 100, rows)["sigreg"].item() == pytest.approx(vectors * 0.402047577, rel=1e-5)


def test_a_share_of_the_real_tokens_becomes_uniform_draws():
    rows, length = 400, 50
    mask = torch.arange(length) < torch.tensor([[20], [50]]).repeat(rows // 2, 1)
    text = Batch(torch.full((rows, length), 7), mask, torch.zeros(rows, length, 3))
    swapped = swap_tokens(text, 0.3, 100, RowNoise(0, range(rows), 5))
    changed = swapped.tokens_BL != 7
    assert not changed[~mask].any(), "padding stays"
    assert changed[mask].float().mean().item() == pytest.approx(0.3 * 0.99, abs=4 * (0.21 / mask.sum().item()) ** 0.5)
    counts = torch.bincount(swapped.tokens_BL[changed], minlength=100)
    expected = counts.sum().item() / 99
    assert ((counts.float() - expected) ** 2 / expected)[torch.arange(100) != 7].sum() < 98 + 5 * (2 * 98) ** 0.5  # chi squared
    assert swapped.features_BLF is None, "cached features are of the original text"


def test_the_decode_branch_alone_sees_random_tokens_and_only_in_training():
    plain, with_swaps = build(), build(objective__swap=0.5)
    with_swaps.load_state_dict(plain.state_dict())
    step = noise(step=FROZEN_STEP)
    expected, other = plain.losses(batch(), step), plain.losses(swap_tokens(batch(), 0.5, VOCAB, step), step)
    terms = with_swaps.losses(batch(), step)
    assert differing(expected, terms) == {"jep", "feat", "ce", "sigreg", "var", "cov"} and differing(other, terms) == {"flow"}
    assert not differing(plain.eval().losses(batch(), step), with_swaps.eval().losses(batch(), step))


def test_uniform_times_cover_the_late_ones():
    late = [(build(objective__time_uniform=u).draw_times(noise(2000)) > 0.8).float().mean().item() for u in (0.0, 0.3)]
    assert late[0] < 0.005 and late[1] == pytest.approx(0.3 * 0.2, abs=0.02)


def test_several_draws_begin_with_the_one(monkeypatch):
    """With k draws the flow loss is the mean of k losses, the first of which is that of a single draw."""
    monkeypatch.setattr(jpeg_dlm, "SC_PROB", 0.0)
    method, single = with_statistics(build(objective__flow_draws=3)), with_statistics(build())
    single.load_state_dict(method.state_dict())
    z = method.target_latents(method.features(batch()), None)
    n = method.noisy_embeddings(z, batch(), noise(step=FROZEN_STEP))
    each = [F.mse_loss(method.dit(n.z_t[i::B], n.t[i::B], None, n.w[i::B]), n.z_1[i::B]) for i in range(B)]
    assert losses(method)["flow"].item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-5)
    first = single.noisy_embeddings(z, batch(), noise(step=FROZEN_STEP))
    assert all(torch.equal(getattr(n, name)[:B], getattr(first, name)) for name in ("z_1", "z_t", "t", "w"))


@pytest.mark.parametrize(("step", "factor"), [(0, 1), (5, 1), (15, 5), (9, 1 + 4 * 0.4), (99, 5)])
def test_sigreg_grows_once_tokens_decode(step, factor):
    base, late = with_statistics(build()), with_statistics(build(objective__sigreg_weight=0.02, objective__sigreg_late=0.1))
    late.load_state_dict(base.state_dict())
    ratio = losses(late, step=step)["sigreg"] / losses(base, step=step)["sigreg"]
    assert ratio.item() == pytest.approx(factor, rel=1e-4)


def test_separate_networks_with_equal_weights_equal_a_shared_one():
    base, separate = build(), build(model__shared=False)
    separate.load_state_dict(base.state_dict(), strict=False)
    separate.predictor.load_state_dict(base.dit.state_dict())
    assert not differing(losses(base), losses(separate))
    sampler = base.config.sampler
    assert torch.equal(base.eval().sample(sampler, noise(3)), separate.eval().sample(sampler, noise(3)))


# ---------------------------------------------------------------- reconstruction and compilation


@torch.no_grad()
def test_reconstruction_is_a_share_of_real_tokens(monkeypatch):
    method = build().eval()
    mask = torch.arange(8) < torch.tensor([8, 3, 5, 1])[:, None]
    monkeypatch.setattr(method, "greedy", lambda z: torch.where(torch.arange(8) < 2, tokens(), -1))
    assert method.reconstruction(batch()).item() == pytest.approx(2 / 8)
    assert method.reconstruction(batch(mask_BL=mask)).item() == pytest.approx((2 + 2 + 2 + 1) / 17)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jpeg-dlm", "elf"])
def test_compiled_layers_break_no_graph_and_add_none_after_the_first_step(name):
    """Rows of self-conditioning differ from step to step."""
    method, counters = micro_model(name, data__vocab_size=VOCAB, data__token_len=8).train(), torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    graphs = []
    for layer in repeated_layers(method):
        layer.compile(dynamic=True, backend="eager")
    for step in range(4):
        method.total_loss(method.losses(batch(16), noise(16, step))).backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert not counters["graph_break"] and graphs[0] == graphs[-1] > 0
