"""Count what a text costs as the rate r falls and texts grow: parameters, operations, memory and time.

JPEG-DLM stands beside ELF at full length and AR with and without KV cache; `--measure` times models with random weights.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import comb, factorial, prod
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from jpeg_dlm.accounting.costs import build_weightless, parameter_parts, sampling_cost
from jpeg_dlm.accounting.info import as_released, gigabytes, operations
from jpeg_dlm.config import Config, validate
from jpeg_dlm.config_io import override, to_dict
from jpeg_dlm.errors import UsageError
from jpeg_dlm.evaluation.paper import OWN, paper_tables
from jpeg_dlm.evaluation.trial import Trial, run_trial
from jpeg_dlm.machine.console import Console
from jpeg_dlm.methods.ar import Ar
from jpeg_dlm.methods.base import FREE
from jpeg_dlm.methods.registry import for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.results.pictures import INK, LINE_COLORS, dress, new_figure, save_png
from jpeg_dlm.results.resumable import Parts
from jpeg_dlm.results.table import Table
from jpeg_dlm.studies.study import StudyOutcome

UNCACHED, CACHED = "AR", "AR, KV cache"
FULL = "ELF, full length"  # one latent for each token and no codec
SYSTEMS = (OWN, FULL, UNCACHED, CACHED)
COLORS = dict(zip(SYSTEMS, LINE_COLORS, strict=False))
STYLES = {FULL: "--"}  # where it needs the same as another system both lines are seen
LEAST = (2, 1)  # tokens and latents of the shortest text that is measured
LONGEST = 1 << 22  # where the search for the length at which attention dominates gives up


@dataclass(frozen=True)
class Point:
    """A system at one length, and its rate where it has one."""

    system: str
    config: Config

    @property
    def token_len(self) -> int:
        return self.config.data.token_len

    @property
    def key(self) -> tuple[str, int, int | None]:
        return self.system, self.token_len, getattr(self.config.model, "latent_len", None)


def at_length(base: Config, system: str, token_len: int, rate: float) -> Point:
    """A system under a preset's conditions with texts of `token_len` tokens."""
    latent_len = max(1, round(rate * token_len))
    config = replace(
        base, data=replace(base.data, token_len=token_len), model=replace(base.model, latent_len=min(latent_len, token_len))
    )
    if system == FULL:
        config = for_method(config, "elf")
    if system in (UNCACHED, CACHED):
        config = override(for_method(config, "ar"), {"sampler.kv_cache": system == CACHED})
    return Point(system, config)


# ---------------------------------------------------------------- counted


def macs_of(point: Point) -> tuple[int, int]:
    """Return the operations of one text, and how many of them are attention.

    They are a polynomial in L and N, of degree 3 for AR without cache, else 2; Newton's differences of short texts give it.
    """
    lengths = point.token_len, getattr(point.config.model, "latent_len", None)
    steps = [0 if length is None else length - least for length, least in zip(lengths, LEAST, strict=True)]
    terms = [(_choose(steps[0], i) * _choose(steps[1], j), found) for (i, j), found in _differences(at_least(point)).items()]
    return sum(c * macs for c, (macs, _) in terms), sum(c * attention for c, (_, attention) in terms)


def at_least(point: Point) -> Point:
    """Return a point with the shortest texts that are measured."""
    return _resized(point, *LEAST)


def _resized(point: Point, token_len: int, latent_len: int) -> Point:
    config = replace(point.config, data=replace(point.config.data, token_len=token_len))
    if hasattr(config.model, "latent_len"):
        config = replace(config, model=replace(config.model, latent_len=latent_len))
    return replace(point, config=config)


@lru_cache(maxsize=64)
def _differences(least: Point) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the differences of i-th order in L and j-th in N, of all operations and of those of attention."""
    degree, latents = 3 if least.system == UNCACHED else 2, hasattr(least.config.model, "latent_len")
    places = [(i, j) for i in range(degree + 1) for j in range(degree - i + 1 if latents else 1)]
    found = {(i, j): _measured_macs(_resized(least, LEAST[0] + i, LEAST[1] + j)) for i, j in places}

    def difference(i: int, j: int, which: int) -> int:
        return sum(
            (-1) ** (i + j - a - b) * comb(i, a) * comb(j, b) * found[a, b][which] for a in range(i + 1) for b in range(j + 1)
        )

    return {(i, j): (difference(i, j, 0), difference(i, j, 1)) for i, j in places}


def _measured_macs(point: Point) -> tuple[int, int]:
    cost = sampling_cost(point.config, prepare=as_released if point.system == OWN else None)
    return cost.macs, cost.attention


def _choose(n: int, k: int) -> int:
    """Return n (n - 1) ... (n - k + 1) / k!, also of a negative n."""
    return prod(n - i for i in range(k)) // factorial(k)


def memory_of(point: Point) -> dict[str, int]:
    """Return bytes of sampling one text in fp32; AR without cache holds most when it reads the whole text at the end."""
    config, cache = point.config, 0
    if point.system == CACHED:
        cache, config = kv_cache_bytes(point), at_least(point).config
    given_BL = None
    if point.system == UNCACHED:
        given_BL = torch.zeros(1, point.token_len, dtype=torch.long)
        given_BL[:, -1] = FREE
    cost = sampling_cost(config, given_BL=given_BL)
    beside = cost.peak - (kv_cache_bytes(at_least(point)) if point.system == CACHED else 0)
    return {"weights": cost.weights, "activations": beside, "kv_cache": cache}


def kv_cache_bytes(point: Point) -> int:
    """Return the bytes of AR's keys and values of one text."""
    method = build_weightless(point.config)
    assert isinstance(method, Ar)
    layers = method.backbone.new_cache(1, point.token_len + method.before)
    return sum(layer.k_BKLd.nbytes + layer.v_BKLd.nbytes for layer in layers)


def counted(point: Point) -> dict[str, Any]:
    """Return everything that needs no clock."""
    own = point.system == OWN
    parameters = parameter_parts(build_weightless(point.config))["total"]
    macs, attention = macs_of(point)
    return {
        "system": point.system, "token_len": point.token_len, "latent_len": point.key[2],
        "rate": point.config.rate if own else None, "parameters": parameters,
        "evaluations": point.config.sampler.evaluations(point.token_len), "macs": macs, "attention_share": attention / macs,
        "memory": memory_of(point), "paper_macs_T": paper_macs(point),
    }  # fmt: skip


def paper_macs(point: Point) -> float | None:
    """The paper's sampling compute, for the very sizes that it states; its full length is an estimate with codec."""
    system = paper_tables()["system"].get(point.config.preset)
    if system is None or point.token_len != system["token_len"]:
        return None
    named = {system["latent_len"]: "macs_compressed_T", system["token_len"]: "macs_full_T"}
    return system[named[point.key[2]]] if point.system == OWN and point.key[2] in named else None


def half_attention_length(share: Callable[[int], float]) -> int | None:
    """The shortest length at which attention is more than half of the operations; None if there is none in sight."""
    if share(LONGEST) <= 0.5:
        return None
    low, high = 0, LONGEST  # the share grows with the length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if share(middle) > 0.5 else (middle, high)
    return high


def attention_share(base: Config, system: str, rate: float) -> Callable[[int], float]:
    """Share of the operations of a text by its length."""

    def share(token_len: int) -> float:
        macs, attention = macs_of(at_length(base, system, token_len, rate))
        return attention / macs

    return share


# ---------------------------------------------------------------- measured


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


# ---------------------------------------------------------------- the study


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


# ---------------------------------------------------------------- table

COLUMNS = ["parameters", "operations", "of these attention", "weights", "activations", "KV cache"]
MEASURED = ["s per text, measured", "memory beyond the model, measured"]


def tables(result: Mapping[str, Any]) -> list[Table]:
    more = MEASURED if result["repeats"] else []
    first = [["r", "N", *COLUMNS, *more, "paper"]]
    first += [[f"{row['rate']:g}", f"{row['latent_len']:,}", *_cells(row, result), _paper(row)] for row in result["by_rate"]]
    second = [["tokens L", "system", *COLUMNS, *more]]
    second += [[f"{row['token_len']:,}", row["system"], *_cells(row, result)] for row in result["by_length"]]
    measured = f" Measured at batch {result['batch']}, median of {result['repeats']} rounds." if more else ""
    head = (
        f"Preset {result['preset']}, {result['sampler']}; cost of one text in fp32, one multiply-accumulate is one operation."
        f"{measured} The paper's column is its 'sampling compute'."
    )
    return [
        Table(head),
        Table.of(f"{OWN} at L = {result['token_len']:,}:", first[0], first[1:]),
        Table.of(f"As texts grow, r = {result['rate']:g}:", second[0], second[1:], sentences(result)),
    ]


def _cells(row: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    kept = [gigabytes(row["memory"][name]) if row["memory"][name] else "" for name in ("weights", "activations", "kv_cache")]
    cells = [f"{row['parameters'] / 1e6:.1f} M", operations(row["macs"]), f"{100 * row['attention_share']:.1f}%", *kept]
    if not result["repeats"]:
        return cells
    found = row.get("measured", {})
    if "seconds" not in found:
        return [*cells, "left out", ""]
    return [*cells, f"{found['seconds'] / result['batch']:.3g}", gigabytes(found["peak_bytes"] / result["batch"])]


def _paper(row: Mapping[str, Any]) -> str:
    return f"{row['paper_macs_T']:.2f} T" if row["paper_macs_T"] else ""


def sentences(result: Mapping[str, Any]) -> list[str]:
    """Return sentences on where attention dominates and on what was not measured."""
    found = [
        f"{name}: attention is more than half of the operations from L = {length:,} on."
        if length else f"{name}: attention is never more than half of the operations up to L = {LONGEST:,}."
        for name, length in result["half_attention"].items()
    ]  # fmt: skip
    for row in {(r["system"], r["token_len"], r["latent_len"]): r for r in result["by_rate"] + result["by_length"]}.values():
        if "left_out" in row.get("measured", {}):
            found.append(f"{row['system']} at L = {row['token_len']:,} was not measured: {row['measured']['left_out']}.")
    return found


# ---------------------------------------------------------------- picture


def draw(result: Mapping[str, Any], path: Path) -> Path:
    """Lines are counted, points are measured."""
    measured = bool(result["repeats"])
    points = "lines are counted, points measured" if measured else "counted"
    figure, panels = new_figure(3 + measured, f"cost of one text, {result['preset']}: {points}")
    _draw_rates(panels[0], result)
    _draw_lengths(panels[1], result, lambda row: row["macs"] / 1e12, None)
    dress(panels[1], f"operations as texts grow, r = {result['rate']:g}", "multiply-accumulates (T)", "tokens L")
    _draw_lengths(
        panels[2], result, lambda row: (row["memory"]["activations"] + row["memory"]["kv_cache"]) / 1e9,
        lambda found: found["peak_bytes"] / result["batch"] / 1e9,
    )  # fmt: skip
    dress(panels[2], "memory beyond the weights", "GB for each text", "tokens L")
    if measured:
        speed = typical_speed(result)
        seconds = (lambda row: row["macs"] / speed) if speed else None
        _draw_lengths(panels[3], result, seconds, lambda found: found["seconds"] / result["batch"])
        dress(panels[3], f"time, lines at {speed / 1e9:.3g} G operations a second", "seconds for each text", "tokens L")
    panels[1].legend(fontsize=7.5, frameon=False, labelcolor=INK)
    return save_png(figure, path)


def typical_speed(result: Mapping[str, Any]) -> float:
    """Median operations a second over all measured points; 0 without any."""
    rows = [row for row in result["by_rate"] + result["by_length"] if "seconds" in row.get("measured", {})]
    return statistics.median([row["macs"] * result["batch"] / row["measured"]["seconds"] for row in rows] or [0.0])


def _draw_rates(axes: Axes, result: Mapping[str, Any]) -> None:
    rows = sorted(result["by_rate"], key=lambda row: row["rate"])
    axes.plot([row["rate"] for row in rows], [row["macs"] / 1e12 for row in rows], ".-", color=COLORS[OWN], label=OWN)
    stated = [row for row in rows if row["paper_macs_T"]]
    if stated:
        axes.plot([row["rate"] for row in stated], [row["paper_macs_T"] for row in stated], "x", color=INK, ms=8, label="paper")
    full = next((r for r in result["by_length"] if (r["system"], r["token_len"]) == (FULL, result["token_len"])), None)
    if full:
        axes.axhline(full["macs"] / 1e12, color=COLORS[FULL], ls="--", lw=1.2, label=FULL)
    dress(axes, f"operations as r falls, L = {result['token_len']:,}", "multiply-accumulates (T)", "rate r")
    _log_scales(axes, [row["rate"] for row in rows])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # the span is too short for powers of ten alone
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(fontsize=7.5, frameon=False, labelcolor=INK)


def _draw_lengths(
    axes: Axes,
    result: Mapping[str, Any],
    line: Callable[[Mapping[str, Any]], float] | None,
    point: Callable[[Mapping[str, Any]], float] | None,
) -> None:
    lengths = sorted({row["token_len"] for row in result["by_length"]})
    for system in SYSTEMS:
        rows = sorted((r for r in result["by_length"] if r["system"] == system), key=lambda row: row["token_len"])
        if line is not None:
            lengths_of = [r["token_len"] for r in rows]
            axes.plot(lengths_of, [line(r) for r in rows], STYLES.get(system, "-"), lw=1.5, color=COLORS[system], label=system)
        tried = [r for r in rows if "seconds" in r.get("measured", {})] if point is not None else []
        if point is not None and tried:
            values = [point(r["measured"]) for r in tried]
            axes.plot([r["token_len"] for r in tried], values, "o", ms=4.5, color=COLORS[system])
    _log_scales(axes, lengths)


def _log_scales(axes: Axes, places: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(places)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
