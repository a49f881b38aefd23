"""Toy learns a made-up language, in which each token is one more than the one before it, and writes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from toy_system import Toy

from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.registry import build_method, method_class
from jpeg_dlm.presets import preset
from jpeg_dlm.util.rng import RowNoise

ROWS, LENGTH, VOCABULARY = 16, 12, 8


@pytest.fixture(scope="module")
def trained() -> Toy:
    base = preset("smoke")
    small = replace(base, data=replace(base.data, token_len=LENGTH, vocab_size=VOCABULARY))
    method = build_method(Toy.adapt(small, "toy"))
    assert isinstance(method, Toy)
    optimizer = torch.optim.Adam(method.parameters(), 0.02)
    batch = Batch((torch.arange(ROWS)[:, None] + torch.arange(LENGTH)) % VOCABULARY)
    for step in range(200):
        loss = method.total_loss(method.losses(batch, RowNoise(0, range(ROWS), step)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return method.eval()


def test_commands_know_it_by_its_name() -> None:
    assert method_class("toy") is Toy  # else: pip install -e . once more


def test_it_writes_the_language_that_it_learned(trained: Toy) -> None:
    tokens = trained.sample(trained.config.sampler, RowNoise(1, range(100)))
    assert tokens.shape == (100, LENGTH)
    assert ((tokens[:, 1:] - tokens[:, :-1]) % VOCABULARY == 1).float().mean() > 0.9


def test_a_text_depends_on_its_number_and_not_on_its_batch(trained: Toy) -> None:
    together, alone = (trained.sample(trained.config.sampler, RowNoise(1, rows)) for rows in (range(8), [5]))
    assert torch.equal(together[5:6], alone)


def test_a_loss_depends_on_its_step_alone(trained: Toy) -> None:
    batch = Batch(torch.arange(LENGTH).expand(ROWS, -1) % VOCABULARY)
    first, again, later = (trained.losses(batch, RowNoise(0, range(ROWS), step))["ce"].item() for step in (3, 3, 4))
    assert first == again != later
