"""jpeg-dlm tune"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.cli.values import positive, whole
from jpeg_dlm.errors import UsageError
from jpeg_dlm.flow.sampler_config import FAST_EVALUATIONS
from jpeg_dlm.wording import command


def add_arguments(parser: Parser) -> None:
    parser.add_argument("checkpoint", nargs="?", type=Path, help="model folder, run or checkpoint (default: the bundled model)")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument(
        "--evaluations", type=whole(2), default=FAST_EVALUATIONS,
        help="network evaluations per text, including the decoding one",
    )  # fmt: skip
    parser.add_argument(
        "--solver",
        choices=("euler", "heun", "multistep"),
        help="solver of the fast sampler (default: its own, or multistep if that is sde)",
    )
    parser.add_argument("--w", type=positive, help="guidance scale of the fast sampler (default: the model's)")
    parser.add_argument("--rows", type=whole(1), default=64, help="texts that the search samples")
    parser.add_argument("--trials", type=whole(1), default=150, help="grids tried")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    if args.out.exists():
        raise UsageError(f"'{args.out}' already exists: name another folder, nothing was overwritten.")

    from dataclasses import replace

    from jpeg_dlm.api import load
    from jpeg_dlm.config import validate
    from jpeg_dlm.folders.model_folder import write_model
    from jpeg_dlm.machine.console import Console
    from jpeg_dlm.sampling.grid_search import tuned

    model = load(args.checkpoint, args.device)
    config = model.config
    if model.writer.latent_sampler is None:
        raise UsageError(f"{model.writer.title} has no sampling times to tune: use a jpeg-dlm model.")
    own = config.sampler.fast_solver
    sampler = replace(
        config.sampler, fast_solver=args.solver or ("multistep" if own == "sde" else own),  # times are those of an ODE
        fast_w=config.sampler.fast_w if args.w is None else args.w,
    )  # fmt: skip
    sampler = validate(replace(config, sampler=sampler)).sampler
    console = Console()
    with console.progress("Searching times", "grids") as progress:
        sampler, found = tuned(model.method, sampler, args.evaluations, args.rows, args.trials, progress)
    write_model(replace(model.parts, config=replace(config, sampler=sampler)), args.out)
    evaluations = sampler.fast().evaluations(config.data.token_len)
    print(
        f"Wrote '{args.out}': {sampler.fast_solver} with {evaluations} evaluations, distance from {found.start_error:.4f} to "
        f"{found.error:.4f}; use it with  {command('generate', args.out, '--fast')}"
    )
    return 0
