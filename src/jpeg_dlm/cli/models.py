"""jpeg-dlm info, import, export and verify: what a run or a model is, and its other forms"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from jpeg_dlm.cli.options import add_config_arguments, add_options, flag, list_options, overrides, read_config
from jpeg_dlm.cli.parser import Parser, positive, share, unit
from jpeg_dlm.config import Config
from jpeg_dlm.methods.registry import names
from jpeg_dlm.options import flatten, read_options_file
from jpeg_dlm.presets import PRESETS
from jpeg_dlm.util.errors import UsageError, command

DEFAULT = "lm1b"
PLAN_ONLY = ("devices", "tokens", "tflops", "utilization")
FORMATS = {
    "safetensors": "a model folder in the released layout",
    "onnx": "the networks of jpeg-dlm for ONNX Runtime",
    "transformers": "jpeg-dlm, elf and mdlm for AutoModel, without this package",
    "web": "a page that writes text in the browser",
}
RUN = "run or model folder to describe; without it, a preset is described"
PUBLISHED = "a .safetensors, .ckpt, .pth, .pt or .bin file, or a Hugging Face folder; sizes are read from it"
RUNTIME = "with --format web: folder 'dist' of the package onnxruntime-web (default: npm downloads it)"
BLEND = "average the weights with another model's, such as the one that was fine-tuned (bundled, translator: of the package)"


def add_info_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("path", nargs="?", type=Path, metavar="RUN", help=RUN)
    add_config_arguments(parser, DEFAULT)
    add("--method", choices=names("system"), metavar="NAME", help="which system (default: jpeg-dlm)")
    add("--options", action="store_true", help="every option of the method instead, with its value and meaning")
    add("--plan", action="store_true", help="what a training needs instead: memory of a device, time, days")
    add("--devices", metavar="NxMEMORY", help="with --plan: such as 8x80GB or 1x24GB (default: 8x80GB)")
    add("--tokens", metavar="NUMBER", help="with --plan: tokens of the corpus, such as 1.2B")
    add("--tflops", type=positive, help="with --plan: peak TFLOP/s of a device (default: an A100's)")
    add("--utilization", type=share, help="with --plan: share of the peak that is reached (default: 0.3)")
    add("--json", action="store_true", help="print JSON")


def run_info(args: argparse.Namespace) -> None:
    if args.path:
        _describe(args)
        return
    stray = next((name for name in PLAN_ONLY if getattr(args, name) and not args.plan), None)
    if stray:
        raise UsageError(f"--{stray} belongs to a plan: add --plan.")
    config = read_config(args, default=DEFAULT, method=args.method)
    if args.options and (args.json or args.plan):
        raise UsageError(f"--options is a list of its own: leave out --{'json' if args.json else 'plan'}.")
    if args.options:
        print(list_options(config))
    elif args.plan:
        _plan(args, config)
    else:
        from jpeg_dlm.cli.show import show
        from jpeg_dlm.cost.plan import describe, description_table

        description = describe(config)
        print(json.dumps(description, indent=1)) if args.json else show([description_table(description)])


def _describe(args: argparse.Namespace) -> None:
    """Describe the model or run in a folder; its options are fixed."""
    stray = [name for name in (*PLAN_ONLY, "plan", "options", "preset", "config", "method") if getattr(args, name)]
    if stray := [*stray, *overrides(args)]:
        raise UsageError(f"{flag(stray[0])} is for a preset, and '{args.path}' is as it is: leave one of them out.")
    from jpeg_dlm.checkpoints.model_folder import named_folder

    path = named_folder(args.path)
    if not path.is_dir():
        hint = f": a preset is described by  {command('info', '--preset', args.path)}" if str(args.path) in PRESETS else ""
        raise UsageError(f"'{args.path}' is no folder of a run or a model{hint or '.'}")

    from jpeg_dlm.report.run_summary import format_summary, run_summary

    summary = run_summary(path)
    print(json.dumps(summary, indent=1, ensure_ascii=False) if args.json else format_summary(summary))


def _plan(args: argparse.Namespace, config: Config) -> None:
    from jpeg_dlm.cli.show import show
    from jpeg_dlm.cost.plan import make_plan, parse_devices, parse_tokens, plan_tables, stages, stated_speed

    devices = parse_devices(args.devices or "8x80GB")
    tokens = parse_tokens(args.tokens) if args.tokens else None
    speed = stated_speed(config, args.tflops, args.utilization)
    plans = [make_plan(stage, devices, speed, tokens) for stage in stages(config)]
    if args.json:
        print(json.dumps(plans, indent=1))
    else:
        show([table for plan in plans for table in plan_tables(plan)])


def add_import_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add_config_arguments(parser, "by the file")
    add("path", type=Path, help=PUBLISHED)
    add("--method", choices=names("system"), metavar="NAME", help="system of the checkpoint (default: detected from the file)")
    add("--weights", choices=("ema", "raw"), help="weights to take if the file has both (default: ema)")
    add("--tokenizer", type=Path, help="tokenizer.json, or a folder with one, to keep with the model")
    add("--out", type=Path, required=True, help="model folder to write")


def run_import(args: argparse.Namespace) -> None:
    values = read_options_file(args.config) if args.config else {}
    method: str = args.method or str(values.pop("method", ""))
    options = flatten(values) | overrides(args)

    from jpeg_dlm.checkpoints.model_folder import write_model
    from jpeg_dlm.importing.published import import_published, read_published

    published = read_published(args.path, args.weights)
    parts, assumed, of_preset = import_published(published, options, method, args.preset or "", args.tokenizer)
    write_model(parts, args.out)

    which = " (averaged weights)" if published.weights == "ema" else ""
    data, parameters = parts.config.data, sum(t.numel() for t in published.tensors.values())
    sizes = f"{parameters:,} parameters, {data.token_len} tokens, vocabulary {data.vocab_size:,}"
    print(f"Imported {parts.method.title}{which}: {sizes}, into '{args.out}'.")
    if assumed:
        print(f"Not stated in the file, so assumed: {_values(assumed, parts.config)}.")
    print(f"Of preset {parts.config.preset}, as no weights tell them: {_values(of_preset, parts.config)}.")


def _values(names: Sequence[str], config: Config) -> str:
    return ", ".join(f"{flag(name)} {attrgetter(name)(config)}" for name in names)


def add_export_arguments(parser: Parser) -> None:
    add, formats = parser.add_argument, "; ".join(f"{name}: {text}" for name, text in FORMATS.items())
    add("checkpoint", type=Path, help="run, checkpoint or model folder")
    add("--out", type=Path, required=True, help="folder to write")
    add("--format", choices=FORMATS, default="safetensors", metavar="NAME", help=formats)
    add("--precision", choices=("fp32", "int8"), help="with --format onnx or web (default: fp32)")
    add("--runtime", type=Path, metavar="FOLDER", help=RUNTIME)
    add("--blend", type=Path, metavar="MODEL", help=BLEND)
    add("--share", type=unit, help="with --blend: weight of the other model, from 0 to 1 (default: 0.5)")
    add("--half", action="store_true", help="store the weights in fp16, at half the size (safetensors)")
    add_options(parser, ("sampler",))


def run_export(args: argparse.Namespace) -> None:
    if args.share is not None and not args.blend:
        raise UsageError("--share is the weight of another model: name it with --blend.")
    if args.half and args.format != "safetensors":
        raise UsageError("--half is for safetensors: leave it out, or choose that format.")
    if args.precision and args.format not in ("onnx", "web"):
        raise UsageError("--precision is for --format onnx or web: leave it out, or choose one of these formats.")
    if args.runtime and args.format != "web":
        raise UsageError("--runtime is for --format web: leave it out, or choose that format.")

    from jpeg_dlm.checkpoints.model_folder import blend, named_model, write_model
    from jpeg_dlm.config import validate
    from jpeg_dlm.options import override

    changes = overrides(args)
    parts = named_model(args.checkpoint)
    parts = replace(parts, config=validate(override(parts.config, changes)))
    if args.blend:
        blend(parts, named_model(args.blend), 0.5 if args.share is None else args.share)
    if args.format == "transformers":
        from jpeg_dlm.export.transformers_folder import usage, write_transformers
        from jpeg_dlm.hub import HubModel

        card = HubModel(parts).generate_model_card(usage=usage(parts), library_name="transformers")
        write_transformers(parts, args.out, str(card))
        print(f"Wrote '{args.out}': load it with  AutoModel.from_pretrained({str(args.out)!r}, trust_remote_code=True)")
        return
    if args.format == "web":
        from jpeg_dlm.export.web import write_web

        write_web(parts, args.out, args.precision or "fp32", args.runtime)
        server = shlex.join(["python", "-m", "http.server", "--directory", str(args.out)])
        return print(f"Wrote '{args.out}', a page for any server of files, such as  {server}")
    if args.format == "onnx":
        from jpeg_dlm.export.onnx_model import write_exported

        write_exported(parts, args.out, args.precision or "fp32")
    else:
        write_model(parts, args.out, half=args.half)
    print(f"Wrote '{args.out}': load it with  jpeg_dlm.load({str(args.out)!r})  or  {command('generate', args.out)}")


def add_verify_arguments(parser: Parser) -> None:
    parser.add_argument("path", type=Path, help="run directory, checkpoint, model folder or prepared text")


def run_verify(args: argparse.Namespace) -> int:
    """Print a line for every folder with a manifest; return 1 if any is damaged."""
    from jpeg_dlm.checkpoints.model_folder import named_folder, verify

    damaged = False
    for folder, error in verify(named_folder(args.path)):
        print(f"{folder}  {error or 'whole'}")
        damaged |= error is not None
    return int(damaged)
