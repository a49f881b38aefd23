"""A report on disk: `index.html`, which is complete by itself, and `report.md` with its pictures beside it."""

from __future__ import annotations

from pathlib import Path

from jpeg_dlm.errors import UsageError
from jpeg_dlm.files import write_atomic
from jpeg_dlm.report import markdown, page
from jpeg_dlm.report.page_blocks import Report, figures


def write_report(report: Report, out: Path) -> list[Path]:
    """Write or replace the report in a folder, file by file; pictures of an earlier report are removed."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"'{out}' is a file: name a folder for the report with --out.")
    folder = out / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {figure: f"figures/figure-{i:02d}.png" for i, figure in enumerate(figures(report), 1)}
    for figure, name in pictures.items():
        write_atomic(out / name, figure.png)
    index, text = out / "index.html", out / "report.md"
    write_atomic(index, page.render(report))
    write_atomic(text, markdown.render(report, pictures))
    for path in folder.glob("figure-[0-9][0-9]*.png"):
        if f"figures/{path.name}" not in pictures.values():
            path.unlink()
    return [index, text]
