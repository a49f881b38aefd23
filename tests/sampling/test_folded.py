"""Folded weights mirror the trained networks: whoever changes one of them and not the other fails here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest
import torch
import torch.nn.functional as F
from conftest import MICRO, perturb
from torch import Tensor

from jpeg_dlm.config_io import override
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.nn.dit import Context
from jpeg_dlm.presets import preset
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.sampling.engine import Engine
from jpeg_dlm.sampling.folded import fold

T, W = 0.3, 2.0
CONTEXT = {"model.context_blocks": 2, "data.packing": "padded"}
SWITCHES = {"model.decode_residual": True, "model.denoise_skip": True, "model.position_scale": 0.7}
NEVER_RUN = ("dit.decode_head.", "dit.mode_tokens", "predictor.denoise_head.")  # of separate networks


def made(changes: dict) -> JpegDlm:
    torch.manual_seed(0)
    config = override(preset("smoke"), MICRO | {"model.depth": 2, "model.codec_layers": 2} | changes)
    method = perturb(JpegDlm(config).eval())
    method.latent_mean.copy_(torch.linspace(-1, 1, len(method.latent_mean)))
    method.latent_scale.copy_(torch.linspace(0.5, 2, len(method.latent_scale)))
    return method


def tensors(folded: object) -> Iterator[Tensor]:
    """Every tensor in dataclasses and tuples."""
    if isinstance(folded, Tensor):
        yield folded
    elif is_dataclass(folded):
        yield from tensors(tuple(getattr(folded, field.name) for field in fields(folded)))
    elif isinstance(folded, tuple):
        for part in folded:
            yield from tensors(part)


def read_by_sampling(method: JpegDlm) -> dict[str, Tensor]:
    """The tensors of a model folder but those that only compress."""
    return {name: tensor for name, tensor in method.export_state().items() if not name.startswith("compressor.")}


def changes_of(method: JpegDlm) -> Iterator[str]:
    """The name of each tensor that sampling reads, while it is changed."""
    for name, tensor in read_by_sampling(method).items():
        before, g = tensor.clone(), torch.Generator().manual_seed(1)
        tensor.add_(0.3 * torch.rand(tensor.shape, generator=g) + 0.1)
        yield name
        tensor.copy_(before)


@torch.no_grad()
def by_torch(method: JpegDlm, z: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """(x, logits) of the trained networks."""
    w = torch.full((len(z),), W)
    zhat = method.decode_latents(z, w)
    return method.dit(z, torch.full_like(w, T), s, w, context=context_of(method)), method.project(
        method.decompressor(method.unstandardize(zhat))
    )


@torch.no_grad()
def by_folded(method: JpegDlm, z: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """(x, logits) of the engine."""
    engine = Engine(method)
    d = engine.decoder
    logits = d.lm_head(F.gelu(d.up(d.down(d.states(engine.decode_latents(z, W))))))
    return engine.denoiser([T], W, context_of(method))(z, T, s), logits.unflatten(0, (len(z), -1))


VARIANTS = {
    "paper": {}, "switches": SWITCHES, "separate": SWITCHES | {"model.shared": False}, "context": CONTEXT,
    "separate-context": CONTEXT | {"model.shared": False},
    "causal": SWITCHES | {"model.codec": "causal", "encoder.causal": True},
}  # fmt: skip


def context_of(method: JpegDlm) -> Context | None:
    """Some latents of blocks before, and some that are missing."""
    if not method.config.model.context_blocks:
        return None
    return Context(
        RowNoise(0, range(3)).normal("context", 6, 16), torch.arange(6).expand(3, -1) >= torch.tensor([[0], [3], [6]])
    )


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_every_trained_tensor_changes_the_folded_networks_as_it_changes_the_trained_ones(changes):
    method = made(changes)
    z, s = (RowNoise(0, range(3)).normal(name, 3, 16) for name in "zs")
    plain, folded = by_torch(method, z, s), list(tensors(fold(method)))
    for name in changes_of(method):
        expected, found = by_torch(method, z, s), by_folded(method, z, s)
        moved = any(not torch.equal(a, b) for a, b in zip(expected, plain, strict=True))
        mirrored = any(not torch.equal(a, b) for a, b in zip(tensors(fold(method)), folded, strict=True))
        assert moved == (method.predictor is None or not name.startswith(NEVER_RUN)), name
        assert mirrored or not moved, name
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_folded_tensors_are_copies():
    """But for the tables of positions, which are constants."""
    method = made({})
    folded = fold(method)
    constants = {folded.dit.cos.data_ptr(), folded.dit.sin.data_ptr()}
    trained = {tensor.data_ptr() for tensor in method.state_dict().values()}
    assert not trained & ({tensor.data_ptr() for tensor in tensors(folded)} - constants)
    assert folded.predictor is folded.dit
