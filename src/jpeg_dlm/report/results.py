"""Sections on evaluations, comparisons and studies: each is a JSON file with its tables, and pictures."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jpeg_dlm.config_io import flatten, read_json_file
from jpeg_dlm.report.page_blocks import Block, Details, Figure, Paragraph, Samples, Section, Verbatim, code
from jpeg_dlm.report.reading import Trouble, facts, folded_options, read_figure, read_text, shown
from jpeg_dlm.report.runs import config_blocks
from jpeg_dlm.results.table import Cell, Table
from jpeg_dlm.studies.catalog import STUDIES

LENGTHS_ALT = "Shares of texts by length in tokens, generated beside real."
SWEEP_ALT = (
    "Gen-PPL, entropy and MAUVE where measured, against network evaluations per text; a line for each system and solver."
)
CURVES_ALT = "Gen-PPL, entropy, MAUVE and words that exist, where measured, against training tokens; a line for each system."
COMPARE_ALT = "Gen-PPL, entropy and MAUVE where measured, against texts per second; a point with its deviation for each system."


def is_evaluation(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("results.json", "results.md"))


def is_comparison(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("compare.json", "compare.md"))


def study_names(folder: Path) -> list[str]:
    """The studies in a folder, in the order of the registry, then those not known to it."""
    found = {path.stem.removeprefix("study-") for end in ("json", "md", "png") for path in folder.glob(f"study-?*.{end}")}
    return [name for name in STUDIES if name in found] + sorted(found - STUDIES.keys())


def evaluation_section(folder: Path) -> Section:
    trouble = Trouble()
    result = _result(folder / "results.json", trouble)
    pictures = _pictures(sorted(folder.glob("lengths*.png"), key=_natural), LENGTHS_ALT, "Lengths of texts.", trouble)
    pictures += _pictures([folder / "sweep.png"], SWEEP_ALT, "Quality against cost.", trouble)
    asked = trouble.attempt("The request", lambda: read_json_file(folder / "request.json"), {})
    line = trouble.attempt("The command", lambda: evaluate_command(asked, result.get("mauve")) if asked else "", "")
    return _section(f"Evaluation {folder.resolve().name}", folder / "results.md", result, pictures, trouble, line)


def comparison_section(folder: Path) -> Section:
    trouble = Trouble()
    result = _result(folder / "compare.json", trouble)
    pictures = _pictures([folder / "compare-curves.png"], CURVES_ALT, "Quality against training.", trouble)
    pictures += _pictures([folder / "compare.png"], COMPARE_ALT, "Quality against speed.", trouble)
    return _section(f"Comparison {folder.resolve().name}", folder / "compare.md", result, pictures, trouble)


def study_section(folder: Path, name: str) -> Section:
    trouble = Trouble()
    result = _result(folder / f"study-{name}.json", trouble)
    title = _capital(str(result.get("title") or f"study {name}"))
    alt = f"Picture of the study '{title}'; its numbers are in the table."
    pictures = _pictures([folder / f"study-{name}.png"], alt, title, trouble)
    about = [Paragraph(f"{_capital(STUDIES[name].summary)}.")] if name in STUDIES else []
    return _section(title, folder / f"study-{name}.md", result, pictures, trouble, about=about)


def _section(
    title: str,
    text: Path,
    result: Mapping[str, Any],
    pictures: Sequence[Figure],
    trouble: Trouble,
    command: str = "",
    about: Sequence[Block] = (),
) -> Section:
    tables = _tables(result, f"Table of {title}", text, trouble)
    entries = trouble.attempt("The list of entries", lambda: _entries(result), [])
    samples = trouble.attempt("The samples", lambda: _samples(entries), [])
    options = trouble.attempt("The configurations", lambda: _configurations(entries), [])
    provenance = trouble.attempt("The provenance", lambda: _provenance(result, entries), [])
    command = command or str(result.get("command", ""))
    again = [Paragraph("To make it again:"), Verbatim(command)] if command else []
    parts = {"Samples": samples, "Configuration": options, "Provenance": [*provenance, *again]}
    return Section(
        title,
        (*trouble.notes(), *about, *tables, *pictures),
        tuple(Section(name, tuple(blocks)) for name, blocks in parts.items() if blocks),
    )


def _result(path: Path, trouble: Trouble) -> dict[str, Any]:
    return trouble.attempt(path.name, lambda: read_json_file(path), {})


def _tables(result: Mapping[str, Any], label: str, text: Path, trouble: Trouble) -> list[Block]:
    """The tables of a result; earlier versions kept them as Markdown alone, which is shown as it is."""
    if "tables" in result:
        return trouble.attempt("The list of tables", lambda: [b for t in result["tables"] for b in _blocks(t, label)], [])
    lines = trouble.attempt(text.name, lambda: read_text(text), "")
    said = f"The tables are shown as {text.name} has them, since {text.stem}.json holds none, as in earlier versions."
    return [Paragraph(said), Verbatim(lines)] if lines else []


def _blocks(value: Mapping[str, Any], label: str) -> list[Block]:
    table = Table.from_json(value)
    grid = [replace(table, title=label, notes=())] if table.columns else []
    return [*(Paragraph(said) for said in [table.title] if said), *grid, *map(Paragraph, table.notes)]


def _pictures(paths: Sequence[Path], alt: str, caption: str, trouble: Trouble) -> list[Figure]:
    """Read the pictures that exist: not every result can be drawn."""
    there = [path for path in paths if path.is_file()]
    found = [trouble.attempt(path.name, lambda path=path: read_figure(path, alt, caption), None) for path in there]
    return [figure for figure in found if figure is not None]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _natural(path: Path) -> list[int]:
    """Return a key by which lengths-10.png follows lengths-9.png."""
    return [int(number) for number in re.findall(r"\d+", path.stem)]


def _entries(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what was measured: the entries of an evaluation; the rows of a comparison or study, or the entries within them."""
    return [row.get("entry", row) for row in (*result.get("entries", ()), *result.get("rows", ()))]


def _samples(entries: Sequence[Mapping[str, Any]]) -> list[Block]:
    blocks: list[Block] = []
    for entry in entries:
        texts = tuple(map(str, entry.get("runs", [entry])[0].get("samples", ())))
        if texts:
            blocks.append(Details(_name(entry), (Samples(texts),), unfolded=not blocks))
    return [Paragraph("The first texts of the first seed: in order, not chosen."), *blocks] if blocks else []


def _configurations(entries: Sequence[Mapping[str, Any]]) -> list[Block]:
    """One of each system: entries of a sweep share it."""
    configs = {str(entry.get("name")): entry["config"] for entry in entries if entry.get("config")}
    return [Details(name, tuple(config_blocks(config))) for name, config in configs.items()]


def _provenance(result: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> list[Block]:
    shown_elsewhere = ("title", "command")
    plain_values = [(k, v) for k, v in result.items() if isinstance(v, (str, int, float)) and k not in shown_elsewhere]
    groups = {name: value for name, value in result.items() if isinstance(value, dict)}
    conditions = {name: value for name, value in flatten(groups).items() if isinstance(value, (str, int, float))}
    blocks: list[Block] = []
    if plain_values:
        blocks.append(facts((name.replace("_", " ").capitalize(), value) for name, value in plain_values))
    identified = [entry for entry in entries if _identity(entry)]
    if identified:
        heading = ("system", "checkpoint SHA-256", "tokenizer", "real text", "seeds", "device", "precision")
        blocks.append(Table.of("Provenance of each system", heading, map(_identity_row, identified)))
    return blocks + ([folded_options("All conditions", conditions)] if conditions else [])


def _identity(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what identifies a scored model; nothing for a row that only holds numbers."""
    return entry.get("identity", entry if "checkpoint_sha256" in entry else {})


def _identity_row(entry: Mapping[str, Any]) -> list[Cell]:
    known = _identity(entry)
    hashes = [code(known[name]) if known.get(name) else "" for name in ("checkpoint_sha256", "tokenizer")]
    others = [entry.get("reference"), entry.get("seeds"), known.get("device"), known.get("dtype")]
    return [_name(entry), *hashes, *("" if value is None else shown(value) for value in others)]


def _name(entry: Mapping[str, Any]) -> str:
    name = entry.get("name") or entry.get("label") or entry.get("title") or ""
    return ", ".join(str(part) for part in (name, entry.get("sampler_label")) if part)


def evaluate_command(asked: Mapping[str, Any], mauve: str | None = None) -> str:
    """The command line that asks for the same evaluation again."""
    seeds = asked["seeds"]
    options = {
        "--protocol": asked["protocol"], "-n": asked["n"], "--seeds": len(seeds), "--seed": seeds[0],
        "--steps": ",".join(map(str, asked["steps"])), "--solver": ",".join(asked["solvers"]), "--scorer": asked["scorer"],
        "--scorer-precision": asked.get("scorer_precision"),
        "--data": asked["data"], "--reference": asked["reference"], "--likelihood-draws": asked.get("likelihood_draws"),
        "--task": asked.get("task"), "--context-scale": asked.get("context_scale"), "--mauve": mauve,
        **{f"--sampler.{name.replace('_', '-')}": value for name, value in asked["sampler"].items()},
        "--out": "AGAIN",
    }  # fmt: skip
    words = [word for name, value in options.items() if value not in (None, "") for word in (name, str(value))]
    flags = ["--likelihood"] if "likelihood_draws" in asked else []
    return shlex.join(["jpeg-dlm", "evaluate", *map(str, asked["sources"]), *flags, *words])
