"""Reliability of training under kills, damaged files, full disks and long runs: the figures of docs/training.md.

python benchmarks/reliability.py kills        # SIGKILL in the middle of saving
python benchmarks/reliability.py flips        # single flipped bits in every file of a checkpoint
python benchmarks/reliability.py full-disk    # a full disk at five points of a save
python benchmarks/reliability.py signals      # SIGKILL, SIGTERM and Ctrl-C at four moments of a run
python benchmarks/reliability.py resume       # every method, with and without interruptions
python benchmarks/reliability.py soak         # memory and open files over thousands of steps
python benchmarks/reliability.py all --short  # fewer of each, as in the slow tests
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from reliability_runs import (
    FULL_POINTS,
    MOMENTS,
    SERVER,
    SIGNALS,
    VARIANTS,
    end_state,
    full_disk_case,
    hurried,
    prepare_text,
    resume_is_exact,
    signal_case,
    soak,
    train_to_the_end,
    train_words,
    write_text,
)

from jpeg_dlm.folders.checkpoint import latest_checkpoint, save_checkpoint, verify_run
from jpeg_dlm.machine.console import Console
from jpeg_dlm.methods.registry import names
from jpeg_dlm.results.table import markdown_table

SIZE = 200_000  # numbers in each of three groups: a checkpoint of 2.4 MB
FLAT_MB = 3.0  # growth per 1000 steps below which memory is flat (1 to 2.1 measured): a leaked tensor a step has 30 times that


@dataclass(frozen=True)
class Figure:
    """One line of the table: the experiment, its result, and True if the result is as promised."""

    what: str
    found: str
    holds: bool


def progress(title: str, items: Sequence) -> Iterator:
    """Yield the items, with progress on standard error."""
    with Console().progress(title, "cases") as report:
        for done, item in enumerate(items, 1):
            yield item
            report(done, len(items))


# ---------------------------------------------------------------- kills


def groups_of(step: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return tensors filled with the number of their step."""
    return {name: {"w": torch.full((SIZE,), float(step))} for name in ("model", "ema", "optimizer")}


def save_forever(run: Path, step: int, again: bool, said) -> None:
    """Save step after step, or one step `again` and again, and report each; runs in its own process."""
    while True:
        step += 0 if again else 1
        save_checkpoint(run, step, groups_of(step), {"step": step}, keep=2)
        said.send(step)


def save_in_place_forever(path: Path, step: int, again: bool, said) -> None:
    """Do the same with `torch.save` over one file, the usual way."""
    while True:
        step += 0 if again else 1
        torch.save(groups_of(step), path)
        said.send(step)


def kill_in(body: Callable[..., None], where: Path, step: int, again: bool, delay: float) -> int:
    """Start a saver, kill it `delay` seconds after its first save, and return the last step it reported."""
    hear, say = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=body, args=(where, step, again, say), daemon=True)
    process.start()
    say.close()
    told = hear.recv()
    time.sleep(delay)
    process.kill()
    process.join()
    while hear.poll():
        try:
            told = hear.recv()
        except EOFError:
            break
    return told


@dataclass(frozen=True)
class Kills:
    """Counts of what killed savers left behind."""

    kills: int
    midway: int  # kills that left an unfinished temporary file, which proves that they hit a save
    unreadable: int  # cases in which no checkpoint, or not the last reported one, could be loaded
    torn: int  # cases in which a checkpoint under its final name was not whole or held another step's tensors
    in_place_unreadable: int


def kill_savers(kills: int, scratch: Path, again: bool = False, seed: int = 0) -> Kills:
    """Kill savers of checkpoints, and as many savers that overwrite one file, at random moments."""
    rng, counts, step, plain_step = random.Random(seed), Counter(), 1, 1
    run, plain = scratch / "run", scratch / "plain.pt"
    for _ in progress("Killing savers", range(kills)):
        delay = rng.uniform(0.0, 0.2)
        told = kill_in(save_forever, run, step, again, delay)
        counts["midway"] += any((run / "checkpoints").glob(".tmp-*"))
        warnings: list[str] = []
        found = latest_checkpoint(run, warnings.append)
        counts["unreadable"] += found is None or found.step not in (told, told + 1)
        whole = found is not None and all(bool((found.tensors(n)["w"] == found.step).all()) for n in groups_of(0))
        counts["torn"] += bool(warnings) or not whole or any(report.error for report in verify_run(run))
        step = found.step if found else step
        plain_step = kill_in(save_in_place_forever, plain, plain_step, again, delay)
        counts["in place"] += not readable_in_place(plain)
    return Kills(kills, counts["midway"], counts["unreadable"], counts["torn"], counts["in place"])


def readable_in_place(path: Path) -> bool:
    try:
        torch.load(path, weights_only=True)
    except Exception:  # a torn file can raise any error
        return False
    return True


def kills(short: bool, scratch: Path) -> list[Figure]:
    found = kill_savers(20 if short else 200, scratch)
    in_place = f"{found.in_place_unreadable} of {found.kills} unreadable"
    return [
        Figure(
            f"{found.kills} SIGKILLs of a process that saves without pause, {found.midway} of them in the middle of a save",
            f"{found.unreadable} unreadable, {found.torn} torn",
            found.unreadable == found.torn == 0,
        ),
        Figure("the same kills of `torch.save` over one file, for comparison", in_place, True),
    ]


# ---------------------------------------------------------------- flipped bits


@dataclass(frozen=True)
class Flips:
    """Single flipped bits; `caught` counts those for which the file was named and the previous step loaded instead."""

    flips: int
    caught: int
    files: int


def flip_bits(flips: int, run: Path, seed: int = 0) -> Flips:
    """Flip one bit at a time in the last checkpoint of a run that has at least two, in each file in turn."""
    rng, caught = random.Random(seed), 0
    before, path = (report.path for report in verify_run(run)[-2:])
    entries = sorted(path.iterdir())
    for i in progress("Flipping bits", range(flips)):
        target = entries[i % len(entries)]
        data = target.read_bytes()
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        target.write_bytes(flipped)
        warnings: list[str] = []
        found = latest_checkpoint(run, warnings.append)
        caught += found is not None and found.path == before and len(warnings) == 1 and f"'{target}'" in warnings[0]
        target.write_bytes(data)
    return Flips(flips, caught, len(entries))


def flips(short: bool, scratch: Path) -> list[Figure]:
    with hurried():
        train_to_the_end(train_words("jpeg-dlm", prepare_text(scratch), scratch / "run", train__save_every=2))
    found = flip_bits(100 if short else 1000, scratch / "run")
    what = f"{found.flips} single bits flipped over the {found.files} files of a checkpoint of JPEG-DLM"
    told = f"{found.caught} caught, with the file named and the step before loaded"
    return [Figure(what, told, found.caught == found.flips)]


# ---------------------------------------------------------------- whole runs


def straight_end(method: str, data: Path, run: Path) -> dict[str, object]:
    """Return the end state of an undisturbed run."""
    with hurried():
        train_to_the_end(train_words(method, data, run))
    return end_state(run)


def full_disk(short: bool, scratch: Path) -> list[Figure]:
    data = prepare_text(scratch)
    straight = straight_end("jpeg-dlm", data, scratch / "straight")
    cases = [full_disk_case(p, data, scratch / p, straight) for p in progress("Filling the disk", list(FULL_POINTS))]
    return [
        Figure(
            f"disk full at {len(cases)} points of a save: {', '.join(FULL_POINTS)}",
            f"{sum(c.told for c in cases)} left with one sentence, {sum(c.kept for c in cases)} kept the earlier checkpoint, "
            f"{sum(c.exact for c in cases)} resumed to identical hashes",
            all(c.told and c.kept and c.exact for c in cases),
        )
    ]


def signals(short: bool, scratch: Path) -> list[Figure]:
    text = write_text(scratch)
    straight = straight_end("jpeg-dlm", text, scratch / "straight")
    pairs = [(number, moment) for moment in MOMENTS for number in SIGNALS]
    cases = [
        signal_case(number, moment, text, scratch / f"{number.name} {moment}", straight)
        for number, moment in progress("Sending signals", pairs)
    ]
    left = sum(case.exit_code == case.expected for case in cases)
    return [
        Figure(
            f"{', '.join(n.name for n in SIGNALS)} {', '.join(MOMENTS)}: {len(cases)} cases",
            f"{left} left as they should, {sum(c.exact for c in cases)} resumed to identical hashes",
            all(case.exit_code == case.expected and case.exact for case in cases),
        )
    ]


def resume(short: bool, scratch: Path) -> list[Figure]:
    data = prepare_text(scratch)
    methods = names("system", "stage")
    pairs = [(m, v) for m in methods for v in (["plain"] if short else VARIANTS)]
    exact = {
        (method, variant): resume_is_exact(method, variant, data, scratch / f"{method} {variant}")
        for method, variant in progress("Resuming", pairs)
    }
    variants = {variant: None for _, variant in pairs}
    wrong = "".join(f"; NOT {method} {variant}" for (method, variant), same in exact.items() if not same)
    return [
        Figure(
            f"{len(methods)} methods ({', '.join(methods)}), each {', '.join(variants)}; SIGTERM and a cut in every stage",
            f"{sum(exact.values())} of {len(exact)} end with identical hashes and logs{wrong}",
            all(exact.values()),
        )
    ]


def soaked(short: bool, scratch: Path) -> list[Figure]:
    steps = 1000 if short else 3000
    found = soak(steps, prepare_text(scratch), scratch)
    later = found.settled()
    low, high = int(later.handles.min()), int(later.handles.max())
    return [
        Figure(
            f"{steps:,} steps of AR with saves, evaluations, samples and pictures",
            f"memory {later.mb_per_1000_steps:+.2f} MB per 1,000 steps (at {later.rss_mb[-1]:.0f} MB), "
            f"{low} to {high} open files",
            later.mb_per_1000_steps < FLAT_MB and low == high,
        )
    ]


FIGURES = {"kills": kills, "flips": flips, "full-disk": full_disk, "signals": signals, "resume": resume, "soak": soaked}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*FIGURES, "all"])
    parser.add_argument("--short", action="store_true", help="fewer cases")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # for child processes; the next line is for this one
    torch.set_num_threads(1)
    rows: list[tuple[str, Figure]] = []
    for name in FIGURES if args.name == "all" else [args.name]:
        with tempfile.TemporaryDirectory() as scratch:
            rows += [(name, figure) for figure in FIGURES[name](args.short, Path(scratch))]
    cells = [[figure.what, figure.found, f"`{name}`", "yes" if figure.holds else "NO"] for name, figure in rows]
    print(markdown_table(["what was done", "what came out", "figure", "holds"], cells))
    return 0 if all(figure.holds for _, figure in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
