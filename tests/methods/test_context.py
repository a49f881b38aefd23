"""Context in the losses of JPEG-DLM: given by the rows before, dropped for a share of rows, without a gradient or a loss."""

import dataclasses

import pytest
import torch
from micro import micro_config, micro_model

from jpeg_dlm.methods import jpeg_dlm_networks
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.util.errors import UsageError
from jpeg_dlm.util.rng import RowNoise

B, K, L, N, VOCAB = 6, 2, 8, 3, 40
SIZES = {"data__vocab_size": VOCAB, "data__token_len": L, "data__packing": "padded", "model__context_blocks": K}


def build(perturbed=0.1, **changes) -> JpegDlm:
    return micro_model("jpeg-dlm", perturbed, **SIZES | changes).train()


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
    context = method.blocks_before(dataclasses.replace(data, present_BK=first))
    z_BKND, whole_BKND = (z.view(B, K, N, -1) for z in (context.z_BCD, method.blocks_before(data).z_BCD))
    assert context.present_BC.all() and not z_BKND[~first].any()
    torch.testing.assert_close(z_BKND[first], whole_BKND[first])


def memory_of(method, data, noise):
    return method.draw_context(data, noise.repeated(method.config.objective.flow_draws))


def test_gradients_go_into_the_dit_alone(monkeypatch):
    monkeypatch.setattr(jpeg_dlm_networks, "CONTEXT_DROP", 0.5)
    method, data = build(), batch()
    flow = method.losses(data, noise())["flow"]
    flow.backward()
    touched = {name.split(".")[0] for name, p in method.named_parameters() if p.grad is not None and p.grad.any()}
    assert touched == {"dit"} and method.dit.context_kind.grad.any()


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
    method.encode = lambda before: torch.zeros(4000 * K, N, 16)  # type: ignore[method-assign]
    found = memory_of(method, dataclasses.replace(data, before=data, present_BK=present), RowNoise(0, rows, 50))
    kept = found.present_BC.view(3, 4000, K * N)
    assert torch.equal(kept.all(2), kept.any(2))  # of a row all or nothing
    for draw in kept[..., 0].float():
        assert draw.mean().item() == pytest.approx(0.85, abs=0.02)
    assert not torch.equal(kept[0], kept[1])  # each draw has a chance of its own
    few = memory_of(build(), batch(), noise([5, 2, 0, 1, 3, 4]))
    again = memory_of(build(), batch(), noise())
    assert few.present_BC[[2, 3, 1, 4, 5, 0]].equal(again.present_BC)


def test_latents_of_the_context_are_those_of_the_text_itself():
    method, data = build(), batch()
    z = method.blocks_before(data).z_BCD
    expected = method.encode(data.before)  # (B K, N, D)
    for row in range(B):
        for k in range(K):
            torch.testing.assert_close(z[row, k * N : (k + 1) * N], expected[row * K + k])


@pytest.mark.parametrize("changes", [{"data__packing": "continuous"}, {"data__whole": True}, {"data__frame": True}])
def test_documents_of_one_row_or_none_are_refused(changes):
    with pytest.raises(UsageError, match="model.context_blocks needs documents of several rows"):
        micro_config(**SIZES | changes)


@pytest.mark.slow
def test_the_flow_learns_to_use_the_context():
    """Rows repeat the row before them; after another text than their own they are predicted far worse."""
    method = build(0.0, model__context_blocks=1, model__hidden=32, objective__sigma=0.1)
    optimizer = torch.optim.AdamW([p for g in method.parameter_groups() for p in g.parameters.values()], lr=5e-3)

    def losses(step, shift=0, rows=32):
        text = torch.randint(VOCAB, (rows, 1), generator=torch.Generator().manual_seed(step)).expand(-1, L)
        before = Batch(text.roll(shift, 0), torch.ones(rows, L).bool())
        data = Batch(text, before.mask_BL, before=before, present_BK=torch.ones(rows, 1).bool())
        return method.losses(data, RowNoise(0, range(rows), step))

    for step in range(300):
        optimizer.zero_grad()
        method.total_loss(losses(step)).backward()
        optimizer.step()
        method.after_step(step, 300)
    method.eval()
    with torch.no_grad():
        own, other = (losses(1000, shift, 256)["flow"].item() for shift in (0, 1))
    assert own < 0.3 * other  # measured: 0.09 and 0.90
