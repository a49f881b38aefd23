"""jpeg-dlm evaluate"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jpeg_dlm.cli.options import parse_overrides
from jpeg_dlm.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", nargs="?", type=Path, help="model folder, run or checkpoint (default: the bundled model)")
    parser.add_argument("-n", type=int, default=256, help="texts of each kind (default: 256)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples (default: 0)")
    parser.add_argument(
        "--data", help="text, prepared folder or named corpus to hold against (default: what the model was trained on)"
    )
    parser.add_argument(
        "--scorer", default="smollm2", help="smollm2 (fetched), hf:gpt2-large (the paper's), hf:FOLDER or gguf:FILE"
    )
    parser.add_argument("--out", type=Path, help="folder for results.json and results.md")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    extra = parse_overrides(rest)
    if any(not name.startswith("sampler.") for name in extra):
        raise UsageError("Only --sampler.* options can be changed when evaluating.")
    if args.n < 2:
        raise UsageError("Evaluation needs at least 2 texts: raise -n.")
    if args.out and (args.out / "results.json").exists():
        raise UsageError(f"'{args.out}' already holds results: name another folder, nothing was overwritten.")

    from jpeg_dlm.api import load
    from jpeg_dlm.assets import cache_dir
    from jpeg_dlm.evaluation.evaluate import evaluate, table
    from jpeg_dlm.evaluation.scoring import build_scorer
    from jpeg_dlm.files import write_atomic
    from jpeg_dlm.text.blocks import Blocks
    from jpeg_dlm.text.prepare import prepare
    from jpeg_dlm.training.console import Console

    model, console = load(args.checkpoint, args.device), Console(args.quiet)
    data = replace(model.config.data, source=args.data or model.config.data.source)
    folder = Path(data.source)
    if not (folder / "index.json").is_file():
        # The model's own tokenizer and the same split by document: text held out in training is held out here.
        folder = cache_dir() / "prepared" / f"{folder.name}-{model.tokenizer.fingerprint[:12]}-{data.token_len}"
        with console.progress("Preparing text", "bytes") as progress:
            prepare(data, folder, progress, model.tokenizer)
    sampler = {name.removeprefix("sampler.").replace("-", "_"): value for name, value in extra.items()}
    result = evaluate(model, Blocks(folder, "heldout"), build_scorer(args.scorer), args.n, args.seed, console, **sampler)
    print(table(result))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        write_atomic(args.out / "results.md", table(result) + "\n")
        write_atomic(args.out / "results.json", json.dumps(result, indent=1) + "\n")
    return 0
