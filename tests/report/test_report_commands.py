"""The commands in a report train the run again, to the last bit, however it was called."""

import shlex
from pathlib import Path

import pytest
from conftest import micro_flags
from report_folders import make_run

from jpeg_dlm.cli.main import main
from jpeg_dlm.files import sha256_file
from jpeg_dlm.report.commands import effective, training_commands
from jpeg_dlm.report.page_blocks import Paragraph, Verbatim
from jpeg_dlm.report.runs import run_section
from jpeg_dlm.training.record import INVOCATIONS, append_row, read_rows

SMALL = {"encoder__kind": "random", "encoder__scale": "none", "train__steps": 4, "train__schedule": "cosine",
         "train__eval_every": 0, "train__save_every": 3}  # fmt: skip


def commands(run: Path) -> list[list[str]]:
    (provenance,) = (part for part in run_section(run).parts if part.title == "Provenance")
    return [shlex.split(block.text) for block in provenance.blocks if isinstance(block, Verbatim)]


def test_the_commands_of_a_run_that_was_extended_give_its_hashes(corpus_file, tmp_path):
    run, again = tmp_path / "run", tmp_path / "again"
    end = ["--quiet", "--device", "cpu"]
    words = ["train", "--preset", "smoke", "--data", str(corpus_file), "--out", str(run), *end]
    assert main([*words, *micro_flags(**SMALL), "--stop-at", "2"]) == 0
    assert main(["train", "--resume", "--out", str(run), *end]) == 0  # the same options: no bit is changed by the stop
    assert main(["train", "--resume", "--out", str(run), "--train.steps", "8", "--stop-at", "6", *end]) == 0
    assert main(["train", "--resume", "--out", str(run), "--train.lr", "0.01", *end]) == 0
    assert [(row["stage"], row["step"]) for row in read_rows(run / INVOCATIONS)] == [("jpeg-dlm", s) for s in (0, 2, 4, 6)]
    told = commands(run)
    assert len(told) == 3 and ["--stop-at" in line for line in told] == [False, True, False]
    for line in told:
        assert line[:2] == ["jpeg-dlm", "train"]
        assert main([*(str(again) if word == "AGAIN" else word for word in line[1:]), *end]) == 0
    last = "checkpoints/step-00000008"
    for name in ("model", "ema", "optimizer"):
        assert sha256_file(run / last / f"{name}.safetensors") == sha256_file(again / last / f"{name}.safetensors")

    straight = tmp_path / "straight"  # what the options of the end alone give
    assert main(["train", "--config", str(run / "config.json"), "--out", str(straight), *end]) == 0
    assert sha256_file(run / last / "ema.safetensors") != sha256_file(straight / last / "ema.safetensors")


def row(stage: str, step: int, lr: float = 1.0, **more: object) -> dict:
    return {"stage": stage, "step": step, "processes": 1, "threads": 2, "config": {"train": {"lr": lr, "steps": 9}}} | more


@pytest.mark.parametrize("rows, left", [
    ([], []),
    ([row("m", 0), row("m", 4)], [0]),  # stopped and resumed
    ([row("m", 0), row("m", 4, 2.0)], [0, 1]),
    ([row("m", 0), row("m", 6, 2.0), row("m", 4, 3.0)], [0, 2]),  # went back to an earlier checkpoint
    ([row("m", 0), row("m", 0, 2.0)], [1]),  # began anew
    ([row("encoder", 0), row("encoder", 3, 2.0), row("m", 0, 2.0), row("m", 5)], [0, 1, 3]),
    ([row("m", 0), row("m", 4, threads=1)], [0, 1]),
])  # fmt: skip
def test_what_counts_of_several_invocations(rows, left):
    assert effective(rows, "m") == [rows[i] for i in left]


def test_what_is_not_recorded_is_said(tmp_path):
    folder = make_run(tmp_path / "run")
    config = {"method": "m", "train": {"lr": 2.0, "steps": 9, "seed": 7}}

    def told() -> tuple[str, list[str]]:
        blocks = training_commands(folder, config, 2)
        said = [block.text for block in blocks if isinstance(block, Paragraph)]
        return " ".join(said), [block.text for block in blocks if isinstance(block, Verbatim)]

    said, lines = told()
    assert "not recorded" in said and len(lines) == 1 and "--threads 2" in lines[0]
    append_row(folder / INVOCATIONS, row("m", 5, processes=2))
    assert "not recorded" in told()[0]
    (folder / INVOCATIONS).unlink()
    append_row(folder / INVOCATIONS, row("encoder", 0, processes=2))
    append_row(folder / INVOCATIONS, row("encoder", 3, 2.0))
    said, lines = told()
    assert "step 3 of its stage 'encoder'" in said and len(lines) == 2
    assert lines[0].startswith("torchrun --nproc-per-node 2 -m jpeg_dlm train --config ") and "--train.lr 1.0" in lines[0]
    assert lines[1] == "jpeg-dlm train --resume --threads 2 --out AGAIN --train.lr 2.0"
