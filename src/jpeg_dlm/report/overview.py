"""A run or a model folder in a few lines: what it is, how far it got, what it writes and how to go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jpeg_dlm.accounting.costs import build_weightless, parameter_parts
from jpeg_dlm.config import Config, validate
from jpeg_dlm.config_io import from_dict
from jpeg_dlm.errors import CheckpointError
from jpeg_dlm.folders.checkpoint import STATE
from jpeg_dlm.methods.registry import method_class, system_class, writes
from jpeg_dlm.report.reading import Trouble
from jpeg_dlm.report.run_folder import Run, duration, is_model, is_run, read_config, read_run, samples_of
from jpeg_dlm.text.blocks import read_index
from jpeg_dlm.training.metrics import HELDOUT, read_metrics
from jpeg_dlm.wording import command, counted

SHOWN = 2  # samples (assumed): enough to see what a run writes


def overview(folder: Path) -> dict[str, Any]:
    """Return everything `format_overview` shows, as JSON values; what cannot be read is in `trouble`."""
    if (folder / STATE).is_file():  # a checkpoint: its run tells more
        folder = folder.parent.parent
    if not (is_run(folder) or is_model(folder)):
        raise CheckpointError(f"'{folder}' is no run and no model folder; a preset is named with --preset.")
    trouble = Trouble()
    run = read_run(folder, trouble) if is_run(folder) else Run(folder, read_config(folder, trouble), [], None, None)
    stored = run.saved.state.get("config") if run.saved else None  # has the steps that epochs came to
    config = trouble.attempt("The configuration", lambda: validate(from_dict(stored or run.config)), None)
    found: dict[str, Any] = {"path": str(folder), "kind": "run" if is_run(folder) else "model"}
    if config:
        found |= trouble.attempt("The system", lambda: _system(config), {})
    if is_run(folder):
        found["text"] = trouble.attempt("The text", lambda: _text(run), None)
        found |= trouble.attempt("The training", lambda: _training(run, config), {})
        found["samples"] = trouble.attempt("The samples", lambda: _samples(folder), None)
    found["next"] = _next(folder, found, run.saved is not None or is_model(folder))
    return found | {"trouble": trouble.sentences}


def _system(config: Config) -> dict[str, Any]:
    sizes = {"token_len": config.data.token_len, "vocab_size": config.data.vocab_size}
    if config.rate is not None:
        sizes |= {"latent_len": config.model.latent_len, "rate": config.rate}
    return {
        "method": config.method, "title": method_class(config.method).title, "preset": config.preset,
        "sizes": sizes | {"parameters": parameter_parts(build_weightless(config))["total"]},
        "sampler": config.sampler.label() if writes(config.method) else None,
        "takes": sorted(system_class(config.method).supports) if writes(config.method) else [],
    }  # fmt: skip


def _text(run: Run) -> dict[str, Any]:
    source = str(run.option("data", "source") or "")
    own = run.folder / "data"
    folder = own if (own / "index.json").is_file() else Path(source)
    if not (folder / "index.json").is_file():
        return {"source": source}
    splits = read_index(folder)["splits"]
    return {"source": source} | {f"{name}_blocks": splits[name]["rows"] for name in ("train", "heldout")}


def _training(run: Run, config: Config | None) -> dict[str, Any]:
    done = max((row["step"] for row in run.metrics), default=0)
    total = config.train.steps if config else 0
    alarms = run.folder / "alarms.jsonl"
    return {
        "steps": {"done": done, "total": total or None, "finished": bool(total) and done >= total},
        "seconds": run.seconds,
        "checkpoint": run.saved.name if run.saved else None,
        "heldout": {name.removeprefix(HELDOUT): value for name, value in run.heldout.items()},
        "heldout_step": max((row["step"] for row in run.metrics if any(key.startswith(HELDOUT) for key in row)), default=None),
        "alarms": len(read_metrics(alarms)) if alarms.is_file() else 0,
    }


def _samples(folder: Path) -> dict[str, Any] | None:
    step, texts = next(samples_of(folder), (0, ()))
    return {"step": step, "texts": list(texts[:SHOWN])} if texts else None


def _next(folder: Path, found: dict[str, Any], usable: bool) -> list[str]:
    """Commands with which to go on."""
    steps = found.get("steps")
    commands = []
    if steps and not steps["finished"]:
        commands.append(command("train", "--resume", "--out", folder))
    if usable and found.get("sampler"):
        commands += [command("generate", folder), command("evaluate", folder)]
    if steps and steps["finished"]:
        commands.append(command("train", "--resume", "--out", folder, "--train.steps", 2 * steps["total"]))
    return commands


def format_overview(found: dict[str, Any]) -> str:
    """Lines for a terminal."""
    rows = [("path", found["path"])]
    if "method" in found:
        sizes, sampler = found["sizes"], found["sampler"]
        latents = f" as {sizes['latent_len']} latents (rate {sizes['rate']:g})" if "latent_len" in sizes else ""
        rows += [
            ("system", f"{found['title']} ({found['method']}), preset {found['preset']}"),
            ("sizes", f"{sizes['token_len']:,} tokens{latents}, vocabulary {sizes['vocab_size']:,}"),
            ("parameters", f"{sizes['parameters']:,}"),
            *([("sampler", sampler)] if sampler else []),
            *([("takes", ", ".join(found["takes"]))] if found["takes"] else []),
        ]
    rows += _run_rows(found) if found["kind"] == "run" else []
    lines = [f"{name:<11} {value}" for name, value in rows]
    if samples := found.get("samples"):
        lines += [f"samples at step {samples['step']:,}, not chosen:", *(f"  - {_line(text)}" for text in samples["texts"])]
    lines += found["trouble"]
    return "\n".join([*lines, "Go on with:", *(f"  {words}" for words in found["next"])] if found["next"] else lines)


def _run_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if text := found["text"]:
        blocks = "train_blocks" in text and f": {text['train_blocks']:,} training, {text['heldout_blocks']:,} held-out blocks"
        rows.append(("text", f"{text['source']}{blocks or ''}"))
    if steps := found.get("steps"):
        of = f" of {steps['total']:,}" if steps["total"] else ""
        rows += [
            ("steps", f"{steps['done']:,}{of}{', finished' if steps['finished'] else ''}"),
            ("time", duration(found["seconds"]) or "none yet"),
            ("saved", found["checkpoint"] or "nothing yet"),
        ]
        if found["heldout"]:
            figures = ", ".join(f"{name} {value:.4g}" for name, value in found["heldout"].items())
            rows.append(("held out", f"{figures} (step {found['heldout_step']:,})"))
        if found["alarms"]:
            rows.append(("alarms", f"{counted(found['alarms'], 'alarm')} raised, see alarms.jsonl"))
    return rows


def _line(text: str) -> str:
    """A text on one line; whatever would command the terminal is shown as it is written."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(text.split()))
