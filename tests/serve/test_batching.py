"""The batching service: each request gets the same texts as alone, whatever other requests do."""

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
import torch
from conftest import assert_same_tokens
from micro import micro_model

from jpeg_dlm.methods.base import FREE, Batch
from jpeg_dlm.methods.sources import sample
from jpeg_dlm.serve.batching import BatchingService, StackedNoise
from jpeg_dlm.util.errors import UsageError
from jpeg_dlm.util.rng import RowNoise


class Gate:
    """A sampler that holds its first batch until it is opened; a row's tokens are its seed and number."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.entered, self.open, self.batches = threading.Event(), threading.Event(), []

    def sample(self, sampler, noise, watch=None, fixed_BL=None):
        self.batches.append(list(noise.rows))
        self.entered.set()
        assert self.open.wait(60)
        if sampler == "bad" or any(part.seed == 13 for part in noise.parts):
            raise ValueError("unlucky")
        return torch.tensor([[part.seed, row] for part in noise.parts for row in part.rows])


class Counting(Gate):
    """Counts the rows that reach the sampler of a method."""

    def __init__(self, method) -> None:
        self.method, self.batches = method, []

    def sample(self, sampler, noise, watch=None, fixed_BL=None):
        self.batches.append(len(noise.rows))
        return self.method.sample(sampler, noise, watch, fixed_BL)


@contextmanager
def busy(gate: Gate, *args):
    """A service whose thread is held by a first request, so that what follows piles up until the gate opens."""
    with closing(BatchingService(*args, max_wait_s=0)) as service:
        first = service.submit(gate, range(1), "first")
        assert gate.entered.wait(60)
        try:
            yield service
        finally:
            gate.open.set()
        assert rows(first) == [[0, 0]]


def rows(futures, timeout=60):
    return torch.cat([future.result(timeout) for future in futures]).tolist()


def test_only_the_grid_may_be_shared_by_several_seeds():
    mixed, same = (StackedNoise.of([RowNoise(0, [0]), RowNoise(seed, [1])]) for seed in (1, 0))
    for purpose, noises in (("grid", (mixed, same)), ("other", (same,))):
        for noise in noises:
            expected = torch.rand(3, generator=RowNoise(0, []).shared(purpose))
            assert torch.equal(torch.rand(3, generator=noise.shared(purpose)), expected)
    with pytest.raises(ValueError, match="several seeds"):
        mixed.shared("other")


@pytest.mark.parametrize("max_batch", [5, 64])
def test_mixed_requests_from_many_threads_get_what_they_would_get_alone(max_batch):
    rng, method = random.Random(max_batch), micro_model()
    base, counting = method.config.sampler, Counting(method)
    options = [base, replace(base, solver="sde"), replace(base, grid="random", steps=4), replace(base, w=1.5)]
    firsts = [(rng.randint(1, 7), rng.randrange(5), rng.choice(options), rng.randrange(3)) for _ in range(40)]
    requests = [(range(first, first + n), sampler, seed) for n, first, sampler, seed in firsts]
    with closing(BatchingService(max_batch)) as service, ThreadPoolExecutor(16) as threads:
        sampled = list(threads.map(lambda request: rows(service.submit(counting, *request)), requests))
    for (numbers, sampler, seed), tokens in zip(requests, sampled, strict=True):
        assert tokens == method.sample(sampler, RowNoise(seed, numbers)).tolist(), (numbers, sampler, seed)
    assert max(counting.batches) <= max_batch


def test_texts_of_several_seeds_share_batches_in_their_order():
    gate = Gate()
    with busy(gate, 4) as service:
        large, small = service.submit(gate, range(6), "x", seed=1), service.submit(gate, range(1), "x", seed=2)
        gate.open.set()
        assert rows(large) == [[1, row] for row in range(6)] and rows(small) == [[2, 0]]
    assert gate.batches == [[0], [0, 1, 2, 3], [4, 5, 0]]


def test_a_full_batch_starts_at_once_and_a_lone_request_after_its_wait():
    gate, observed = Gate(), []
    gate.open.set()
    with closing(BatchingService(2, max_wait_s=60, observe=lambda rows, seconds: observed.append(rows))) as service:
        assert len(rows([*service.submit(gate, range(1), "x"), *service.submit(gate, range(1), "x")])) == 2
        service.call(lambda _: None).result(60)
    assert observed == [2]
    with closing(BatchingService(2, max_wait_s=0.01)) as service:
        assert len(rows(service.submit(gate, range(1), "x"))) == 1


def test_an_error_reaches_only_who_caused_it():
    gate = Gate()
    with busy(gate, 8) as service:
        good, bad = [service.submit(gate, range(2), "x", seed) for seed in (1, 2)], service.submit(gate, range(1), "x", 13)
        other = service.submit(gate, range(1), "bad")
        gate.open.set()
        assert [rows(futures) for futures in good] == [[[seed, 0], [seed, 1]] for seed in (1, 2)]
        for futures in (bad, other):
            with pytest.raises(ValueError, match="unlucky"):
                rows(futures)
        assert len(rows(service.submit(gate, range(1), "x", seed=4))) == 1  # and it goes on


def test_a_batch_for_which_nobody_waits_stops_at_its_next_step():
    """A sampler of endless steps: only an abandoned batch ends."""
    began = threading.Event()

    class Endless(Gate):
        def sample(self, sampler, noise, watch=None, fixed_BL=None):
            for step in itertools.count():
                watch(step, 10, 0.0, lambda: torch.zeros(len(noise.rows), 1))
                began.set()

    gate = Gate()
    gate.open.set()
    with closing(BatchingService(max_wait_s=0)) as service:
        futures = service.submit(Endless(), range(100), "x")  # its second batch must not start either
        assert began.wait(60) and all(future.cancel() for future in reversed(futures))
        assert rows(service.submit(gate, range(1), "x", seed=4)) == [[4, 0]] and service.waiting == 0


def test_calls_run_in_the_same_thread_between_batches():
    gate, names = Gate(), []
    with busy(gate) as service:
        called = [service.call(lambda _: names.append(threading.current_thread().name) or 7), service.call(lambda _: 1 // 0)]
        gate.open.set()
        assert called[0].result(60) == 7 and names == ["jpeg-dlm-batching"]
        with pytest.raises(ZeroDivisionError):
            called[1].result(60)


def test_closing_finishes_what_was_asked_for():
    gate = Gate()
    with busy(gate, 1) as service:
        waiting = [service.submit(gate, range(1), "x", seed) for seed in range(3)]
        assert service.alive
    assert [rows(futures, 0) for futures in waiting] == [[[seed, 0]] for seed in range(3)]
    assert not service.alive and not service._thread.is_alive()
    with pytest.raises(UsageError, match="closed"):
        service.submit(gate, range(1), "x")


@pytest.mark.parametrize("name", ["ar", "mdlm", "sedd", "duo"])
def test_given_tokens_of_several_requests_share_a_batch(name):
    method = micro_model(name)
    counting, sampler, given = Counting(method), method.config.sampler, []
    for length in (1, 3, 7, 1):
        given.append(torch.full((12,), FREE))
        given[-1][:length] = torch.arange(length) + 20
    with closing(BatchingService(8, max_wait_s=60)) as service:
        futures = [service.submit(counting, range(2), sampler, seed, row) for seed, row in enumerate(given)]
        sampled = [torch.tensor(rows(texts)) for texts in futures]
    assert counting.batches == [8]
    for seed, (row, tokens) in enumerate(zip(given, sampled, strict=True)):
        assert torch.equal(tokens, method.sample(sampler, RowNoise(seed, range(2)), fixed_BL=row.expand(2, -1)))
        assert torch.equal(tokens[:, row != FREE], row[row != FREE].expand(2, -1))


@pytest.mark.parametrize("name", ["ar", "jpeg-dlm"])
def test_sources_of_several_requests_share_a_batch(name):
    method = micro_model(name, data__packing="padded", data__source_len=5)
    sampler, batches = method.config.sampler, []
    sources = [Batch(torch.full((1, 5), 20 + i), torch.arange(5)[None] <= i) for i in range(4)]
    with closing(BatchingService(8, max_wait_s=60, observe=lambda rows, _: batches.append(rows))) as service:
        futures = [service.submit(method, range(2), sampler, seed, source=one) for seed, one in enumerate(sources)]
        sampled = [torch.tensor(rows(texts)) for texts in futures]
    assert batches == [8]
    for seed, (one, tokens) in enumerate(zip(sources, sampled, strict=True)):
        both = Batch(one.tokens_BL.expand(2, -1), one.real_BL.expand(2, -1))
        assert_same_tokens(tokens, sample(method, sampler, RowNoise(seed, range(2)), source=both))
