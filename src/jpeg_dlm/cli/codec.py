"""jpeg-dlm reconstruct, interpolate and edit: texts through their latents"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from jpeg_dlm.cli.options import add_options, overrides
from jpeg_dlm.cli.parser import Parser, unit, whole
from jpeg_dlm.util.errors import DataError


def add_model(parser: Parser) -> None:
    parser.add_argument("--checkpoint", type=Path, help="model folder, run or checkpoint (default: the bundled model)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")


def add_reconstruct_arguments(parser: Parser) -> None:
    parser.add_argument("text", nargs="*", help="the text; without it, standard input is read")
    add_model(parser)


def run_reconstruct(args: argparse.Namespace) -> None:
    text = " ".join(args.text) if args.text else sys.stdin.read()
    if not text.strip():
        raise DataError("There is no text: give it as an argument or on standard input.")

    from jpeg_dlm.api import load

    model = load(args.checkpoint, args.device)
    (back,) = model.reconstruct([text])
    before, after = model.tokenizer.encode(text), model.tokenizer.encode(back)
    same = sum(a == b for a, b in zip(before, after, strict=False))
    sizes = f"{model.config.model.latent_len} latents for every {model.config.data.token_len} tokens"
    print(back)
    print(f"{same} of {len(before)} tokens kept, through {sizes}", file=sys.stderr)


def add_interpolate_arguments(parser: Parser) -> None:
    parser.add_argument("first", help="the text at one end")
    parser.add_argument("second", help="the text at the other end")
    parser.add_argument("more", nargs="*", default=[], help="texts to go on to from there, one after the other")
    parser.add_argument("--points", type=whole(2), default=5, help="texts along the way from one to the next, ends included")
    add_model(parser)


def run_interpolate(args: argparse.Namespace) -> None:
    from jpeg_dlm.api import load

    texts = load(args.checkpoint, args.device).interpolate(args.first, args.second, *args.more, points=args.points)
    for i, text in enumerate(texts):
        print(f"{i / (args.points - 1):.2f}  {text}")


def add_edit_arguments(parser: Parser) -> None:
    parser.add_argument("text", help="the text to write anew")
    parser.add_argument("--noise", type=unit, default=0.4, help="share of noise: 0 keeps the text, 1 forgets it")
    parser.add_argument("-n", type=whole(1), default=4, help="number of variations")
    parser.add_argument("--seed", type=whole(0), default=0, help="variation i of a seed is the same in any batch")
    parser.add_argument("--steps", type=whole(1), help="sampling steps from noise alone (default: the model's own)")
    parser.add_argument("--batch", type=whole(1), default=64, help="texts at once")
    add_model(parser)
    add_options(parser, ("sampler",))


def run_edit(args: argparse.Namespace) -> None:
    options: dict[str, Any] = overrides(args, "sampler")
    options |= {"steps": args.steps} if args.steps else {}

    from jpeg_dlm.api import load

    model = load(args.checkpoint, args.device)
    texts = model.edit(args.text, args.n, noise=args.noise, seed=args.seed, batch=args.batch, **options)
    before = model.tokenizer.encode(args.text)
    kept = 0
    for i, text in enumerate(texts):
        print(f"[{i}] {text}")
        kept += sum(a == b for a, b in zip(before, model.tokenizer.encode(text), strict=False))
    print(f"{kept / (len(before) * len(texts)):.0%} of the tokens stand where they stood", file=sys.stderr)
