"""Count what a text costs as the rate r falls and texts grow: parameters, operations, memory and time.

JPEG-DLM stands beside ELF at full length and AR with and without KV cache; `--measure` times models with random weights.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jpeg_dlm.config import validate
from jpeg_dlm.config_io import override, to_dict
from jpeg_dlm.errors import UsageError
from jpeg_dlm.evaluation.paper import OWN
from jpeg_dlm.evaluation.trial import Trial, run_trial
from jpeg_dlm.machine.console import Console
from jpeg_dlm.presets import preset
from jpeg_dlm.results.resumable import Parts
from jpeg_dlm.studies.cost_pictures import draw
from jpeg_dlm.studies.cost_points import SYSTEMS, Point, at_length, attention_share, counted, half_attention_length, macs_of
from jpeg_dlm.studies.cost_report import tables
from jpeg_dlm.studies.study import StudyOutcome


@dataclass
class Measurement:
    """Trials of all points in turns, so that a busy machine slows all of them alike."""

    trial: Trial
    repeats: int
    parts: Parts
    console: Console

    def run(self, points: Sequence[Point]) -> dict[Any, dict[str, Any]]:
        """By the key of a point: medians over rounds, or in `left_out` why there are none."""
        found: dict[Any, list[dict[str, Any]]] = {point.key: [] for point in points}
        left_out: dict[Any, str] = {}
        speeds: dict[str, float] = {}  # seconds for each operation at the longest texts so far
        total, done = self.repeats * len(points), 0
        with self.console.progress(f"Measuring {len(points)} sizes", "trials") as progress:
            for round_ in range(self.repeats):
                for point in points:
                    if point.key not in left_out:
                        reason = self._try(point, round_, found[point.key], speeds)
                        left_out |= {point.key: reason} if reason else {}
                    done += 1
                    progress(done, total)
        return {
            key: {"left_out": left_out[key]} if key in left_out else {
                name: statistics.median(run[name] for run in runs) for name in ("seconds", "peak_bytes")
            } for key, runs in found.items()
        }  # fmt: skip

    def _try(self, point: Point, round_: int, runs: list[dict[str, Any]], speeds: dict[str, float]) -> str | None:
        """One trial; a sentence if this size has to be left out."""
        macs, limit = macs_of(point)[0] * self.trial.batch, self.trial.limit
        expected = speeds.get(point.system, 0.0) * macs
        if expected > limit:
            return f"about {expected:,.0f} s expected, the limit is {limit:g}"
        depends = {"kind": "trial", "config": to_dict(point.config), "trial": vars(self.trial), "round": round_}

        def make() -> dict[str, Any]:
            try:
                return run_trial(point.config, self.trial) or {"left_out": f"more than the limit of {limit:g} s"}
            except RuntimeError as error:
                return {"left_out": str(error)}

        one = self.parts.get_or_make(f"trial-{point.system}-{point.token_len}", depends, make)
        if "left_out" in one:
            return one["left_out"]
        runs.append(one)
        speeds[point.system] = one["seconds"] / macs
        return None


def study(args: argparse.Namespace, overrides: Mapping[str, Any]) -> StudyOutcome:
    """Counts for all sizes; measurements of those that are quick enough, if asked for."""
    base = validate(override(preset(args.preset), overrides))
    own_rate = base.model.latent_len / base.data.token_len
    rates, lengths = _numbers(args.rates, "rates", float, 1.0), _numbers(args.lengths, "lengths", int)
    by_rate = [at_length(base, OWN, base.data.token_len, rate) for rate in rates]
    by_length = [at_length(base, system, length, own_rate) for length in lengths for system in SYSTEMS]
    unique = list({point.key: point for point in (*by_rate, *by_length)}.values())
    found = {point.key: counted(point) for point in unique}
    result = {
        "preset": base.preset, "token_len": base.data.token_len, "rate": own_rate, "batch": args.batch,
        "repeats": args.repeats if args.measure else 0, "sampler": base.sampler.label(),
        "half_attention": {name: half_attention_length(attention_share(base, name, own_rate)) for name in SYSTEMS},
    }  # fmt: skip
    if args.measure:
        for key, values in _measured(args, unique).items():
            found[key]["measured"] = values
    result |= {"by_rate": [found[p.key] for p in by_rate], "by_length": [found[p.key] for p in by_length]}
    return StudyOutcome(result, tables(result), lambda path: draw(result, path))


def _measured(args: argparse.Namespace, points: Sequence[Point]) -> dict[Any, dict[str, Any]]:
    from jpeg_dlm.machine.dist import read_ranks

    trial = Trial("sample", args.batch, str(read_ranks(args.device, {}).device), torch.get_num_threads(), args.limit)
    ordered = sorted(points, key=lambda point: macs_of(point)[0])  # the quick ones tell how long the others would take
    return Measurement(trial, args.repeats, Parts(args.out / "parts"), Console(args.quiet)).run(ordered)


def _numbers(text: str, name: str, kind: type, most: float | None = None) -> list[Any]:
    """Numbers between commas, each once, in the order given."""
    try:
        numbers = list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError as error:
        raise UsageError(f"--{name} takes numbers with commas between them, not '{text}'.") from error
    if min(numbers) <= 0 or (most is not None and max(numbers) > most):
        raise UsageError(f"--{name} must be positive" + (f" and at most {most:g}." if most else "."))
    return numbers
