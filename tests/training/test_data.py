"""Batches gathered ahead of time are the batches of their step."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from small_runs import micro_config, prepare_blocks

from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.training.data import BatchStream


@pytest.fixture(scope="module")
def blocks(corpus_file, tmp_path_factory):
    return Blocks(prepare_blocks(corpus_file, tmp_path_factory.mktemp("data") / "blocks"))


def test_prefetched_batches_are_those_of_their_step_also_after_a_jump(blocks, monkeypatch):
    train = replace(micro_config("ar").train, accumulation=2)
    plain, ahead = (BatchStream(blocks, train, torch.device("cpu")) for _ in range(2))
    ahead.prefetch = True
    threads, real = set(), BatchStream.batch

    def batch(self, rows):
        if self is ahead:
            threads.add(threading.get_ident())
        return real(self, rows)

    monkeypatch.setattr(BatchStream, "batch", batch)
    for step in (0, 1, 2, 7, 8, 3):
        pairs = zip(plain.micro_batches(step), ahead.micro_batches(step), strict=True)
        assert all(torch.equal(a.tokens_BL, b.tokens_BL) and m.rows == n.rows for (a, m), (b, n) in pairs)
    assert threading.get_ident() not in threads and len(threads) == 1
