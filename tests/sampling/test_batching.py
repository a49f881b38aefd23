"""The batching service: each request gets the same texts as alone, whatever other requests do."""

import itertools
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
from jpeg_dlm.methods.base import FREE
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.sampling.batching import BatchingService, QueueFullError, StackedNoise


@pytest.fixture(scope="module")
def method():
    torch.manual_seed(0)
    return perturb(build_method(override(preset("smoke"), MICRO)).eval())


class Counting:
    """Tells what reached the sampler."""

    def __init__(self, method) -> None:
        self.method, self.batches, self.device = method, [], method.device

    def sample(self, sampler, noise, watch=None, given_BL=None):
        self.batches.append(len(noise.rows))
        return self.method.sample(sampler, noise, watch, given_BL)


class Gate:
    """A sampler that holds its first batch until it is opened; a row's tokens are its seed and number."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.entered, self.open, self.batches = threading.Event(), threading.Event(), []

    def sample(self, sampler, noise, watch=None, given_BL=None):
        self.batches.append(list(noise.rows))
        self.entered.set()
        assert self.open.wait(60)
        if sampler == "bad" or any(part.seed == 13 for part in noise.parts):
            raise ValueError("unlucky")
        return torch.tensor([[part.seed, row] for part in noise.parts for row in part.rows])


def gated(gate: Gate, service: BatchingService) -> Future:
    """A first request that keeps the thread busy, so that what follows piles up."""
    first = service.submit(gate, 1, "first")
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
    options = [
        base,
        replace(base, solver="heun"),
        replace(base, solver="sde"),
        replace(base, grid="random", steps=4),
        replace(base, w=1.5),
    ]
    asked = [(rng.randint(1, 7), rng.choice(options), rng.randrange(3), rng.randrange(5)) for _ in range(40)]
    counting = Counting(method)
    with BatchingService(max_batch) as service, ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda request: service.submit(counting, *request).result(60), asked))
    for (n, sampler, seed, first), tokens in zip(asked, found, strict=True):
        assert torch.equal(tokens, method.sample(sampler, RowNoise(seed, range(first, first + n)))), (n, sampler, seed, first)
    assert max(counting.batches) <= max_batch


def test_requests_of_several_seeds_share_one_batch(method):
    counting = Counting(method)
    with BatchingService(6, max_wait_s=60) as service:
        found = [service.submit(counting, 2, method.config.sampler, seed) for seed in range(3)]
        assert [len(future.result(60)) for future in found] == [2, 2, 2]
    assert counting.batches == [6]


def test_a_random_grid_parts_seeds_at_the_first_try_and_never_joins_them_again(method):
    counting, sampler = Counting(method), replace(method.config.sampler, grid="random", steps=5)
    with BatchingService(4, max_wait_s=60) as service:
        for future in [service.submit(counting, 1, sampler, seed) for seed in (0, 1, 0, 1)]:
            future.result(60)
        assert counting.batches == [4, 2, 2]
        for future in [service.submit(counting, 2, sampler, seed) for seed in (0, 1, 1, 0)]:
            future.result(60)
    assert counting.batches == [4, 2, 2, 4, 4]


def test_a_large_request_is_split_and_others_join_its_last_part():
    gate = Gate()
    with BatchingService(4, max_wait_s=0) as service:
        gated(gate, service)
        large, small = service.submit(gate, 6, "x", seed=1), service.submit(gate, 1, "x", seed=2)
        gate.open.set()
        assert large.result(60).tolist() == [[1, row] for row in range(6)] and small.result(60).tolist() == [[2, 0]]
    assert gate.batches == [[0], [0, 1, 2, 3], [4, 5, 0]]


# ---------------------------------------------------------------- waiting


def test_a_full_batch_starts_at_once_and_a_lone_request_after_its_wait():
    gate = Gate()
    gate.open.set()
    with BatchingService(2, max_wait_s=60) as service:  # would run into the timeouts below if it waited
        assert [len(f.result(30)) for f in (service.submit(gate, 1, "x"), service.submit(gate, 1, "x"))] == [1, 1]
    with BatchingService(2, max_wait_s=0.01) as service:
        assert len(service.submit(gate, 1, "x").result(30)) == 1


def test_an_idle_service_sleeps():
    gate = Gate()
    gate.open.set()
    waits = []
    with BatchingService(2, max_wait_s=0) as service:
        service.submit(gate, 1, "x").result(30)
        real, service._changed.wait = service._changed.wait, lambda *timeout: waits.append(timeout) or real(*timeout)
        service.submit(gate, 1, "x").result(30)
        service.submit(gate, 1, "x").result(30)
    assert len(waits) <= 3 and not any(waits)  # without a timeout: woken by the next request alone


# ---------------------------------------------------------------- errors, cancellation, the end


def test_an_error_reaches_only_who_caused_it():
    gate = Gate()
    with BatchingService(8, max_wait_s=0) as service:
        gated(gate, service)
        good, bad = [service.submit(gate, 2, "x", seed) for seed in (1, 2)], service.submit(gate, 1, "x", seed=13)
        other = service.submit(gate, 1, "bad")
        gate.open.set()
        assert [future.result(60).tolist() for future in good] == [[[seed, 0], [seed, 1]] for seed in (1, 2)]
        for future in (bad, other):
            with pytest.raises(ValueError, match="unlucky"):
                future.result(60)
        assert len(service.submit(gate, 1, "x", seed=4).result(60)) == 1  # and it goes on


def test_the_rest_of_a_split_request_is_dropped_with_its_error():
    gate = Gate()
    gate.open.set()
    with BatchingService(2, max_wait_s=0) as service, pytest.raises(ValueError, match="unlucky"):
        service.submit(gate, 9, "x", seed=13).result(60)
    assert gate.batches == [[0, 1]]


def test_a_cancelled_request_is_not_sampled():
    gate = Gate()
    with BatchingService(8, max_wait_s=0) as service:
        first = gated(gate, service)
        dropped, kept = service.submit(gate, 1, "x", seed=5), service.submit(gate, 1, "x", seed=6)
        assert dropped.cancel() and service.waiting == 1
        gate.open.set()
        assert kept.result(60).tolist() == [[6, 0]] and first.result(60).tolist() == [[0, 0]]
    assert gate.batches == [[0], [0]]


def test_a_batch_for_which_nobody_waits_stops_at_its_next_step():
    """A sampler of endless steps: only an abandoned batch ends."""
    began, seen = threading.Event(), []

    class Endless(Gate):
        def sample(self, sampler, noise, watch=None, given_BL=None):
            for step in itertools.count():
                watch(step, 10, 0.0, lambda: torch.zeros(len(noise.rows), 1))
                seen.append(step)
                began.set()

    gate = Gate()
    gate.open.set()
    with BatchingService(max_wait_s=0) as service:
        future = service.submit(Endless(), 100, "x")  # its second batch must not start either
        assert began.wait(60) and future.cancel()
        assert service.submit(gate, 1, "x", seed=4).result(60).tolist() == [[4, 0]] and service.waiting == 0


def test_a_full_queue_refuses_and_counts_what_waits():
    gate = Gate()
    with BatchingService(2, max_wait_s=0, max_queue=5) as service:
        gated(gate, service)
        kept = [service.submit(gate, 3, "x"), service.submit(gate, 2, "x")]
        with pytest.raises(QueueFullError, match="5 texts wait"):
            service.submit(gate, 1, "x")
        assert service.waiting == 5 and service.expected_wait_s == 0 and kept[0].cancel()
        kept.append(service.submit(gate, 3, "x", seed=7))  # the place of the cancelled one
        gate.open.set()
        assert kept[2].result(60).tolist() == [[7, row] for row in range(3)] and kept[1].result(60) is not None
        assert service.expected_wait_s == 0 and service.alive
    assert not service.alive


def test_calls_run_in_the_same_thread_between_batches():
    gate, names = Gate(), []
    with BatchingService(max_wait_s=0) as service:
        gated(gate, service)
        called = [service.call(lambda: names.append(threading.current_thread().name) or 7), service.call(lambda: 1 // 0)]
        gate.open.set()
        assert called[0].result(60) == 7 and names == ["jpeg-dlm-batching"]
        with pytest.raises(ZeroDivisionError):
            called[1].result(60)


def test_batches_are_observed():
    gate, observed = Gate(), []
    gate.open.set()
    with BatchingService(4, observe=lambda rows, seconds: observed.append((rows, seconds >= 0))) as service:
        service.submit(gate, 6, "x").result(60)
        service.call(lambda: None).result(60)
    assert observed == [(4, True), (2, True)]


# ---------------------------------------------------------------- given tokens and watching


@pytest.mark.parametrize("name", ["ar", "mdlm", "sedd", "duo"])
def test_given_tokens_of_several_requests_share_a_batch(name):
    torch.manual_seed(0)
    method = perturb(build_method(for_method(override(preset("smoke"), MICRO), name)).eval())
    counting, sampler, rows = Counting(method), method.config.sampler, []
    for length in (1, 3, 7):
        rows.append(torch.full((12,), FREE))
        rows[-1][:length] = torch.arange(length) + 20
    with BatchingService(8, max_wait_s=60) as service:
        asked = [service.submit(counting, 2, sampler, seed, given_L=row) for seed, row in enumerate([*rows, rows[0]])]
        found = [future.result(60) for future in asked]
    assert counting.batches == [8]
    for seed, (row, tokens) in enumerate(zip([*rows, rows[0]], found, strict=True)):
        assert torch.equal(tokens, method.sample(sampler, RowNoise(seed, range(2)), given_BL=row.expand(2, -1)))
        assert torch.equal(tokens[:, row != FREE], row[row != FREE].expand(2, -1))


def test_watchers_see_their_own_rows(method):
    """As each would alone; requests that nobody watches form other batches."""
    counting, sampler, seen, lone = Counting(method), method.config.sampler, {0: [], 1: []}, {0: [], 1: []}

    def watch(seed, into=seen):
        return lambda step, steps, t, tokens: into[seed].append((step, steps, t, tokens(), tokens.state_BND))

    with BatchingService(6, max_wait_s=60) as service:  # a full batch starts at once, the other one at the end
        asked = [service.submit(counting, 3, sampler, seed, watch=watch(seed)) for seed in (0, 1)]
        plain = service.submit(counting, 3, sampler, 2)
        assert [len(future.result(60)) for future in asked] == [3, 3]
    assert len(plain.result(0)) == 3
    assert counting.batches == [6, 3]
    for seed in (0, 1):
        method.sample(sampler, RowNoise(seed, range(3)), watch(seed, lone))
        alone = lone[seed]
        assert [told[:3] for told in seen[seed]] == [told[:3] for told in alone] and len(alone) == sampler.steps + 1
        for ours, theirs in zip(seen[seed], alone, strict=True):
            assert torch.equal(ours[3], theirs[3]) and torch.allclose(ours[4], theirs[4], atol=1e-5)


# ---------------------------------------------------------------- the end


def test_closing_finishes_what_was_asked_for():
    gate = Gate()
    service = BatchingService(1, max_wait_s=60)
    gated(gate, service)
    waiting = [service.submit(gate, 1, "x", seed) for seed in range(3)]
    gate.open.set()
    service.close()
    assert [future.result(0).tolist() for future in waiting] == [[[seed, 0]] for seed in range(3)]
    assert not service._thread.is_alive()
    with pytest.raises(UsageError, match="closed"):
        service.submit(gate, 1, "x")
    service.close()


def test_closing_can_cancel_and_leaving_by_an_error_does():
    gate = Gate()
    with pytest.raises(KeyError), BatchingService(1, max_wait_s=0) as service:
        begun = gated(gate, service)
        waiting = service.submit(gate, 3, "x")
        threading.Timer(0.05, gate.open.set).start()
        raise KeyError
    assert begun.result(0).tolist() == [[0, 0]] and not service._thread.is_alive()
    with pytest.raises(CancelledError):
        waiting.result(0)


@pytest.mark.parametrize(
    "act, said",
    [
        (lambda service: service.submit(Gate(), 0, "x"), "at least 1"),
        (lambda service: service.submit(Gate(), 1, SamplerConfig(protocol="released")), "released"),
        (lambda service: BatchingService(0), "at least 1"),
    ],
)
def test_what_cannot_be_served(act, said):
    with BatchingService() as service, pytest.raises(UsageError, match=said):
        act(service)
