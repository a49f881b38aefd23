"""jpeg-dlm prepare"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from jpeg_dlm.cli.options import add_config_arguments, read_config
from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.wording import counted


def add_arguments(parser: Parser) -> None:
    add_config_arguments(parser, groups=("data",), required=False)
    parser.add_argument(
        "source",
        help="text file, folder, .jsonl, a named corpus (captions, tatoeba, stories, sotu, wikipedia, ...) or hf:NAME[/CONFIG]",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the blocks")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    config = read_config(args, rest, **{"data.source": args.source})

    from jpeg_dlm.machine.console import Console
    from jpeg_dlm.text.corpora import bring, open_corpus
    from jpeg_dlm.text.prepare import prepare
    from jpeg_dlm.training.lock import run_lock

    console = Console(args.quiet)
    prepared = (args.out / "index.json").is_file()  # then it is only checked, and may be read-only
    bring(config.data.source, args.out, console)
    if not prepared:
        open_corpus(config.data.source, field=config.data.field)  # raises an error for missing text before anything is written
    lock = nullcontext() if prepared else run_lock(args.out)
    with lock, console.progress("Preparing text", "bytes") as progress:
        done = prepare(config.data, args.out, progress)
    print(
        f"{done.train_rows:,} training and {counted(done.heldout_rows, 'held-out block')} of {done.token_len} tokens "
        f"(vocabulary {done.vocab_size:,}) in '{done.path}'{', already there' if done.reused else ''}"
    )
    if done.note:
        print(done.note)
    return 0
