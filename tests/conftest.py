"""Text and tiny models that tests share; nothing here needs a network."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import setuptools  # noqa: F401  # torch.compile imports it from its threads, where replacing distutils can fail
from hypothesis import HealthCheck, settings

from jpeg_dlm.machine.cpu import make_safe

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that reached for the hub would be a bug


def pytest_configure() -> None:
    """Tests multiply in every type: before the first, and before workers inherit the environment."""
    make_safe()
    # A busy machine is slow, which says nothing about the code.
    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")


def made_up_text(documents: int = 60, seed: int = 0) -> str:
    """Simple English-like sentences with structure to learn: the verb depends on the subject, the object on the verb."""
    rng = random.Random(seed)
    subjects = {"The farmer": "plants", "The captain": "steers", "The teacher": "reads", "The smith": "forges"}
    objects = {
        "plants": ["corn", "wheat"],
        "steers": ["ships", "boats"],
        "reads": ["books", "letters"],
        "forges": ["swords", "nails"],
    }
    places = ["in the valley", "near the river", "behind the old house", "before the long winter"]
    paragraphs = []
    for _ in range(documents):
        sentences = []
        for _ in range(12):
            subject = rng.choice(list(subjects))
            verb = subjects[subject]
            sentences.append(f"{subject} {verb} {rng.choice(objects[verb])} {rng.choice(places)}.")
        paragraphs.append(" ".join(sentences))
    return "\n\n".join(paragraphs) + "\n"


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "stories.txt"
    path.write_text(made_up_text(), "utf-8")
    return path


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    """Debian's Chromium, through selenium."""
    from browsing import open_browser

    driver = open_browser(tmp_path)
    yield driver
    driver.quit()


# A model so small that a step takes milliseconds; every part of the system is still in it.
MICRO = {
    "data.vocab_size": 300, "data.token_len": 12, "encoder.feature_dim": 16, "encoder.depth": 1, "encoder.heads": 2,
    "model.latent_len": 3, "model.latent_dim": 16, "model.bottleneck_dim": 8, "model.codec_layers": 1, "model.codec_heads": 2,
    "model.proj_dim": 16, "model.hidden": 16, "model.depth": 1, "model.heads": 2, "model.freq_dim": 8,
    "objective.sigreg_slices": 8, "train.batch": 8, "train.steps": 12, "train.encoder_steps": 4, "train.save_every": 4,
    "train.eval_every": 6, "train.log_every": 1, "sampler.steps": 3,
    "train.collapse_alarm": 0.0,  # so short a run never unfolds its latents
}  # fmt: skip


def micro_flags(**changes: object) -> list[str]:
    """MICRO as command-line options."""
    values = MICRO | {name.replace("__", "."): value for name, value in changes.items()}
    return list(itertools.chain.from_iterable((f"--{name.replace('_', '-')}", str(value)) for name, value in values.items()))


def assert_same_tokens(found, expected):
    """Equal but for a few: rounding, whose direction the CPU decides, may turn over two ids that are equally probable."""
    assert found.shape == expected.shape and (found == expected).float().mean() > 0.9


def perturb(method, scale: float = 0.3):
    """Add fixed noise to every weight: a fresh head is zero, so every token as likely, and stops gradients behind it."""
    import torch

    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in method.parameters():
            p.add_(scale * torch.randn(p.shape, generator=g))
    return method
