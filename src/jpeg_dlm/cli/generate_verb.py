"""jpeg-dlm generate"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jpeg_dlm.cli.options import document_options, parse_overrides
from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.cli.values import EVERY_SOLVER, SOLVERS_SAID, from_zero, positive, share, whole, words
from jpeg_dlm.config_io import option_choices
from jpeg_dlm.errors import UsageError
from jpeg_dlm.wording import command, counted

if TYPE_CHECKING:
    from torch import Tensor

    from jpeg_dlm.api import Model
    from jpeg_dlm.methods.base import Watch
    from jpeg_dlm.report.moments import Recorder

DTYPES = ("exact", "auto", "fp32", "bf16", "int8")  # the last three are those of `sampling.linear`, which imports torch
SLOW_S = 10.0  # seconds of sampling above which an export to another runtime is suggested (assumed)
PRICED = 8  # texts sampled again in fp32 to measure the effect of a reduced precision

CHOICES = option_choices()

# Sampler options that may omit the prefix --sampler.; each method supports some of them.
SHORTHANDS = ("steps", "solver", "grid", "w", "protocol", "temperature", "top_k", "top_p")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("checkpoint", nargs="?", type=Path, help="model folder, run or checkpoint (default: the bundled model)")
    parser.add_argument("-n", type=whole(1), default=4, help="number of texts")
    parser.add_argument("--seed", type=whole(0), default=0, help="text i of a seed is the same in any batch")
    parser.add_argument("--prompt", metavar="TEXT", help="how every text begins")
    parser.add_argument(
        "--template", metavar="TEXT", help="text with holes to fill in: [MASK] is one token, [MASK:5] are five"
    )  # fmt: skip
    parser.add_argument(
        "--length", type=whole(1), metavar="N",
        help="of a model with context: write N tokens after the prompt, block after block, or fewer if the text ends",
    )  # fmt: skip
    parser.add_argument(
        "--context-scale", type=from_zero, default=1.0, metavar="S",
        help="of a model with context: guidance over it; above 1 holds texts closer to what came before (default: 1.0)",
    )  # fmt: skip
    parser.add_argument("--stream", action="store_true", help="of a model with context: print each text block by block")
    parser.add_argument(
        "--contains", type=words, metavar="WORD,WORD", help="of jpeg-dlm, elf, cosmos: words that every text shall contain"
    )  # fmt: skip
    parser.add_argument(
        "--strength", type=from_zero, default=1.0,
        help="of jpeg-dlm, elf, cosmos: how strongly a prompt, a template or words guide the rest of the text",
    )  # fmt: skip
    parser.add_argument("--fast", action="store_true", help="of jpeg-dlm: few steps, at the times found by tune")
    parser.add_argument("--steps", type=whole(1), help="sampling steps (default: the model's own)")
    parser.add_argument("--solver", choices=EVERY_SOLVER, metavar="NAME", help=f"{SOLVERS_SAID} (default: the model's own)")
    parser.add_argument(
        "--grid", choices=CHOICES["sampler.grid"], metavar="NAME", help="spacing of sampling times (default: the model's own)"
    )
    parser.add_argument("--w", type=positive, help="self-conditioning guidance scale (default: the model's own)")
    parser.add_argument(
        "--protocol", choices=CHOICES["sampler.protocol"], help="released: random numbers in the order of the authors' code"
    )
    parser.add_argument("--temperature", type=from_zero, help="of ar: divides the logits, 0 is greedy")
    parser.add_argument("--top-k", type=whole(0), help="of ar: draw from the k most probable tokens")
    parser.add_argument("--top-p", type=share, help="of ar: draw from the smallest set of tokens with this total probability")
    parser.add_argument("--batch", type=whole(1), default=64, help="texts at once")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="exact", metavar="TYPE",
        help="of jpeg-dlm: type of the weights; bf16 and int8 change some tokens (default: exact, the fastest form on this "
        "machine that writes the tokens of fp32; auto: also bf16 and int8, if measured faster here)",
    )  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="of jpeg-dlm: fuse operations; takes minutes at first")
    parser.add_argument("--watch", action="store_true", help="show the first text form step by step")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write an animated picture of the first texts as they form")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page that plays the steps of the first texts")
    parser.add_argument("--tokens", action="store_true", help="print token ids instead of text")
    parser.add_argument("--out", type=Path, help="write JSON lines to this file instead of printing")
    document_options(parser, ("sampler",))


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    extra = parse_overrides(rest)
    options = {name.removeprefix("sampler.").replace("-", "_"): value for name, value in extra.items()}
    options |= {name: getattr(args, name) for name in SHORTHANDS if getattr(args, name) is not None}
    options |= {"fast": True} if args.fast else {}
    for path in (args.out, args.svg, args.html):
        if path and path.exists():
            raise UsageError(f"'{path}' already exists: name another file, nothing was overwritten.")

    from jpeg_dlm.api import load
    from jpeg_dlm.continuing import context_blocks
    from jpeg_dlm.export.fastest import PLAIN
    from jpeg_dlm.files import write_atomic
    from jpeg_dlm.flow.latent_sampler import together
    from jpeg_dlm.sampling.given import Decoded

    model = load(args.checkpoint, args.device, args.dtype, args.compile)
    if args.length or args.stream or args.context_scale != 1 or (args.prompt is not None and context_blocks(model)):
        from jpeg_dlm.cli.generate_long import write_long

        return write_long(args, model, options)
    if (args.prompt or args.template or args.contains) and model.can_accelerate and "guides" not in model.writer.supports:
        model.accelerate()  # exported networks have no gradients, which a guide needs
    given = model.given(args.prompt, args.template)
    asked = {"given": given, "guide": model.contains(*args.contains) if args.contains else None, "strength": args.strength}
    reduced = model.form is not None and model.form.dtype != "fp32"
    on_cpu = model.writer.device.type == "cpu"
    if args.dtype in ("bf16", "int8") and on_cpu and (cost := slower(args.dtype)):
        print(f"{cost} The default, --dtype exact, is the fastest that writes the tokens of fp32.", file=sys.stderr)
    if model.form is not None and args.dtype in ("exact", "auto") and model.form != PLAIN:
        print(f"Sampling with {model.form.name}, the fastest form on this machine (measured).", file=sys.stderr)
    watch, picture = watchers(args, model, given)
    decoded = Decoded(given) if given is not None and "guides" in model.writer.supports else None
    began = time.monotonic()
    tokens = model.sample(args.n, seed=args.seed, batch=args.batch, watch=together(decoded, watch), **asked, **options)
    seconds = time.monotonic() - began
    texts = None if args.tokens else model.to_text(tokens, given)
    put_out(args.out, tokens.tolist(), texts)
    for path, content in pictures(args, picture):
        write_atomic(path, content, new=True)
        print(f"Wrote {path}.", file=sys.stderr)
    print(f"{counted(args.n, 'text')} of {tokens.shape[1]} tokens in {seconds:.1f} s", file=sys.stderr)
    if decoded is not None:
        print(decoded.sentence, file=sys.stderr)
    if seconds > SLOW_S and on_cpu and model.form == PLAIN and args.checkpoint:
        print(
            "OpenVINO may be faster on this CPU. After  "
            f"{command('export', args.checkpoint, '--format', 'openvino')}  generate measures both and takes the faster.",
            file=sys.stderr,
        )
    if reduced:
        print(price(model, tokens, args, options, asked), file=sys.stderr)
    return 0


def put_out(path: Path | None, rows: Sequence[Sequence[int]], texts: Sequence[str] | None) -> None:
    """Write texts as JSON lines to a file, or print them; without texts, the token ids alone."""
    from jpeg_dlm.files import write_atomic

    if path:
        lines = [{"index": i, "token_ids": row} | ({"prediction": texts[i]} if texts else {}) for i, row in enumerate(rows)]
        write_atomic(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), new=True)
        return
    for i, row in enumerate(rows):
        print(" ".join(map(str, row)) if texts is None else f"[{i}] {texts[i]}")


def watchers(args: argparse.Namespace, model: Model, given: Tensor | None) -> tuple[Watch | None, Recorder | None]:
    """Return what the sampler shall call at each step, and the part of it that records a picture."""
    if not args.watch and not args.svg and not args.html:
        return None, None
    from jpeg_dlm.cli.watch import Watcher
    from jpeg_dlm.flow.latent_sampler import together
    from jpeg_dlm.report.moments import Recorder

    picture = Recorder(model, given) if args.svg or args.html else None
    return together(Watcher(model, given) if args.watch else None, picture), picture


def pictures(args: argparse.Namespace, recorder: Recorder | None) -> Iterator[tuple[Path, str]]:
    """Yield the files that show how the first texts formed."""
    if recorder and args.svg:
        from jpeg_dlm.cli.forming import draw

        yield args.svg, draw(recorder.moments, recorder.heading)
    if recorder and args.html:
        from jpeg_dlm.report.player import single_file

        yield args.html, single_file([moment.as_json() for moment in recorder.moments], recorder.heading, args.command)


def slower(dtype: str) -> str | None:
    """Return a message if a reduced type is no faster on this CPU."""
    import torch

    from jpeg_dlm.sampling.linear import computes_in_bf16
    from jpeg_dlm.sampling.speeds import cost_of

    if dtype == "bf16" and not computes_in_bf16(torch.device("cpu")):
        return "This CPU has no bf16 instructions: weights are rounded to bf16 and multiplied in fp32, which is no faster."
    return cost_of(dtype)


def price(model: Model, tokens: Tensor, args: argparse.Namespace, options: dict[str, Any], asked: dict[str, Any]) -> str:
    """Compare the first texts of a reduced precision with those of fp32."""
    from jpeg_dlm.sampling.sampler import RELEASED_BATCH

    assert model.form is not None
    name = model.form.name.removeprefix("torch ")
    sampler = model.sampler_options(**options)
    # In the released protocol a text depends on its whole batch.
    n = min(args.n, RELEASED_BATCH[sampler.grid] if sampler.protocol == "released" else PRICED)
    exact = model.accelerate("fp32").sample(n, seed=args.seed, batch=args.batch, **asked, **options)
    share = (exact == tokens[:n]).float().mean().item()
    return (
        f"{name} against fp32: {share:.1%} of the tokens of the first {counted(n, 'text')} are the same; one that "
        "differs early changes those after it, so judge the texts: write some of both with --out, then  "
        "jpeg-dlm evaluate FP32.jsonl REDUCED.jsonl --reference REAL.txt"
    )
