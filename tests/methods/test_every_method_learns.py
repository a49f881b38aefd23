"""Every system, trained at the smoke size, against independent figures: unigram entropy and word pairs."""

import math
from collections import Counter

import pytest
from conftest import made_up_text
from micro import PIECES, as_flags

from jpeg_dlm.api import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.util.rng import RowNoise

STEPS = {"ar": 300, "mdlm": 400, "sedd": 400, "duo": 500, "elf": 400, "langflow": 400, "flm": 400, "cosmos": 400}


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    path = tmp_path_factory.mktemp("stories") / "stories.txt"
    path.write_text(made_up_text(documents=200), "utf-8")
    return path


def train(method, stories, out, steps):
    words = ["train", "--preset", "smoke", "--method", method, "--data", str(stories), "--out", str(out), "--quiet"]
    words += ["--train.steps", str(steps), "--train.eval-every", "0", "--train.save-every", str(steps)]
    words += as_flags(PIECES | {"data.vocab_size": 512})
    assert main(words) == 0
    return load(out, "cpu")


def unigram_nats(run):
    """Cross-entropy of held-out tokens under the training split's token frequencies, in nats per token."""
    seen = Blocks(run / "data", "train")
    counts = Counter(seen.rows(list(range(len(seen)))).flatten().tolist())
    total = sum(counts.values()) + seen.vocab_size
    rest = Blocks(run / "data", "heldout")
    held = rest.rows(list(range(len(rest)))).flatten().tolist()
    return -sum(math.log((counts[i] + 1) / total) for i in held) / len(held)


def real_pairs_share(texts, real):
    """Share of adjacent word pairs that occur in the real text."""
    words = real.split()
    known = set(zip(words, words[1:], strict=False))
    pairs = [pair for text in texts for pair in zip(text.split(), text.split()[1:], strict=False)]
    return sum(pair in known for pair in pairs) / max(1, len(pairs))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar", "mdlm", "sedd", "duo"])
def test_bounds_fall_well_below_the_unigram_entropy(method, stories, tmp_path):
    model = train(method, stories, tmp_path / "run", STEPS[method])
    heldout = Blocks(tmp_path / "run" / "data", "heldout")
    rows = range(len(heldout))
    tokens = heldout.rows(list(rows))
    draws = [model.method.likelihood(Batch(tokens), RowNoise(7, rows, draw, total=len(rows))) for draw in range(8)]
    bound = sum(float(d.nats_B.sum() / d.tokens_B.sum()) for d in draws) / len(draws)
    assert bound < unigram_nats(tmp_path / "run") - 1.0
    assert real_pairs_share(model.generate(64), stories.read_text()) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("method", ["elf", "langflow", "flm", "cosmos"])
def test_texts_get_better_with_training(method, stories, tmp_path):
    real = stories.read_text()
    shares = [
        real_pairs_share(train(method, stories, tmp_path / str(steps), steps).generate(64), real)
        for steps in (1, STEPS[method])
    ]
    assert shares[1] > shares[0] + 0.25


def test_the_measure_itself():
    assert real_pairs_share(["a b c", "c a"], "a b x c a") == pytest.approx(2 / 3)
    assert real_pairs_share([""], "a b") == 0
