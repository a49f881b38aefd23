"""jpeg-dlm edit"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jpeg_dlm.cli.options import document_options, parse_overrides
from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.cli.values import unit, whole


def add_arguments(parser: Parser) -> None:
    parser.add_argument("text", help="the text to write anew")
    parser.add_argument("--noise", type=unit, default=0.4, help="share of noise: 0 keeps the text, 1 forgets it")
    parser.add_argument("-n", type=whole(1), default=4, help="number of variations")
    parser.add_argument("--seed", type=whole(0), default=0, help="variation i of a seed is the same in any batch")
    parser.add_argument("--steps", type=whole(1), help="sampling steps from noise alone (default: the model's own)")
    parser.add_argument("--batch", type=whole(1), default=64, help="texts at once")
    parser.add_argument("--checkpoint", type=Path, help="model folder, run or checkpoint (default: the bundled model)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    document_options(parser, ("sampler",))


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    options = {name.removeprefix("sampler.").replace("-", "_"): value for name, value in parse_overrides(rest).items()}
    options |= {"steps": args.steps} if args.steps else {}

    from jpeg_dlm.api import load

    model = load(args.checkpoint, args.device, "auto")
    texts = model.edit(args.text, args.n, noise=args.noise, seed=args.seed, batch=args.batch, **options)
    before = model.tokenizer.encode(args.text)
    kept = 0
    for i, text in enumerate(texts):
        print(f"[{i}] {text}")
        kept += sum(a == b for a, b in zip(before, model.tokenizer.encode(text), strict=False))
    print(f"{kept / (len(before) * len(texts)):.0%} of the tokens stand where they stood", file=sys.stderr)
    return 0
