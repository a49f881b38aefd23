"""Quality against solver steps (paper, appendix)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jpeg_dlm.evaluation.entry import EvaluationEntry, ModelFacts, of_models
from jpeg_dlm.evaluation.entry_pictures import draw_sweep
from jpeg_dlm.evaluation.evaluate import Evaluation, EvaluationRequest
from jpeg_dlm.evaluation.paper import OWN, paper_tables
from jpeg_dlm.evaluation.protocols import PROTOCOLS, Protocol
from jpeg_dlm.evaluation.sources import ModelSource
from jpeg_dlm.evaluation.summary import scorer_said
from jpeg_dlm.results.spread import plus_minus
from jpeg_dlm.results.table import Cell, Table, emphasis
from jpeg_dlm.studies.study import Asked, StudyOutcome

PAPER_PRESET = "lm1b"  # of the paper's sweep
DEFAULT_STEPS = (4, 8, 16, 32, 64, 128)  # for other models (assumed)
CLOSE = 0.05  # a Gen-PPL this close to the sweep's best counts as equally good (assumed)
COLUMNS = ("text", "steps", "evaluations", "Gen-PPL", "entropy (nats)", "MAUVE", "texts/s", "")


def sweep_of(preset: str, own: int) -> tuple[int, ...]:
    """Return the paper's steps for its own setup, else powers of two, and always the model's own number."""
    paper = tuple(row["steps"] for row in paper_tables()["lm1b_steps"]["rows"])
    return tuple(sorted({*(paper if preset == PAPER_PRESET else DEFAULT_STEPS), own}))


def common_protocol(sources: Sequence[ModelSource]) -> Protocol:
    """Return the paper's protocol if all models share one of its setups, else the default."""
    presets = {source.model.config.preset for source in sources}
    return PROTOCOLS.get(presets.pop() if len(presets) == 1 else "", PROTOCOLS["default"])


def analyze(sources: Sequence[ModelSource], asked: Asked) -> StudyOutcome:
    """Evaluate every model at every number of steps; a model without steps, such as AR, is one point."""
    scorer, rules = asked.scorer(), common_protocol(sources)
    entries: list[EvaluationEntry] = []
    for source in sources:
        config = source.model.config
        steps = sweep_of(config.preset, config.sampler.steps) if hasattr(config.sampler, "steps") else ()
        request = EvaluationRequest(rules, asked.seeds, asked.n, steps, mauve=asked.mauve)  # type: ignore[arg-type]
        entries += Evaluation(scorer, request, asked.parts, asked.console).entries(source)
    result = {
        "scorer": scorer.name, "scorer_precision": scorer.precision, "protocol": rules.name,
        "paper": paper_tables()["lm1b_steps"], "entries": entries,
        "enough": {source.name: enough_steps(sweep(entries, source.name)) for source in sources},
    }  # fmt: skip
    return StudyOutcome(result, [table(result)], partial(draw_sweep, entries, scorer.name))


def sweep(entries: Sequence[EvaluationEntry], name: str) -> list[tuple[int, float]]:
    """Return steps and Gen-PPL of the entries of a model."""
    own = [(entry, model.sampler) for entry, model in of_models(entries) if entry.name == name]
    return [(sampler["steps"], entry.measures["gen_ppl"]["mean"]) for entry, sampler in own if "steps" in sampler]


def enough_steps(swept: Sequence[tuple[int, float]]) -> int | None:
    """Return the fewest steps whose Gen-PPL is within `CLOSE` of the sweep's best; None for a model without a sweep."""
    best = min((ppl for _, ppl in swept), default=0.0)
    return min((steps for steps, ppl in swept if ppl <= (1 + CLOSE) * best), default=None)


def table(result: Mapping[str, Any]) -> Table:
    """Return a table with our rows, real text, and the paper's rows, whose conditions the first line states."""
    entries: Sequence[EvaluationEntry] = result["entries"]
    rows: list[Sequence[Cell]] = [_own_row(entry, model) for entry, model in of_models(entries)]
    for real in {real.gen_ppl: real for real in (entry.figures["real"] for entry in entries)}.values():
        rows.append([emphasis("real text"), "", "", f"{real.gen_ppl:.1f}", f"{real.entropy:.3f}", "", "", ""])
    rows += [_paper_row(row) for row in result["paper"]["rows"]]
    runs = entries[0].runs
    head = (
        f"Gen-PPL by {scorer_said(result)}, protocol {result['protocol']}, {len(runs)} x {runs[0].figures.texts} texts; "
        f"± is the deviation over seeds. The paper's rows: {OWN} on LM1B, r = {result['paper']['rate']:g}, "
        f"{paper_tables()['scorer']}, {result['paper']['seeds']} seeds."
    )
    sentences = [
        f"{name}: {steps} steps come within {100 * CLOSE:.0f}% of the best Gen-PPL of the sweep."
        for name, steps in result["enough"].items()
        if steps is not None
    ]
    return Table.of(head, COLUMNS, rows, sentences)


def _own_row(entry: EvaluationEntry, model: ModelFacts) -> list[str]:
    m = entry.measures
    return [
        f"{entry.name} ({model.title})", str(model.sampler.get("steps", "")), str(model.evaluations),
        plus_minus(m["gen_ppl"], 1), plus_minus(m["entropy"], 3), plus_minus(m.get("mauve"), 3),
        plus_minus(m.get("texts_per_second"), 2), "degenerate?" if entry.degenerate else "",
    ]  # fmt: skip


def _paper_row(row: Mapping[str, Any]) -> list[str]:
    steps = row["steps"]
    return [OWN, str(steps), str(steps + 1), f"{row['gen_ppl']:g}", f"{row['entropy']:g}", f"{row['mauve']:g}", "", "paper"]
