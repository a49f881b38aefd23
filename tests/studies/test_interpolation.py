"""Between two texts: pairs, mixtures and noise by hand, the curve through the points, and the whole study."""

import json

import numpy as np
import pytest
import torch

from jpeg_dlm.cli.main import main
from jpeg_dlm.studies import interpolation
from jpeg_dlm.studies.interpolation import LAMBDAS, draw_pairs, level, mixed, monotone_cubic, seen_by_decoder, shared_noise

pytest_plugins = ["tiny_evaluation", "stand_in"]  # fixtures


def test_pairs_use_every_row_before_any_twice():
    pairs = draw_pairs(7, 8)
    assert pairs.shape == (8, 2) and (pairs[:, 0] != pairs[:, 1]).all()
    for start in (0, 3):
        assert len(set(pairs[start : start + 3].flatten())) == 6
    assert np.array_equal(draw_pairs(7, 3), pairs[:3])


def test_mixture():
    a, b = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[5.0, -2.0]]])
    torch.testing.assert_close(mixed(a, b, 0.25), torch.tensor([[[2.0, 1.0]]]))
    assert torch.equal(mixed(a, b, 0.0), a) and torch.equal(mixed(a, b, 1.0), b)


def test_noise_is_shared_and_of_unit_size():
    like = torch.empty(3, 4, 5)
    eps = shared_noise([0, 1, 2], like)
    torch.testing.assert_close((eps**2).mean((1, 2)), torch.ones(3))
    assert torch.equal(shared_noise([2], like[:1])[0], eps[2]) and not torch.equal(eps[0], eps[1])


class Recorder:
    """A view whose prediction is the state it was given."""

    def noisy(self, z, eps, ratio):
        return z + ratio * eps

    def predict(self, z_t, ratio):
        self.asked = ratio
        return z_t


def test_only_noise_needs_a_prediction():
    view, z, eps = Recorder(), torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    assert level(0.0) == {"t": 0.0, "ratio": 0.0, "linear_t": 1.0}
    assert seen_by_decoder(view, z, eps, 0.0) is z and not hasattr(view, "asked")
    ratio = level(0.1)["ratio"]
    torch.testing.assert_close(seen_by_decoder(view, z, eps, ratio) - z, ratio * eps)
    assert view.asked == ratio and level(0.1)["linear_t"] == pytest.approx(0.5580599, abs=1e-7)


CURVES = {
    "valley": [9.0, 5, 4, 3.9, 3, 2.8, 3, 6, 6, 6.5, 12],
    "monotone": [0.0, 0.1, 0.1, 4, 4.2, 4.3, 50, 51, 51.5, 70, 70],
    "ragged": [1.0, 3, 2, 5, 0, 4, 4, 1, 9, 8, 8.5],
}


@pytest.mark.parametrize("name", CURVES)
def test_curve_stays_between_its_points_and_passes_through_them(name):
    x, y = np.array(LAMBDAS), np.array(CURVES[name])
    np.testing.assert_allclose(monotone_cubic(x, y, x), y, atol=1e-12)
    for k in range(len(x) - 1):
        piece = monotone_cubic(x, y, np.linspace(x[k], x[k + 1], 50))
        steps = np.diff(piece) * np.sign(y[k + 1] - y[k])
        assert (steps >= -1e-12).all() and min(y[k : k + 2]) - 1e-12 <= piece.min() <= piece.max() <= max(y[k : k + 2]) + 1e-12


def test_curve_of_a_line_and_of_few_points():
    x, at = np.array([0.0, 0.3, 1.0]), np.linspace(0, 1, 7)
    np.testing.assert_allclose(monotone_cubic(x, 2 + 3 * x, at), 2 + 3 * at)
    np.testing.assert_allclose(monotone_cubic(x[:2], 2 + 3 * x[:2], at * 0.3), 2 + 0.9 * at)
    # By hand (equal steps): slopes 1 and 3 meet at the harmonic mean 1.5; the ends are (3 * 1 - 3) / 2 = 0 and (9 - 1) / 2 = 4.
    middle = monotone_cubic(np.array([0.0, 1, 2]), np.array([0.0, 1, 4]), np.array([0.5, 1.5]))
    np.testing.assert_allclose(middle, [0.5 + (0 - 1.5) / 8, 2.5 + (1.5 - 4) / 8])


def test_both_systems(micro_folders, byte_gpt2, corpus_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(interpolation, "RESAMPLES", 50)
    words = ["study", "interpolation", str(micro_folders("jpeg-dlm")), str(micro_folders("cosmos")), "-n", "5", "--batch", "3"]
    words += ["--scorer", f"hf:{byte_gpt2}", "--data", str(corpus_file), "--out", str(tmp_path / "out"), "--quiet"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "study-interpolation.json").read_text())
    assert [row["title"] for row in result["rows"]] == ["JPEG-DLM", "COSMOS"] and result["protocol"] == "default"
    for row in result["rows"]:
        assert [len(points) for points in row["levels"]] == [11] * 4
        for point in (p for points in row["levels"] for p in points if p["gen_ppl"] is not None):
            assert point["gen_ppl_low"] <= point["gen_ppl"] <= point["gen_ppl_high"] and point["entropy"] >= 0
    assert shown.count("\n| 0.45 | ") == 2 and "t = 0.1, SNR 1.59" in shown and "no noise" in shown
    assert (tmp_path / "out" / "study-interpolation.png").stat().st_size > 10_000
    monkeypatch.setattr(interpolation, "path_texts", lambda *a: pytest.fail("written twice"))
    assert main(words) == 0 and capsys.readouterr().out == shown


def test_the_ends_of_the_path_are_the_texts_own_reconstructions(micro_folders, corpus_file, tmp_path, monkeypatch):
    from jpeg_dlm.evaluation.heldout import model_sources
    from jpeg_dlm.machine.console import Console
    from jpeg_dlm.methods.base import Batch
    from jpeg_dlm.results.resumable import Parts
    from jpeg_dlm.studies.study import Asked

    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    console = Console(quiet=True)
    [source] = model_sources([micro_folders("cosmos")], "cpu", 2, str(corpus_file), console)
    asked = Asked(5, (0,), 2, lambda: pytest.fail("no scorer is needed"), Parts(), console)
    texts = interpolation.path_texts(source, 0.0, asked)
    method = source.model.method
    for side, found in ((0, texts[0]), (1, texts[-1])):
        tokens = source.heldout.rows(draw_pairs(len(source.heldout), 5)[:, side])
        assert found == source.model.to_text(method.greedy(method.encode(Batch(tokens))))


def test_text_that_vanished_is_told(fake):
    from jpeg_dlm.evaluation.protocols import PROTOCOLS
    from jpeg_dlm.results.resumable import Parts

    nothing = interpolation._scored("x", ["", " "], fake, PROTOCOLS["default"], Parts())
    assert nothing["gen_ppl"] is None and interpolation._cell(nothing) == "no text"
    # Without a beginning token the first word is context: (2 + 4) / 2 nats.
    some = interpolation._scored("x", ["w9 w2 w4", ""], fake, PROTOCOLS["default"], Parts())
    assert some["gen_ppl"] == pytest.approx(np.exp(3)) and some["skipped"] == 1 and some["entropy"] == pytest.approx(np.log(3))
