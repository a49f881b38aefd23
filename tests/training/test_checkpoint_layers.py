"""Recomputed layers give the gradients of layers that keep everything, and keep less."""

from __future__ import annotations

import pytest
import torch
from small_runs import prepare_blocks, start

from jpeg_dlm.machine.dist import Ranks
from jpeg_dlm.nn.recompute import recompute_in_backward
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.training.sharding import repeated_layers


@pytest.fixture(scope="module")
def blocks(corpus_file, tmp_path_factory) -> Blocks:
    return Blocks(prepare_blocks(corpus_file, tmp_path_factory.mktemp("layers") / "blocks"))


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


@pytest.mark.parametrize("method, changes", [
    ("jpeg-dlm", {"model__dropout": 0.2}), ("mdlm", {"model__dropout": 0.2}), ("ar", {}), ("cosmos", {}), ("encoder", {}),
])  # fmt: skip
def test_gradients_are_the_same_and_less_is_kept(blocks, tmp_path, method, changes):
    deep = changes | ({} if method == "encoder" else {"model__depth": 6})
    plain = start(method, blocks, tmp_path, Ranks(), **deep)
    lean = start(method, blocks, tmp_path, Ranks(), train__checkpoint_layers=True, **deep)
    assert plain.method.state_dict().keys() == lean.method.state_dict().keys()
    (expected, much), (found, little) = gradients_and_bytes(plain), gradients_and_bytes(lean)
    assert expected.keys() == found.keys() and max(g.abs().max().item() for g in expected.values()) > 1e-3
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)  # dropout drops the same
    assert little < (0.8 if method == "encoder" else 0.5) * much


def test_dropout_draws_are_those_of_an_unwrapped_layer():
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    recompute_in_backward(layers[1])
    results = []
    for layer in layers:
        torch.manual_seed(3)
        y = layer(torch.ones(4, 8))
        after = torch.rand(())  # the stream goes on as if nothing had been computed twice
        y.square().sum().backward()
        results.append((y, layer[0].weight.grad, after, torch.rand(())))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        assert not layers[1](torch.ones(4, 8)).requires_grad


def test_only_layers_with_parts_are_recomputed(blocks, tmp_path):
    trainer = start("cosmos", blocks, tmp_path, Ranks(), model__depth=2)
    assert not any(isinstance(layer, torch.nn.Linear) for layer in repeated_layers(trainer.method))
