"""Random numbers by address: the same address gives the same numbers, whatever surrounds it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jpeg_dlm.rng import RowNoise, derive_seed, generator


def test_seeds_are_a_fixed_function_of_the_address():
    # First eight bytes of blake2b of "42/init", little-endian, without the last bit: changing this breaks old runs.
    import hashlib

    digest = hashlib.blake2b(b"42/init", digest_size=8).digest()
    assert derive_seed(42, "init") == sum(byte << (8 * i) for i, byte in enumerate(digest)) // 2
    assert 0 <= derive_seed(42, "init") < 2**63


def test_distinct_addresses_give_distinct_seeds():
    addresses = {(s, p, c, d) for s in range(4) for p in ("a", "b", "time") for c in range(8) for d in range(8)}
    assert len({derive_seed(s, p, c, d) for s, p, c, d in addresses}) == len(addresses)
    assert derive_seed(1, "a", 23) != derive_seed(1, "a", 2, 3) != derive_seed(12, "a", 3)


@settings(max_examples=20, deadline=None)
@given(rows=st.lists(st.integers(0, 10**9), min_size=1, max_size=6), step=st.integers(0, 10**6), seed=st.integers(0, 2**31))
def test_a_row_depends_on_its_number_alone(rows, step, seed):
    whole = RowNoise(seed, rows, step)
    for kind in ("normal", "uniform"):
        drawn = getattr(whole, kind)("x", 2, 3)
        assert drawn.shape == (len(rows), 2, 3)
        for i, row in enumerate(rows):
            assert torch.equal(drawn[i], getattr(RowNoise(seed, [row], step), kind)("x", 2, 3)[0])


@pytest.mark.parametrize("other", [RowNoise(1, [5], 2), RowNoise(0, [6], 2), RowNoise(0, [5], 3)], ids=["seed", "row", "step"])
def test_seed_row_step_and_purpose_all_matter(other):
    base = RowNoise(0, [5], 2)
    assert not torch.equal(base.normal("x", 4), other.normal("x", 4))
    assert not torch.equal(base.normal("x", 4), base.normal("y", 4))


def test_scalars_per_row_have_shape_B():
    assert RowNoise(0, range(5)).normal("time").shape == (5,)


def test_the_shared_generator_does_not_depend_on_the_rows():
    a, b = (torch.rand(3, generator=RowNoise(0, rows, 7).shared("grid")) for rows in ([1, 2], [9]))
    assert torch.equal(a, b)
    assert not torch.equal(a, torch.rand(3, generator=RowNoise(0, [9], 8).shared("grid")))


def test_the_global_random_state_is_neither_used_nor_moved():
    torch.manual_seed(1)
    first = RowNoise(0, [0, 1]).normal("x", 3)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1))
    assert torch.equal(first, RowNoise(0, [0, 1]).normal("x", 3))
    assert torch.equal(torch.rand(2, generator=generator(3, "p")), torch.rand(2, generator=generator(3, "p")))


def test_rows_together_look_independent_and_of_the_right_law():
    n = 400
    x = RowNoise(0, range(n)).normal("x", 8).double()
    u = RowNoise(0, range(n)).uniform("x", 8).double()
    # Five standard errors of the mean and of the mean square.
    assert abs(x.mean()) < 5 / math.sqrt(8 * n) and abs((x**2).mean() - 1) < 5 * math.sqrt(2 / (8 * n))
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / (8 * n)) and u.min() >= 0 and u.max() < 1
    neighbors = (x[1:] * x[:-1]).mean()
    assert abs(neighbors) < 5 / math.sqrt(8 * (n - 1))


def test_repeated_noise_begins_with_that_of_one_draw_and_goes_on_independently():
    once = RowNoise(3, range(4), 7)
    thrice = once.repeated(3)
    x = thrice.normal("latent", 1000)
    assert x.shape == (12, 1000) and torch.equal(x[:4], once.normal("latent", 1000))
    assert (torch.corrcoef(x) - torch.eye(12)).abs().max() < 0.2
    assert torch.equal(RowNoise(3, [2], 7).repeated(3).uniform("scale"), thrice.uniform("scale")[2::4])
    assert once.repeated(1) is once
