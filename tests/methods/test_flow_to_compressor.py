"""Flow gradients that reach the compressor, and features that are learned: which loss moves what, and what stays as it was."""

import pytest
import torch
import torch.nn.functional as F
from test_jpeg_dlm import FROZEN_STEP, B, batch, build, losses, moved, noise, tiny, tokens, with_statistics

from jpeg_dlm.config import validate
from jpeg_dlm.encoders import build_encoder
from jpeg_dlm.errors import UsageError
from jpeg_dlm.methods.registry import build_method, for_method

ON = {"objective__flow_to_compressor": 1.0}
PAPER = {
    "jep": {"compressor", "dit"},
    "flow": {"dit"},
    "feat": {"compressor", "dit", "decompressor"},
    "ce": {"compressor", "dit", "decompressor", "unembed_proj", "lm_head"},
    "sigreg": {"compressor"},
    "var": {"compressor"},
    "cov": {"compressor"},
}
REACHED = PAPER | {"flow": {"compressor", "dit"}}
CASES = {
    "plain": (ON, REACHED),
    "after the warm-up": (ON | {"objective__flow_to_compressor_warmup": 0.4}, REACHED),
    "input alone": (ON | {"objective__flow_to_compressor_side": "input"}, REACHED),
    "values of the target": (ON | {"objective__flow_to_compressor_values": "target"}, REACHED),
    "batch": (ON | {"objective__flow_to_compressor_norm": "batch"}, REACHED),
    "adaptive times": (ON | {"objective__time_adaptive": True}, REACHED),
    "decoder noise": ({"objective__decoder_noise": 0.5}, PAPER),
    "token loss for the projection": ({"objective__ce_to_codec": False}, PAPER | {"ce": {"unembed_proj", "lm_head"}}),
    "options without the gradient": (
        {"objective__flow_to_compressor_norm": "batch", "objective__flow_to_compressor_values": "target"}, PAPER
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_which_loss_moves_which_module(case):
    options, wanted = CASES[case]
    method = with_statistics(build(objective__sc_prob=0.5, **options))
    assert {name: moved(method, loss) for name, loss in losses(method).items()} == wanted


def learned(**options):
    return build(encoder__kind="none", **options)


@pytest.mark.parametrize("reached", [False, True])
def test_which_loss_moves_a_learned_embedding(reached):
    """Everything that reaches the compressor reaches its input; the flow loss only if it is let through."""
    method = learned(objective__flow_to_compressor=float(reached))
    before = REACHED if reached else PAPER
    wanted = {name: parts | ({"embedding"} if "compressor" in parts else set()) for name, parts in before.items()}
    assert {name: moved(method, loss) for name, loss in losses(method).items()} == wanted
    method.zero_grad()
    method.total_loss(losses(method)).backward()
    assert [n for n, p in method.named_parameters() if p.requires_grad and p.grad is None] == []


def compressor_gradient(method, step=FROZEN_STEP, term="flow"):
    method.zero_grad(set_to_none=True)
    losses(method, step=step)[term].backward()
    found = [p.grad for p in method.compressor.parameters() if p.grad is not None]
    return torch.cat([g.flatten() for g in found]) if found else torch.zeros(1)


def test_the_gradient_is_proportional_to_weight_and_warmup():
    full = compressor_gradient(with_statistics(build(**ON)))
    half = compressor_gradient(with_statistics(build(objective__flow_to_compressor=0.5)))
    assert full.norm() > 1e-4 and torch.allclose(half, 0.5 * full, rtol=1e-4, atol=1e-8)
    warming = with_statistics(build(objective__flow_to_compressor_warmup=1.0, **ON))
    norms = [compressor_gradient(warming, step).norm().item() for step in (0, 60, 80, 99)]
    assert norms[0] == 0 and norms[1] < norms[2] < norms[3]


def test_both_sides_are_the_gradient_of_the_whole_loss():
    """The plain form is the gradient of the flow loss that no stop-gradient interrupts, computed here in one piece."""
    method = with_statistics(build(objective__sc_prob=0.0, objective__flow_to_compressor_side="both", **ON))
    found = compressor_gradient(method)
    method.zero_grad(set_to_none=True)
    n, x = noise(step=FROZEN_STEP), batch().tokens_BL
    z = (method.compressor(method.encoder(x)) - method.latent_mean) * method.latent_scale
    t = torch.sigmoid(-1.5 + 0.8 * n.normal("time"))[:, None, None]
    w = 1.5 * 4 ** n.uniform("scale") - 1
    predicted = method.dit(t * z + (1 - t) * n.normal("latent", 3, 12), t.flatten(), None, w)
    ((predicted - z) ** 2).mean().backward()
    wanted = torch.cat([p.grad.flatten() for p in method.compressor.parameters()])
    assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-7)

    one_side = with_statistics(build(objective__sc_prob=0.0, objective__flow_to_compressor_side="input", **ON))
    method.zero_grad(set_to_none=True)
    z = (method.compressor(method.encoder(x)) - method.latent_mean) * method.latent_scale
    predicted = method.dit(t * z + (1 - t) * n.normal("latent", 3, 12), t.flatten(), None, w)
    ((predicted - z.detach()) ** 2).mean().backward()
    wanted = torch.cat([p.grad.flatten() for p in method.compressor.parameters()])
    assert torch.allclose(compressor_gradient(one_side), wanted, rtol=1e-3, atol=1e-7)


def test_values_of_the_target_leave_every_loss_as_in_the_paper():
    options = ON | {"objective__flow_to_compressor_values": "target", "objective__flow_to_compressor_norm": "batch"}
    ours, paper = (with_statistics(build(**o)) for o in (options, {}))
    found, wanted = losses(ours), losses(paper)
    assert {name: loss.item() for name, loss in found.items()} == {name: loss.item() for name, loss in wanted.items()}


def test_adaptive_times_and_decoder_noise_are_of_training_alone():
    ours, paper = build(objective__time_adaptive=True, objective__decoder_noise=1.0).eval(), build().eval()
    found, wanted = losses(ours), losses(paper)
    assert {name: loss.item() for name, loss in found.items()} == {name: loss.item() for name, loss in wanted.items()}
    curve = ours.adaptive.loss_K.clone()
    ours.train()
    assert losses(ours)["feat"] > found["feat"] and not torch.equal(ours.adaptive.loss_K, curve)
    assert not any(name.startswith("adaptive") for name in ours.export_state())


@torch.no_grad()
def test_learned_features_have_unit_size_at_any_scale_and_know_no_position():
    method = learned()
    h = method.features(batch())
    assert torch.allclose((h**2).mean(-1), torch.ones(B, 8), atol=1e-4)
    assert torch.allclose(h[0, 3], F.rms_norm(method.embedding.weight[batch().tokens_BL[0, 3]], (16,)), atol=1e-6)
    method.embedding.weight.mul_(0.1)
    assert torch.allclose(method.features(batch()), h, atol=1e-3)


def test_all_other_weights_begin_as_with_an_encoder():
    plain, ours = build_method(tiny()).state_dict(), build_method(tiny(encoder__kind="none")).state_dict()
    assert ours.keys() - plain.keys() == {"embedding.weight"}
    assert all(torch.equal(ours[name], tensor) for name, tensor in plain.items() if not name.startswith("encoder."))


def test_the_layout_says_that_features_are_learned():
    method = learned()
    assert method.config_of(method.export_state(), tiny()).encoder.kind == "none"
    other = build_method(tiny(encoder__kind="none"))
    other.import_state(method.export_state(), "here")
    assert torch.equal(other.embedding.weight, method.embedding.weight)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"objective__flow_to_compressor": -1}, "must not be negative"),
        ({"objective__flow_to_compressor_warmup": 1.5}, "must lie between 0 and 1"),
        ({"encoder__kind": "none", "objective__ce_to_codec": False}, "the token loss keeps embeddings apart"),
        ({"encoder__kind": "none", "data__cache_features": True}, "nothing to cache"),
    ],
)
def test_refusals(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        validate(tiny(**options))


def test_other_methods_need_an_encoder():
    with pytest.raises(UsageError, match="Only jpeg-dlm learns its own features"):
        build_encoder(for_method(tiny(encoder__kind="none"), "elf").encoder, 40)


# Deviation of the latents after 50 steps of the flow loss alone, as a share of that before (measured).
DEVIATIONS = {"plain": 0.06, "input alone": 0.81, "values of the target": 0.91, "batch": 0.92}


@pytest.mark.parametrize("case", DEVIATIONS)
def test_the_plain_gradient_alone_collapses_the_latents_and_its_remedies_do_not(case):
    method = build(**CASES[case][0])

    def latents():
        return method.compressor(method.encoder(tokens(64))).detach()

    method.update_statistics(latents())
    before = latents().flatten(0, 1).std(0).mean()
    optimizer = torch.optim.Adam([p for p in method.parameters() if p.requires_grad], 3e-3)
    for step in range(50):
        optimizer.zero_grad()
        method.losses(batch(32), noise(32, FROZEN_STEP + step))["flow"].backward()
        optimizer.step()
        method.after_step(step, 100)
    share = (latents().flatten(0, 1).std(0).mean() / before).item()
    assert share < 0.2 if case == "plain" else share > 0.6
