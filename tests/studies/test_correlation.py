"""Correlation between latent positions against hand-made latents, numpy's correlation and a slow bootstrap."""

import json

import numpy as np
import pytest
import torch

from jpeg_dlm.cli.main import main
from jpeg_dlm.rng import derive_seed
from jpeg_dlm.studies import correlation
from jpeg_dlm.studies.correlation import bootstrap_means, draw, off_diagonal, position_gram, table

pytest_plugins = ["stand_in"]  # fixtures


def test_by_hand():
    # Two sequences, three positions, one channel; without the mean they are (a, -a): 1, 1 and -1.
    z = torch.tensor([[[5.0], [1.0], [0.0]], [[3.0], [-1.0], [8.0]]])
    expected = torch.tensor([[1.0, 1, -1], [1, 1, -1], [-1, -1, 1]], dtype=torch.float64)
    torch.testing.assert_close(position_gram(z), expected)
    assert float(off_diagonal(position_gram(z)).mean()) == pytest.approx(-1 / 3)
    # Two channels: (1, 0) and (-1, 0) against (1, 1) and (-1, -1): 2 / (sqrt 2 * 2).
    z = torch.tensor([[[1.0, 0], [1, 1]], [[-1.0, 0], [-1, -1]]]) + torch.tensor([[7.0, 2], [-3, 1]])
    assert float(position_gram(z)[0, 1]) == pytest.approx(2**-0.5)


def test_one_channel_is_numpys_correlation():
    z = torch.randn(40, 6, 1, generator=torch.Generator().manual_seed(0)).cumsum(1)
    np.testing.assert_allclose(position_gram(z).numpy(), np.corrcoef(z[..., 0].numpy().T), atol=1e-6)


@pytest.mark.parametrize("products", [1 << 25, 1])
def test_bootstrap_is_that_of_drawing_rows(monkeypatch, products):
    monkeypatch.setattr(correlation, "PRODUCTS_AT_ONCE", products)
    z = (torch.randn(9, 4, 3, generator=torch.Generator().manual_seed(2)) + 10).cumsum(1)
    counts = np.random.default_rng(derive_seed(0, "bootstrap")).multinomial(9, [1 / 9] * 9, size=5)
    slow = [off_diagonal(position_gram(z[np.repeat(np.arange(9), c)])).mean() for c in counts]
    np.testing.assert_allclose(bootstrap_means(z, 5), slow, atol=1e-5)


def test_common_variation_shows_and_intervals_hold_it():
    held = 0
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        common, own = torch.randn(300, 1, 8, generator=g), torch.randn(300, 5, 8, generator=g)
        z = 0.5 * common + 0.75**0.5 * own  # every pair of positions correlates by a quarter
        low, high = np.quantile(bootstrap_means(z, 200), [0.025, 0.975])
        held += low < 0.25 < high
        assert high - low < 0.1
    assert held >= 16  # of 20 intervals that hold it 19 times on average


def test_two_models_of_unequal_length(micro_folders, corpus_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    folders = [micro_folders("jpeg-dlm"), micro_folders("cosmos", model__latent_len=5)]
    words = ["study", "correlation", *map(str, folders), "-n", "24", "--batch", "7", "--quiet"]
    words += ["--data", str(corpus_file), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "study-correlation.json").read_text())
    jpeg, cosmos = result["rows"]
    assert np.shape(jpeg["gram"]) == (3, 3) and np.shape(cosmos["gram"]) == (5, 5)
    for row in result["rows"]:
        gram = np.array(row["gram"])
        assert row["mean"] == pytest.approx((gram.sum() - len(gram)) / (len(gram) * (len(gram) - 1)), abs=1e-4)
        assert row["low"] <= row["high"] and 2 <= row["sequences"] <= 24 and row["mean_absolute"] >= abs(row["mean"])
    assert "| 0.105 |" in shown and "| 0.039 |" in shown and "signed" in shown
    assert (tmp_path / "out" / "study-correlation.png").stat().st_size > 10_000
    monkeypatch.setattr(correlation, "clean_latents", lambda *a: pytest.fail("encoded twice"))
    assert main(words) == 0 and capsys.readouterr().out == shown


def test_only_different_rows_count(micro_folders, tmp_path, monkeypatch):
    from jpeg_dlm.evaluation.heldout import model_sources
    from jpeg_dlm.machine.console import Console

    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "same.txt"  # every document one of four, so that rows of short blocks repeat
    path.write_text("\n\n".join(["The smith forges nails.", "The teacher reads books."] * 300))
    [source] = model_sources([micro_folders("jpeg-dlm")], "cpu", 8, str(path), Console(quiet=True))
    chosen = correlation.distinct_rows(source, 1000)
    tokens = {tuple(row) for row in source.heldout.rows(chosen).tolist()}
    everything = {tuple(row) for row in source.heldout.rows(range(len(source.heldout))).tolist()}
    assert len(chosen) == len(tokens) and tokens == everything and len(chosen) < len(source.heldout)
    assert correlation.distinct_rows(source, 2) == chosen[:2]


def test_table_and_picture_of_a_system_the_paper_does_not_name(tmp_path):
    row = {"name": "x", "title": "ELF", "rate": 1.0, "latents": 2, "sequences": 4, "mean": 0.5, "low": 0.4, "high": 0.6}
    result = {"rows": [row | {"mean_absolute": 0.5, "gram": [[1.0, 0.5], [0.5, 1.0]]}]}
    shown = table(result)
    assert not any("paper" in name for name in shown.columns) and [row[-1] for row in shown.rows] == ["0.5000"]
    assert draw(result, tmp_path / "one.png").is_file() and result["rows"][0]["gram"][0][0] == 1.0
