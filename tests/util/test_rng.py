"""Random numbers by address: the same address gives the same numbers, whatever surrounds it."""

import hashlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from jpeg_dlm.util.rng import RowNoise, derive_seed, philox

PATHS = pytest.mark.parametrize("host", [True, False], ids=["host", "device"])


def test_seeds_are_a_fixed_function_of_the_address():
    # First eight bytes of blake2b of "42/init", little-endian, without the last bit: changing this breaks old runs.
    digest = hashlib.blake2b(b"42/init", digest_size=8).digest()
    assert derive_seed(42, "init") == sum(byte << (8 * i) for i, byte in enumerate(digest)) // 2
    assert derive_seed(1, "a", 23) != derive_seed(1, "a", 2, 3) != derive_seed(12, "a", 3)


@settings(max_examples=20, deadline=None)
@given(rows=st.lists(st.integers(0, 10**9), min_size=1, max_size=6), step=st.integers(0, 10**6), seed=st.integers(0, 2**31))
@PATHS
def test_a_row_depends_on_its_number_alone(rows, step, seed, host):
    draws = [
        lambda noise: noise.normal("x", 2, 3),
        lambda noise: noise.uniform("x", 2, 3),
        lambda noise: noise.streams("x").uniform(2, 3),
        lambda noise: noise.repeated(2).normal("x", 2, 3)[len(noise.rows) :],
    ]
    for draw in draws:
        drawn = draw(RowNoise(seed, rows, step, host=host))
        assert drawn.shape == (len(rows), 2, 3)
        for i, row in enumerate(rows):
            assert torch.equal(drawn[i], draw(RowNoise(seed, [row], step, host=host))[0])


@PATHS
@pytest.mark.parametrize("size", [1, 5, 64, 1000, 40_000])
def test_a_row_of_a_large_draw_depends_on_its_number_alone(size, host):
    """Vector instructions must not change a number with its place in a tensor."""
    whole = RowNoise(1, range(3, 16), 2, host=host).normal("x", size)
    for row in (3, 4, 9, 15):
        assert torch.equal(whole[row - 3], RowNoise(1, range(row, row + 1), 2, host=host).normal("x", size)[0])


def signed(*words: int) -> list[int]:
    return [word - (word >= 2**31) * 2**32 for word in words]


def test_philox_gives_the_published_answers():
    """Known answers of Philox4x32-10 from Random123 (Salmon et al. 2011): counters, key, words."""
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    known = [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (pi, 0x299F31D0 << 32 | 0xA4093822, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ]
    for counters, key, words in known:
        assert philox(torch.tensor(counters)[:, None], key).flatten().tolist() == signed(*words)


def test_numbers_shared_by_a_batch_do_not_depend_on_its_rows():
    a, b = (RowNoise(0, rows, 7).shared_normal("directions", 3, 2) for rows in ([1, 2], range(9)))
    assert a.shape == (3, 2) and torch.equal(a, b)
    a, b = (RowNoise(0, rows, 7).shared("grid").initial_seed() for rows in ([1, 2], [9]))
    assert a == b != RowNoise(0, [9], 8).shared("grid").initial_seed()
    a = RowNoise(0, [1, 2], 7).shared_normal("directions", 3, 2)
    assert not torch.equal(a, RowNoise(0, [1], 8).shared_normal("directions", 3, 2))


@PATHS
def test_rows_together_look_independent_and_of_the_right_law(host):
    n = 400
    x = RowNoise(0, range(n), host=host).normal("x", 8).double()
    u = RowNoise(0, range(n), host=host).uniform("x", 8).double()
    # Five standard errors of the mean and of the mean square.
    assert abs(x.mean()) < 5 / math.sqrt(8 * n) and abs((x**2).mean() - 1) < 5 * math.sqrt(2 / (8 * n))
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / (8 * n)) and u.min() >= 0 and u.max() < 1
    neighbors = (x[1:] * x[:-1]).mean()
    assert abs(neighbors) < 5 / math.sqrt(8 * (n - 1))
    for law, cdf in (("normal", "norm"), ("uniform", "uniform")):  # Kolmogorov and Smirnov's test
        numbers = getattr(RowNoise(1, range(50), host=host), law)("y", 2000).flatten().numpy()
        assert stats.kstest(numbers, cdf).pvalue > 1e-4
    fine = RowNoise(1, range(50), host=host).streams("z").uniform(200)
    assert fine.dtype == torch.float64 and 0 <= fine.min() and fine.max() < 1
    assert (fine * 2**24 % 1 != 0).float().mean() > 0.99  # more bits than float32 has


def test_repeated_noise_begins_with_that_of_one_draw_and_goes_on_independently():
    once = RowNoise(3, range(4), 7)
    thrice = once.repeated(3)
    x = thrice.normal("latent", 1000)
    assert x.shape == (12, 1000) and torch.equal(x[:4], once.normal("latent", 1000))
    assert (torch.corrcoef(x) - torch.eye(12)).abs().max() < 0.2
    assert torch.equal(RowNoise(3, [2], 7).repeated(3).uniform("scale"), thrice.uniform("scale")[2::4])
    assert once.repeated(1) is once
    u = RowNoise(0, range(8, 12), 0, total=8).repeated(3).stratified("t")
    assert ((u * 8).long() == torch.tensor([0, 1, 2, 3] * 3)).all()
    assert torch.equal(thrice.stratified("time")[:4], once.stratified("time")) and thrice.stratified("time").shape == (12,)
    assert thrice.streams("x").normal(2).shape == (12, 2)
