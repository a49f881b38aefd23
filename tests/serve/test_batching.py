"""The batching service: each request gets the same texts as alone, whatever other requests do."""

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
import torch
from conftest import MICRO, perturb

from jpeg_dlm.methods.base import FREE
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.options import override
from jpeg_dlm.presets import preset
from jpeg_dlm.serve.batching import BatchingService, StackedNoise
from jpeg_dlm.util.errors import UsageError
from jpeg_dlm.util.rng import RowNoise


@pytest.fixture(scope="module")
def method():
    torch.manual_seed(0)
    return perturb(build_method(override(preset("smoke"), MICRO)).eval())


class Counting:
    """Tells what reached the sampler."""

    def __init__(self, method) -> None:
        self.method, self.batches, self.device = method, [], method.device

    def sample(self, sampler, noise, watch=None, fixed_BL=None):
        self.batches.append(len(noise.rows))
        return self.method.sample(sampler, noise, watch, fixed_BL)


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


@contextmanager
def busy(gate: Gate, *args):
    """A service whose thread is held by a first request, so that what follows piles up until the gate opens."""
    with closing(BatchingService(*args, max_wait_s=0)) as service:
        first = service.submit(gate, 1, "first")
        assert gate.entered.wait(60)
        try:
            yield service
        finally:
            gate.open.set()
        assert first.result(60).tolist() == [[0, 0]]


# ---------------------------------------------------------------- noise


def test_only_the_grid_may_be_shared_by_several_seeds():
    mixed, same = (StackedNoise.of([RowNoise(0, [0]), RowNoise(seed, [1])]) for seed in (1, 0))
    for purpose, noises in (("grid", (mixed, same)), ("other", (same,))):
        for noise in noises:
            expected = torch.rand(3, generator=RowNoise(0, []).shared(purpose))
            assert torch.equal(torch.rand(3, generator=noise.shared(purpose)), expected)
    with pytest.raises(ValueError, match="several seeds"):
        mixed.shared("other")


# ---------------------------------------------------------------- equal to sampling alone


@pytest.mark.parametrize("max_batch", [5, 64])
def test_mixed_requests_from_many_threads_get_what_they_would_get_alone(method, max_batch):
    rng = random.Random(max_batch)
    base = method.config.sampler
    options = [base, replace(base, solver="sde"), replace(base, grid="random", steps=4), replace(base, w=1.5)]
    requests = [(rng.randint(1, 7), rng.choice(options), rng.randrange(3), rng.randrange(5)) for _ in range(40)]
    counting = Counting(method)
    with closing(BatchingService(max_batch)) as service, ThreadPoolExecutor(16) as threads:
        sampled = list(threads.map(lambda request: service.submit(counting, *request).result(60), requests))
    for (n, sampler, seed, first), tokens in zip(requests, sampled, strict=True):
        assert torch.equal(tokens, method.sample(sampler, RowNoise(seed, range(first, first + n)))), (n, sampler, seed, first)
    assert max(counting.batches) <= max_batch


def test_requests_of_several_seeds_share_one_batch(method):
    counting = Counting(method)
    with closing(BatchingService(6, max_wait_s=60)) as service:
        futures = [service.submit(counting, 2, method.config.sampler, seed) for seed in range(3)]
        assert [len(future.result(60)) for future in futures] == [2, 2, 2]
    assert counting.batches == [6]


def test_a_large_request_is_split_and_others_join_its_last_part():
    gate = Gate()
    with busy(gate, 4) as service:
        large, small = service.submit(gate, 6, "x", seed=1), service.submit(gate, 1, "x", seed=2)
        gate.open.set()
        assert large.result(60).tolist() == [[1, row] for row in range(6)] and small.result(60).tolist() == [[2, 0]]
    assert gate.batches == [[0], [0, 1, 2, 3], [4, 5, 0]]


def test_a_full_batch_starts_at_once_and_a_lone_request_after_its_wait():
    gate, observed = Gate(), []
    gate.open.set()
    with closing(BatchingService(2, max_wait_s=60, observe=lambda rows, seconds: observed.append(rows))) as service:
        assert [len(f.result(30)) for f in (service.submit(gate, 1, "x"), service.submit(gate, 1, "x"))] == [1, 1]
        service.call(lambda _: None).result(60)
    assert observed == [2]
    with closing(BatchingService(2, max_wait_s=0.01)) as service:
        assert len(service.submit(gate, 1, "x").result(30)) == 1


# ---------------------------------------------------------------- errors, cancellation, the end


def test_an_error_reaches_only_who_caused_it():
    gate = Gate()
    with busy(gate, 8) as service:
        good, bad = [service.submit(gate, 2, "x", seed) for seed in (1, 2)], service.submit(gate, 1, "x", seed=13)
        split, other = service.submit(gate, 20, "y", seed=13), service.submit(gate, 1, "bad")
        gate.open.set()
        assert [future.result(60).tolist() for future in good] == [[[seed, 0], [seed, 1]] for seed in (1, 2)]
        for future in (bad, split, other):
            with pytest.raises(ValueError, match="unlucky"):
                future.result(60)
        assert len(service.submit(gate, 1, "x", seed=4).result(60)) == 1  # and it goes on
    assert gate.batches.count(list(range(8))) == 1 and list(range(8, 16)) not in gate.batches  # the rest was dropped


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
        future = service.submit(Endless(), 100, "x")  # its second batch must not start either
        assert began.wait(60) and future.cancel()
        assert service.submit(gate, 1, "x", seed=4).result(60).tolist() == [[4, 0]] and service.waiting == 0


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
        waiting = [service.submit(gate, 1, "x", seed) for seed in range(3)]
        assert service.alive
    assert [future.result(0).tolist() for future in waiting] == [[[seed, 0]] for seed in range(3)]
    assert not service.alive and not service._thread.is_alive()
    with pytest.raises(UsageError, match="closed"):
        service.submit(gate, 1, "x")


# ---------------------------------------------------------------- given tokens


@pytest.mark.parametrize("name", ["ar", "mdlm", "sedd", "duo"])
def test_given_tokens_of_several_requests_share_a_batch(name):
    torch.manual_seed(0)
    method = perturb(build_method(for_method(override(preset("smoke"), MICRO), name)).eval())
    counting, sampler, rows = Counting(method), method.config.sampler, []
    for length in (1, 3, 7):
        rows.append(torch.full((12,), FREE))
        rows[-1][:length] = torch.arange(length) + 20
    with closing(BatchingService(8, max_wait_s=60)) as service:
        futures = [service.submit(counting, 2, sampler, seed, fixed_L=row) for seed, row in enumerate([*rows, rows[0]])]
        sampled = [future.result(60) for future in futures]
    assert counting.batches == [8]
    for seed, (row, tokens) in enumerate(zip([*rows, rows[0]], sampled, strict=True)):
        assert torch.equal(tokens, method.sample(sampler, RowNoise(seed, range(2)), fixed_BL=row.expand(2, -1)))
        assert torch.equal(tokens[:, row != FREE], row[row != FREE].expand(2, -1))
