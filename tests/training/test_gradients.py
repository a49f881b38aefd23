"""Every trainable parameter of a positive loss has a gradient in bf16, whatever autocast keeps between passes."""

from __future__ import annotations

import contextlib

import pytest
import torch
from small_runs import prepare_blocks, start

from jpeg_dlm.methods.registry import names
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.training.trainer import Trainer


def untrained(trainer: Trainer, casts: dict | None = None) -> list[str]:
    """The parameters that have no gradient in one of three steps; casts last for a step."""
    lacking = set()
    for _ in range(3):
        if casts:
            casts.clear()
        trainer.train_step()
        lacking |= {name for name, p in trainer.parameters.items() if p.grad is None}
    return sorted(lacking)


@pytest.mark.parametrize("method", names("system"))
def test_every_parameter_has_a_gradient_in_bf16(method, blocks, tmp_path):
    trainer = start(method, blocks, tmp_path, train__precision="bf16")
    assert trainer.config.train.precision == "bf16"
    assert untrained(trainer) == []


@contextlib.contextmanager
def keeping_casts():
    """Autocast as it was before torch 2.11: a weight is cast once, with or without gradients; yields its casts."""
    casts: dict[int, torch.Tensor] = {}
    linear = torch.nn.functional.linear

    def cast(t):
        if t is None or not t.is_leaf or not t.requires_grad or not torch.is_autocast_cache_enabled():
            return t
        if id(t) not in casts:
            casts[id(t)] = t.to(torch.bfloat16)
        return casts[id(t)]

    def remembering(x, weight, bias=None):
        return linear(x, cast(weight), cast(bias)) if torch.is_autocast_enabled("cpu") else linear(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", remembering)
        yield casts


@pytest.mark.parametrize("method", ["jpeg-dlm", "elf", "langflow"])
def test_casts_of_a_pass_without_gradients_are_not_reused(method, blocks, tmp_path, monkeypatch):
    """With the cache on, self-conditioning would leave weights untrained: the simulation shows it, and that it is off."""
    with keeping_casts() as casts:
        trainer = start(method, blocks, tmp_path, train__precision="bf16")
        assert untrained(trainer, casts) == []
        monkeypatch.setattr(Trainer, "autocast", lambda self: torch.autocast("cpu", torch.bfloat16))
        assert untrained(trainer, casts) != []


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """Short and long documents in turn, one padded row each."""
    folder = tmp_path_factory.mktemp("padded")
    long = "The quick brown fox jumps over the lazy dog and runs away into the dark old forest."
    (folder / "text.txt").write_text("\n\n".join(f"{long} {i}" if i % 8 < 4 else f"Dogs {i}." for i in range(400)))
    return Blocks(prepare_blocks(folder / "text.txt", folder / "blocks", "--data.packing", "padded"))


def gradients(trainer: Trainer) -> torch.Tensor:
    trainer.method.train()
    trainer.accumulate()
    return torch.cat([p.grad.flatten().double() for p in trainer.parameters.values() if p.grad is not None])


@pytest.mark.parametrize("method", ["ar", "mdlm", "duo", "elf", "langflow", "flm", "encoder", "cosmos-codec"])
def test_a_step_has_the_same_gradient_however_it_is_split(method, padded, tmp_path):
    """Token means are those of the whole step: rows with few tokens do not weigh more because they share a micro-batch."""
    whole, split = (start(method, padded, tmp_path / str(n), train__batch=8 // n, train__accumulation=n) for n in (1, 4))
    split.method.load_state_dict(whole.method.state_dict())
    a, b = gradients(whole), gradients(split)
    tolerance = 0.1 if method == "encoder" else 1e-5  # the masked share of a row is rounded to tokens
    assert (a - b).norm() <= tolerance * a.norm()
