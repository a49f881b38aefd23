"""Recomputed layers give the gradients of layers that keep everything, and keep less."""

from __future__ import annotations

import pytest
import torch
from small_runs import start


def gradients_and_bytes(trainer):
    """Gradients of the first batch, and the bytes that autograd kept for them, each tensor's memory once."""
    kept: dict[int, int] = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    batch, noise = next(trainer.stream.micro_batches(0))
    torch.manual_seed(0)
    trainer.method.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = trainer.method.total_loss(trainer.method(batch, noise))
    held = {p.untyped_storage().data_ptr() for p in trainer.method.parameters()}
    loss.backward()
    gradients = {name: p.grad for name, p in trainer.parameters.items() if p.grad is not None}
    return gradients, sum(size for place, size in kept.items() if place not in held)


@pytest.mark.parametrize("method", ["jpeg-dlm", "mdlm", "ar", "cosmos", "encoder"])
def test_gradients_are_the_same_and_less_is_kept(blocks, tmp_path, method):
    deep = {} if method == "encoder" else {"model__depth": 6}
    deep |= {"model__dropout": 0.2} if method == "mdlm" else {}
    plain = start(method, blocks, tmp_path, **deep)
    lean = start(method, blocks, tmp_path, train__checkpoint_layers=True, **deep)
    assert plain.method.state_dict().keys() == lean.method.state_dict().keys()
    (expected, much), (found, little) = gradients_and_bytes(plain), gradients_and_bytes(lean)
    assert expected.keys() == found.keys() and max(g.abs().max().item() for g in expected.values()) > 1e-3
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)  # dropout drops the same
    assert little < (0.8 if method == "encoder" else 0.5) * much


@pytest.mark.slow
def test_losses_of_a_compiled_run_match(blocks, tmp_path):
    sizes = {"model__depth": 1, "train__warmup": 1, "train__checkpoint_layers": True}
    eager, compiled = (start("jpeg-dlm", blocks, tmp_path, train__compile=c, **sizes) for c in (False, True))
    torch._dynamo.reset()
    for step in range(4):
        a, b = eager.train_step(), compiled.train_step()
        assert b == pytest.approx(a, abs=1e-4, rel=1e-4), step
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # something was compiled
