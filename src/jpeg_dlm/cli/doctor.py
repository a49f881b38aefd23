"""jpeg-dlm demo and doctor: a first look, and what is installed"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import textwrap
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from jpeg_dlm import __version__
from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.cli.selftest import CHECKS, run_checks
from jpeg_dlm.util.errors import UsageError

# Held-out pairs of the translator: eight that lie evenly over the file, none chosen.
PAIRS = {
    "C'est pas possible !": "No way!",
    "Tom paraît énervé.": "Tom sounds angry.",
    "Je vous parlais.": "I was talking to you.",
    "Effectuons un appel.": "Let's make a phone call.",
    "Veuillez rester à portée de voix.": "Please stay within earshot.",
    "Je n'ai pas d'amis à qui parler.": "I have no friend to talk with.",
    "Il s'agit d'une approche globale.": "This is a comprehensive approach.",
    "Cela vous dérangerait-il si je changeais de siège maintenant ?": "Would you mind if I changed seats now?",
}
CARD = "Of 3,093 held-out sentences it has BLEU 29.7, an AR model of its size 56.4 (docs/translator.md)."
SENTENCE = "A woman in a red dress is walking down the street."
ENDS = ("Two dogs are running in the grass.", "A woman is sitting on a bench in the park.")
NEXT = {  # commands that work when pasted, with a note
    "generate translator --source 'Je suis fatigué.'": "",
    "generate -n 8 --steps 64 --watch": "",
    "reconstruct 'A dog is running on the beach.'": "",
    "edit 'A dog is running on the beach.' --noise 0.6": "",
    "train --preset smoke --out runs/first": "minutes; it writes short sentences",
    "train --preset captions --out runs/captions": "this model before fine-tuning, two hours",
}


def add_demo_arguments(parser: Parser) -> None:
    """No options."""


def run_demo(args: argparse.Namespace) -> None:
    from jpeg_dlm.api import load
    from jpeg_dlm.cli.live_view import Watcher

    def say(text: str, indent: str = "   ") -> None:
        columns = shutil.get_terminal_size().columns
        print(textwrap.fill(text, columns, initial_indent=indent, subsequent_indent="   "), flush=True)

    began, model = time.monotonic(), load("translator")
    m, d, steps = model.config.model, model.config.data, model.config.sampler.steps
    about = f"{m.latent_len} latents become a sentence of up to {d.token_len} tokens in {steps} steps (model: translator)."
    say(f"1. French to English: {about}", "")
    print("   Held-out sentences, not chosen; the translation of a person stands in parentheses.\n")
    for (source, reference), text in zip(PAIRS.items(), model.generate(source=list(PAIRS)), strict=True):
        say(source, "   ")
        say(f"{text}  ({reference})", "     -> ")
    print()
    say(CARD)
    model = load()
    m, d = model.config.model, model.config.data
    print()
    say(f"2. Writing: {m.latent_len} latents of noise become a sentence of up to {d.token_len} tokens (model: bundled).", "")
    say("Each moment shows what the model would write if it had to stop there.\n")
    model.generate(1, seed=7, watch=Watcher(model))
    print("\n   Eight more, not chosen:\n")
    for text in model.generate(8, seed=0):
        say(text, "   - ")
    print(f"\n3. The codec: a sentence through {m.latent_len} latents per {d.token_len} tokens and back.\n")
    say(SENTENCE, "   in   ")
    say(model.reconstruct([SENTENCE])[0], "   out  ")
    print("\n4. Halfway between two sentences, in latent space.\n")
    for i, text in enumerate(model.interpolate(*ENDS, points=5)):
        say(text, f"   {i / 4:.2f}  ")
    print(f"\nThat took {time.monotonic() - began:.1f} s. What to try next:\n")
    for words, note in NEXT.items():
        print(f"   jpeg-dlm {words}")
        if note:
            print(f"      ({note})")


def add_doctor_arguments(parser: Parser) -> None:
    parser.add_argument("--selftest", action="store_true", help="train, sample and measure small models here, in minutes")
    parser.add_argument("--only", nargs="+", choices=CHECKS, metavar="NAME", help="with --selftest: only these checks")
    parser.add_argument("--out", type=Path, metavar="FILE", help="with --selftest: file for the result, replaced if it exists")


def run_doctor(args: argparse.Namespace) -> int:
    if args.selftest:
        return selftest(args.only or list(CHECKS), args.out)
    stray = next((name for name in ("only", "out") if getattr(args, name)), None)
    if stray:
        raise UsageError(f"--{stray} belongs to the self-test: add --selftest.")

    from jpeg_dlm.checkpoints.model_folder import BUNDLED_FOLDER
    from jpeg_dlm.text.download import ASSETS
    from jpeg_dlm.util.files import cache_dir

    print(*machine(), sep="\n")
    for name, extra in packages().items():
        missing = f"not installed: pip install 'jpeg-dlm[{extra}]'" if extra else "MISSING: pip install jpeg-dlm"
        print(f"  {name:<18} {_version(name) or missing}")
    cache = cache_dir()
    disk = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    print(f"Cache: {cache} ({shutil.disk_usage(disk).free / 1e9:.0f} GB free)")
    for name, asset in ASSETS.items():
        there = (cache / asset.cached_name).exists()
        print(f"  {name:<18} {'cached' if there else f'{asset.megabytes} MB, fetched when first needed'}")
    if not (BUNDLED_FOLDER / "manifest.json").is_file():
        print("Bundled models: MISSING: reinstall jpeg-dlm")
    return 0


def selftest(checks: Sequence[str], out: Path | None) -> int:
    """Run the checks, show and write their table with the facts of this machine, and return 1 if one failed."""
    from jpeg_dlm.cli.show import show
    from jpeg_dlm.evaluation.table import Table, markdown
    from jpeg_dlm.util.console import Console
    from jpeg_dlm.util.files import write_atomic

    rows = run_checks(checks, Console())
    versions = ", ".join(f"{name} {version}" for name in packages() if (version := _version(name)))
    columns = ("check", "result", "detail", "seconds")
    table = Table.of(f"jpeg-dlm {__version__} self-test", columns, rows, (*machine(), versions))
    if out:
        write_atomic(out, markdown([table]) + "\n")  # before the output, which a closed pipe may end
    show([table])
    return 1 if any(result == "failed" for _, result, _, _ in rows) else 0


def packages() -> dict[str, str]:
    """Return the packages that this one uses, each with the extra that installs it, '' for those of the core."""
    needs = [need for need in metadata.requires("jpeg-dlm") or [] if not re.search(r'extra == "(dev|docs)"', need)]
    extras = {re.split(r"[^\w.-]", need)[0]: re.search(r'extra == "([^"]+)"', need) for need in needs}
    return {name: match[1] if match else "" for name, match in extras.items()}


def machine() -> list[str]:
    """Describe the system, the GPUs with the CUDA of torch, and the CPU with the precision of training on it."""
    import torch

    from jpeg_dlm.util.distributed import cpu_name, training_precision

    gpu = "none; everything runs on the CPU"
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        gpu = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {memory:.0f} GiB, CUDA {torch.version.cuda}"
    return [
        f"Python {platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        f"GPU: {gpu}",
        f"CPU: {cpu_name()}; --train.precision auto is {training_precision('auto', 'cpu')}",
    ]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
