"""Find what the folders of a report hold."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from jpeg_dlm import __version__
from jpeg_dlm.errors import UsageError
from jpeg_dlm.report.page_blocks import Report, Section
from jpeg_dlm.report.results import (
    comparison_section,
    evaluation_section,
    is_comparison,
    is_evaluation,
    study_names,
    study_section,
)
from jpeg_dlm.report.run_folder import is_model, is_run
from jpeg_dlm.report.runs import model_section, run_section, runs_section

EXPECTED = "a run, a model, or what evaluate, compare or study wrote, or a folder that holds some of these"


def collect(paths: Sequence[Path], title: str | None = None) -> Report:
    """A report on folders; one in which nothing is known is refused."""
    folders = list({path.resolve(): path for path in paths}.values())
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"'{folder}' {'is a file' if folder.exists() else 'does not exist'}: name {EXPECTED}.")
    runs = [folder for folder in folders if is_run(folder)]
    sections = [runs_section("Runs", runs, with_details=False)] if len(runs) > 1 else []
    for folder in folders:
        found = folder_sections(folder)
        if not found:
            raise UsageError(f"'{folder}' holds nothing to report: name {EXPECTED}.")
        sections += found
    names = ", ".join(folder.resolve().name for folder in folders)
    about = f"Written by jpeg-dlm {__version__} on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."
    return Report(title or f"Report on {names}", about, tuple(sections))


def folder_sections(folder: Path) -> list[Section]:
    """Return sections on a folder itself, then on what lies in it: results at length, runs in one table."""
    sections = result_sections(folder)
    if is_run(folder):
        return [*sections, run_section(folder)]  # what lies in a run are its own parts
    inside = subfolders(folder)
    for sub in inside:
        sections += result_sections(sub)
    runs = [sub for sub in inside + subfolders(folder / "runs") if is_run(sub)]
    return [*sections, runs_section(f"Runs in {folder.resolve().name}", runs)] if runs else sections


def result_sections(folder: Path) -> list[Section]:
    """Comparison, studies, evaluation and model in a folder: it may be several of these at once."""
    sections = [comparison_section(folder)] if is_comparison(folder) else []
    sections += [study_section(folder, name) for name in study_names(folder)]
    sections += [evaluation_section(folder)] if is_evaluation(folder) else []
    return sections + ([model_section(folder)] if is_model(folder) else [])


def subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
