"""jpeg-dlm export"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jpeg_dlm.cli.options import document_options, parse_overrides
from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.cli.values import unit
from jpeg_dlm.errors import UsageError
from jpeg_dlm.wording import command

FORMATS = {
    "safetensors": "a model folder in the released layout",
    "onnx": "the networks of jpeg-dlm for onnxruntime",
    "openvino": "the same for OpenVINO",
}


def add_arguments(parser: Parser) -> None:
    parser.add_argument("checkpoint", type=Path, help="run, checkpoint or model folder")
    parser.add_argument(
        "--out", type=Path, help="folder to write (default for onnx and openvino: the cache, where generate finds it by itself)"
    )
    said = "; ".join(f"{name}: {text}" for name, text in FORMATS.items())
    parser.add_argument("--format", choices=FORMATS, default="safetensors", metavar="NAME", help=said)
    parser.add_argument(
        "--blend", type=Path, metavar="MODEL",
        help="average the weights with another model's, such as the one that was fine-tuned ('bundled': the bundled model)",
    )  # fmt: skip
    parser.add_argument("--share", type=unit, default=0.5, help="with --blend: weight of the other model, from 0 to 1")
    parser.add_argument("--half", action="store_true", help="store the weights in fp16, at half the size (safetensors)")
    document_options(parser, ("sampler",))


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    from jpeg_dlm.config import validate
    from jpeg_dlm.config_io import override
    from jpeg_dlm.folders.blend import blend
    from jpeg_dlm.folders.model_folder import named_model, write_model

    changes = parse_overrides(rest)
    parts = named_model(args.checkpoint)
    parts = replace(parts, config=validate(override(parts.config, changes)))
    if args.blend:
        blend(parts, named_model(args.blend), args.share)
    if args.format == "safetensors":
        if args.out is None:
            raise UsageError("Name the folder to write with --out.")
        write_model(parts, args.out, half=args.half)
    elif args.half:
        raise UsageError("--half is for safetensors: leave it out, or choose that format.")
    else:
        from jpeg_dlm.export.folder import cached_export, write_exported
        from jpeg_dlm.machine.console import Console

        out = args.out or cached_export(parts, args.format)
        write_exported(parts, args.format, out, Console().say)
        if args.out is None:
            print(f"Wrote '{out}': {command('generate', args.checkpoint)}  takes it if it is the fastest form on this machine.")
            return 0
    print(f"Wrote '{args.out}': load it with  jpeg_dlm.load({str(args.out)!r})  or  {command('generate', args.out)}")
    return 0
