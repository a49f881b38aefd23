"""FLM's time against dense integration, against the errors of real noisy tokens, and against its own inverse."""

import math

import pytest
import torch

from jpeg_dlm.methods.common.decoding_error import TABLE_POINTS, TimeMap, readable_share


def dense_alpha(gamma: float, vocab: int) -> float:
    """The definition by a trapezoid rule so fine that its error is beyond float64."""
    y = torch.linspace(-12, 12, 20_001, dtype=torch.float64)
    phi = torch.exp(-(y**2) / 2) / math.sqrt(2 * math.pi)
    q = torch.trapezoid(phi * (0.5 * torch.erfc(-(y + gamma / (1 - gamma)) / math.sqrt(2))) ** (vocab - 1), y).item()
    return vocab / (vocab - 1) * (q - 1 / vocab)


@pytest.mark.parametrize("vocab", [2, 40, 512, 30_522, 50_257])
def test_alpha_is_its_definition(vocab):
    gamma = torch.linspace(0, 0.98, 50, dtype=torch.float64)
    wanted = [dense_alpha(g, vocab) for g in gamma.tolist()]
    assert readable_share(gamma, vocab).tolist() == pytest.approx(wanted, abs=1e-10)


def test_two_tokens_have_a_closed_form():
    """The difference of two coordinates is normal with variance 2 (1 - gamma)^2: q = Phi(gamma / (1 - gamma) / sqrt 2)."""
    gamma = torch.tensor([0.1, 0.4, 0.8], dtype=torch.float64)
    q = torch.special.ndtr(gamma / (1 - gamma) / math.sqrt(2))
    assert readable_share(gamma, 2).tolist() == pytest.approx((2 * q - 1).tolist(), abs=1e-10)


@pytest.mark.parametrize("vocab", [2, 40, 50_257])
def test_alpha_runs_from_0_to_1_without_falling(vocab):
    alpha = readable_share(torch.linspace(0, 1, 2001, dtype=torch.float64), vocab)
    assert alpha[0] == 0 and alpha[-1].item() == pytest.approx(1, abs=1e-12) and alpha.isfinite().all()
    assert (alpha.diff() > -1e-14).all()  # the last digits of a sum that is 1


def test_alpha_is_what_noisy_tokens_show():
    g = torch.Generator().manual_seed(0)
    vocab, n = 12, 40_000
    for gamma in (0.3, 0.6, 0.75):
        z = (1 - gamma) * torch.randn(n, vocab, generator=g)
        z[:, 5] += gamma
        right = (z.argmax(-1) == 5).double().mean().item()
        alpha = readable_share(torch.tensor([gamma]), vocab).item()
        assert vocab / (vocab - 1) * (right - 1 / vocab) == pytest.approx(alpha, abs=4 * 0.5 / math.sqrt(n))


@pytest.mark.parametrize("vocab", [2, 40, 512, 50_257])
def test_the_table_is_the_inverse(vocab):
    times = TimeMap(vocab)
    tau = torch.linspace(0, 1, 1001, dtype=torch.float64)
    gamma = times(tau)
    assert gamma[0] == 0 and gamma[-1] == 1 and gamma.dtype == torch.float64
    assert (gamma.diff() > 0).all()
    assert readable_share(gamma[:-1], vocab).tolist() == pytest.approx(tau[:-1].tolist(), abs=1e-5)


def test_the_table_keeps_shapes_and_ends_and_is_not_stored():
    times = TimeMap(300)
    assert times(torch.tensor([[0.25, 0.5]])).shape == (1, 2) and times(torch.tensor(0.5)).shape == ()
    assert times(torch.tensor([0.0, 1.0])).tolist() == [0, 1]
    assert len(times.tau) == len(times.gamma) <= TABLE_POINTS + 1 and (times.tau.diff() > 0).all()
    assert not times.state_dict()


def test_uniform_times_would_miss_a_large_vocabulary():
    """Half of gamma's range tells nothing of a token among 50,257: what the map is for."""
    assert readable_share(torch.tensor([0.5]), 50_257).item() < 0.01
    assert TimeMap(50_257)(torch.tensor([0.1, 0.9])).tolist() == pytest.approx([0.75, 0.85], abs=0.03)
