"""FLM: a slow loss, a slow sampler, and ids that are never written."""

import pytest
import torch
import torch.nn.functional as F
from micro import micro_model

from jpeg_dlm.methods.argmax_noise import TimeMap
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.flm import Flm
from jpeg_dlm.util.rng import RowNoise

B, L, V = 4, 6, 20


def build(scale: float = 0.1, **options) -> Flm:
    return micro_model("flm", scale, **{"data__vocab_size": V, "data__token_len": L, "sampler__steps": 5} | options)


def tokens(rows=B):
    return torch.randint(0, V, (rows, L), generator=torch.Generator().manual_seed(7))


def noise(rows=B):
    return RowNoise(0, range(rows), 50)


def test_extra_ids_are_part_of_the_process_but_never_written():
    method, seen = build(model__extra_ids=2), []
    assert method.backbone.vocab_embed.embedding.shape[0] == V + 2
    with torch.no_grad():
        method.backbone.output_layer.linear.bias[V:] = 1e3
    rows = method.sample(method.config.sampler, noise(), lambda k, n, t, decode: seen.append(decode()))
    assert max(x.max() for x in [rows, *seen]) < V


@pytest.mark.parametrize("mask", [None, torch.arange(L) < torch.tensor([6, 2, 4, 1])[:, None]])
@torch.no_grad()
def test_the_loss_is_what_it_says(mask):
    method = build()
    assert all(block.mix.keywords == {"cap": 50} for block in method.backbone.blocks)
    tau = (noise().uniform("time") + torch.arange(B)) / B
    t, eps, nll = TimeMap(V)(tau), noise().normal("state", L, V), []
    for b in range(B):
        z = ((1 - t[b]) * eps[b] + t[b] * F.one_hot(tokens()[b], V)).float()[None]
        x = z @ method.backbone.vocab_embed.embedding
        logits = method.backbone.head(method.backbone.embedded_states(x, tau[b : b + 1]))
        row = F.cross_entropy(logits[0], tokens()[b], reduction="none")
        nll += row.tolist() if mask is None else row[mask[b]].tolist()
    assert method.losses(Batch(tokens(), mask), noise())["ce"].item() == pytest.approx(sum(nll) / len(nll), rel=1e-5)


@torch.no_grad()
def test_the_sampler_follows_its_definition():
    method = build(0.6)
    z, tau = RowNoise(3, [0, 1]).normal("sample", L, V), torch.linspace(0, 1, 6)
    t = TimeMap(V)(tau).float()
    for k in range(5):
        p = method.denoise(z, tau[k].expand(2))
        z = z + (t[k + 1] - t[k]) * (p - z) / (1 - t[k] + 1e-5)
    rows = method.sample(method.config.sampler, RowNoise(3, [0, 1]))
    assert torch.equal(rows, p.argmax(-1)) and len(rows.unique()) > 1
