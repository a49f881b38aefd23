"""jpeg-dlm study"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from jpeg_dlm.cli.options import GROUPS, document_options, parse_overrides
from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.cli.scorer_options import add_scorer_arguments, scorer_of
from jpeg_dlm.cli.values import positive, whole
from jpeg_dlm.errors import UsageError
from jpeg_dlm.evaluation.protocols import PROTOCOLS
from jpeg_dlm.presets import PRESETS
from jpeg_dlm.studies.catalog import STUDIES

if TYPE_CHECKING:
    from jpeg_dlm.machine.console import Console
    from jpeg_dlm.machine.dist import Ranks
    from jpeg_dlm.scorers.scoring import Scorer
    from jpeg_dlm.studies.study import StudyOutcome


def add_arguments(parser: Parser) -> None:
    studies = parser.add_subparsers(dest="study", metavar="STUDY", required=True)
    for name, info in STUDIES.items():
        sub = studies.add_parser(name, help=info.summary, description=info.summary[0].upper() + info.summary[1:] + ".")
        ARGUMENTS[info.takes](sub)
        sub.add_argument("--threads", type=whole(1), help="CPU threads of PyTorch")
        sub.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
        sub.add_argument("--out", type=Path, required=True, help="folder for the results; repeat the command to continue")
        sub.add_argument("--quiet", action="store_true", help="no progress")
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        sub.set_defaults(parser=sub)
        if info.takes != "models":  # a trained model has a fixed config
            document_options(sub, GROUPS)


def _scoring(parser: Parser, n: int, seeds: int) -> None:
    parser.add_argument("-n", type=whole(1), default=n, help="texts per seed")
    parser.add_argument("--seeds", type=whole(1), default=seeds, help="number of sampling seeds")
    add_scorer_arguments(parser)
    parser.add_argument("--batch", type=whole(1), default=64, help="texts at once")


def _training(parser: Parser) -> None:
    parser.add_argument("--preset", choices=tuple(PRESETS), default="tiny", metavar="NAME", help="base values of all options")
    parser.add_argument("--data", help="text file, folder, .jsonl, prepared folder, named corpus or hf:NAME")
    parser.add_argument(
        "--budget", help="training budget of each variant: 2000steps, 5Mtokens or 10min (default: the preset's)"
    )
    parser.add_argument(
        "--train-seeds", type=whole(1), default=1, help="training runs per variant; if several, deviations are over them"
    )
    parser.add_argument(
        "--jobs", type=whole(1), default=1,
        help="processes that share the training; to add another node, run the same command with the same --out there",
    )  # fmt: skip
    parser.add_argument("--only", metavar="TEXT", help="only variants with this in their name, such as 'r = 0.25'")
    parser.add_argument("--so-far", action="store_true", help="score what is trained by now, without training more")
    parser.add_argument("--train-only", action="store_true", help=argparse.SUPPRESS)  # for the workers of --jobs
    parser.add_argument("--protocol", choices=PROTOCOLS, default="default", metavar="NAME", help="as for evaluate")
    _scoring(parser, 256, 3)


def _models(parser: Parser) -> None:
    parser.add_argument(
        "checkpoints", nargs="*", type=Path, metavar="CHECKPOINT",
        help="model folders, runs, checkpoints or bundled (default: bundled)",
    )  # fmt: skip
    parser.add_argument("--data", help="text to analyze (default: the held-out part of the model's training corpus)")
    _scoring(parser, 256, 1)


def _sizes(parser: Parser) -> None:
    parser.add_argument("--preset", choices=tuple(PRESETS), default="lm1b", metavar="NAME", help="base values of all options")
    parser.add_argument("--lengths", default="128,256,512,1024,2048,4096,8192", help="tokens of a text")
    parser.add_argument("--rates", default="1,0.5,0.25,0.125,0.0625", help="compression rates")
    parser.add_argument("--measure", action="store_true", help="also build and time each model, not only count operations")
    parser.add_argument("--limit", type=positive, default=60.0, help="most seconds for one measured batch")
    parser.add_argument("--batch", type=whole(1), default=1, help="texts at once when time is measured")
    parser.add_argument("--repeats", type=whole(1), default=3, help="rounds when time is measured")


ARGUMENTS: dict[str, Callable[[Parser], None]] = {
    "training": _training, "models": _models, "sizes": _sizes,
}  # fmt: skip


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    import torch

    from jpeg_dlm.cli.show import show
    from jpeg_dlm.machine.dist import setup, teardown

    if args.threads:
        torch.set_num_threads(args.threads)
    ranks = setup(args.device)
    outcome = RUN[STUDIES[args.study].takes](args, rest, ranks)
    if outcome is None:
        teardown()
        return 0
    if ranks.is_main:
        outcome.result["command"] = args.command
        show(outcome.tables)
        written = outcome.write(args.out, args.study)
        if not args.quiet:
            print(f"Wrote {', '.join(str(path) for path in written)}.")
    teardown()
    return 1 if any("error" in row for row in outcome.result.get("rows", [])) else 0


def _run_training(args: argparse.Namespace, rest: Sequence[str], ranks: Ranks) -> StudyOutcome | None:
    from jpeg_dlm.evaluation.evaluate import EvaluationRequest
    from jpeg_dlm.evaluation.protocols import protocol
    from jpeg_dlm.machine.collectives import main_first
    from jpeg_dlm.machine.console import Console
    from jpeg_dlm.studies import trained
    from jpeg_dlm.studies.budget import parse_budget
    from jpeg_dlm.studies.workshop import Workshop

    if args.jobs > 1 and ranks.world > 1:
        raise UsageError("The processes of torchrun train together already: leave --jobs out.")
    budget = parse_budget(args.budget) if args.budget else None
    question = trained.ask(
        args.study, args.preset, args.data, parse_overrides(rest), budget, args.train_seeds, args.only or "", ranks.world
    )
    request = EvaluationRequest(protocol(args.protocol), tuple(range(args.seeds)), args.n, mauve=args.mauve)
    workshop = Workshop(args.out, ranks, Console(args.quiet or not ranks.is_main), trains=not args.so_far)
    planned = trained.plan(question, workshop)  # before the workers start: speeds are measured on an idle machine
    if args.so_far:
        planned = trained.so_far(planned, workshop)
    else:
        with _workers(args, rest, workshop.console):
            trained.train(planned, workshop, wait=not args.train_only)
    if args.train_only:
        return None

    def scorer() -> Scorer:
        return main_first(lambda: scorer_of(args, str(ranks.device), workshop.console))

    return trained.evaluate(planned, workshop, scorer, request, args.batch)


@contextlib.contextmanager
def _workers(args: argparse.Namespace, rest: Sequence[str], console: Console) -> Iterator[None]:
    """Start `--jobs` - 1 workers on equal shares of the CPU threads, or on the GPUs in turn, and end them after the block."""
    import torch

    threads = torch.get_num_threads()
    share = args.threads or max(1, threads // args.jobs)
    with contextlib.ExitStack() as stack:
        if args.jobs > 1:
            args.out.mkdir(parents=True, exist_ok=True)
            torch.set_num_threads(share)
            stack.callback(torch.set_num_threads, threads)
            previous = signal.signal(signal.SIGTERM, _leave)  # otherwise the workers would keep running
            stack.callback(signal.signal, signal.SIGTERM, previous)
        for number in range(1, args.jobs):
            log = args.out / f"worker-{number}.log"
            device = args.device or (f"cuda:{number % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu")
            words = _worker_words(args, rest, share, device)
            with open(log, "w") as output:
                worker = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            stack.callback(_dismiss, worker, log, console)
        yield


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _worker_words(args: argparse.Namespace, rest: Sequence[str], threads: int, device: str) -> list[str]:
    """Return the command of a worker, which only trains."""
    words = ["--preset", args.preset, "--train-seeds", args.train_seeds, "--threads", threads, "--device", device]
    words += [word for name in ("data", "budget", "only") if getattr(args, name) for word in (f"--{name}", getattr(args, name))]
    words += ["--out", args.out, "--train-only", "--quiet", *rest]
    return [sys.executable, "-m", "jpeg_dlm", "study", args.study, *map(str, words)]


def _dismiss(worker: subprocess.Popen[bytes], log: Path, console: Console) -> None:
    if worker.poll() is None:
        worker.terminate()
    elif worker.returncode:
        console.warn(f"A worker exited with code {worker.returncode}, so this process did its work: see '{log}'.")
    worker.wait()


def _run_models(args: argparse.Namespace, rest: Sequence[str], ranks: Ranks) -> StudyOutcome:
    from jpeg_dlm.evaluation.heldout import model_sources
    from jpeg_dlm.machine.collectives import main_first
    from jpeg_dlm.machine.console import Console
    from jpeg_dlm.results.resumable import Parts
    from jpeg_dlm.studies.study import Asked

    console, device = Console(args.quiet or not ranks.is_main), str(ranks.device)
    asked = Asked(
        args.n, tuple(range(args.seeds)), args.batch, lambda: main_first(lambda: scorer_of(args, device, console)),
        Parts(args.out / "parts"), console, args.mauve,
    )  # fmt: skip
    sources = model_sources(args.checkpoints or [None], device, args.batch, args.data, console)
    return import_module(f"jpeg_dlm.studies.{args.study}").analyze(sources, asked)


def _run_sizes(args: argparse.Namespace, rest: Sequence[str], ranks: Ranks) -> StudyOutcome:
    if ranks.world > 1:
        raise UsageError(f"The study '{args.study}' counts and times on one device: start it without torchrun.")
    return import_module(f"jpeg_dlm.studies.{args.study}").study(args, parse_overrides(rest))


RUN: dict[str, Callable[[argparse.Namespace, Sequence[str], Ranks], StudyOutcome | None]] = {
    "training": _run_training, "models": _run_models, "sizes": _run_sizes,
}  # fmt: skip
