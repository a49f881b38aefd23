"""jpeg-dlm serve and report: pages about models and results"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from jpeg_dlm.cli.generate import add_backend
from jpeg_dlm.cli.parser import Parser, number, positive, whole


def add_serve_arguments(parser: Parser) -> None:
    models = "model folders, runs or checkpoints, as PATH or NAME=PATH; 'bundled' is the bundled model (default: bundled)"
    parser.add_argument("models", nargs="*", metavar="MODEL", help=models)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is every one of this machine")
    parser.add_argument("--port", type=number(int, ge=0, le=65535), default=8000, help="port to listen on; 0 takes a free one")
    parser.add_argument("--keys", type=Path, metavar="FILE", help="file of bearer keys, one on each line (default: no key)")
    parser.add_argument("--cors", action="append", default=[], metavar="ORIGIN", help="allow pages of this origin; repeatable")
    parser.add_argument("--time-limit", type=positive, default=60.0, help="seconds for one request")
    parser.add_argument("--queue", type=whole(1), default=1024, help="texts that may wait; more are answered with 429")
    parser.add_argument("--batch", type=whole(1), default=64, help="texts at once")
    parser.add_argument("--log", action="store_true", help="write a line for each request")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    add_backend(parser)


def run_serve(args: argparse.Namespace) -> None:
    from jpeg_dlm.serve.app import Service, bind, run_server
    from jpeg_dlm.serve.http import read_keys
    from jpeg_dlm.serve.models import load_models

    keys = read_keys(args.keys) if args.keys else ()
    bound = bind(args.host, args.port)  # before the models are loaded, which takes longer
    models = load_models(args.models, args.device, args.backend, args.precision)
    service = Service(models, args.time_limit, args.queue, args.batch, keys)
    address = f"http://{f'[{args.host}]' if ':' in args.host else args.host}:{bound.getsockname()[1]}"
    print(f"Serving {', '.join(models)} at {address}. Ctrl-C ends it.", file=sys.stderr, flush=True)
    run_server(service, bound, args.cors, args.log)


def add_report_arguments(parser: Parser) -> None:
    folders = "runs, models, results of evaluate, compare or study, or folders that contain them"
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN", help=folders)
    parser.add_argument("--out", type=Path, default=Path("report"), help="folder for index.html")
    parser.add_argument("--title", help="heading of the page (default: the names of the folders)")


def run_report(args: argparse.Namespace) -> None:
    from jpeg_dlm.report.collect import collect
    from jpeg_dlm.report.render import write_report

    print(f"Wrote {write_report(collect(args.folders, args.title), args.out)}.")
