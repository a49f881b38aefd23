"""jpeg-dlm info"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jpeg_dlm.cli.options import add_config_arguments, list_options, read_config
from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.cli.values import positive, share
from jpeg_dlm.errors import UsageError
from jpeg_dlm.methods.registry import names
from jpeg_dlm.presets import PRESETS
from jpeg_dlm.wording import command

if TYPE_CHECKING:
    from jpeg_dlm.config import Config

DEFAULT = "lm1b"
PLAN_ONLY = ("devices", "tokens", "tflops", "utilization", "measured", "device")


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "path", nargs="?", type=Path, metavar="RUN", help="run or model folder to describe; without it, a preset is described"
    )
    add_config_arguments(parser, DEFAULT, required=False)
    parser.add_argument("--method", choices=names("system"), metavar="NAME", help="which system (default: jpeg-dlm)")
    parser.add_argument("--options", action="store_true", help="every option of the method instead, with its value and meaning")
    parser.add_argument("--plan", action="store_true", help="what a training needs instead: memory of a device, time, days")
    parser.add_argument("--devices", metavar="NxMEMORY", help="with --plan: such as 8x80GB or 1x24GB (default: 8x80GB)")
    parser.add_argument("--tokens", metavar="NUMBER", help="with --plan: tokens of the corpus, such as 1.2B")
    parser.add_argument("--tflops", type=positive, help="with --plan: peak TFLOP/s of a device (default: an A100's)")
    parser.add_argument("--utilization", type=share, help="with --plan: share of the peak that is reached (default: 0.3)")
    parser.add_argument("--measured", action="store_true", help="with --plan: the speed of this machine instead, timed now")
    parser.add_argument("--device", help="with --measured: cpu, cuda, ... (default: a GPU if there is one)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    if args.path:
        return _describe(args, rest)
    stray = next((name for name in PLAN_ONLY if getattr(args, name) and not args.plan), None)
    if stray:
        raise UsageError(f"--{stray} belongs to a plan: add --plan.")
    config = read_config(args, rest, default=DEFAULT, method=args.method)
    if args.options:
        print(list_options(config))
        return 0
    if args.plan:
        print(_plan(args, config))
        return 0
    from jpeg_dlm.accounting.info import describe, format_description

    description = describe(config)
    print(json.dumps(description, indent=1) if args.json else format_description(description))
    return 0


def _describe(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Describe the model or run in a folder; its options are fixed."""
    stray = [name for name in (*PLAN_ONLY, "plan", "options", "preset", "config", "method") if getattr(args, name)]
    if stray or rest:
        option = rest[0] if rest else f"--{stray[0]}"
        raise UsageError(f"{option} is for a preset, and '{args.path}' is as it is: leave one of them out.")
    from jpeg_dlm.folders.model_folder import named_folder

    path = named_folder(args.path)
    if not path.is_dir():
        hint = f": a preset is described by  {command('info', '--preset', args.path)}" if str(args.path) in PRESETS else ""
        raise UsageError(f"'{args.path}' is no folder of a run or a model{hint or '.'}")

    from jpeg_dlm.report.overview import format_overview, overview

    found = overview(path)
    print(json.dumps(found, indent=1, ensure_ascii=False) if args.json else format_overview(found))
    return 0


def _plan(args: argparse.Namespace, config: Config) -> str:
    from jpeg_dlm.accounting.plan import full_plan, measured_speed, parse_devices, parse_tokens, stated_speed
    from jpeg_dlm.accounting.plan_text import format_plan

    devices = parse_devices(args.devices or "8x80GB")
    tokens = parse_tokens(args.tokens) if args.tokens else None
    if args.measured and (args.tflops or args.utilization):
        raise UsageError("A speed is either measured or stated: drop --measured, or --tflops and --utilization.")
    if args.measured:
        from jpeg_dlm.machine.console import Console

        Console().say(f"Timing a few rows of {config.method} at the size of {config.preset}; this may take a minute ...")
        speed = measured_speed(config, args.device)
    else:
        speed = stated_speed(config, args.tflops, args.utilization)
    plan = full_plan(config, devices, speed, tokens)
    return json.dumps(plan, indent=1) if args.json else format_plan(plan)
