"""Context in the losses of JPEG-DLM: given by the rows before, dropped for a share of rows, without a gradient or a loss."""

import dataclasses

import pytest
import torch
from conftest import perturb

from jpeg_dlm.config import validate
from jpeg_dlm.encoders import build_encoder
from jpeg_dlm.methods import jpeg_dlm_networks
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.methods.registry import build_method
from jpeg_dlm.options import override
from jpeg_dlm.presets import preset
from jpeg_dlm.util.errors import UsageError
from jpeg_dlm.util.rng import RowNoise

B, K, L, N, VOCAB = 6, 2, 8, 3, 40
SIZES = {
    "data.vocab_size": VOCAB, "data.token_len": L, "data.packing": "padded", "encoder.kind": "random",
    "encoder.feature_dim": 16, "encoder.depth": 1, "encoder.heads": 2, "encoder.scale": "none", "model.latent_len": N,
    "model.latent_dim": 12, "model.bottleneck_dim": 8, "model.codec_layers": 1, "model.codec_heads": 2, "model.proj_dim": 10,
    "model.hidden": 16, "model.heads": 2, "model.depth": 1, "model.freq_dim": 8, "objective.sigreg_slices": 8,
    "model.context_blocks": K,
}  # fmt: skip


def build(**changes) -> JpegDlm:
    config = override(preset("smoke"), SIZES | {name.replace("__", "."): value for name, value in changes.items()})
    method = build_method(validate(config), build_encoder(config.encoder, VOCAB))
    assert isinstance(method, JpegDlm)
    return perturb(method, 0.1).train()


def batch(seed=7) -> Batch:
    g = torch.Generator().manual_seed(seed)
    rows, before = (torch.randint(VOCAB, (n, L), generator=g) for n in (B, B * K))
    return Batch(
        rows, torch.ones(B, L).bool(), before=Batch(before, torch.ones(B * K, L).bool()), present_BK=torch.ones(B, K).bool()
    )


def noise(rows=range(B)):
    return RowNoise(0, rows, 50, total=B)


@pytest.mark.parametrize("shared", [True, False])
def test_the_flow_sees_the_context_and_nothing_else_does(shared, monkeypatch):
    monkeypatch.setattr(jpeg_dlm_networks, "CONTEXT_DROP", 0.0)
    method, data = build(model__shared=shared), batch()
    plain = method.losses(data, noise())
    tokens = data.before.tokens_BL.flip(0)
    moved = method.losses(dataclasses.replace(data, before=dataclasses.replace(data.before, tokens_BL=tokens)), noise())
    assert {name for name in plain if not torch.isclose(plain[name], moved[name])} == {"flow"}
    monkeypatch.setattr(jpeg_dlm_networks, "CONTEXT_DROP", 1.0)
    dropped = method.losses(data, noise())
    alone = method.losses(dataclasses.replace(data, before=None, present_BK=None), noise())
    for name, value in alone.items():
        torch.testing.assert_close(value, dropped[name])
    assert not torch.equal(alone["flow"], plain["flow"])


def test_before_the_beginning_of_a_text_latents_are_zero_and_given(monkeypatch):
    """So that the model can tell the beginning from a row whose context was dropped."""
    monkeypatch.setattr(jpeg_dlm_networks, "CONTEXT_DROP", 0.0)
    method, data = build(), batch()
    first = torch.tensor([[False, False], [False, True], [True, True]]).repeat(2, 1)
    context = context_of(method, dataclasses.replace(data, present_BK=first), noise())
    z_BKND, whole_BKND = (z.view(B, K, N, -1) for z in (context.z_BCD, context_of(method, data, noise()).z_BCD))
    assert context.present_BC.all() and not z_BKND[~first].any()
    torch.testing.assert_close(z_BKND[first], whole_BKND[first])


def context_of(method, data, noise):
    return method.draw_context(data, noise.repeated(method.config.objective.flow_draws))


def test_gradients_go_into_the_dit_alone(monkeypatch):
    monkeypatch.setattr(jpeg_dlm_networks, "CONTEXT_DROP", 0.5)
    method, data = build(), batch()
    context = context_of(method, data, noise())
    assert not context.z_BCD.requires_grad
    flow = method.losses(data, noise())["flow"]
    flow.backward()
    touched = {name.split(".")[0] for name, p in method.named_parameters() if p.grad is not None and p.grad.any()}
    assert touched == {"dit"} and method.dit.context_kind.grad.any() and method.dit.no_context.grad.any()


@pytest.mark.parametrize("shared", [True, False])
def test_every_trainable_parameter_gets_a_gradient(shared):
    """Processes that share a step would wait forever for one that never comes."""
    method = build(model__shared=shared)
    method.total_loss(method.losses(batch(), noise())).backward()
    assert [name for name, p in method.named_parameters() if p.requires_grad and p.grad is None] == []


def test_a_share_of_rows_has_no_context_whatever_their_batch():
    method = build(objective__flow_draws=3)
    rows = range(4000)
    data = Batch(torch.zeros(1, L).long().expand(4000, -1), None, before=None)
    present = torch.ones(4000, K).bool()
    method.encode = lambda before: torch.zeros(4000 * K, N, 12)  # type: ignore[method-assign]
    found = context_of(method, dataclasses.replace(data, before=data, present_BK=present), RowNoise(0, rows, 50))
    kept = found.present_BC.view(3, 4000, K * N)
    assert torch.equal(kept.all(2), kept.any(2))  # of a row all or nothing
    for draw in kept[..., 0].float():
        assert draw.mean().item() == pytest.approx(0.85, abs=0.02)
    assert not torch.equal(kept[0], kept[1])  # each draw has a chance of its own
    few = context_of(build(), batch(), noise([5, 2, 0, 1, 3, 4]))
    again = context_of(build(), batch(), noise())
    assert few.present_BC[[2, 3, 1, 4, 5, 0]].equal(again.present_BC)


def test_latents_of_the_context_are_those_of_the_text_itself():
    method, data = build(), batch()
    z = context_of(method, data, noise()).z_BCD
    expected = method.encode(data.before)  # (B K, N, D)
    for row in range(B):
        for k in range(K):
            torch.testing.assert_close(z[row, k * N : (k + 1) * N], expected[row * K + k])


def test_a_checkpoint_tells_how_many_blocks_its_model_sees():
    method = build()
    found = JpegDlm.config_of(method.export_state(), override(method.config, {"model.context_blocks": 0}))
    assert found.model.context_blocks == K
    assert JpegDlm.config_of(build(model__context_blocks=0).export_state(), method.config).model.context_blocks == 0


@pytest.mark.parametrize("changes", [{"data.packing": "continuous"}, {"data.whole": True}, {"data.frame": True}])
def test_documents_of_one_row_or_none_are_refused(changes):
    with pytest.raises(UsageError, match="model.context_blocks needs documents of several rows"):
        validate(override(preset("smoke"), SIZES | changes))
