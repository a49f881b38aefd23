"""jpeg-dlm serve"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from jpeg_dlm.cli.generate_verb import DTYPES
from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.cli.values import positive, whole
from jpeg_dlm.errors import MissingPackageError, UsageError

NEEDED = {"starlette": "starlette", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"}
LARGEST_PORT = 65535
BACKLOG = 2048  # connections that wait to be accepted


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "models", nargs="*", metavar="MODEL",
        help="model folders, runs or checkpoints, as PATH or NAME=PATH; 'bundled' is the bundled model (default: bundled)",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is every one of this machine")
    parser.add_argument("--port", type=whole(0), default=8000, help="port to listen on; 0 takes a free one")
    parser.add_argument("--keys", type=Path, metavar="FILE", help="file of bearer keys, one on each line (default: no key)")
    parser.add_argument("--cors", action="append", default=[], metavar="ORIGIN", help="allow pages of this origin; repeatable")
    parser.add_argument("--time-limit", type=positive, default=60.0, help="seconds for one request")
    parser.add_argument("--queue", type=whole(1), default=1024, help="texts that may wait; more are answered with 429")
    parser.add_argument("--batch", type=whole(1), default=64, help="texts at once")
    parser.add_argument("--log", action="store_true", help="write a line of JSON for each request to standard error")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="exact", metavar="TYPE", help="of jpeg-dlm: type of the weights, as in generate"
    )


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    if args.port > LARGEST_PORT:
        raise UsageError(f"--port must be at most {LARGEST_PORT}, not {args.port}.")
    for module, package in NEEDED.items():
        if importlib.util.find_spec(module) is None:
            raise MissingPackageError(package, "serve", "jpeg-dlm serve")

    from jpeg_dlm.serve.app import Limits, Service
    from jpeg_dlm.serve.auth import read_keys
    from jpeg_dlm.serve.logs import Log
    from jpeg_dlm.serve.models import load_models
    from jpeg_dlm.serve.server import address_of, bind, run_server

    keys = read_keys(args.keys) if args.keys else ()
    bound = bind(args.host, args.port)  # before the models are loaded, which takes longer
    models = load_models(args.models, args.device, args.dtype)
    service = Service(models, Limits(args.time_limit, args.queue, args.batch), keys, Log(args.log))
    bound.listen(BACKLOG)
    print(f"Serving {', '.join(models)} at {address_of(bound)}. Ctrl-C ends it.", file=sys.stderr, flush=True)
    run_server(service, bound, args.cors)
    return 0
