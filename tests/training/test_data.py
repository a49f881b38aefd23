"""Batches gathered ahead of time are the batches of their step."""

from __future__ import annotations

import threading

import torch
from micro import micro_config

from jpeg_dlm.training.data import BatchStream


def test_prefetched_batches_are_those_of_their_step_also_after_a_jump(blocks, monkeypatch):
    train = micro_config("ar", train__accumulation=2).train
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
