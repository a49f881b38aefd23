"""The smallest preset learns to predict held-out text far better than word frequencies do."""

import math
from collections import Counter

import pytest
from conftest import made_up_text
from micro import PIECES, as_flags

from jpeg_dlm.cli.main import main
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.training.metrics import read_metrics


def unigram_entropy(rows):
    """The cross-entropy in nats of the best guess that knows token frequencies alone."""
    counts = Counter(rows.flatten().tolist())
    total = sum(counts.values())
    return -sum(c / total * math.log(c / total) for c in counts.values())


@pytest.mark.slow
def test_the_smoke_preset_learns(tmp_path):
    (tmp_path / "stories.txt").write_text(made_up_text(documents=400), "utf-8")
    run = tmp_path / "run"
    command = ["train", "--preset", "smoke", "--data", str(tmp_path / "stories.txt"), "--out", str(run), "--device", "cpu"]
    assert main([*command, "--train.eval-every", "25", *as_flags(PIECES | {"data.vocab_size": 512})]) == 0
    heldout = Blocks(run / "data", "heldout")
    entropy = unigram_entropy(heldout.rows(range(len(heldout))))
    first, *_, last = [row for row in read_metrics(run / "metrics.jsonl") if "heldout_ce" in row]
    assert entropy > 3 and first["heldout_ce"] > 0.8 * entropy  # it began with nothing
    assert last["heldout_ce"] < 0.25 * entropy  # measured: 0.47 nats at step 350
    assert last["heldout_flow"] < 0.5 * first["heldout_flow"]  # measured: from 0.98 to 0.07
    assert last["heldout_accuracy"] > 0.5 > 0.2 > first["heldout_accuracy"]  # measured: 0.42 at step 350, rising
