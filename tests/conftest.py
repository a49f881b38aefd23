"""Text and tiny models that tests share; nothing here needs a network."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import setuptools  # noqa: F401  # torch.compile imports it from its threads, where replacing distutils can fail
from hypothesis import HealthCheck, settings
from micro import MICRO, MicroFolders, micro_flags, perturb  # noqa: F401  # others import them from here

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that reached for the hub would be a bug


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files of help and tables anew")


def pytest_configure() -> None:
    # A busy machine is slow, which says nothing about the code.
    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")


def made_up_text(documents: int = 60, seed: int = 0) -> str:
    """Simple English-like sentences with structure to learn: the verb depends on the subject, the object on the verb."""
    rng = random.Random(seed)
    subjects = {"The farmer": "plants", "The captain": "steers", "The teacher": "reads", "The smith": "forges"}
    objects = {"plants": ["corn", "wheat"], "steers": ["ships", "boats"]}
    objects |= {"reads": ["books", "letters"], "forges": ["swords", "nails"]}
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
def corpus_file(micro_folders: MicroFolders) -> Path:
    return micro_folders.corpus


@pytest.fixture(scope="session")
def blocks(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """That text in rows of 12 tokens without padding."""
    from small_runs import prepare_blocks

    from jpeg_dlm.text.blocks import Blocks

    return Blocks(prepare_blocks(corpus_file, tmp_path_factory.mktemp("blocks") / "blocks"))


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    """Debian's Chromium, through selenium."""
    from browsing import open_browser

    driver = open_browser(tmp_path)
    yield driver
    driver.quit()


@pytest.fixture(scope="session")
def micro_folders(tmp_path_factory: pytest.TempPathFactory) -> MicroFolders:
    """Model folders and runs of micro models, made once for all test processes."""
    base = tmp_path_factory.getbasetemp()
    return MicroFolders((base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "micro", made_up_text())


def assert_same_tokens(found, expected):
    """Equal but for a few: rounding, whose direction the CPU decides, may turn over two ids that are equally probable."""
    assert found.shape == expected.shape and (found == expected).float().mean() > 0.9
