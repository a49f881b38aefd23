"""A run or a model folder in a few facts: what it is, how far it got, what it writes and how to go on.

Nothing is hashed, which is what `verify` is for, and what cannot be read becomes a sentence.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from jpeg_dlm.checkpoints.checkpoint import STATE, STATE_BYTES, newest_step
from jpeg_dlm.config import Config, validate
from jpeg_dlm.cost.flops import build_weightless, parameter_parts
from jpeg_dlm.evaluation.table import visible
from jpeg_dlm.methods.base import system_class
from jpeg_dlm.methods.registry import method_class, writes
from jpeg_dlm.options import from_dict, read_json_file
from jpeg_dlm.studies.training_cache import training_seconds
from jpeg_dlm.training.metrics import HELDOUT, read_invocations, read_metrics
from jpeg_dlm.util.errors import CheckpointError, command, minutes, reason_of
from jpeg_dlm.util.files import MANIFEST, MANIFEST_BYTES, load_json

SAMPLES_IN_TERMINAL = 2  # (assumed) enough to see what a run writes
STAGES = "*-training"  # folders of what is trained before a method

T = TypeVar("T")


@dataclass
class Problems:
    """Sentences about what could not be read, in the order in which it was met."""

    sentences: list[str] = field(default_factory=list)

    def guard(self, what: str, make: Callable[[], T], otherwise: T) -> T:
        """Return what `make` gives; if it fails, keep a sentence and return `otherwise`."""
        try:
            return make()
        except Exception as error:  # the content is anyone's: it may break any assumption, but never the report
            self.sentences.append(f"{what} cannot be shown: {reason_of(error).rstrip('.')}.")
            return otherwise


def is_run(folder: Path) -> bool:
    """Return True for the folder of a run, also of one that was stopped in a stage before its method."""
    logged = (folder / "metrics.jsonl").is_file() or (folder / "checkpoints").is_dir()
    return logged or ((folder / "config.json").is_file() and any(folder.glob(STAGES)))


def is_model(folder: Path) -> bool:
    """Return True for a model folder."""
    return (folder / "model.safetensors").is_file() and not (folder / STATE).is_file()


def run_summary(folder: Path) -> dict[str, Any]:
    """Return what is known of a run or model folder as JSON values; what cannot be read is in `problems`."""
    if (folder / STATE).is_file():  # a checkpoint: its run has more
        folder = folder.parent.parent
    if not (is_run(folder) or is_model(folder)):
        raise CheckpointError(f"'{folder}' is no run and no model folder; a preset is named with --preset.")
    problems = Problems()
    step = newest_step(folder) if is_run(folder) else None
    home = folder if step is None else folder / "checkpoints" / f"step-{step:08d}"
    options: dict[str, Any] = {}
    if step is not None:
        options = problems.guard("The newest checkpoint", lambda: load_json(home / STATE, STATE_BYTES)["config"], {})
    options = options or problems.guard("The configuration", lambda: read_json_file(folder / "config.json"), {})
    saved = step is not None or is_model(folder)
    config = problems.guard("The configuration", lambda: validate(from_dict(options)), None) if options else None
    summary: dict[str, Any] = {
        "path": str(folder),
        "kind": "run" if is_run(folder) else "model",
        "config": options,
        "checkpoint": None if step is None else home.name,
        "manifest": problems.guard("The manifest", lambda: load_json(home / MANIFEST, MANIFEST_BYTES), {}) if saved else {},
    }
    if config:
        summary |= problems.guard("The system", lambda: _system(config), {})
    if is_run(folder):
        summary["text"] = problems.guard("The text", lambda: str(options.get("data", {}).get("source") or ""), "")
        summary |= problems.guard("The training", lambda: _training(folder, config), {})
        summary["samples"] = problems.guard("The samples", lambda: samples_of(folder), {})
        summary["commands"] = problems.guard("The commands", lambda: [typed(row) for row in read_invocations(folder)], [])
    summary["next"] = _next(folder, summary, saved)
    return summary | {"problems": problems.sentences}


def _system(config: Config) -> dict[str, Any]:
    sizes = {"token_len": config.data.token_len, "vocab_size": config.data.vocab_size}
    if config.rate is not None:
        sizes |= {"latent_len": config.model.latent_len, "rate": config.rate}
    facts = {
        "method": config.method,
        "title": method_class(config.method).title,
        "preset": config.preset,
        "sizes": sizes | {"parameters": parameter_parts(build_weightless(config))["total"]},
    }
    if not writes(config.method):
        return facts | {"sampler": None, "takes": []}
    takes = set(system_class(config.method).supports)
    if not getattr(config.model, "context_blocks", 0):
        takes.discard("long text")  # it needs blocks of context
    return facts | {"sampler": config.sampler.label(), "takes": sorted(takes)}


def _training(folder: Path, config: Config | None) -> dict[str, Any]:
    def logged(run: Path) -> list[dict[str, Any]]:
        return read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else []

    def last_step(rows: list[dict[str, Any]]) -> int:
        return max((row["step"] for row in rows), default=0)

    rows, total = logged(folder), config.train.steps if config else 0
    measured = [row for row in rows if any(name.startswith(HELDOUT) for name in row)]
    heldout = {name.removeprefix(HELDOUT): v for row in measured for name, v in row.items() if name.startswith(HELDOUT)}
    done = last_step(rows)
    return {
        "steps": {"done": done, "total": total or None, "finished": bool(total) and done >= total},
        "seconds": training_seconds(folder) if config else None,
        "heldout": heldout,
        "heldout_step": last_step(measured),
        "stages": {path.name: last_step(logged(path)) for path in sorted(folder.glob(STAGES)) if is_run(path)},
    }


def typed(invocation: Mapping[str, Any]) -> str:
    """Return an invocation of `train` as one types it."""
    processes = invocation.get("processes") or 1
    program = ["jpeg-dlm"] if processes == 1 else ["torchrun", "--nproc-per-node", str(processes), "-m", "jpeg_dlm"]
    return shlex.join([*program, *map(str, (invocation.get("argv") or [""])[1:])])


def samples_of(folder: Path) -> dict[int, tuple[str, ...]]:
    """Return the steps of a run at which it wrote samples, the first one first, with their texts."""
    samples = {}
    for path in sorted((folder / "samples").glob("step-*.txt")):
        # Each text begins with its number in brackets at the start of a line.
        texts = re.split(r"^\[\d+\] ?", path.read_text("utf-8", "replace"), flags=re.MULTILINE)[1:]
        samples[int(path.stem.removeprefix("step-"))] = tuple(text.removesuffix("\n") for text in texts)
    return samples


def _next(folder: Path, summary: Mapping[str, Any], usable: bool) -> list[str]:
    """Return commands with which to go on."""
    steps, commands = summary.get("steps"), []
    if steps and not steps["finished"]:
        commands.append(command("train", "--resume", "--out", folder))
    if usable and summary.get("sampler"):
        commands += [command("generate", folder), command("evaluate", folder)]
    if steps and steps["finished"]:
        commands.append(command("train", "--resume", "--out", folder, "--train.steps", 2 * steps["total"]))
    return commands


def facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of a summary as names and values."""
    rows = [("path", summary["path"])]
    if "method" in summary:
        sizes = summary["sizes"]
        latents = f" as {sizes['latent_len']} latents (rate {sizes['rate']:g})" if "latent_len" in sizes else ""
        rows += [
            ("system", f"{summary['title']} ({summary['method']}), preset {summary['preset']}"),
            ("sizes", f"{sizes['token_len']:,} tokens{latents}, vocabulary {sizes['vocab_size']:,}"),
            ("parameters", f"{sizes['parameters']:,}"),
            ("sampler", summary["sampler"] or ""),
            ("takes", ", ".join(summary["takes"])),
        ]
    rows.append(("text", summary.get("text", "")))
    for name, done in summary.get("stages", {}).items():
        rows.append(("stage", f"{name.removesuffix('-training')}, {done:,} steps"))
    if steps := summary.get("steps"):
        of = f" of {steps['total']:,}" if steps["total"] else ""
        rows += [
            ("steps", f"{steps['done']:,}{of}{', finished' if steps['finished'] else ''}"),
            ("time", minutes(summary["seconds"]) if summary["seconds"] else "none yet"),
            ("saved", summary["checkpoint"] or "nothing yet"),
        ]
    if heldout := summary.get("heldout"):
        figures = ", ".join(f"{name} {value:.4g}" for name, value in heldout.items())
        rows.append(("held out", f"{figures} (step {summary['heldout_step']:,})"))
    return [(name, value) for name, value in rows if value]


def format_summary(summary: Mapping[str, Any]) -> str:
    """Return the lines for a terminal."""
    lines = [f"{name:<11} {value}" for name, value in facts(summary)]
    if samples := summary.get("samples"):
        step = max(samples)
        lines += [
            f"samples at step {step:,}, not chosen:",
            *(f"  - {visible(' '.join(t.split()))}" for t in samples[step][:SAMPLES_IN_TERMINAL]),
        ]
    lines += summary["problems"]
    return "\n".join([*lines, "Go on with:", *(f"  {words}" for words in summary["next"])] if summary["next"] else lines)
