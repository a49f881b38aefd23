"""Every row of an epoch is used exactly once, however often the run is interrupted."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from reliability_runs import hurried, interruptions, prepare_text, train_to_the_end, train_words

from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.training.data import BatchStream
from jpeg_dlm.training.metrics import read_metrics

STEPS = 14


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("rows"))


@pytest.mark.parametrize("seed", range(2))
def test_each_row_once_per_epoch(seed: int, blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    moments = random.Random(seed).sample(range(1, STEPS), 4)
    words = train_words(
        "ar", blocks, tmp_path / "run",
        train__steps=STEPS, train__batch=40, train__accumulation=2, train__save_every=4, train__eval_every=0,
    )  # fmt: skip
    real, fed = BatchStream.batch, {}

    with hurried(), interruptions(terms=set(moments[:1]), cuts=set(moments[1:])) as taken:

        def batch(self, rows):
            fed.setdefault(len(taken), []).extend(rows)
            return real(self, rows)

        monkeypatch.setattr(BatchStream, "batch", batch)
        assert train_to_the_end(words) == 4

    assert len(taken) > STEPS  # some steps were undone by a cut and taken again
    learned = {step: fed[call] for call, step in enumerate(taken, 1)}  # the last time counts
    assert all(fed[call] == learned[step] for call, step in enumerate(taken, 1))
    assert sorted(learned) == list(range(STEPS))
    rows = [row for step in range(STEPS) for row in learned[step]]
    count = len(Blocks(blocks))
    assert len(rows) == STEPS * 80 and len(rows) // count == 2  # two whole epochs and a part
    for first in (0, count):
        assert sorted(rows[first : first + count]) == list(range(count))
    assert rows[:count] != rows[count : 2 * count]
    assert len(set(rows[2 * count :])) == len(rows) - 2 * count
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == list(range(1, STEPS + 1))
