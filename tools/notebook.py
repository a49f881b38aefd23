"""Run docs/notebook.ipynb from top to bottom in a new kernel and put the outputs into it: `make notebook`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

PAGE = Path(__file__).resolve().parent.parent / "docs" / "notebook.ipynb"


def executed(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return a copy with new outputs, without times and this machine's versions; an error in a cell is raised."""
    with tempfile.TemporaryDirectory() as folder:
        done = NotebookClient(
            nbformat.from_dict(notebook),
            resources={"metadata": {"path": folder}},
            kernel_name="python3",
            startup_timeout=600,  # of a busy machine
            iopub_timeout=60,
            record_timing=False,
            coalesce_streams=True,
        ).execute()
    done.metadata = notebook.metadata
    return done


def main() -> None:
    done = executed(nbformat.read(PAGE, 4))
    PAGE.write_text(nbformat.writes(done) + "\n", "utf-8")


if __name__ == "__main__":
    main()
