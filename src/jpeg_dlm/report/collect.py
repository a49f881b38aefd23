"""Collect what the folders of a report hold: results of evaluate, compare and study, runs and models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jpeg_dlm import __version__
from jpeg_dlm.evaluation.table import Table
from jpeg_dlm.methods.registry import for_method
from jpeg_dlm.options import flatten, to_dict
from jpeg_dlm.presets import preset
from jpeg_dlm.report.run_summary import Problems, facts, is_model, is_run, run_summary
from jpeg_dlm.util.errors import UsageError
from jpeg_dlm.util.files import load_json

RESULT_BYTES = 256 << 20  # of a result's JSON (assumed): one of 16 samples of 1,024 tokens from nine systems has about 4 MB
EXPECTED = "a run, a model, or what evaluate, compare or study wrote, or a folder that holds some of these"
# Stems of the JSON files in the order of the report, each with those of its pictures; {} is its own.
RESULTS = {"compare": ("compare-curves", "{}"), "study-*": ("{}",), "results": ("lengths*", "sweep")}


@dataclass
class Section:
    """A part of the report; the page shows its fields in this order."""

    title: str
    anchor: str = ""
    problems: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[tuple[str, bytes]] = ()  # PNG files by their name
    snapshots: Sequence[Mapping[str, Any]] = ()  # texts at several steps, for the player
    samples: Mapping[str, Sequence[str]] = field(default_factory=dict)  # texts by the name of who wrote them
    options: Mapping[str, Any] = field(default_factory=dict)  # those that differ from the preset, folded
    commands: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """A title, a sentence about its origin, and sections."""

    title: str
    about: str
    sections: Sequence[Section]


def collect(paths: Sequence[Path], title: str | None = None) -> Report:
    """Return a report on folders: results first, then runs and models; a folder in which nothing is known is refused."""
    folders = list({path.resolve(): path for path in paths}.values())
    results: list[Section] = []
    runs: list[Section] = []
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"'{folder}' {'is a file' if folder.exists() else 'does not exist'}: name {EXPECTED}.")
        before = len(results) + len(runs)
        inside = [] if is_run(folder) else [*sorted(folder.glob("*/")), *sorted(folder.glob("runs/*/"))]
        for place in [folder, *inside]:
            for stem, pictures in RESULTS.items():
                results += [result_section(path, pictures) for path in sorted(place.glob(f"{stem}.json"))]
            runs += [folder_section(place)] if is_run(place) or is_model(place) else []
        if len(results) + len(runs) == before:
            raise UsageError(f"'{folder}' holds nothing to report: name {EXPECTED}.")
    sections = [*results, *([_overview(runs)] if len(runs) > 1 else []), *runs]
    for i, section in enumerate(sections, 1):
        section.anchor = f"s{i}"
    names = ", ".join(folder.resolve().name for folder in folders)
    about = f"Written by jpeg-dlm {__version__} on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."
    return Report(title or f"Report on {names}", about, sections)


def result_section(path: Path, pictures: Sequence[str]) -> Section:
    """Return the section of the JSON of a result, with the pictures beside it."""
    problems = Problems()
    result = problems.guard(path.name, lambda: load_json(path, RESULT_BYTES), {})
    kind = {"results": "Evaluation", "compare": "Comparison"}.get(path.stem, path.stem.replace("-", " ").capitalize())
    drawn = [p for stem in pictures for p in sorted(path.parent.glob(f"{stem.format(path.stem)}.png"))]
    return Section(
        f"{kind}: {result['title']}" if result.get("title") else f"{kind} {path.parent.resolve().name}",
        facts=problems.guard("The conditions", lambda: _conditions(result), []),
        tables=problems.guard("The tables", lambda: [Table.from_json(table) for table in result.get("tables", ())], []),
        figures=problems.guard("The pictures", lambda: [(p.stem, p.read_bytes()) for p in drawn], []),
        samples=problems.guard("The samples", lambda: _samples(result), {}),
        commands=[str(result["command"])] if result.get("command") else [],
        problems=problems.sentences,
    )


def _conditions(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    plain = {k: v for k, v in result.items() if isinstance(v, (str, int, float)) and k not in ("title", "command")}
    return [(name.replace("_", " "), str(value)) for name, value in plain.items() if value != ""]


def _samples(result: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the first texts of the first seed of each system or variant: in order, not chosen."""
    samples = {}
    for entry in [*result.get("entries", ()), *result.get("records", ())]:
        name = ", ".join(str(entry[key]) for key in ("name", "label", "sampler_label") if entry.get(key))
        samples[name] = [str(text) for text in (entry.get("runs") or [entry])[0].get("samples", ())]
    return {name: texts for name, texts in samples.items() if texts}


def folder_section(folder: Path) -> Section:
    """Return the section of a run or a model folder."""
    summary, problems = run_summary(folder), Problems()
    manifest, steps = summary["manifest"], summary.get("samples", {})
    versions = [(name.replace("_", "-"), str(value)) for name, value in manifest.get("versions", {}).items()]
    hashes = [(f"{name} SHA-256", str(entry.get("sha256", ""))) for name, entry in manifest.get("files", {}).items()]
    return Section(
        f"{summary['kind'].capitalize()} {folder.resolve().name}",
        facts=[*facts(summary), *versions, *hashes],
        figures=problems.guard("The curves", lambda: [(p.stem, p.read_bytes()) for p in folder.glob("metrics.png")], []),
        snapshots=[{"step": step, "steps": max(steps), "texts": list(texts)} for step, texts in steps.items()],
        options=changed_options(summary["config"]),
        commands=summary.get("commands", ()),
        problems=[*summary["problems"], *problems.sentences],
    )


def changed_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that differ from those of the preset, or all of them if the preset is not known."""
    options = flatten(config)
    try:
        default = flatten(to_dict(for_method(preset(str(options["preset"])), str(options["method"]))))
    except Exception:  # a preset or method of another version
        return options
    return {name: value for name, value in options.items() if default.get(name) != value}


def _overview(sections: Sequence[Section]) -> Section:
    """Return one table of all runs and models."""
    names = ("system", "steps", "held out", "time")
    rows = [[section.title, *(dict(section.facts).get(name) for name in names)] for section in sections]
    return Section("Runs and models", tables=[Table.of("", ("", *names), rows)])
