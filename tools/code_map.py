"""Draw the rooms of the package and their imports from the source tree: `python tools/code_map.py` writes docs/code-map.svg.

A room is a subpackage. Modules beside the rooms that import none of them are the foundation; other modules beside the rooms
stand together where they are equally far from it. Rows follow the imports at the top of modules, so arrows point down. Of
these arrows only those are drawn that no longer way implies. An import that does not point down, as one inside a function
may not, is drawn dashed. A bar
in a box shows its lines beside those of the largest.
"""

from __future__ import annotations

import argparse
import ast
import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOUNDATION = "foundation"

Edges = dict[str, set[str]]  # what imports, and what it imports

GAP, ROW_GAP, MARGIN, LEAST, LINE, FOOT = 18, 40, 20, 112, 17, 30  # pixels
CHARACTER = 8.8  # pixels of a character of a name, at most
STYLE = """
svg { --paper: #ffffff; --edge: #d0d7de; --box: #ddf4ff; --rim: #54aeff; --ink: #1f2328; --dim: #57606a }
svg { --way: #8c959f; --odd: #bc4c00 }
@media (prefers-color-scheme: dark) {
  svg { --paper: #0d1117; --edge: #30363d; --box: #12233d; --rim: #388bfd; --ink: #e6edf3; --dim: #9198a1 }
  svg { --way: #6e7681; --odd: #f0883e }
}
text { font: 13px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--dim) }
.name { font-size: 15px; font-weight: 600; fill: var(--ink) }
.paper { fill: var(--paper); stroke: var(--edge) }
.box { fill: var(--box); stroke: var(--rim) }
.bar { fill: var(--rim) }
.way { fill: none; stroke: var(--way); stroke-width: 1.3; marker-end: url(#tip) }
.odd { fill: none; stroke: var(--odd); stroke-width: 1.3; stroke-dasharray: 5 4; marker-end: url(#odd-tip) }
#tip path { fill: var(--way) } #odd-tip path { fill: var(--odd) }
"""


@dataclass(frozen=True)
class Source:
    """The parts of a package: subpackages and single modules, their sizes and imports."""

    lines: Mapping[str, int]
    files: Mapping[str, int]
    rooms: frozenset[str]
    early: Edges  # imports at the top of a module
    late: Edges  # imports inside functions


@dataclass(frozen=True)
class Box:
    """A room, or single modules that stand together."""

    name: str
    members: tuple[str, ...]
    lines: int
    files: int
    row: int


def read(package: Path) -> Source:
    """Return the parts of a package below `package`; its own `__init__.py` is left out."""
    rooms = frozenset(path.name for path in package.iterdir() if any(path.rglob("*.py")))
    lines: dict[str, int] = {}
    files: dict[str, int] = {}
    early: Edges = {}
    late: Edges = {}
    known = rooms | {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"}
    for path in sorted(package.rglob("*.py")):
        part = path.relative_to(package).with_suffix("").parts[0]
        if part not in known:
            continue
        text = path.read_text("utf-8")
        lines[part] = lines.get(part, 0) + len(text.splitlines())
        files[part] = files.get(part, 0) + 1
        for edges in (early, late):
            edges.setdefault(part, set())
        tree = ast.parse(text)
        parents = list(path.relative_to(package.parent).parts[:-1])
        for inside, node in _imports(tree.body, False):
            for other in _imported(node, package.name, parents):
                if other in known and other != part:
                    (late if inside else early)[part].add(other)
    return Source(lines, files, rooms, early, late)


def _imports(body: Sequence[ast.AST], inside: bool) -> Iterator[tuple[bool, ast.Import | ast.ImportFrom]]:
    """Every import that is run, and whether it is inside a function."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield inside, node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(node.orelse, inside)
        else:
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(list(ast.iter_child_nodes(node)), inside or function)


def _imported(node: ast.Import | ast.ImportFrom, package: str, parents: list[str]) -> Iterator[str]:
    """The parts of the package that an import names."""
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    else:
        above = parents[: len(parents) - node.level + 1] if node.level else []
        module = ".".join([*above, *([node.module] if node.module else [])])
        modules = [f"{module}.{alias.name}" for alias in node.names] if module == package else [module]
    for module in modules:
        first, _, rest = module.partition(".")
        if first == package and rest:
            yield rest.split(".")[0]


def reachable(edges: Edges, start: str) -> set[str]:
    """Return everything that `start` imports, directly or not."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for other in edges[waiting.pop()] - found:
            found.add(other)
            waiting.append(other)
    return found


def depths(edges: Edges) -> dict[str, int]:
    """Return the length of the longest way from each part to one that imports nothing; a circle counts as one part."""
    below = {part: reachable(edges, part) for part in edges}

    def circle(part: str) -> set[str]:
        return {part} | {other for other in below[part] if part in below[other]}

    depth: dict[str, int] = {}
    for part in sorted(edges, key=lambda part: (len(below[part] - circle(part)), part)):
        depth[part] = 1 + max((depth[other] for other in below[part] - circle(part)), default=-1)
    return depth


def merged(edges: Edges, name_of: Mapping[str, str]) -> Edges:
    """Return the imports between groups."""
    result: Edges = {name: set() for name in name_of.values()}
    for part, others in edges.items():
        result[name_of[part]] |= {name_of[other] for other in others} - {name_of[part]}
    return result


def boxes(source: Source) -> tuple[list[Box], Edges, Edges]:
    """Return what is drawn: boxes, imports that point down, and imports that do not."""
    parts = sorted(source.lines)
    base = {part for part in parts if part not in source.rooms and not (reachable(source.early, part) | {part}) & source.rooms}
    name_of = {part: FOUNDATION if part in base else part for part in parts}
    depth = depths(merged(source.early, name_of))
    for level in set(depth.values()):
        together = [part for part in parts if part not in source.rooms | base and depth[part] == level]
        name_of |= dict.fromkeys(together, together[0] if together else "")
    early, late = merged(source.early, name_of), merged(source.late, name_of)
    drawn = []
    for name in sorted(early):
        members = tuple(part for part in parts if name_of[part] == name)
        size = sum(source.lines[part] for part in members), sum(source.files[part] for part in members)
        drawn.append(Box(name, members, *size, depth[members[0]] if name != FOUNDATION else depth[FOUNDATION]))
    row = {box.name: box.row for box in drawn}
    down = {name: {other for other in others if row[other] < row[name]} for name, others in early.items()}
    implied = {name: {far for near in down[name] for far in reachable(down, near)} for name in down}
    odd = {name: {other for other in early[name] | late[name] if row[other] >= row[name]} for name in early}
    return drawn, {name: down[name] - implied[name] for name in down}, odd


def label(box: Box) -> tuple[list[str], list[str]]:
    """Return the lines in a box that name it, and those below: its size, and the modules of the foundation."""
    size = f"{box.lines:,} lines" + (f", {box.files} files" if box.files > 1 else "")
    if box.name == FOUNDATION:
        return [FOUNDATION], [size, *_listed(box.members, 56)]
    return _listed(box.members, 20), [size]


def _listed(names: Sequence[str], width: int) -> list[str]:
    return textwrap.wrap(", ".join(names), width, break_long_words=False, break_on_hyphens=False)


def size_of(box: Box) -> tuple[float, float]:
    """Return the width and height of a box."""
    names, rows = label(box)
    text = max(*(CHARACTER * len(line) for line in names), *(0.8 * CHARACTER * len(line) for line in rows))
    return max(LEAST, text + 16), LINE * len(names + rows) + 22


def arranged(drawn: Sequence[Box], ways: Edges) -> list[list[Box]]:
    """Return the rows from the bottom up, in each of them boxes near the middle of what they import."""
    rows: list[list[Box]] = [[] for _ in range(1 + max(box.row for box in drawn))]
    for box in drawn:
        rows[box.row].append(box)
    middle: dict[str, float] = {}
    for row in rows:
        aims = {box.name: [middle[other] for other in ways[box.name]] for box in row}
        row.sort(key=lambda box: (sum(aims[box.name]) / len(aims[box.name]) if aims[box.name] else 0.5, box.name))  # noqa: B023
        middle |= {box.name: (i + 0.5) / len(row) for i, box in enumerate(row)}
    return rows


def draw(source: Source, package: str) -> str:
    """Return the map as the text of an SVG file."""
    drawn, ways, odd = boxes(source)
    rows = arranged(drawn, ways)
    sizes = {box.name: size_of(box) for box in drawn}
    widths = [sum(sizes[box.name][0] for box in row) + GAP * (len(row) - 1) for row in rows]
    heights = [max(sizes[box.name][1] for box in row) for row in rows]
    wide = max(widths) + 2 * MARGIN
    high = sum(heights) + ROW_GAP * (len(rows) - 1) + 2 * MARGIN + FOOT
    place: dict[str, tuple[float, float, float, float]] = {}
    y = high - MARGIN - FOOT
    for row, width, height in zip(rows, widths, heights, strict=True):
        x = (wide - width) / 2
        y -= height
        for box in row:
            place[box.name] = x, y, sizes[box.name][0], height
            x += sizes[box.name][0] + GAP
        y -= ROW_GAP

    root = ET.Element("svg", xmlns="http://www.w3.org/2000/svg", width=f"{wide:.0f}", height=f"{high:.0f}", role="img")
    root.set("viewBox", f"0 0 {wide:.0f} {high:.0f}")
    ET.SubElement(root, "title").text = f"The rooms of {package} and their imports"
    ET.SubElement(root, "style").text = STYLE
    definitions = ET.SubElement(root, "defs")
    for name in ("tip", "odd-tip"):
        shape = {"id": name, "viewBox": "0 0 8 8", "refX": "7", "refY": "4", "markerWidth": "7", "markerHeight": "7"}
        ET.SubElement(ET.SubElement(definitions, "marker", shape | {"orient": "auto"}), "path", d="M0 0 L8 4 L0 8 z")
    _rect(root, "paper", 0.5, 0.5, wide - 1, high - 1)
    for kind, edges in (("way", ways), ("odd", odd)):
        for name, other in sorted((name, other) for name, others in edges.items() for other in others):
            _arrow(root, kind, place[name], place[other])
    for box in drawn:
        _box(root, box, *place[box.name])
        x, y, width, height = place[box.name]
        bar = (LEAST - 16) * box.lines / max(one.lines for one in drawn)
        _rect(root, "bar", x + (width - bar) / 2, y + height - 9, bar, 3)
    note = f"{sum(source.lines.values()):,} lines. An arrow points to what is imported; "
    note += "what other arrows imply is left out." if not any(odd.values()) else "dashed: inside functions only."
    ET.SubElement(root, "text", {"x": str(MARGIN), "y": f"{high - 16:.0f}"}).text = note
    return ET.tostring(root, encoding="unicode") + "\n"


def _box(root: ET.Element, box: Box, x: float, y: float, width: float, height: float) -> None:
    group = ET.SubElement(root, "g", {"class": "part", "id": box.name})
    _rect(group, "box", x, y, width, height)
    names, rows = label(box)
    top = y + (height - LINE * len(names + rows)) / 2 + 11
    for i, row in enumerate(names + rows):
        where = {"x": f"{x + width / 2:.1f}", "y": f"{top + i * LINE:.1f}", "text-anchor": "middle"}
        ET.SubElement(group, "text", where | ({"class": "name"} if i < len(names) else {})).text = row


def _rect(parent: ET.Element, kind: str, x: float, y: float, width: float, height: float) -> None:
    size = {"x": f"{x:g}", "y": f"{y:g}", "width": f"{width:g}", "height": f"{height:g}", "rx": f"{min(6, height / 2):g}"}
    ET.SubElement(parent, "rect", {"class": kind, **size})


def _arrow(parent: ET.Element, kind: str, start: Sequence[float], end: Sequence[float]) -> None:
    """A curve between two places: from below to above if it points down, else from above to below, or above to above."""
    (x, y, width, height), (x2, y2, width2, height2) = start, end
    x, x2 = x + width / 2, x2 + width2 / 2
    if y2 > y:
        y, bend, bend2 = y + height, ROW_GAP * 0.7, -ROW_GAP * 0.7
    elif y2 < y:
        y2, bend, bend2 = y2 + height2, -ROW_GAP * 0.7, ROW_GAP * 0.7
    else:
        bend = bend2 = -MARGIN  # above the first row, too, it stays inside
    path = f"M{x:.1f} {y:.1f} C{x:.1f} {y + bend:.1f} {x2:.1f} {y2 + bend2:.1f} {x2:.1f} {y2:.1f}"
    ET.SubElement(parent, "path", {"class": kind, "d": path})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, default=ROOT / "src" / "jpeg_dlm")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "code-map.svg")
    args = parser.parse_args()
    args.out.write_text(draw(read(args.package), args.package.name), "utf-8")
    print(f"Wrote {args.out}.")


if __name__ == "__main__":
    main()
