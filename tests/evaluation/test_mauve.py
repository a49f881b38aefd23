"""MAUVE: arguments passed to the package, equality with it if installed, and the reasons for skipping it."""

import random
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_evaluation import evaluation

from jpeg_dlm.evaluation import metrics
from jpeg_dlm.evaluation.metrics import length_overlap, mauve_score
from jpeg_dlm.evaluation.protocols import PROTOCOLS
from jpeg_dlm.evaluation.scorer import Scorer
from jpeg_dlm.evaluation.tables import texts_table
from jpeg_dlm.evaluation.texts import SourceTexts, file_sources
from jpeg_dlm.util.errors import MissingPackageError

pytest_plugins = ["tiny_evaluation"]  # fixtures


def features(n, shift, seed):
    return np.random.default_rng(seed).normal(size=(n, 8)) + shift


def test_the_package_is_asked_once_per_kmeans_seed_and_protocols_choose_what_is_reported(fake, tmp_path, monkeypatch):
    """The paper's protocols report the released seed, the others the mean; both with the deviation over seeds."""
    calls = []

    def compute_mauve(p_features, q_features, seed, verbose):
        calls.append((len(p_features), len(q_features), seed))
        return SimpleNamespace(mauve=0.9 + 0.01 * (seed - 42), num_buckets=12, p_hist=np.ones(12) / 12, q_hist=np.ones(12) / 12)

    monkeypatch.setitem(sys.modules, "mauve", SimpleNamespace(compute_mauve=compute_mauve))
    monkeypatch.setattr(metrics, "mauve_installed", lambda: True)
    (tmp_path / "s.txt").write_text("w1 w2 w3\n" * 101)
    (tmp_path / "r.txt").write_text("w1 w2 w3\n" * 100)
    [source] = file_sources([tmp_path / "s.txt"], tmp_path / "r.txt")
    for name, value in {"lm1b": 0.9, "default": 0.92}.items():
        asked = evaluation(fake, name)
        table = texts_table(asked.result([entry := asked.entry(source, {})]))
        cells = dict(zip((column.name for column in table.columns), table.rows[0], strict=True))
        assert cells["MAUVE"]["mean"] == pytest.approx(value), name
        assert cells["± of k-means"] == pytest.approx(0.0158114, abs=1e-6)
        assert entry.runs[0].mauve["values"][0] == pytest.approx(0.9) and entry.runs[0].mauve["texts"] == [101, 100]
    assert calls == [(100, 101, seed) for seed in (42, 43, 44, 45, 46)] * 2  # p is the real text


def test_faiss_says_nothing_and_stays_as_it_is_for_others(capfd, monkeypatch):
    faiss = pytest.importorskip("faiss", reason="mauve-text is an extra")
    pytest.importorskip("mauve")
    kmeans, train, seen = faiss.Kmeans, faiss.Kmeans.train, []

    def spy(self, data, *args, **options):
        seen.append(faiss.Kmeans is kmeans)  # while MAUVE runs, another thread may cluster too
        return train(self, data, *args, **options)

    monkeypatch.setattr(faiss.Kmeans, "train", spy)
    mauve_score(features(120, 0.0, 0), features(130, 0.3, 1), seeds=(42,))
    assert capfd.readouterr() == ("", "") and seen and all(seen)
    kmeans(8, 12).train(features(120, 0.0, 0).astype(np.float32))
    assert "WARNING clustering" in capfd.readouterr().err


def test_reasons_for_having_none(fake, monkeypatch):
    monkeypatch.setattr(fake, "features", pytest.fail)  # nothing is computed for nothing
    many, few = SourceTexts(["w1"] * 500), SourceTexts(["w1"] * 99 + [" "])
    assert "asked" in evaluation(fake, mauve="off").mauve(many, many, 8)["skipped"]
    assert "at least 100" in evaluation(fake).mauve(many, few, 8)["skipped"]
    monkeypatch.setattr(metrics, "mauve_installed", lambda: False)
    assert "jpeg-dlm[eval]" in evaluation(fake).mauve(many, many, 8)["skipped"]
    with pytest.raises(MissingPackageError, match=r"jpeg-dlm\[eval\]"):
        evaluation(fake, mauve="on")


# ---------------------------------------------------------------- lengths


def test_lengths_that_never_meet_and_lengths_that_agree():
    apart = length_overlap([10, 11, 12] * 10, [50, 51, 52] * 10)
    assert apart["overlap"] == 0 and apart["generated"]["median"] == 11 and apart["real"]["longest"] == 52
    assert length_overlap(np.arange(1024), np.arange(1024) + 0.5)["bins"] == 204  # the paper's
    same = length_overlap(range(100), range(100))
    assert same["overlap"] == 1 and same["bins"] == 20
    assert all(n == 5 for n in same["real"]["histogram"])  # equal frequency


def test_overlap_by_hand():
    # Two bins split at the pooled median 3: generated has 3 of 4 below it, real 1 of 4.
    found = length_overlap([1, 1, 2, 4], [2, 3, 4, 4], bins=2)
    assert found["edges"] == [3] and found["generated"]["histogram"] == [3, 1] and found["real"]["histogram"] == [1, 3]
    assert found["overlap"] == pytest.approx(0.25 + 0.25)
    one = length_overlap([7] * 30, [7] * 30)
    assert one["overlap"] == 1 and one["bins"] == 1 and not one["enough"] and length_overlap([7] * 50, [7] * 50)["enough"]


# ---------------------------------------------------------------- from texts to the figure


def test_the_whole_way_equals_the_package_on_texts(byte_gpt2, tmp_path):
    """The package's own tokenizing, features and clustering give what an evaluation reports."""
    mauve = pytest.importorskip("mauve", reason="mauve-text is an extra")
    rng = random.Random(0)
    words = "the old smith forges nails and long ships near a river".split()
    generated, real = ([" ".join(rng.choices(words[i:], k=rng.randint(4, 9))) for _ in range(110)] for i in (0, 2))
    (tmp_path / "s.txt").write_text("\n".join([*generated, "", " "]) + "\n")
    (tmp_path / "r.txt").write_text("\n".join(real) + "\n")
    [source] = file_sources([tmp_path / "s.txt"], tmp_path / "r.txt")
    entry = evaluation(Scorer(str(byte_gpt2)), replace(PROTOCOLS["lm1b"], mauve_tokens=16)).entry(source, {})
    found = entry.runs[0].mauve
    options = {"featurize_model_name": str(byte_gpt2), "max_text_length": 16, "seed": 42, "batch_size": 8}
    want = mauve.compute_mauve(p_text=real, q_text=generated, **options).mauve
    assert found["values"][0] == pytest.approx(want, abs=1e-4) and 0 < want < 1
    assert found["tokens"] == 16 and entry.measures["mauve"]["kmeans_sd"] == pytest.approx(found["kmeans_sd"])
