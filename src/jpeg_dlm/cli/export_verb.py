"""jpeg-dlm export"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.wording import command

FORMATS = {
    "safetensors": "a model folder in the released layout",
    "onnx": "the networks of jpeg-dlm for onnxruntime",
    "openvino": "the same for OpenVINO",
}


def add_arguments(parser: Parser) -> None:
    parser.add_argument("checkpoint", type=Path, help="run, checkpoint or model folder")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    said = "; ".join(f"{name}: {text}" for name, text in FORMATS.items())
    parser.add_argument("--format", choices=FORMATS, default="safetensors", metavar="NAME", help=said)


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    from jpeg_dlm.folders.model_folder import read_model, write_model

    parts = read_model(args.checkpoint)
    if args.format == "safetensors":
        write_model(parts, args.out)
    else:
        from jpeg_dlm.export.folder import write_exported
        from jpeg_dlm.machine.console import Console

        write_exported(parts, args.format, args.out, Console().say)
    print(f"Wrote '{args.out}': load it with  jpeg_dlm.load({str(args.out)!r})  or  {command('generate', args.out)}")
    return 0
