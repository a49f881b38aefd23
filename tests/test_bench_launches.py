"""A training step has as many launches for any number of rows, and one host sync at most."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import launches

from jpeg_dlm.methods.registry import names

SMALL = {"model__depth": 1, "model__codec_layers": 1, "encoder__depth": 1, "data__token_len": 16}


@pytest.mark.parametrize("method", names("system"))
def test_launches_do_not_depend_on_rows_and_a_step_reads_once(method):
    few, many = (launches.counted(launches.trainer(method, rows, **SMALL)) for rows in (16, 48))
    assert few.launches == many.launches > 100
    assert few.syncs.total() <= 1 and many.syncs.total() <= 1


def test_the_straightforward_step_reads_more_often():
    """The counter can tell."""
    assert launches.counted(launches.trainer("jpeg-dlm", 6, plain=True, **SMALL)).syncs.total() > 1


@pytest.mark.parametrize("method", ["jpeg-dlm", "elf"])
def test_compiled_layers_break_no_graph_and_add_none_after_the_first_step(method):
    assert launches.compiled(method, **SMALL) == (0, 0)
