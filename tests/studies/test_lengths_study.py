"""The length diagnostic: closed forms of overlap, chance and accuracy, and the study on a model that writes known lengths."""

import itertools
import json

import numpy as np
import pytest

from jpeg_dlm.evaluation.length_overlap import chance_overlap, length_accuracy, length_overlap
from jpeg_dlm.evaluation.sources import Real, SourceTexts
from jpeg_dlm.machine.console import Console
from jpeg_dlm.results.resumable import Parts
from jpeg_dlm.results.table import markdown
from jpeg_dlm.studies import lengths
from jpeg_dlm.studies.study import Asked

pytest_plugins = ["tiny_evaluation"]  # fixtures


def test_chance_is_the_mean_over_every_labeling():
    a, b = [1, 1, 2, 3], [2, 3, 3, 1]
    pooled = np.array(a + b)
    overlaps = []
    for chosen in itertools.combinations(range(8), 4):
        mask = np.isin(np.arange(8), chosen)
        p, q = (np.bincount(pooled[m], minlength=4) / 4 for m in (mask, ~mask))
        overlaps.append(np.minimum(p, q).sum())
    assert chance_overlap(a, b, bins=8) == pytest.approx(np.mean(overlaps), abs=0.02)
    assert chance_overlap(a, b, bins=8) == chance_overlap(a, b, bins=8)  # explicit randomness


def test_alike_sets_overlap_as_much_as_chance():
    rng = np.random.default_rng(0)
    a, b = rng.normal(500, 30, 1024).astype(int), rng.normal(500, 30, 1024).astype(int)
    overlap, chance = length_overlap(a, b)["overlap"], chance_overlap(a, b)
    assert chance < 0.95 and overlap == pytest.approx(chance, abs=0.03)  # 1 would be too much to ask of ten texts a bin
    assert length_accuracy(a, b) == pytest.approx(0.5, abs=0.05)


def test_the_papers_case():
    """Medians 950 and 1,021, deviations 31.9 and 1.0: the histograms hardly meet, and a rule tells nearly every text."""
    rng = np.random.default_rng(0)
    elf, fixed = rng.normal(950, 31.9, 1024).round(), rng.normal(1021, 1.0, 1024).round()
    assert length_overlap(elf, fixed, bins=204)["overlap"] < 0.03
    assert length_accuracy(elf, fixed) > 0.97
    cut = lengths.figures_of(elf.astype(int), fixed.astype(int), 768)
    assert cut["overlap"] > 0.999 and cut["accuracy"] == pytest.approx(0.5, abs=1e-3)
    assert cut["generated"]["median"] == cut["real"]["median"] == 768 and cut["real"]["std"] == 0


def test_accuracy_in_closed_form():
    # Half of the generated texts have a length of their own: those are known, of the rest every answer is right half the time.
    generated, real = [10, 10, 20, 20] * 50, [20] * 200
    assert length_accuracy(generated, real) == pytest.approx(0.75)
    assert length_accuracy([10] * 60, [20] * 60) == 1.0
    assert length_accuracy([10] * 60, [10] * 60) == 0.5
    assert length_accuracy([10], [10, 12]) == 0.5  # nothing to learn from


class Writer:
    """Texts of lengths that are known."""

    name = "writer"

    def __init__(self, generated, real):
        class Model:
            class config:  # noqa: N801
                preset = "tiny"

                class data:  # noqa: N801
                    token_len = 64

            class method:  # noqa: N801
                title = "Writer"

        self.model, self.generated, self._real = Model, generated, real

    def identity(self, run, sampler):
        return {"seed": run}

    def write(self, run, n, sampler, specials):
        return SourceTexts([" ".join(["w1"] * k) for k in np.roll(self.generated, run)[:n]])

    def real(self, n, specials=False):
        return Real(SourceTexts([" ".join(["w2"] * k) for k in self._real[:n]]), "made up", same_length=True)


def asked(fake, folder, n=60, **changes):
    values = {"n": n, "seeds": (0, 1), "batch": 4, "mauve": "off"} | changes
    return Asked(**values, scorer=lambda: fake, parts=Parts(folder), console=Console(quiet=True))


def test_the_study(fake, tmp_path):
    source = Writer([30 + k % 5 for k in range(60)], [40] * 60)
    outcome = lengths.analyze([source], asked(fake, tmp_path / "parts"))
    [system] = outcome.result["systems"]
    assert system["budget"] == 24  # 75% of the shorter median, 32
    whole, cut = system["runs"][0]["whole"], system["runs"][0]["cut"]
    assert (whole["overlap"], whole["accuracy"]) == (0, 1) and (cut["overlap"], cut["accuracy"], cut["chance"]) == (1, 0.5, 1)
    assert whole["generated"]["median"] == 32 and whole["real"] == {"texts": 60, "median": 40, "std": 0}
    lines = [line for line in markdown(outcome.tables).splitlines() if line.startswith("| ")]
    assert lines[2].startswith("| writer (Writer) | whole | 0.0 ± 0.0% |") and "| 24 tokens | 100.0 ± 0.0% |" in lines[3]
    assert lines[4].split(" | ")[2] == "0.9%" and "| 950 | 31.9 | 1021 | 1 |" in lines[4]
    written = outcome.write(tmp_path, "lengths")
    assert outcome.result.items() <= json.loads(written[0].read_text()).items() and written[2].stat().st_size > 10_000


def test_few_texts_are_told(fake, tmp_path):
    outcome = lengths.analyze([Writer([30] * 4, [40] * 4)], asked(fake, None, 4, mauve="auto"))
    assert "too few texts to compare lengths" in markdown(outcome.tables)
    assert any("MAUVE" in line for line in markdown(outcome.tables).splitlines()[-3:])
