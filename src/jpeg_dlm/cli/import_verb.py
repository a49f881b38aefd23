"""jpeg-dlm import"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from jpeg_dlm.cli.options import add_config_arguments, read_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, default="lm1b")
    parser.add_argument("file", type=Path, help="a .safetensors file in the released layout; sizes are read from it")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    config = read_config(args, rest)

    from jpeg_dlm.model_folder import import_released, write_model

    parts = import_released(args.file, config)
    write_model(parts, args.out)
    m, d = parts.config.model, parts.config.data
    sizes = f"{d.token_len} tokens, {m.latent_len} latents of width {m.latent_dim}, vocabulary {d.vocab_size:,}"
    print(f"Imported a model of {sizes} into '{args.out}'.")
    return 0
