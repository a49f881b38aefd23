"""Long texts of `jpeg-dlm generate`: with --length, or with a prompt for a model that has a context."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from jpeg_dlm.api import Model
from jpeg_dlm.cli.generate_verb import put_out
from jpeg_dlm.cli.watch import Watcher
from jpeg_dlm.continuing import LongTexts
from jpeg_dlm.errors import UsageError
from jpeg_dlm.methods.base import Watch
from jpeg_dlm.wording import counted

UNFINISHED = "�"  # how a tokenizer of bytes shows a character of which only the first bytes are written


def write_long(args: argparse.Namespace, model: Model, options: dict[str, Any]) -> int:
    """Write what `generate` was asked for; all is checked before the first block."""
    if args.prompt is not None and args.template is not None:
        raise UsageError("Give a prompt or a template, not both.")
    for name, asked in (("--template", args.template), ("--svg", args.svg), ("--html", args.html)):
        if asked:
            raise UsageError(f"{name} is about a single block: leave out --prompt, --length, --stream and --context-scale.")
    if args.stream and (args.out or args.tokens):
        raise UsageError("--stream prints texts: leave out --out and --tokens.")
    guide = model.contains(*args.contains) if args.contains else None
    long = LongTexts.of(model, args.prompt, args.length, args.context_scale, guide, args.strength)
    if long.notice:
        print(long.notice, file=sys.stderr)
    watch, decoded = each_block(model) if args.watch else None, long.counter()
    wanted = {"seed": args.seed, "batch": args.batch, "watch": watch, "decoded": decoded} | options
    began = time.monotonic()
    if args.stream:
        count = stream(long, args.n, wanted)
    else:
        rows = long.tokens(args.n, **wanted)
        count = sum(map(len, rows)) - args.n * len(long.prompts[0])
        texts = None if args.tokens else [model.tokenizer.decode(row) for row in rows]
        put_out(args.out, rows, texts)
    said = f"{counted(args.n, 'text')}, {count:,} new tokens in {time.monotonic() - began:.1f} s"
    print(said, file=sys.stderr)
    if decoded is not None:
        print(decoded.sentence, file=sys.stderr)
    return 0


def stream(long: LongTexts, n: int, options: dict[str, Any]) -> int:
    """Print texts one after the other, each block when it is written; return the number of new tokens."""
    count, ids, shown = 0, list(long.prompts[0]), ""
    options |= {"batch": 1}  # a text is the same in any batch
    for piece in long.pieces(n, **options):
        count += len(piece.ids)
        ids += piece.ids
        text = long.model.tokenizer.decode(ids)
        text = text if piece.last else text.rstrip(UNFINISHED)
        print(("" if shown else f"[{piece.sample}] ") + text[len(shown) :], end="\n" if piece.last else "", flush=True)
        ids, shown = (list(long.prompts[0]), "") if piece.last else (ids, text)
    return count


def each_block(model: Model) -> Watch:
    """Return a watcher that shows every block of the first text as it forms."""
    watcher = Watcher(model)

    def see(step: int, steps: int, t: float, tokens: Callable[[], Tensor]) -> None:
        nonlocal watcher
        if step == 0:
            watcher = Watcher(model)
        watcher(step, steps, t, tokens)

    return see
