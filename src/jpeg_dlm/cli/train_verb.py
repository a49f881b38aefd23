"""jpeg-dlm train"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jpeg_dlm.cli.options import add_config_arguments, read_config
from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.cli.values import whole
from jpeg_dlm.config import Config, with_files
from jpeg_dlm.config_io import from_dict, read_json_file
from jpeg_dlm.errors import UsageError
from jpeg_dlm.methods.registry import method_class, names, writes
from jpeg_dlm.training.record import check_recorded
from jpeg_dlm.wording import command

if TYPE_CHECKING:
    from jpeg_dlm.training.bench import Outcome


def add_arguments(parser: Parser) -> None:
    add_config_arguments(parser, required=False)  # distinguishes 'not given' from 'tiny' when a run is resumed
    students = names("student")
    parser.add_argument(
        "--method", choices=names("system", "stage", "student"), metavar="NAME",
        help=f"system to train; encoder: the small text encoder alone; {', '.join(students)}: from a trained --teacher; "
        "default: jpeg-dlm",
    )  # fmt: skip
    parser.add_argument(
        "--teacher", type=Path, metavar="MODEL",
        help=f"of {' and '.join(students)}: model folder, run or checkpoint to learn from ('bundled': the bundled model)",
    )  # fmt: skip
    parser.add_argument(
        "--init", type=Path, metavar="MODEL",
        help="fine-tune: start from the weights of a model folder, run or checkpoint, with its options, tokenizer and encoder "
        "('bundled': the bundled model)",
    )  # fmt: skip
    parser.add_argument(
        "--data", help="text file, folder, .jsonl, prepared folder, named corpus or hf:NAME (default: the preset's)"
    )
    parser.add_argument("--out", type=Path, required=True, help="run directory")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out with its own options, or start it")
    parser.add_argument("--stop-at", type=whole(1), metavar="STEP", help="save and stop after this step, as on a signal")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    parser.add_argument(
        "--threads", type=whole(1), help="CPU threads (default: PyTorch's choice); exact repetition needs the same number"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")


def base_config(args: argparse.Namespace) -> Config | None:
    """Return the stored config of a run that is resumed; otherwise that of the teacher or of the first model, if any."""
    stored = args.out / "config.json"
    if not (args.resume and stored.is_file()):
        if args.teacher:
            return student_of(args.teacher, args.method)
        return start_of(args.init) if args.init else None
    check_recorded(args.out, stored.name, "restore it, or delete it and give the options of the run again")
    config = from_dict(read_json_file(stored))
    if args.preset and args.preset != config.preset:
        raise UsageError(
            f"'{args.out}' was started with --preset {config.preset}, not {args.preset}: name another folder with --out."
        )
    if args.method and args.method != config.method:
        raise UsageError(
            f"'{args.out}' was started with --method {config.method}, not {args.method}: name another folder with --out."
        )
    return config


def start_of(model: Path) -> Config:
    """Return the config of a training that goes on from a trained model of the same method."""
    from jpeg_dlm.folders.model_folder import named_model

    parts = named_model(model)
    config = with_files(parts.config, parts.tokenizer, parts.encoder)
    return replace(config, train=replace(config.train, init=str(parts.origin)))


def student_of(teacher: Path, method: str) -> Config:
    """Return the config of a method that learns from a trained model."""
    from jpeg_dlm.folders.model_folder import named_model

    parts = named_model(teacher)
    return method_class(method).student_config(parts.config, parts.origin, parts.tokenizer, parts.encoder)


def where(outcome: Outcome, config: Config) -> str:
    """Describe at which step a run stopped and what was saved."""
    if not outcome.saved:
        return "before the first step, so there is no checkpoint; what was prepared is kept"
    stage = f" of the stage '{outcome.stage}'" if outcome.stage not in ("", config.method) else ""
    return f"at step {outcome.step:,}{stage} and saved"


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    if args.teacher and (args.method not in names("student") or args.preset):
        students = " and ".join(names("student"))
        raise UsageError(f"--teacher needs --method {students} and replaces --preset: change one of them.")
    if args.init and (args.teacher or args.preset):
        raise UsageError("--init brings the options of its model: leave out --teacher and --preset.")
    config = read_config(args, rest, base_config(args), **{"method": args.method, "data.source": args.data})
    if not config.data.source:
        raise UsageError("There is no text to train on: name it with --data.")

    import torch

    from jpeg_dlm.machine.console import Console
    from jpeg_dlm.machine.dist import setup, teardown
    from jpeg_dlm.training.run import train_run

    if args.threads:
        torch.set_num_threads(args.threads)
    ranks = setup(args.device)
    console = Console(args.quiet or not ranks.is_main)
    outcome = train_run(config, args.out, ranks, console, args.resume, args.stop_at)
    teardown()  # not after an error, when other processes may be gone
    if outcome.stopped_by:
        console.say(f"Stopped by {outcome.stopped_by} {where(outcome, config)}: continue with --resume.")
        return {"SIGTERM": 143, "SIGINT": 130}.get(outcome.stopped_by, 0)
    if config.method == "encoder":
        console.say(f"Done. Use it with  --encoder.name {shlex.quote(str(args.out / 'encoder'))}")
    elif writes(config.method):
        console.say(f"Done. Try  {command('generate', args.out)}")
    return 0
