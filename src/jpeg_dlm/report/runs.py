"""Sections on trainings: one run at length, several in a table; and of the models made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jpeg_dlm.config_io import flatten, to_dict
from jpeg_dlm.files import MANIFEST, MANIFEST_BYTES, load_json
from jpeg_dlm.methods.common.denoising import TIMES
from jpeg_dlm.methods.registry import for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.report.commands import training_commands
from jpeg_dlm.report.page_blocks import Block, Course, Details, Facts, Note, Paragraph, Samples, Section, code
from jpeg_dlm.report.reading import Trouble, facts, folded_options, options_table, read_figure, shown
from jpeg_dlm.report.run_folder import Run, duration, is_run, read_config, read_run, samples_of
from jpeg_dlm.results.resumable import key_of
from jpeg_dlm.results.table import Table
from jpeg_dlm.training.alarms import ADVICE
from jpeg_dlm.training.diagnosis_plot import diagnoses
from jpeg_dlm.training.metrics import HELDOUT, read_metrics
from jpeg_dlm.wording import command

METRICS_ALT = (
    "Curves over the optimizer steps: losses in training and on held-out text, gradient norm, speed and learning rates."
)

DIAGNOSIS_ALT = (
    "Error of one prediction over that of the best linear denoiser, right tokens and effective rank, trigram perplexity and "
    "words of samples."
)


# ---------------------------------------------------------------- sections


def run_section(folder: Path) -> Section:
    """Everything about one run."""
    trouble = Trouble()
    run = read_run(folder, trouble)
    attempt = trouble.attempt
    losses = attempt("The table of losses", lambda: [_losses(run)] if run.metrics else [], [])
    alarms = attempt("The list of alarms", lambda: _alarms(folder), [])
    caption = f"{run.name}: what was measured in training."
    picture = attempt("metrics.png", lambda: [read_figure(folder / "metrics.png", METRICS_ALT, caption)], [])
    diagnosis = attempt("The diagnosis", lambda: _diagnosis(run), [])
    parts = [
        Section("Diagnosis", tuple(diagnosis)),
        Section("Samples", tuple(attempt("The samples", lambda: _samples(folder), []))),
        Section("Configuration", tuple(attempt("The table of options", lambda: config_blocks(run.config), []))),
        Section("Stages before", tuple(attempt("The table of stages", lambda: _stages(folder), []))),
        Section("Provenance", tuple(attempt("The provenance", lambda: _provenance(run), []))),
    ]
    summary = attempt("The summary", lambda: [_summary(run)], [])
    blocks: list[Block] = [*trouble.notes(), *alarms, *summary, *losses, *picture]
    return Section(f"Run {run.name}", tuple(blocks), tuple(part for part in parts if part.blocks))


def runs_section(title: str, folders: Sequence[Path], with_details: bool = True) -> Section:
    """Several runs in one table; last samples and provenance of each are folded away."""
    trouble = Trouble()
    runs = [(run, own) for folder in folders for own in [Trouble()] for run in [read_run(folder, own)]]
    rows = [row for run, _ in runs for row in trouble.attempt(f"The row of {run.name}", lambda run=run: [_row(run)], [])]
    table = Table.of(title, ("run", "method", "steps", "loss", "last held-out losses", "time of training"), rows)
    notes = [Note(f"{run.name}: {sentence}") for run, own in runs for sentence in own.sentences]
    details = [_folded(run, trouble) for run, _ in runs] if with_details else []
    return Section(title, (*trouble.notes(), *notes, table, *details))


def _row(run: Run) -> list[str]:
    heldout = ", ".join(f"{name.removeprefix(HELDOUT)} {value:.4g}" for name, value in run.heldout.items())
    loss = run.losses.get("loss")
    return [
        run.name, shown(run.config.get("method", "")), run.progress, "" if loss is None else f"{loss:.4g}", heldout,
        duration(run.seconds),
    ]  # fmt: skip


def _folded(run: Run, trouble: Trouble) -> Details:
    samples = trouble.attempt(f"The samples of {run.name}", lambda: _samples(run.folder)[:2], [])
    provenance = trouble.attempt(f"The provenance of {run.name}", lambda: _provenance(run), [])
    return Details(f"{run.name}: samples and provenance", (*samples, *provenance))


def model_section(folder: Path) -> Section:
    """A model folder."""
    trouble = Trouble()
    config = read_config(folder, trouble)
    manifest = trouble.attempt("The manifest", lambda: load_json(folder / MANIFEST, MANIFEST_BYTES), {})
    parts = [
        Section("Configuration", tuple(trouble.attempt("The table of options", lambda: config_blocks(config), []))),
        Section("Provenance", tuple(trouble.attempt("The provenance", lambda: _model_provenance(config, manifest), []))),
    ]
    summary = facts([("Method", config.get("method")), ("Preset", config.get("preset"))])
    return Section(f"Model {folder.resolve().name}", (*trouble.notes(), summary), tuple(part for part in parts if part.blocks))


# ---------------------------------------------------------------- parts of a run


def _summary(run: Run) -> Facts:
    return facts(
        [
            ("Method", run.config.get("method")),
            ("Preset", run.config.get("preset")),
            ("Text", run.option("data", "source")),
            ("Optimizer steps", run.progress),
            ("Time of training", duration(run.seconds)),
        ]
    )


def _losses(run: Run) -> Table:
    """Each term in training and on held-out text, as last measured; the total comes first."""
    train, heldout = run.losses, {name.removeprefix(HELDOUT): value for name, value in run.heldout.items()}
    terms = sorted(train.keys() | heldout.keys(), key=lambda name: (name != "loss", name))
    cells = [[name, *(f"{of[name]:.4g}" if name in of else "" for of in (train, heldout))] for name in terms]
    return Table.of(f"Last losses of {run.name}", ("last value", "training", "held out"), cells)


def _diagnosis(run: Run) -> list[Block]:
    """Show the last diagnosis of denoiser and samples, and the picture of all of them."""
    found = diagnoses(run.folder / "metrics.jsonl")
    if not found:
        return []
    step, last = max(found.items())
    times = [f"{t:g}" for t in TIMES if f"ratio_{t:g}" in last]
    kinds = {"error": "error of one prediction", "linear": "of the best linear one", "ratio": "ratio", "accuracy": "tokens"}
    cells = [[text, *(f"{last[f'{kind}_{t}']:.3g}" for t in times)] for kind, text in kinds.items()] if times else []
    table = [Table.of(f"Denoiser of {run.name} at step {step:,}", ("t", *times), cells)] if times else []
    known = facts(
        [
            ("Words that exist", beside(last, "words")),
            ("Different pairs of words", beside(last, "distinct")),
            ("Trigram perplexity", beside(last, "trigram", "shuffled")),
            ("Copied from training", beside(last, "copied")),
            ("Effective rank of a vector", shown(last.get("rank", ""))),
            ("Effective rank of a whole text", shown(last.get("rank_joint", ""))),
        ]
    )
    picture = read_figure(run.folder / "diagnosis.png", DIAGNOSIS_ALT, f"{run.name}: denoiser and samples at every evaluation.")
    return [*table, known, picture]


def beside(values: Mapping[str, float], name: str, *others: str) -> str:
    """A measure of samples with what real text has, and what else it is held against."""
    held = [f"{other} text {shown(values[key])}" for other in ("real", *others) if (key := f"{name}_{other}") in values]
    return f"{shown(values[name])} ({', '.join(held)})" if held else shown(values[name])


def _alarms(folder: Path) -> list[Block]:
    path = folder / "alarms.jsonl"
    rows = read_metrics(path) if path.is_file() else []
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[*(shown(row.get(name, "")) for name in names), ADVICE.get(row.get("kind", ""), "")] for row in rows]
    said = f"{len(rows)} alarm{'s were' if len(rows) > 1 else ' was'} raised in training: see the table."
    return [Note(said), Table.of("Alarms", [*names, "what to do"], cells)]


def _samples(folder: Path) -> list[Block]:
    """The first texts of seed 0, of the last step first and those of earlier steps folded."""
    found = dict(samples_of(folder))
    if not found:
        return []
    (step, newest), *earlier = found.items()
    said = f"The first {len(newest)} texts of seed 0 at step {step:,}: in order, not chosen."
    if not earlier:
        return [Paragraph(said), Samples(newest)]
    played = f"{said} The slider goes back to earlier steps; words are colored by the step since which they have stayed."
    course = Course(tuple(reversed(found)), tuple(reversed(found.values())))
    folded = [Details(f"At step {step:,}", (Samples(texts),)) for step, texts in earlier]
    return [Paragraph(played), course, *folded]


def config_blocks(config: Mapping[str, Any]) -> list[Block]:
    """Show the options that differ from the preset, and folded all options."""
    if not config:
        return []
    options = flatten(config)
    name, method = str(options.pop("preset", "")), str(options.pop("method", ""))
    everything = folded_options("All options", options)
    try:
        default = flatten(to_dict(for_method(preset(name), method)))
    except Exception:  # a preset or method of another version
        return [everything]
    changed = {key: value for key, value in options.items() if key not in default or default[key] != value}
    if not changed:
        return [Paragraph(f"All options are those of the preset {name} for {method}."), everything]
    said = Paragraph(f"Options that differ from the preset {name} for {method}:")
    return [said, options_table("Options that differ from the preset", changed), everything]


def _stages(folder: Path) -> list[Block]:
    stages = [path for path in sorted(folder.glob("*-training")) if is_run(path)]
    return list(runs_section("Stages before", stages, with_details=False).blocks) if stages else []


def _provenance(run: Run) -> list[Block]:
    if run.saved is None:
        return [Paragraph("There is no checkpoint yet, so nothing is recorded of one.")]
    manifest, known = run.saved.manifest, run.saved.state.get("provenance", {})
    listed = facts(
        [
            ("Checkpoint", run.saved.name),
            ("Proof of its files", code(command("verify", run.folder))),
            ("Step", f"{manifest['extra']['step']:,}"),
            ("Seed", run.option("train", "seed")),
            *_machine(manifest),
            ("Configuration SHA-256", code(key_of(run.config))),
            *_hashes(manifest, ("ema.safetensors", "model.safetensors")),
            *((f"{name.capitalize()} fingerprint", code(value)) for name, value in known.items()),
        ]
    )
    return [
        Paragraph("As recorded with the newest checkpoint:"),
        listed,
        *training_commands(run.folder, run.config, manifest["threads"]),
    ]


def _model_provenance(config: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[Block]:
    if not manifest:
        return []
    pairs = [*_machine(manifest), ("Configuration SHA-256", code(key_of(config))), *_hashes(manifest, manifest["files"])]
    return [facts([*pairs, *manifest.get("extra", {}).items()])]


def _machine(manifest: Mapping[str, Any]) -> list[tuple[str, Any]]:
    versions = manifest["versions"]
    return [
        ("jpeg-dlm", versions.get("jpeg_dlm")),
        ("torch", versions.get("torch")),
        ("Python", versions.get("python")),
        ("Threads", manifest["threads"]),
    ]


def _hashes(manifest: Mapping[str, Any], names: Sequence[str] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    files = manifest["files"]
    return [(f"{name} SHA-256", code(files[name]["sha256"])) for name in names if name in files]
