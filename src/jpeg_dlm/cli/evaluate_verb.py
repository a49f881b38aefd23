"""jpeg-dlm evaluate"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from jpeg_dlm.cli.options import parse_overrides
from jpeg_dlm.config import SamplerConfig
from jpeg_dlm.errors import UsageError
from jpeg_dlm.evaluation.protocols import PROTOCOLS, protocol

if TYPE_CHECKING:
    from jpeg_dlm.api import Model
    from jpeg_dlm.evaluation.samples import SampleFile
    from jpeg_dlm.evaluation.sources import Source
    from jpeg_dlm.text.blocks import Blocks
    from jpeg_dlm.training.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources", nargs="*", type=Path, metavar="CHECKPOINT_OR_SAMPLES",
        help="model folders, runs, checkpoints, or .txt and .jsonl files of texts (default: the bundled model)",
    )  # fmt: skip
    parser.add_argument("--protocol", default="default", help=f"one of {', '.join(PROTOCOLS)} (default: default)")
    parser.add_argument("-n", type=int, help="texts per seed (default: 256, in the paper's protocols 1024; all of a file)")
    parser.add_argument("--seeds", type=int, help="number of seeds (default: 1, in the paper's protocols 5)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--steps", help="solver steps; several, such as 4,8,16,32, give a sweep")
    parser.add_argument("--solver", help="euler, heun or multistep; several give a sweep")
    parser.add_argument(
        "--data", help="text, prepared folder or named corpus to hold against (default: what the model was trained on)"
    )
    parser.add_argument("--reference", type=Path, help="real texts to hold against instead: .txt or .jsonl")
    parser.add_argument(
        "--scorer", default="smollm2", help="smollm2 (fetched), hf:gpt2-large (the paper's), hf:FOLDER or gguf:FILE"
    )
    parser.add_argument("--mauve", choices=("auto", "on", "off"), default="auto", help="default: auto, if it can be had")
    parser.add_argument("--batch", type=int, default=64, help="texts written at once (default: 64)")
    parser.add_argument("--out", type=Path, help="folder for results, pictures, and parts to go on from when stopped")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    asked = _asked(args, parse_overrides(rest))
    _claim(args.out, asked)

    from jpeg_dlm.evaluation.evaluate import Evaluation, Request
    from jpeg_dlm.evaluation.parts import Parts
    from jpeg_dlm.evaluation.report import table
    from jpeg_dlm.evaluation.scoring import build_scorer
    from jpeg_dlm.training.console import Console

    console = Console(args.quiet)
    request = Request(
        protocol(args.protocol), tuple(asked["seeds"]), args.n, tuple(asked["steps"]), tuple(asked["solvers"]),
        asked["sampler"], args.mauve,
    )  # fmt: skip
    sources = _sources(args, console)
    evaluation = Evaluation(build_scorer(args.scorer), request, Parts(args.out / "parts" if args.out else None), console)
    result = evaluation.run(sources) | {"request": asked}
    print(table(result))
    if args.out:
        _write(args.out, result, console)
    return 0


def _asked(args: argparse.Namespace, extra: dict[str, Any]) -> dict[str, Any]:
    """The request in plain values, checked."""
    if any(not name.startswith("sampler.") for name in extra):
        raise UsageError("Only --sampler.* options can be changed when evaluating.")
    if args.n is not None and args.n < 2:
        raise UsageError("Evaluation needs at least 2 texts: raise -n.")
    count = args.seeds if args.seeds is not None else protocol(args.protocol).seeds
    if count < 1 or args.batch < 1:
        raise UsageError("--seeds and --batch must be at least 1.")
    try:
        steps = [int(k) for k in args.steps.split(",")] if args.steps else []
    except ValueError as error:
        raise UsageError(f"--steps takes numbers such as 4,8,16, not '{args.steps}'.") from error
    solvers = args.solver.split(",") if args.solver else []
    known = get_args(get_type_hints(SamplerConfig)["solver"])
    wrong = [name for name in solvers if name not in known]
    if wrong:
        raise UsageError(f"Unknown solver '{wrong[0]}': choose of {', '.join(known)}.")
    if any(k < 1 for k in steps):
        raise UsageError("--steps must be at least 1.")
    return {
        "sources": [str(p) for p in args.sources], "protocol": args.protocol, "n": args.n,
        "seeds": list(range(args.seed, args.seed + count)), "steps": steps, "solvers": solvers,
        "sampler": {name.removeprefix("sampler.").replace("-", "_"): value for name, value in extra.items()},
        "scorer": args.scorer, "data": args.data, "reference": str(args.reference) if args.reference else None,
    }  # fmt: skip


def _claim(out: Path | None, asked: dict[str, Any]) -> None:
    """A folder belongs to one request: the same one goes on or is repeated there, another one is refused."""
    if out is None:
        return
    from jpeg_dlm.files import write_atomic

    path = out / "request.json"
    begun = (out / "results.json").exists() or (out / "parts").is_dir()
    if begun:
        try:
            same = json.loads(path.read_text("utf-8")) == asked
        except (OSError, ValueError):
            same = False
        if not same:
            raise UsageError(
                f"'{out}' already holds results of another evaluation: name another folder, nothing was overwritten."
            )
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(asked, indent=1) + "\n")


def _sources(args: argparse.Namespace, console: Console) -> Iterator[Source]:
    """Files are read at once, so that a bad one is told before anything long; models one after the other."""
    from jpeg_dlm.evaluation.samples import REAL, is_samples, read_samples
    from jpeg_dlm.evaluation.sources import file_sources

    files = [path for path in args.sources if is_samples(path)]
    models: list[Path | None] = [path for path in args.sources if not is_samples(path)]
    found = file_sources(files, args.reference)
    for source in found:
        source.real(1)  # refuses texts without real ones beside them
    reference = read_samples(args.reference, REAL) if args.reference else None
    if not args.sources:
        models = [None]
    return _chain(found, models, reference, args, console)


def _chain(
    files: Sequence[Source],
    models: Sequence[Path | None],
    reference: SampleFile | None,
    args: argparse.Namespace,
    console: Console,
) -> Iterator[Source]:
    yield from files
    from jpeg_dlm.api import load
    from jpeg_dlm.evaluation.sources import ModelSource

    names = [path.resolve().name if path else "bundled" for path in models]
    for path, name in zip(models, names, strict=True):
        model = load(path, args.device)
        label = str(path) if names.count(name) > 1 else name
        yield ModelSource(model, label, args.batch, _heldout(model, args, reference, console), reference)


def _heldout(model: Model, args: argparse.Namespace, reference: SampleFile | None, console: Console) -> Blocks | None:
    """Text held out in training, packed like the model's; with a reference file it is used only if it is prepared."""
    from jpeg_dlm.assets import cache_dir
    from jpeg_dlm.text.blocks import Blocks
    from jpeg_dlm.text.prepare import prepare

    data = replace(model.config.data, source=args.data or model.config.data.source)
    folder = Path(data.source)
    if not (folder / "index.json").is_file():
        if reference is not None:
            return None
        # The model's own tokenizer and the same split by document: text held out in training is held out here.
        folder = cache_dir() / "prepared" / f"{folder.name}-{model.tokenizer.fingerprint[:12]}-{data.token_len}"
        with console.progress("Preparing text", "bytes") as progress:
            prepare(data, folder, progress, model.tokenizer)
    return Blocks(folder, "heldout")


def _write(out: Path, result: dict[str, Any], console: Console) -> None:
    from jpeg_dlm.evaluation.pictures import draw_lengths, draw_sweep
    from jpeg_dlm.evaluation.report import table
    from jpeg_dlm.files import write_atomic

    write_atomic(out / "results.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    write_atomic(out / "results.md", table(result) + "\n")
    entries = [entry for entry in result["entries"] if entry["runs"][0]["lengths"]]
    for i, entry in enumerate(entries):
        draw_lengths(entry, out / ("lengths.png" if len(entries) == 1 else f"lengths-{i + 1}.png"))
    swept = [entry for entry in result["entries"] if "sampler" in entry]
    if len({(e["sampler"]["steps"], e["sampler"]["solver"]) for e in swept}) > 1:
        draw_sweep(swept, result["scorer"], out / "sweep.png")
    console.say(f"Wrote {out / 'results.json'}, results.md and pictures.")
