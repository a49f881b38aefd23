"""Feature statistics and cached features: measured once on the device of the main process, never stale."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from micro import micro_config

from jpeg_dlm.encoders import build_encoder
from jpeg_dlm.training import features
from jpeg_dlm.training.features import COMPLETE_FILE, FEATURES_FILE, FeatureCache, feature_cache, frozen_encoder
from jpeg_dlm.util.console import Console
from jpeg_dlm.util.distributed import Ranks
from jpeg_dlm.util.errors import DataError


def test_only_the_main_process_measures_statistics_and_on_its_device(blocks, tmp_path, monkeypatch):
    config = micro_config(encoder__scale="per_channel")
    real, order = build_encoder, []

    def build(*args):
        encoder = real(*args)
        encoder.has_statistics = False
        features.load_statistics(tmp_path, encoder)
        move = encoder.to
        encoder.to = lambda device: order.append("moved") or move(device)
        return encoder

    measure = features.measure_statistics
    monkeypatch.setattr(features, "build_encoder", build)
    monkeypatch.setattr(features, "measure_statistics", lambda *args: order.append("measured") or measure(*args))
    main = frozen_encoder(config, tmp_path, blocks, Ranks())
    assert order == ["moved", "measured"] and main.has_statistics
    other = frozen_encoder(config, tmp_path, blocks, Ranks(1, 2))
    assert order == ["moved", "measured", "moved"] and other.fingerprint == main.fingerprint


def test_cached_features_are_those_of_the_encoder(blocks, tmp_path):
    encoder = build_encoder(micro_config().encoder, blocks.vocab_size)
    cache = feature_cache(tmp_path, encoder, blocks, Ranks(), Console(quiet=True))
    rows = [5, 0, len(blocks) - 1]
    expected = encoder(blocks.rows(rows)).half().float()
    torch.testing.assert_close(cache.rows(rows), expected, rtol=2e-3, atol=2e-3)
    before = (tmp_path / FEATURES_FILE).stat().st_mtime_ns
    feature_cache(tmp_path, encoder, blocks, Ranks(), Console(quiet=True))
    assert (tmp_path / FEATURES_FILE).stat().st_mtime_ns == before  # not computed again


def test_stale_or_unfinished_features_are_not_used(blocks, tmp_path):
    encoder, other = (build_encoder(micro_config().encoder, blocks.vocab_size, seed) for seed in (0, 1))
    feature_cache(tmp_path, encoder, blocks, Ranks(), Console(quiet=True))
    assert FeatureCache(tmp_path, encoder, blocks).is_complete and not FeatureCache(tmp_path, other, blocks).is_complete
    (tmp_path / FEATURES_FILE).write_bytes((tmp_path / FEATURES_FILE).read_bytes()[:-2])
    assert not FeatureCache(tmp_path, encoder, blocks).is_complete
    (tmp_path / COMPLETE_FILE).unlink()
    assert not FeatureCache(tmp_path, encoder, blocks).is_complete


def test_a_full_disk_is_noticed_before_a_memory_map_is_made(blocks, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    encoder = build_encoder(micro_config().encoder, blocks.vocab_size)
    with pytest.raises(DataError, match="cache-features"):
        feature_cache(tmp_path, encoder, blocks, Ranks(), Console(quiet=True))
    assert not (tmp_path / FEATURES_FILE).exists()
