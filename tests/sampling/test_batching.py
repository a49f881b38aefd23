"""The batching service: each request gets the same texts as alone, whatever other requests do."""

import random
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from conftest import MICRO, perturb

from jpeg_dlm.config_io import override
from jpeg_dlm.errors import UsageError
from jpeg_dlm.flow.sampler_config import SamplerConfig
from jpeg_dlm.methods.registry import build_method
from jpeg_dlm.presets import preset
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.sampling.batching import BatchingService, StackedNoise


@pytest.fixture(scope="module")
def method():
    torch.manual_seed(0)
    return perturb(build_method(override(preset("smoke"), MICRO)).eval())


class Counting:
    """Tells what reached the sampler."""

    def __init__(self, method) -> None:
        self.method, self.batches = method, []

    def sample(self, sampler, noise):
        self.batches.append(len(noise.rows))
        return self.method.sample(sampler, noise)


class Gate:
    """A sampler that holds its first batch until it is opened; a row's tokens are its seed and number."""

    def __init__(self) -> None:
        self.entered, self.open, self.batches = threading.Event(), threading.Event(), []

    def sample(self, sampler, noise):
        self.batches.append(list(noise.rows))
        self.entered.set()
        assert self.open.wait(60)
        if sampler == "bad" or any(part.seed == 13 for part in noise.parts):
            raise ValueError("unlucky")
        return torch.tensor([[part.seed, row] for part in noise.parts for row in part.rows])


def gated(gate: Gate, service: BatchingService) -> Future:
    """A first request that keeps the thread busy, so that what follows piles up."""
    first = service.submit(1, "first")
    assert gate.entered.wait(60)
    return first


# ---------------------------------------------------------------- noise


def test_stacked_noise_is_the_noise_of_its_parts():
    parts = [RowNoise(3, range(2, 4)), RowNoise(7, [9]), RowNoise(3, [0])]
    stacked = StackedNoise.of(parts)
    assert list(stacked.rows) == [2, 3, 9, 0]
    assert torch.equal(stacked.normal("a", 2, 3), torch.cat([part.normal("a", 2, 3) for part in parts]))
    assert torch.equal(stacked.uniform("b"), torch.cat([part.uniform("b") for part in parts]))
    ours, theirs = stacked.streams("c"), [part.streams("c") for part in parts]
    for _ in range(2):  # streams go on
        assert torch.equal(ours.normal(2), torch.cat([streams.normal(2) for streams in theirs]))


def test_numbers_shared_within_a_seed_are_noticed_when_they_are_drawn():
    mixed, same = (StackedNoise.of([RowNoise(0, [0]), RowNoise(seed, [1])]) for seed in (1, 0))
    for noise in (mixed, same):
        generator = noise.shared("grid")
        assert not noise.parted
        assert torch.equal(torch.rand(3, generator=generator), torch.rand(3, generator=RowNoise(0, []).shared("grid")))
    assert mixed.parted and not same.parted


# ---------------------------------------------------------------- equal to sampling alone


@pytest.mark.parametrize("max_batch", [1, 5, 64])
def test_mixed_requests_from_many_threads_get_what_they_would_get_alone(method, max_batch):
    rng = random.Random(max_batch)
    base = method.config.sampler
    options = [base, replace(base, solver="heun"), replace(base, grid="random", steps=4), replace(base, w=1.5)]
    asked = [(rng.randint(1, 7), rng.choice(options), rng.randrange(3), rng.randrange(5)) for _ in range(40)]
    with BatchingService(Counting(method), max_batch) as service, ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda request: service.submit(*request).result(60), asked))
    for (n, sampler, seed, first), tokens in zip(asked, found, strict=True):
        assert torch.equal(tokens, method.sample(sampler, RowNoise(seed, range(first, first + n)))), (n, sampler, seed, first)
    assert max(service.method.batches) <= max_batch


def test_requests_of_several_seeds_share_one_batch(method):
    counting = Counting(method)
    with BatchingService(counting, 6, max_wait_s=60) as service:
        found = [service.submit(2, method.config.sampler, seed) for seed in range(3)]
        assert [len(future.result(60)) for future in found] == [2, 2, 2]
    assert counting.batches == [6]


def test_a_random_grid_parts_seeds_at_the_first_try_and_never_joins_them_again(method):
    counting, sampler = Counting(method), replace(method.config.sampler, grid="random", steps=5)
    with BatchingService(counting, 4, max_wait_s=60) as service:
        for future in [service.submit(1, sampler, seed) for seed in (0, 1, 0, 1)]:
            future.result(60)
        assert counting.batches == [4, 2, 2]
        for future in [service.submit(2, sampler, seed) for seed in (0, 1, 1, 0)]:
            future.result(60)
    assert counting.batches == [4, 2, 2, 4, 4]


def test_a_large_request_is_split_and_others_join_its_last_part():
    gate = Gate()
    with BatchingService(gate, 4, max_wait_s=0) as service:
        gated(gate, service)
        large, small = service.submit(6, "x", seed=1), service.submit(1, "x", seed=2)
        gate.open.set()
        assert large.result(60).tolist() == [[1, row] for row in range(6)] and small.result(60).tolist() == [[2, 0]]
    assert gate.batches == [[0], [0, 1, 2, 3], [4, 5, 0]]


# ---------------------------------------------------------------- waiting


def test_a_full_batch_starts_at_once_and_a_lone_request_after_its_wait():
    gate = Gate()
    gate.open.set()
    with BatchingService(gate, 2, max_wait_s=60) as service:  # would run into the timeouts below if it waited
        assert [len(f.result(30)) for f in (service.submit(1, "x"), service.submit(1, "x"))] == [1, 1]
    with BatchingService(gate, 2, max_wait_s=0.01) as service:
        assert len(service.submit(1, "x").result(30)) == 1


def test_an_idle_service_sleeps():
    gate = Gate()
    gate.open.set()
    waits = []
    with BatchingService(gate, 2, max_wait_s=0) as service:
        service.submit(1, "x").result(30)
        real, service._changed.wait = service._changed.wait, lambda *timeout: waits.append(timeout) or real(*timeout)
        service.submit(1, "x").result(30)
        service.submit(1, "x").result(30)
    assert len(waits) <= 3 and not any(waits)  # without a timeout: woken by the next request alone


# ---------------------------------------------------------------- errors, cancellation, the end


def test_an_error_reaches_only_who_caused_it():
    gate = Gate()
    with BatchingService(gate, 8, max_wait_s=0) as service:
        gated(gate, service)
        good, bad = [service.submit(2, "x", seed) for seed in (1, 2)], service.submit(1, "x", seed=13)
        other = service.submit(1, "bad")
        gate.open.set()
        assert [future.result(60).tolist() for future in good] == [[[seed, 0], [seed, 1]] for seed in (1, 2)]
        for future in (bad, other):
            with pytest.raises(ValueError, match="unlucky"):
                future.result(60)
        assert len(service.submit(1, "x", seed=4).result(60)) == 1  # and it goes on


def test_the_rest_of_a_split_request_is_dropped_with_its_error():
    gate = Gate()
    gate.open.set()
    with BatchingService(gate, 2, max_wait_s=0) as service, pytest.raises(ValueError, match="unlucky"):
        service.submit(9, "x", seed=13).result(60)
    assert gate.batches == [[0, 1]]


def test_a_cancelled_request_is_not_sampled():
    gate = Gate()
    with BatchingService(gate, 8, max_wait_s=0) as service:
        first = gated(gate, service)
        dropped, kept = service.submit(1, "x", seed=5), service.submit(1, "x", seed=6)
        assert dropped.cancel() and not first.cancel()
        gate.open.set()
        assert kept.result(60).tolist() == [[6, 0]] and first.result(60).tolist() == [[0, 0]]
    assert gate.batches == [[0], [0]]


def test_closing_finishes_what_was_asked_for():
    gate = Gate()
    service = BatchingService(gate, 1, max_wait_s=60)
    gated(gate, service)
    waiting = [service.submit(1, "x", seed) for seed in range(3)]
    gate.open.set()
    service.close()
    assert [future.result(0).tolist() for future in waiting] == [[[seed, 0]] for seed in range(3)]
    assert not service._thread.is_alive()
    with pytest.raises(UsageError, match="closed"):
        service.submit(1, "x")
    service.close()


def test_closing_can_cancel_and_leaving_by_an_error_does():
    gate = Gate()
    with pytest.raises(KeyError), BatchingService(gate, 1, max_wait_s=0) as service:
        begun = gated(gate, service)
        waiting = service.submit(3, "x")
        threading.Timer(0.05, gate.open.set).start()
        raise KeyError
    assert begun.result(0).tolist() == [[0, 0]] and not service._thread.is_alive()
    with pytest.raises(CancelledError):
        waiting.result(0)


@pytest.mark.parametrize(
    "act, said",
    [
        (lambda service: service.submit(0, "x"), "at least 1"),
        (lambda service: service.submit(1, SamplerConfig(protocol="released")), "released"),
        (lambda service: BatchingService(service.method, 0), "at least 1"),
    ],
)
def test_what_cannot_be_served(act, said):
    with BatchingService(Gate()) as service, pytest.raises(UsageError, match=said):
        act(service)
