"""Pictures of results in one style: panels, axes, colors, PNG files."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jpeg_dlm.util.files import atomic_file

INK, GRID = "#2d3748", "#e2e8f0"
GENERATED_COLOR, REAL_COLOR = "#2b6cb0", "#dd6b20"
MORE_COLORS = "#2f855a #805ad5 #b7791f #97266d #c53030 #0bc5ea #68d391 #1a202c #f687b3"
LINE_COLORS = (GENERATED_COLOR, *MORE_COLORS.split())


def new_figure(panels: int, heading: str, columns: int = 0) -> tuple[Figure, list[Axes]]:
    """Panels in one row, or in as many as `columns` panels a row make."""
    columns = min(panels, columns or panels)
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(4.6 * columns + 0.4, 3.1 * rows + 0.3), facecolor="white", layout="constrained")
    figure.suptitle(heading, fontsize=11, color=INK, fontweight="bold")
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(panels)]


def dress(axes: Axes, heading: str, y: str, x: str) -> None:
    axes.set_title(heading, fontsize=10, color=INK, loc="left")
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=INK, length=3)
    axes.grid(True, color=GRID, lw=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save_png(figure: Figure, path: Path) -> Path:
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=110)
    return path
