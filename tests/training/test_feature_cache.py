"""The feature cache returns the encoder's features and never reads stale or half-written files."""

import json

import pytest
import torch

from jpeg_dlm.config import EncoderConfig
from jpeg_dlm.encoders import build_encoder
from jpeg_dlm.errors import DataError
from jpeg_dlm.training import feature_cache
from jpeg_dlm.training.feature_cache import COMPLETE_FILE, FEATURES_FILE, PROGRESS_FILE, FeatureCache

N, L, F = 23, 6, 16


@pytest.fixture
def encoder():
    return build_encoder(EncoderConfig(kind="random", feature_dim=F, depth=2, heads=2), 50)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(feature_cache, "ROWS_PER_WRITE", 4)
    monkeypatch.setattr(feature_cache, "SAVE_EVERY", 2)


TOKENS = torch.randint(0, 50, (N, L), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(L)[None] < torch.randint(1, L + 1, (N, 1), generator=torch.Generator().manual_seed(1))


def source(span):
    return TOKENS[span.start : span.stop], MASK[span.start : span.stop]


def test_rows_are_the_encoders_features(tmp_path, encoder):
    seen = []
    cache = FeatureCache.build(tmp_path, encoder, source, N, L, lambda *p: seen.append(p), "data")
    rows = [22, 0, 7, 7]
    h = cache.rows(rows)
    assert h.dtype == torch.float32 and len(cache) == N and cache.rows([]).shape == (0, L, F)
    torch.testing.assert_close(h, encoder(TOKENS, MASK)[rows], rtol=2**-10, atol=1e-4)
    assert seen[-1] == (N, N) and not (tmp_path / PROGRESS_FILE).exists()
    assert torch.equal(FeatureCache(tmp_path, encoder.fingerprint, "data").rows(rows), h)
    with pytest.raises(DataError, match="row"):
        cache.rows([N])
    with pytest.raises(DataError, match="row"):
        cache.rows([-1])


def test_an_interrupted_build_goes_on_where_it_stopped(tmp_path, encoder):
    def failing(span):
        if span.start >= 12:
            raise KeyboardInterrupt
        return source(span)

    with pytest.raises(KeyboardInterrupt):
        FeatureCache.build(tmp_path, encoder, failing, N, L, data_fingerprint="data")
    assert not (tmp_path / COMPLETE_FILE).exists()
    with pytest.raises(DataError, match="complete"):
        FeatureCache(tmp_path, encoder.fingerprint, "data")
    asked = []

    def counting(span):
        asked.append(span.start)
        return source(span)

    cache = FeatureCache.build(tmp_path, encoder, counting, N, L, data_fingerprint="data")
    assert asked == [8, 12, 16, 20]  # marks were made after rows 8 only: 12 was written but not yet flushed
    torch.testing.assert_close(cache.rows(range(N)), encoder(TOKENS, MASK), rtol=2**-10, atol=1e-4)
    asked.clear()
    FeatureCache.build(tmp_path, encoder, counting, N, L, data_fingerprint="data")
    assert asked == []


def test_progress_for_other_data_is_not_continued(tmp_path, encoder):
    def failing(span):
        if span.start >= 12:
            raise KeyboardInterrupt
        return torch.zeros(4, L, dtype=torch.long), None

    with pytest.raises(KeyboardInterrupt):
        FeatureCache.build(tmp_path, encoder, failing, N, L, data_fingerprint="old")
    cache = FeatureCache.build(tmp_path, encoder, source, N, L, data_fingerprint="new")
    torch.testing.assert_close(cache.rows(range(N)), encoder(TOKENS, MASK), rtol=2**-10, atol=1e-4)


@pytest.mark.parametrize("bad", [1e5, float("nan")])
def test_features_that_half_precision_cannot_hold_are_refused(tmp_path, encoder, bad, monkeypatch):
    plain = type(encoder).forward
    monkeypatch.setattr(type(encoder), "forward", lambda self, *a: plain(self, *a).index_fill(0, torch.tensor([2]), bad))
    with pytest.raises(DataError, match="float16"):
        FeatureCache.build(tmp_path, encoder, source, N, L)


def test_other_encoder_data_or_shape_is_refused(tmp_path, encoder, monkeypatch):
    FeatureCache.build(tmp_path, encoder, source, N, L, data_fingerprint="data")
    other = build_encoder(EncoderConfig(kind="random", feature_dim=F, depth=2, heads=2), 50, seed=1)
    for arguments in ((other.fingerprint, "data"), (encoder.fingerprint, "changed")):
        with pytest.raises(DataError, match="was made with other"):
            FeatureCache(tmp_path, *arguments)
    info = json.loads((tmp_path / COMPLETE_FILE).read_text())
    with monkeypatch.context() as patched, pytest.raises(DataError, match="other numbers"):
        patched.setattr(feature_cache, "_read_info", lambda path: feature_cache.CacheInfo(**info | {"dtype": "bfloat16"}))
        FeatureCache(tmp_path, encoder.fingerprint, "data")
    with pytest.raises(DataError, match="shape"):
        FeatureCache.build(tmp_path, encoder, source, N - 1, L, data_fingerprint="data")


@pytest.mark.parametrize("damage", ["cut", "gone", "json"])
def test_damage_is_noticed(tmp_path, encoder, damage):
    FeatureCache.build(tmp_path, encoder, source, N, L)
    path = tmp_path / FEATURES_FILE
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-2])
    elif damage == "gone":
        path.unlink()
    else:
        (tmp_path / COMPLETE_FILE).write_text(json.dumps({"surprise": 1}))
    with pytest.raises(DataError):
        FeatureCache(tmp_path, encoder.fingerprint, "")


def test_rows_of_the_wrong_shape_and_a_full_disk_are_refused(tmp_path, encoder, monkeypatch):
    with pytest.raises(DataError, match="Rows have shape"):
        FeatureCache.build(tmp_path / "a", encoder, lambda span: (TOKENS, None), N, L)
    monkeypatch.setattr(feature_cache, "free_bytes", lambda path: 10)
    with pytest.raises(DataError, match="cache-features false"):
        FeatureCache.build(tmp_path / "b", encoder, source, N, L)
