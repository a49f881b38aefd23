"""Small folders as the verbs write them, made without training anything."""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch

from jpeg_dlm.checkpoints.checkpoint import save_checkpoint
from jpeg_dlm.evaluation.table import Span, Table, write_result
from jpeg_dlm.options import override, to_dict
from jpeg_dlm.presets import preset
from jpeg_dlm.training.metrics import MetricsLog
from jpeg_dlm.util.pictures import new_figure

FILE = io.BytesIO()
new_figure(2, "curves")[0].savefig(FILE, format="png")
PICTURE = FILE.getvalue()
HOSTILE = '<script>alert("x")</script></style><img src=x onerror=alert(1)>\u202e"\'&amp; `|*'


def make_run(folder: Path, text: str = "The farmer plants corn.", steps: int = 20) -> Path:
    config = override(preset("smoke"), {"train.steps": steps, "data.source": "stories.txt", "train.seed": 7})
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    with MetricsLog(folder / "metrics.jsonl", None) as log:
        for step in (10, 20):
            log.log(step, {"ce": 5.0 - step / 10, "loss": 6.25 - step / 10, "grad_norm": 1.5, "rows_per_s": 64.0})
            log.log(step, {"heldout_ce": 4.5, "heldout_accuracy": 0.125})
    (folder / "metrics.png").write_bytes(PICTURE)
    (folder / "samples").mkdir()
    (folder / "samples" / "step-00000010.txt").write_text("[0] early\n")
    (folder / "samples" / "step-00000020.txt").write_text(f"[0] {text}\n[1] two\nlines [7] here\n[2] \n", "utf-8")
    state = {"step": 20, "config": to_dict(config), "provenance": {"data": "d" * 64, "tokenizer": "e" * 64}}
    invocation = {"stage": "jpeg-dlm", "step": 0, "processes": 1, "argv": ["jpeg-dlm", "train", "--out", "my run"]}
    (folder / "invocations.jsonl").write_text(json.dumps(invocation | {"config": to_dict(config)}) + "\n")
    save_checkpoint(folder, 20, {"ema": {"w": torch.zeros(2)}, "model": {"w": torch.ones(2)}}, state, 2)
    return folder


def make_results(folder: Path, name: str = "results", key: str = "entries", text: str = "one") -> Path:
    """An evaluation; with other names a comparison or a study."""
    folder.mkdir(parents=True, exist_ok=True)
    entry = {
        "name": text,
        "sampler_label": "8 euler steps",
        "config": {"preset": "smoke", "method": "jpeg-dlm", "train": {"steps": 3}},
        "runs": [{"samples": [text, "second"]}],
    }
    result = {
        "version": "0.1.0",
        "scorer": "small",
        "title": "a title",
        "command": f"jpeg-dlm evaluate {text} --length 9",
        key: [entry],
    }
    score = {"mean": 12.5, "sd": 0.1}
    table = Table.of(f"By {text}.", ("system", "Gen-PPL"), [(Span("real text"), score)], (f"A note on {text}.",))
    write_result(folder / name, result, [table])
    return folder


def make_workshop(folder: Path) -> Path:
    """A comparison, a study, an evaluation and two runs."""
    make_results(folder, "compare", "records")
    (folder / "compare.png").write_bytes(PICTURE)
    make_results(folder, "study-rates", "records")
    make_results(folder / "scored")
    for name in ("jpeg-dlm-1", "ar-2"):
        make_run(folder / "runs" / name)
    return folder
