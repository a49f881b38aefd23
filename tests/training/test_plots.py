"""The picture of a run: its panels, and that it shows the measured values."""

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from jpeg_dlm.errors import DataError
from jpeg_dlm.training import plots
from jpeg_dlm.training.metrics import MetricsLog


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))[1])
    return figures


def write(run, rows):
    with MetricsLog(run / "metrics.jsonl", None) as log:
        for step, values in rows:
            log.log(step, values)


def test_panels_follow_the_measures(tmp_path, drawn):
    rows = [(s, {"ce": 3.0 / s, "loss": 4.0 / s, "odd_term": 1.0, "grad_norm": 1.0, "lr_flow": 1e-3, "lr_codec": 3e-4,
                 "rows_per_s": 50.0, "elapsed_s": s, "note": "text"}) for s in range(1, 300)]  # fmt: skip
    rows += [(100, {"heldout_ce": 0.5}), (200, {"heldout_ce": 0.4, "heldout_only": 2.0, "diag_ratio_0.3": 1.0})]
    write(tmp_path, rows)
    path = plots.plot_metrics(tmp_path)
    assert path == tmp_path / "metrics.png" and imread(path).shape[1] > 1000
    axes = {a.get_title(loc="left"): a for a in drawn[0].axes}
    assert list(axes) == ["total loss", "ce", "odd_term", "only", "gradient norm", "speed", "learning rates"]
    assert all(a.get_ylabel() for a in axes.values()) and axes["speed"].get_ylabel() == "rows per second"
    assert [t.get_text() for t in axes["learning rates"].get_legend().get_texts()] == ["flow", "codec"]
    held = next(line for line in axes["ce"].lines if line.get_label() == "held out")
    assert list(held.get_xdata()) == [100, 200] and list(held.get_ydata()) == [0.5, 0.4]
    assert axes["ce"].get_yscale() == "log" and axes["odd_term"].get_yscale() == "linear"
    assert axes["learning rates"].get_xlabel() == "optimizer step"


def test_latents_have_two_panels(tmp_path, drawn):
    found = {"latent_rank": 0.3, "latent_isotropy": 0.2, "latent_std_min": 0.8, "latent_text": 0.7, "latent_sigreg": 1e-3}
    rows = [(s, {"loss": 1.0}) for s in range(10)]
    rows += [(s, {"heldout_loss": 1.0, **found, "decode_t0.3": 0.001, "decode_t0.7": 0.9}) for s in (4, 8)]
    write(tmp_path, rows)
    plots.plot_metrics(tmp_path)
    axes = {a.get_title(loc="left"): a for a in drawn[0].axes}
    assert list(axes) == ["total loss", "latent geometry", "decoding noisy latents"]
    names = {title: [t.get_text() for t in a.get_legend().get_texts()] for title, a in axes.items()}
    assert names["decoding noisy latents"] == ["t = 0.3", "t = 0.7"]
    assert len(set(names["latent geometry"])) == 5 and not any("_" in name for name in names["latent geometry"])
    assert all(a.get_yscale() == "linear" for a in axes.values())
    rank = axes["latent geometry"].lines[0]
    assert list(rank.get_xdata()) == [4, 8] and list(rank.get_ydata()) == [0.3, 0.3]


def test_one_row_and_bad_numbers(tmp_path, drawn):
    write(tmp_path, [(0, {"loss": float("nan")})])
    plots.plot_metrics(tmp_path)
    write(tmp_path, [(s, {"loss": float("inf") if s % 7 == 0 else 1.0}) for s in range(500)])
    plots.plot_metrics(tmp_path)
    assert len(drawn) == 2 and "not finite" in [t.get_text() for t in drawn[1].axes[0].get_legend().get_texts()]


def test_smoothing_is_a_centered_mean():
    y = np.random.default_rng(0).normal(size=40)
    y[17] = np.nan
    smooth = plots._smooth(y, 4)
    for i in range(4, 36):
        assert np.isclose(smooth[i], np.nanmean(y[i - 4 : i + 5]))
    assert np.allclose(plots._smooth(np.arange(40.0), 4)[2:-2], np.arange(40.0)[2:-2])  # a straight line stays, at its ends too
    assert np.isnan(smooth[0]) and np.isnan(plots._smooth(np.full(5, np.nan), 1)).all()


def test_empty_runs_are_refused(tmp_path):
    with pytest.raises(DataError, match="Cannot read"):
        plots.plot_metrics(tmp_path)
    write(tmp_path, [])
    with pytest.raises(DataError, match="no measurements"):
        plots.plot_metrics(tmp_path)


def test_no_global_state(tmp_path):
    import subprocess
    import sys

    write(tmp_path, [(1, {"loss": 1.0})])
    code = (
        "import sys; from pathlib import Path; from jpeg_dlm.training.plots import plot_metrics\n"
        f"plot_metrics(Path({str(tmp_path)!r})); sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert matplotlib.get_backend()  # the caller's choice is theirs
