"""A model trained with context goes on with what came before, and writes without a context as well as one trained without.

Documents are about one of three topics, each with three words of its own that tend to follow each other in a circle. The
process that wrote them is known, so texts are scored by it and by no trained model.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import Counter
from pathlib import Path

import pytest
from conftest import micro_flags

from jpeg_dlm import load
from jpeg_dlm.api import Model
from jpeg_dlm.cli.main import main
from jpeg_dlm.continuing import LongTexts

TOPICS = [list("abc"), list("def"), list("ghi")]
WORDS = 9
FOLLOWS, STRANGE = 0.7, 0.05  # chance that the next word of the circle follows; share of any word in the scores
L, BLOCKS, SEEDS = 4, 10, (0, 1, 2)


def documents(n: int) -> list[str]:
    rng, found = random.Random(0), []
    for _ in range(n):
        words = rng.choice(TOPICS)
        text = [rng.choice(words)]
        for _ in range(rng.randint(60, 100)):
            text.append(words[(words.index(text[-1]) + 1) % 3] if rng.random() < FOLLOWS else rng.choice(words))
        found.append(" ".join(text))
    return found


def train(folder: Path, context_blocks: int) -> Model:
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(500)))
    flags = micro_flags(
        data__packing="padded", data__token_len=L, encoder__feature_dim=32, model__latent_len=2, model__latent_dim=32,
        model__bottleneck_dim=16, model__proj_dim=32, model__hidden=48, model__depth=2, model__freq_dim=16,
        model__denoise_skip=True, model__context_blocks=context_blocks, objective__sigma=0.2, objective__sigreg_slices=16,
        objective__flow_draws=2, objective__time_mean=-0.5, objective__time_std=1.0, train__batch=32, train__steps=400,
        train__encoder_steps=200, train__lr=4e-3, train__codec_lr=4e-3, train__eval_every=400, train__save_every=400,
        sampler__steps=8, sampler__w=1.0,
    )  # fmt: skip
    where = ["--data", str(folder / "text.jsonl"), "--out", str(folder / "run"), "--quiet", "--device", "cpu", "--threads", "1"]
    assert main(["train", "--preset", "smoke", *where, *flags]) == 0
    return load(folder / "run", "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    return train(tmp_path_factory.mktemp("with"), 1)


def share(word: str, topic: list[str]) -> float:
    return (1 - STRANGE) * (word in topic) / len(topic) + STRANGE / WORDS


def nats_after(prompt: list[str], text: list[str]) -> float:
    """-log P(word | prompt), the mean over the words of a text: the mixture over what the prompt may be about."""
    likely = [math.prod(share(word, topic) for word in prompt) for topic in TOPICS]
    chances = [sum(p * share(word, topic) for p, topic in zip(likely, TOPICS, strict=True)) / sum(likely) for word in text]
    return -statistics.fmean(map(math.log, chances))


def nats_alone(text: list[str]) -> float:
    """-log P(text) per word by the chain that wrote the documents, with a share of any word at any place."""
    total = math.log(WORDS)
    for before, word in zip(text, text[1:], strict=False):
        topic = next((topic for topic in TOPICS if before in topic), None)
        own = 0.0
        if topic and word in topic:
            own = (1 - FOLLOWS) / 3 + FOLLOWS * (topic[(topic.index(before) + 1) % 3] == word)
        total -= math.log((1 - STRANGE) * own + STRANGE / WORDS)
    return total / len(text)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_ten_blocks_have_to_do_with_their_prompt(model, scale):
    prompts = [" ".join((topic * 3)[: 2 * L]) for topic in TOPICS]
    for seed in SEEDS:
        own, other, longest = [], [], 0
        for i, prompt in enumerate(prompts):
            for row in LongTexts.of(model, prompt, BLOCKS * L, scale).tokens(4, seed=seed):
                text = model.tokenizer.decode(row)
                assert text.startswith(prompt)
                words = text[len(prompt) :].split()
                longest = max(longest, len(words))
                if words:
                    own.append(nats_after(prompt.split(), words))
                    other.append(nats_after(prompts[(i + 1) % 3].split(), words))
        assert longest == BLOCKS * L  # some documents end before, not all of them
        assert math.exp(statistics.fmean(own)) < 0.5 * math.exp(statistics.fmean(other)), seed


@pytest.mark.slow
def test_without_context_it_writes_as_well_as_a_model_that_knows_none(model, tmp_path):
    """Gen-PPL under the process itself, 3 seeds: the difference is smaller than between two trainings of one kind.

    Trainings that differ in their seed alone gave 1.92 and 2.80 nats per word without a context, 2.01 and 2.15 with one; real
    text has about 1.05, random words 3.5. One of each kind can show no less than that, and 0.25 is well inside of it.
    """
    with_context, without = written(model), written(train(tmp_path, 0))
    gen_ppl = [[math.exp(nats_per_word(texts)) for texts in kind] for kind in (with_context, without)]
    errors = [statistics.stdev(map(math.log, kind)) / math.sqrt(len(kind)) for kind in gen_ppl]  # of sampling alone
    difference = statistics.fmean(map(math.log, gen_ppl[0])) - statistics.fmean(map(math.log, gen_ppl[1]))
    assert difference < 0.25 + 2 * math.hypot(*errors)
    assert entropy(with_context) > entropy(without) - 0.25  # not by saying the same again and again


def written(writer: Model) -> list[list[list[str]]]:
    """Return the words of the texts of each seed."""
    return [[text.split() for text in writer.generate(256, seed=seed) if text.split()] for seed in SEEDS]


def nats_per_word(texts: list[list[str]]) -> float:
    return sum(nats_alone(text) * len(text) for text in texts) / sum(map(len, texts))


def entropy(seeds: list[list[list[str]]]) -> float:
    """Return the entropy of the words in nats."""
    counts = Counter(word for texts in seeds for text in texts for word in text)
    return -sum(n / counts.total() * math.log(n / counts.total()) for n in counts.values())
