"""jpeg-dlm import"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from jpeg_dlm.cli.options import add_config_arguments, parse_overrides
from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.config import Config
from jpeg_dlm.config_io import flatten, read_json_file
from jpeg_dlm.methods.registry import names

BY_FILE = "auto"  # not a preset: selects the paper's preset with the file's vocabulary


def add_arguments(parser: Parser) -> None:
    add_config_arguments(parser, default=BY_FILE)
    parser.add_argument(
        "path", type=Path,
        help="a .safetensors, .ckpt, .pth, .pt or .bin file, or a Hugging Face folder; sizes are read from it",
    )  # fmt: skip
    parser.add_argument(
        "--method", choices=names("system"), metavar="NAME", help="system of the checkpoint (default: detected from the file)"
    )
    parser.add_argument("--weights", choices=("ema", "raw"), help="weights to take if the file has both (default: ema)")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json, or a folder with one, to keep with the model")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    values = read_json_file(args.config) if args.config else {}
    method: str = args.method or str(values.pop("method", ""))
    options = flatten(values) | parse_overrides(rest)

    from jpeg_dlm.folders.model_folder import write_model
    from jpeg_dlm.foreign.published import import_published, read_published

    published = read_published(args.path, args.weights)
    base = "" if args.preset == BY_FILE else args.preset
    imported = import_published(published, options, method, base, args.tokenizer)
    parts = imported.parts
    write_model(parts, args.out)

    which = " (averaged weights)" if published.weights == "ema" else ""
    data, parameters = parts.config.data, sum(t.numel() for t in published.tensors.values())
    sizes = f"{parameters:,} parameters, {data.token_len} tokens, vocabulary {data.vocab_size:,}"
    print(f"Imported {parts.method.title}{which}: {sizes}, into '{args.out}'.")
    if imported.assumed:
        print(f"Not stated in the file, so assumed: {_values(imported.assumed, parts.config)}.")
    print(f"Of preset {parts.config.preset}, as no weights tell them: {_values(imported.of_preset, parts.config)}.")
    return 0


def _values(names: Sequence[str], config: Config) -> str:
    return ", ".join(f"--{name.replace('_', '-')} {attrgetter(name)(config)}" for name in names)
