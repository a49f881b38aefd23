"""jpeg-dlm prepare and train"""

from __future__ import annotations

import argparse
import shlex
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from jpeg_dlm.cli.options import add_config_arguments, read_config
from jpeg_dlm.cli.parser import Parser, whole
from jpeg_dlm.config import Config, with_files
from jpeg_dlm.methods.registry import method_class, names, writes
from jpeg_dlm.options import from_dict, read_json_file
from jpeg_dlm.util.errors import UsageError, command, counted

INIT = (
    "fine-tune: start from the weights of a model folder, run or checkpoint, with its options, tokenizer and encoder "
    "(bundled, translator: of the package)"
)


def add_prepare_arguments(parser: Parser) -> None:
    add_config_arguments(parser, groups=("data",))
    parser.add_argument(
        "source", help="text file, folder, .jsonl, a named corpus (captions, lm1b, openwebtext) or hf:NAME[/CONFIG]"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the blocks")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run_prepare(args: argparse.Namespace) -> None:
    config = read_config(args, **{"data.source": args.source})

    from jpeg_dlm.text.prepare import prepare
    from jpeg_dlm.training.lock import run_lock
    from jpeg_dlm.util.console import Console

    prepared = (args.out / "index.json").is_file()  # then it is only checked, and may be read-only
    with nullcontext() if prepared else run_lock(args.out):
        done = prepare(config.data, args.out, Console(args.quiet))
    print(
        f"{done.train_rows:,} training and {counted(done.heldout_rows, 'held-out block')} of {done.token_len} tokens "
        f"(vocabulary {done.vocab_size:,}) in '{done.path}'{', already there' if done.reused else ''}"
    )
    if done.note:
        print(done.note)


def add_train_arguments(parser: Parser) -> None:
    add_config_arguments(parser)
    students, add = names("student"), parser.add_argument
    method = f"system to train; encoder: the small text encoder alone; {', '.join(students)}: from a trained --teacher; "
    add("--method", choices=names("system", "stage", "student"), metavar="NAME", help=f"{method}default: jpeg-dlm")
    teacher = f"of {' and '.join(students)}: model folder, run or checkpoint to learn from (or bundled, translator)"
    add("--teacher", type=Path, metavar="MODEL", help=teacher)
    add("--init", type=Path, metavar="MODEL", help=INIT)
    add("--data", help="text file, folder, .jsonl, prepared folder, named corpus or hf:NAME (default: the preset's)")
    add("--out", type=Path, required=True, help="run directory")
    add("--resume", action="store_true", help="continue the run in --out with its own options, or start it")
    add("--stop-at", type=whole(1), metavar="STEP", help="save and stop after this step, as on a signal")
    add("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    add("--threads", type=whole(1), help="CPU threads (default: PyTorch's choice); exact repetition needs the same number")
    add("--quiet", action="store_true", help="no progress")


def base_config(args: argparse.Namespace) -> Config | None:
    """Return the stored config of a run that is resumed; otherwise that of the teacher or of the first model, if any."""
    stored = args.out / "config.json"
    if not (args.resume and stored.is_file()):
        if args.teacher:
            return started_from(args.teacher, args.method)
        return started_from(args.init) if args.init else None
    config = from_dict(read_json_file(stored))
    for name in ("preset", "method"):
        stored, given = getattr(config, name), getattr(args, name)
        if given and given != stored:
            raise UsageError(f"'{args.out}' was started with --{name} {stored}, not {given}: name another folder with --out.")
    return config


def started_from(model: Path, student: str = "") -> Config:
    """Return the config of a training that goes on from a trained model, as its student or with the same method."""
    from jpeg_dlm.checkpoints.model_folder import named_model

    parts = named_model(model)
    config = method_class(student).adapt(parts.config, student) if student else parts.config
    config = with_files(config, parts.tokenizer, parts.encoder)
    return replace(config, train=replace(config.train, init=str(parts.origin)))


def run_train(args: argparse.Namespace) -> int:
    if args.teacher and (args.method not in names("student") or args.preset):
        students = " and ".join(names("student"))
        raise UsageError(f"--teacher needs --method {students} and replaces --preset: change one of them.")
    if args.init and (args.teacher or args.preset):
        raise UsageError("--init brings the options of its model: leave out --teacher and --preset.")
    config = read_config(args, base_config(args), **{"method": args.method, "data.source": args.data})
    if not config.data.source:
        raise UsageError("There is no text to train on: name it with --data.")

    from jpeg_dlm.training.run import train_run
    from jpeg_dlm.util.console import Console
    from jpeg_dlm.util.distributed import setup, teardown

    ranks = setup(args.device)
    console = Console(args.quiet or not ranks.is_main)
    outcome = train_run(config, args.out, ranks, console, args.resume, args.stop_at)
    teardown()  # not after an error, when other processes may be gone
    if outcome.stopped_by:
        stage = f" of the stage '{outcome.stage}'" if outcome.stage not in ("", config.method) else ""
        where = f"at step {outcome.step:,}{stage} and saved"
        if outcome.step == 0:
            where = "before the first step, so there is no checkpoint; what was prepared is kept"
        same = [word for name in ("device", "threads") if (value := getattr(args, name)) for word in (f"--{name}", value)]
        resume = command("train", "--resume", "--out", args.out, *same)
        console.say(f"Stopped by {outcome.stopped_by} {where}: continue with  {resume}")
        return {"SIGTERM": 143, "SIGINT": 130}.get(outcome.stopped_by, 0)
    if config.method == "encoder":
        console.say(f"Done. Use it with  --encoder.name {shlex.quote(str(args.out / 'encoder'))}")
    elif writes(config.method):
        console.say(f"Done. Try  {command('generate', args.out)}")
    return 0
