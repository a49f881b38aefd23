"""Quality of the bundled model's texts against network evaluations, by solver and grid; and of distilled students.

python benchmarks/fewer_steps.py                                     # minutes on two cores
python benchmarks/fewer_steps.py --distilled students/8 students/4 students/2 students/1

Students, each with half the steps of its teacher, a few minutes on one core for each:

    train="jpeg-dlm train --method distill --train.lr 5e-4 --train.steps 300"
    $train --teacher bundled    --sampler.steps 8 --objective.sub-steps 4 --out students/8
    $train --teacher students/8 --sampler.steps 4 --objective.sub-steps 2 --out students/4
    $train --teacher students/4 --sampler.steps 2 --objective.sub-steps 2 --out students/2
    $train --teacher students/2 --sampler.steps 1 --objective.sub-steps 2 --out students/1

All samplers start from the same noise, so their figures share most of the variation between seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from jpeg_dlm.evaluation.entry import EvaluationEntry, ModelFacts, of_models
from jpeg_dlm.evaluation.entry_pictures import Point, draw_against_evaluations
from jpeg_dlm.evaluation.evaluate import Evaluation, EvaluationRequest
from jpeg_dlm.evaluation.heldout import model_sources
from jpeg_dlm.evaluation.protocols import protocol
from jpeg_dlm.evaluation.sources import ModelSource
from jpeg_dlm.flow.sampler_config import steps_within
from jpeg_dlm.machine.console import Console
from jpeg_dlm.results.pictures import INK
from jpeg_dlm.results.resumable import Parts
from jpeg_dlm.results.spread import plus_minus, spread
from jpeg_dlm.results.table import markdown_table
from jpeg_dlm.scorers.language_models import build_scorer

TEXTS, SEEDS = 100, 3  # the fewest texts for MAUVE; three seeds show the variation that differences must exceed
BATCH = 64
SCORER = "smollm2"
MEASURES = {"gen_ppl": "Gen-PPL", "entropy": "entropy (nats)", "mauve": "MAUVE"}
COLUMNS = ("solver", "grid", "evaluations", *MEASURES.values(), "Gen-PPL / 32-step Euler's", "entropy - 32-step Euler's")

Options = dict[str, Any]
EULER_32: Options = {"solver": "euler", "grid": "uniform", "steps": 32}


def at(evaluations: int, solver: str, grid: str) -> Options:
    return {"solver": solver, "grid": grid, "steps": steps_within(evaluations, solver)}


def sweep(fast: Options, short: bool = False) -> list[Options]:
    """Return the baseline, the fast sampler, each solver at several numbers of evaluations, and every grid at 12."""
    if short:
        return [EULER_32, fast, at(12, "euler", "uniform"), at(12, "multistep", "uniform")]
    lines = {"euler": (8, 12, 16), "multistep": (8, 12), "heun": (12,)}
    points = [at(n, solver, "uniform") for solver, counts in lines.items() for n in counts]
    return [EULER_32, fast, *points, at(12, "multistep", "quantile"), at(12, "multistep", "random")]


def fast_options(source: ModelSource) -> Options:
    """Return the sampler options of `generate --fast`."""
    fast = source.model.config.sampler.fast()
    return {"solver": fast.solver, "grid": fast.grid, "steps": fast.steps, "w": fast.w}


def measure(short: bool = False) -> dict[str, Any]:
    """Score the bundled model at every point of the sweep."""
    bench = Bench(16 if short else TEXTS, 1 if short else SEEDS)
    [source] = bench.sources([None])
    level, fast, *others = sweep(fast_options(source), short)
    # MAUVE takes longer than all the rest, so only the two main samplers get it.
    rows = bench.rows(source, [level, fast], mauve=not short) + bench.rows(source, others)
    level, fast = rows[:2]
    return {
        "title": "Fewer steps",
        "markdown": bench.table(rows, level),
        "rows": rows,
        "ratios": {
            "evaluations of 32-step Euler over fast": level["evaluations"] / fast["evaluations"],
            "Gen-PPL of 32-step Euler over fast": level["measures"]["gen_ppl"]["mean"] / fast["measures"]["gen_ppl"]["mean"],
        },
    }


def measure_distilled(runs: Sequence[Path]) -> dict[str, Any]:
    """Score students and, without distillation, the bundled model with as many Euler steps."""
    bench = Bench(TEXTS, SEEDS)
    teacher, *students = bench.sources([None, *runs])
    counts = [student.model.config.sampler.steps for student in students]
    plain = bench.rows(teacher, [EULER_32, *({"solver": "euler", "grid": "uniform", "steps": k} for k in counts)])
    rows = plain + [row for student in students for row in bench.rows(student, [{}])]
    return {"title": "Distilled students", "markdown": bench.table(rows, rows[0]), "rows": rows, "ratios": {}}


class Bench:
    """One scorer and the conditions of the evaluation."""

    def __init__(self, texts: int, seeds: int) -> None:
        self.console, self.texts, self.seeds = Console(), texts, tuple(range(seeds))
        self.request = EvaluationRequest(protocol("default"), self.seeds, texts, mauve="off")
        self.scorer = build_scorer(SCORER)

    def sources(self, paths: Sequence[Path | None]) -> list[ModelSource]:
        return model_sources(paths, "cpu", BATCH, None, self.console)

    def rows(self, source: ModelSource, points: Sequence[Options], mauve: bool = False) -> list[dict[str, Any]]:
        """Return the figures of every point."""
        request = replace(self.request, mauve="auto") if mauve else self.request
        evaluation = Evaluation(self.scorer, request, Parts(), Console(quiet=True))
        with self.console.progress(f"Scoring {source.name}", "samplers") as progress:
            rows = []
            for number, options in enumerate(points, 1):
                [(entry, model)] = of_models([evaluation.entry(source, options)])
                rows.append(self.row(entry, model, bool(source.path)))
                progress(number, len(points))
        return rows

    def row(self, entry: EvaluationEntry, model: ModelFacts, student: bool) -> dict[str, Any]:
        name = f"student, {model.sampler['solver']}" if student else model.sampler["solver"]
        return {
            "name": name, "grid": model.sampler["grid"].replace("stored", "optimized"), "steps": model.sampler["steps"],
            "evaluations": model.evaluations,
            "measures": {key: entry.measures[key] for key in MEASURES if key in entry.measures},
        }  # fmt: skip

    def table(self, rows: Sequence[Mapping[str, Any]], level: Mapping[str, Any]) -> str:
        head = (
            f"Gen-PPL by {self.scorer.name}, {len(self.seeds)} seeds of {self.texts} texts; evaluations include the "
            "one that decodes; ± is the deviation over seeds, and in the last two columns that of the difference seed by seed."
        )
        return "\n".join([head, "", markdown_table(COLUMNS, (cells(row, level) for row in rows))])


def cells(row: Mapping[str, Any], level: Mapping[str, Any]) -> list[str]:
    m = row["measures"]
    ratio = [a / b for a, b in zip(m["gen_ppl"]["values"], level["measures"]["gen_ppl"]["values"], strict=True)]
    more = [a - b for a, b in zip(m["entropy"]["values"], level["measures"]["entropy"]["values"], strict=True)]
    return [
        row["name"], row["grid"], str(row["evaluations"]), plus_minus(m["gen_ppl"], 1), plus_minus(m["entropy"], 3),
        plus_minus(m.get("mauve"), 3), plus_minus(spread(ratio), 3), plus_minus(spread(more), 3),
    ]  # fmt: skip


def draw(result: Mapping[str, Any], path: Path) -> Path:
    """Draw a line for each solver and grid; the band shows 32 Euler steps, over seeds."""
    level, *rows = result["rows"]
    lines: dict[str, list[Point]] = {}
    for row in rows:
        lines.setdefault(f"{row['name']}, {row['grid']}", []).append((row["evaluations"], row["measures"]))

    def band(axes: Axes, measure: str) -> None:
        mean, sd = level["measures"][measure]["mean"], level["measures"][measure]["sd"] or 0.0
        axes.axhspan(mean - sd, mean + sd, color=INK, alpha=0.12, lw=0, label="32-step Euler")

    return draw_against_evaluations(lines, result["title"], SCORER, path, band)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--distilled", nargs="+", type=Path, metavar="RUN", help="score these students instead of the sweep")
    parser.add_argument("--short", action="store_true", help="few samplers, 16 texts of one seed")
    parser.add_argument("--out", type=Path, help="write PREFIX.json and PREFIX.png as well", metavar="PREFIX")
    args = parser.parse_args()
    result = measure_distilled(args.distilled) if args.distilled else measure(args.short)
    print(result["markdown"])
    if args.out:
        args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        draw(result, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
