"""jpeg-dlm generate"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jpeg_dlm.cli.options import add_options, overrides
from jpeg_dlm.cli.parser import Parser, from_zero, positive, share, whole, words
from jpeg_dlm.options import option_choices
from jpeg_dlm.util.errors import UsageError, counted

if TYPE_CHECKING:
    from jpeg_dlm.api import Model
    from jpeg_dlm.sampling.long_text import BlockwiseSampler

UNFINISHED = "�"  # how a tokenizer of bytes shows a character of which only the first bytes are written
GRIDS = option_choices()["sampler.grid"]
LENGTH = "of a model with context: write N tokens after the prompt, block after block, or fewer if the text ends"
CONTEXT_SCALE = "of a model with context: guidance over it; above 1 holds texts closer to what came before (default: 1.0)"
STRENGTH = "of systems with guides: how strongly a prompt, a template or words guide the rest of the text"

# Sampler options that may omit the prefix --sampler.; each method supports some of them.
SHORTHANDS = ("steps", "solver", "grid", "w", "temperature", "top_k", "top_p")


def add_generate_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("checkpoint", nargs="?", type=Path, help="model folder, run or checkpoint (default: the bundled model)")
    add("-n", type=whole(1), help="number of texts (default: 4, or 1 for each source)")
    add("--seed", type=whole(0), default=0, help="text i of a seed is the same in any batch")
    add("--prompt", metavar="TEXT", help="how every text begins")
    add("--source", metavar="TEXT", help="of a model of pairs: what to write the target of")
    add("--sources", type=Path, metavar="FILE", help="of a model of pairs: a file with a source per line")
    add("--candidates", type=whole(1), default=1, metavar="N", help="with a source: write N targets, keep the most agreed one")
    add("--template", metavar="TEXT", help="text with holes to fill in: [MASK] is one token, [MASK:5] are five")
    add("--length", type=whole(1), metavar="N", help=LENGTH)
    add("--context-scale", type=from_zero, default=1.0, metavar="S", help=CONTEXT_SCALE)
    add("--stream", action="store_true", help="of a model with context: print each text block by block")
    add("--contains", type=words, metavar="WORD,WORD", help="of systems with guides: words that every text shall contain")
    add("--strength", type=from_zero, default=1.0, help=STRENGTH)
    add("--steps", type=whole(1), help="sampling steps (default: the model's own)")
    add("--solver", metavar="NAME", help="solver of the sampler (default: the model's own)")
    add("--grid", choices=GRIDS, metavar="NAME", help="spacing of sampling times (default: the model's own)")
    add("--w", type=positive, help="self-conditioning guidance scale (default: the model's own)")
    add("--temperature", type=from_zero, help="of ar: divides the logits, 0 is greedy")
    add("--top-k", type=whole(0), help="of ar: draw from the k most probable tokens")
    add("--top-p", type=share, help="of ar: draw from the smallest set of tokens with this total probability")
    add("--batch", type=whole(1), default=64, help="texts at once")
    add("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    add_backend(parser)
    add("--watch", action="store_true", help="show the first text form step by step")
    add("--html", type=Path, metavar="FILE", help="write a page that plays the steps of the first texts")
    add("--tokens", action="store_true", help="print token ids instead of text")
    add("--out", type=Path, help="write JSON lines to this file instead of printing")
    add_options(parser, ("sampler",))


def add_backend(parser: Parser) -> None:
    """Add the options of what computes the samples."""
    add = parser.add_argument
    add("--backend", choices=("torch", "onnx"), help="of jpeg-dlm: onnx is ONNX Runtime on the CPU (default: torch)")
    add("--precision", choices=("fp32", "int8"), help="with --backend onnx: int8 is faster and changes some tokens")


def run_generate(args: argparse.Namespace) -> None:
    shorthands = {name: value for name in SHORTHANDS if (value := getattr(args, name)) is not None}
    options: dict[str, Any] = overrides(args, "sampler") | shorthands
    for path in (args.out, args.html):
        if path and path.exists():
            raise UsageError(f"'{path}' already exists: name another file, nothing was overwritten.")

    from jpeg_dlm.api import load

    model = load(args.checkpoint, args.device, args.backend, args.precision)
    if args.source is not None or args.sources:
        write_targets(args, model, options)
        return
    if args.candidates > 1:
        raise UsageError("--candidates chooses among targets of a source: give one with --source.")
    args.n = args.n or 4
    is_long = args.length or args.stream or args.context_scale != 1 or (args.prompt is not None and model.context_blocks)
    (write_long if is_long else write_blocks)(args, model, options)


def write_targets(args: argparse.Namespace, model: Model, options: dict[str, Any]) -> None:
    """Write targets of sources."""
    from jpeg_dlm.text.sources import text_lines
    from jpeg_dlm.util.files import write_atomic

    for name in ("prompt", "template", "contains", "length", "stream", "watch", "html", "tokens"):
        if getattr(args, name):
            raise UsageError(f"--{name} is about texts without a source: leave it out.")
    lines = [args.source] if args.source is not None else [line.strip() for line in text_lines(args.sources)]
    sources, n = [line for line in lines if line], args.n or 1
    began = time.monotonic()
    texts = model.generate(n, seed=args.seed, batch=args.batch, source=sources, candidates=args.candidates, **options)
    seconds = time.monotonic() - began
    pairs = [{"source": sources[i // n], "prediction": text} for i, text in enumerate(texts)]
    if args.out:
        write_atomic(args.out, "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs), new=True)
    for pair in [] if args.out else pairs:
        print(pair["prediction"] if args.source is not None else f"{pair['source']}\t{pair['prediction']}")
    print(f"{counted(len(texts), 'target')} in {seconds:.1f} s", file=sys.stderr)


def write_blocks(args: argparse.Namespace, model: Model, options: dict[str, Any]) -> None:
    """Write texts of one block each."""
    from jpeg_dlm.flow.sampler import together
    from jpeg_dlm.sampling.prompts import FixedTokenCounter

    fixed = model.fixed_tokens(args.prompt, args.template)
    guide = model.contains(*args.contains) if args.contains else None
    decoded = FixedTokenCounter(fixed) if fixed is not None and "guides" in model.supports else None
    watchers: list[Any] = [decoded]
    if args.watch:
        from jpeg_dlm.cli.live_view import Watcher

        watchers.append(Watcher(model, fixed))
    if args.html:
        from jpeg_dlm.report.trajectory import TrajectoryRecorder

        watchers.append(TrajectoryRecorder(model, fixed))
    began = time.monotonic()
    request = options | {"seed": args.seed, "batch": args.batch, "watch": together(*watchers)}
    tokens = model.sample(args.n, fixed=fixed, guide=guide, strength=args.strength, **request)
    seconds = time.monotonic() - began
    put_out(args.out, tokens.tolist(), None if args.tokens else model.to_text(tokens, fixed))
    if args.html:
        from jpeg_dlm.report.render import single_file
        from jpeg_dlm.util.files import write_atomic

        recorder = watchers[-1]
        page = single_file([snapshot.as_json() for snapshot in recorder.snapshots], recorder.heading, args.command)
        write_atomic(args.html, page, new=True)
        print(f"Wrote {args.html}.", file=sys.stderr)
    print(f"{counted(args.n, 'text')} of {tokens.shape[1]} tokens in {seconds:.1f} s", file=sys.stderr)
    if decoded is not None:
        print(decoded.sentence, file=sys.stderr)


def write_long(args: argparse.Namespace, model: Model, options: dict[str, Any]) -> None:
    """Write texts block after block; all is checked before the first block."""
    if args.prompt is not None and args.template is not None:
        raise UsageError("Give a prompt or a template, not both.")
    for name in ("template", "html"):
        if getattr(args, name):
            raise UsageError(f"--{name} is about a single block: leave out --prompt, --length, --stream and --context-scale.")
    if args.stream and (args.out or args.tokens):
        raise UsageError("--stream prints texts: leave out --out and --tokens.")

    guide = model.contains(*args.contains) if args.contains else None
    long = model.blockwise(args.prompt, args.length, args.context_scale, guide, args.strength, **options)
    if long.notice:
        print(long.notice, file=sys.stderr)
    request: dict[str, Any] = {"seed": args.seed, "batch": args.batch}
    if args.watch:
        from jpeg_dlm.cli.live_view import Watcher

        request["watch"] = Watcher(model, every_block=True)
    began = time.monotonic()
    if args.stream:
        count = stream(long, model, args.n, request)
    else:
        rows = long.tokens(args.n, **request)
        count = sum(map(len, rows)) - args.n * len(long.prompts[0])
        put_out(args.out, rows, None if args.tokens else [model.tokenizer.decode(row) for row in rows])
    print(f"{counted(args.n, 'text')}, {count:,} new tokens in {time.monotonic() - began:.1f} s", file=sys.stderr)


def stream(long: BlockwiseSampler, model: Model, n: int, request: dict[str, Any]) -> int:
    """Print texts one after the other, each block when it is written; return the number of new tokens."""
    count, ids, printed = 0, list(long.prompts[0]), ""
    alone: dict[str, Any] = request | {"batch": 1}
    for piece in long.stream(n, **alone):  # a text is the same in any batch
        count += len(piece.ids)
        ids += piece.ids
        text = model.tokenizer.decode(ids)
        text = text if piece.last else text.rstrip(UNFINISHED)
        print(("" if printed else f"[{piece.sample}] ") + text[len(printed) :], end="\n" if piece.last else "", flush=True)
        ids, printed = (list(long.prompts[0]), "") if piece.last else (ids, text)
    return count


def put_out(path: Path | None, rows: Sequence[Sequence[int]], texts: Sequence[str] | None) -> None:
    """Write texts as JSON lines to a file, or print them; without texts, the token ids alone."""
    from jpeg_dlm.util.files import write_atomic

    if path:
        lines = [{"index": i, "token_ids": row} | ({"prediction": texts[i]} if texts else {}) for i, row in enumerate(rows)]
        write_atomic(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), new=True)
        return
    for i, row in enumerate(rows):
        print(" ".join(map(str, row)) if texts is None else f"[{i}] {texts[i]}")
