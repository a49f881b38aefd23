"""Write docs/results.md from docs/results/*.json: a summary, one picture, and the tables. No table is written by hand.

python tools/results_page.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jpeg_dlm.studies.verdicts import LEVEL, decide

DOCS = Path(__file__).resolve().parent.parent / "docs"
MEASURES = {"gen_ppl": "Gen-PPL", "mauve": "MAUVE"}


def read(name: str) -> dict[str, Any]:
    return json.loads((DOCS / "results" / f"{name}.json").read_text("utf-8"))


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)


def cell(value: Any, column: Mapping[str, Any]) -> str:
    """Return a number, a mean with its deviation, or a text as a cell of a column."""
    digits, unit = column.get("digits"), column.get("unit", "")
    if isinstance(value, list):
        if digits is None:  # an interval
            return " to ".join(f"{end:.3f}" for end in value)
        return f"{value[0]:.{digits}f}{unit} ± {value[1]:.{digits}f}"
    if isinstance(value, int | float):
        space = "" if unit in ("", "%") else " "
        return f"{value:g}" if digits is None else f"{value:.{digits}f}{space}{unit}"
    return value or ""


def table(values: Mapping[str, Any]) -> str:
    """Return a table of numbers; rows that a result withdraws are left out."""
    columns, void = values["columns"], values.get("void", {})
    rows = [[cell(v, c) for v, c in zip(row, columns, strict=True)] for row in values["rows"] if row[0] not in void]
    return grid([column["name"] for column in columns], rows)


def verdict(v: Mapping[str, Any]) -> str:
    """Return a difference with its interval and verdict."""
    low, high = v["interval"]
    if v["measure"] == "gen_ppl":
        return f"{v['difference']:.2f}x ({low:.2f} to {high:.2f}), {v['verdict']}"
    return f"{v['difference']:+.3f} ({low:+.3f} to {high:+.3f}), {v['verdict']}"


def verdicts(values: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for each pair that is compared, with both measures of text."""
    pairs: dict[tuple[str, str], dict[str, str]] = {}
    for v in decide(values):
        pairs.setdefault((v["label"], v["against"]), {})[v["measure"]] = verdict(v)
    rows = [
        [f"{label} against {against}", *(cells.get(measure, "") for measure in MEASURES)]
        for (label, against), cells in pairs.items()
    ]
    trainings = " or ".join(sorted({str(n) for v in values for n in v["trainings"]}))
    head = f"{len(values)} verdicts over {trainings} trainings of each, corrected for their number (Holm, {LEVEL:.0%}):"
    return f"{head}\n\n" + grid(["better text", *(f"{name} (95% interval)" for name in MEASURES.values())], rows)


def section(values: Mapping[str, Any]) -> list[str]:
    """Return a heading, a sentence, the commands and the tables of one result."""
    commands = "\n".join(f"    {command}" for command in values["commands"])
    parts = [f"## {values['title']}", values["text"], commands, f"({values['cpu']}; {values['date']}, {values['commit']}.)"]
    parts += [f"![{values['alt']}]({values['picture']})"] if "picture" in values else []
    parts += [table(each) for each in values["tables"]]
    return parts + ([verdicts(values["verdicts"])] if "verdicts" in values else [])


def page() -> str:
    """Return the whole page."""
    front, dropped = read("page"), read("dropped")
    parts = ["# Results on two CPU cores", " ".join(front["summary"]), f"![{front['alt']}]({front['picture']})", front["about"]]
    for name in front["sections"]:
        parts += section(read(name))
    rows = [[row["tried"], row["result"], row["verdict"]] for row in dropped["rows"]]
    parts += [f"## {dropped['title']}", dropped["text"], grid(["tried", "result", "verdict"], rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    (DOCS / "results.md").write_text(page(), "utf-8")
