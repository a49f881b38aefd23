"""`jpeg-dlm VERB ...`: runs a verb, shows help without importing torch, and reports errors as one sentence."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module

from jpeg_dlm import __version__
from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.util.errors import JpegDlmError, MissingPackageError

VERBS = {  # the module of `cli` that has `add_VERB_arguments` and `run_VERB`, and a summary
    "demo": ("doctor", "see models translate, write, reconstruct and interpolate"),
    "generate": ("generate", "write text with a model (the bundled one by default)"),
    "reconstruct": ("codec", "encode text to latents and decode it again"),
    "interpolate": ("codec", "interpolate between two or more texts in latent space"),
    "edit": ("codec", "give the latents of a text some noise and write it anew: variations of it"),
    "serve": ("serve", "serve models over HTTP: a page to try them, and an API like OpenAI's"),
    "prepare": ("train", "turn text into packed token blocks on disk"),
    "train": ("train", "train a model; stop and resume exactly"),
    "evaluate": ("evaluate", "score generated, real and shuffled text with a language model"),
    "lm-eval": ("evaluate", "run the lm-evaluation-harness, which then knows our models as jpeg_dlm"),
    "compare": ("study", "train, score and time several systems with an equal budget: the table of all methods"),
    "study": ("study", "repeat the paper's ablations, sweeps and latent-space figures on your text and at your size"),
    "report": ("serve", "write one page with tables, figures and samples of runs, evaluations, comparisons and studies"),
    "benchmark": ("benchmark", "measure the sampling speed of models, in turns"),
    "info": ("models", "describe a run or model and what to do next; or sizes, operations and memory of a preset"),
    "new-system": ("new_system", "write a package with a system of your own, which begins as a small one that works"),
    "import": ("models", "bring in a published checkpoint: JPEG-DLM, MDLM, SEDD, Duo, AR, ELF, LangFlow, FLM"),
    "export": ("models", "write a model folder, its networks for ONNX Runtime, or a page that writes text in the browser"),
    "verify": ("models", "check every file of a run or model against its hashes"),
    "doctor": ("doctor", "show what is installed on this machine, what is missing, and how to fix it"),
}
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of `mallopt` (glibc's malloc.h)


def build_parser(*verbs: str | None) -> Parser:
    """Build the parser; import only the modules of `verbs`."""
    parser = Parser(prog="jpeg-dlm", description="Train, sample and study JPEG-DLM and its relatives.")
    parser.add_argument("--version", action="version", version=f"jpeg-dlm {__version__}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    for verb, (module, summary) in VERBS.items():
        sub = subparsers.add_parser(verb, help=summary, description=summary[0].upper() + summary[1:] + ".")
        sub.set_defaults(parser=sub)
        if verb in verbs:
            getattr(import_module(f"jpeg_dlm.cli.{module}"), f"add_{verb.replace('-', '_')}_arguments")(sub)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def run_verb(words: Sequence[str]) -> int:
    """Parse the command line, run its verb, and return the exit code."""
    verb = next((word for word in words if not word.startswith("-")), None)
    if verb == "lm-eval" and not {"-h", "--help"} & {*words}:  # all other words are those of another program
        from jpeg_dlm.integrations.lm_eval import run

        return run(words[words.index(verb) + 1 :]) or 0
    args, unknown = build_parser(verb).parse_known_args(words)
    if error := args.parser.unknown(unknown):
        raise error
    args.command = shlex.join(["jpeg-dlm", *words])  # stored with the results
    if getattr(args, "threads", None):
        import torch

        torch.set_num_threads(args.threads)
    return getattr(import_module(f"jpeg_dlm.cli.{VERBS[args.verb][0]}"), f"run_{args.verb.replace('-', '_')}")(args) or 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line program; return the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # accept any text, as standard error does
    if argv is None:  # called as a program, not from Python
        keep_freed_memory()
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        try:
            return run_verb(words)
        finally:
            if sys.stdout:
                sys.stdout.flush()  # here, so that a closed pipe raises an error below
    except KeyboardInterrupt:
        return 130
    except (JpegDlmError, OSError, MemoryError, UnicodeError, RuntimeError, ModuleNotFoundError) as error:
        if isinstance(error, OSError) and sys.stdout:  # the interpreter would flush it again at exit
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 0  # the reader closed the pipe (`| head`), which is not an error
        sentence = sentence_of(error)
        if sentence is None or "--debug" in words:
            raise
        escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence)
        print(f"error: {escaped}", file=sys.stderr)
        return error.exit_code if isinstance(error, JpegDlmError) else 1


def sentence_of(error: Exception) -> str | None:
    """Return the message for an error, or None if it can only be a bug."""
    if isinstance(error, JpegDlmError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        from jpeg_dlm.cli.doctor import packages

        package = str(error.name).partition(".")[0].replace("_", "-")
        extra = packages().get(package)
        return str(MissingPackageError(package, extra, "This command")) if extra else None
    if isinstance(error, OSError):
        where = f" '{error.filename}'" if error.filename else ""
        return f"{error.strerror or error}{where}: check the path, its permissions and the free space."
    if isinstance(error, UnicodeError):
        return f"A name or text does not fit the encoding of this system ({error}): set PYTHONUTF8=1 and try again."
    if isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate memory" in str(error):
        return "There is not enough memory for this: lower the batch, the number of texts or the sizes of the model."
    return None


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory, which the system would clear again each time, unless the environment has settings.

    A training step at the size of LM1B then takes 6.8 s instead of 7.9 (measured).
    """
    if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None and mallopt(MMAP_MAX, 0):
            mallopt(TRIM_THRESHOLD, -1)
