"""`jpeg-dlm VERB ...`: runs a verb, shows help without importing torch, and reports errors as one sentence."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module

from jpeg_dlm import __version__
from jpeg_dlm.cli.allocator import keep_freed_memory
from jpeg_dlm.cli.options import refused_override, split_overrides
from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.errors import JpegDlmError

VERBS = {
    "demo": "see the bundled model write, reconstruct and interpolate",
    "generate": "write text with a model (the bundled one by default)",
    "reconstruct": "encode text to latents and decode it again",
    "interpolate": "interpolate between two or more texts in latent space",
    "edit": "give the latents of a text some noise and write it anew: variations of it",
    "serve": "serve models over HTTP: a page to try them, and an API like OpenAI's",
    "prepare": "turn text into packed token blocks on disk",
    "train": "train a model; stop and resume exactly",
    "evaluate": "score generated, real and shuffled text with a language model",
    "compare": "train, score and time several systems with an equal budget: the table of all methods",
    "study": "repeat the paper's ablations, sweeps and latent-space figures on your text and at your size",
    "report": "write one page with tables, figures and samples of runs, evaluations, comparisons and studies",
    "benchmark": "measure the sampling speed of models, in turns",
    "info": "describe a run or model and what to do next; or sizes, operations and memory of a preset",
    "tune": "find the best few sampling times of a model, for generate --fast",
    "import": "bring in a published checkpoint: JPEG-DLM, MDLM, SEDD, Duo, AR, ELF, LangFlow, FLM",
    "export": "write a model folder, or its networks for ONNX or OpenVINO",
    "verify": "check every file of a run or model against its hashes",
    "doctor": "show what is installed on this machine, what is missing, and how to fix it",
    "completion": "print a shell completion script for verbs, options and values",
}


def build_parser(verb: str | None) -> Parser:
    """Build the parser; import only the module of `verb`."""
    parser = Parser(prog="jpeg-dlm", description="Train, sample and study JPEG-DLM and its relatives.")
    parser.add_argument("--version", action="version", version=f"jpeg-dlm {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    for name, summary in VERBS.items():
        sub = verbs.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        sub.set_defaults(parser=sub, accepts=())
        if name == verb:
            import_module(f"jpeg_dlm.cli.{name}_verb").add_arguments(sub)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def run_verb(words: Sequence[str], overrides: Sequence[str]) -> int:
    """Parse the command line, run its verb, and return the exit code."""
    verb = next((word for word in words if not word.startswith("-")), None)
    args, unknown = build_parser(verb).parse_known_args(words)
    error = args.parser.unknown(unknown) or refused_override(overrides, args.accepts, args.parser)
    if error:
        raise error
    args.command = shlex.join(["jpeg-dlm", *words, *overrides])  # stored with the results
    return import_module(f"jpeg_dlm.cli.{args.verb}_verb").run(args, overrides) or 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line program; return the exit code."""
    ready_streams()
    if argv is None:  # called as a program, not from Python
        keep_freed_memory()
    # Remove config options first: argparse would take the value of an unknown option for a positional argument.
    words, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return run_verb(words, overrides)
        finally:
            sys.stdout.flush()  # here, so that a closed pipe raises BrokenPipeError below
    except BrokenPipeError:
        return 0  # the reader closed the pipe (`| head`), which is not an error
    except KeyboardInterrupt:
        return 130
    except (JpegDlmError, OSError, MemoryError, UnicodeError, RuntimeError) as error:
        sentence = sentence_of(error)
        if sentence is None or "--debug" in words:
            raise
        tell(sentence)
        return error.exit_code if isinstance(error, JpegDlmError) else 1
    finally:
        drop_unwritable_output()


def sentence_of(error: Exception) -> str | None:
    """Return the message for an error, or None if it can only be a bug."""
    if isinstance(error, JpegDlmError):
        return str(error)
    if isinstance(error, OSError):
        where = f" '{error.filename}'" if error.filename else ""
        return f"{error.strerror or error}{where}: check the path, its permissions and the free space."
    if isinstance(error, UnicodeError):
        return f"A name or text does not fit the encoding of this system ({error}): set PYTHONUTF8=1 and try again."
    if isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate memory" in str(error):
        return "There is not enough memory for this: lower the batch, the number of texts or the sizes of the model."
    return None


class ClosedOutput(io.TextIOBase):
    """Replaces a standard output that is closed; raises an error only when flushed, after the work is done."""

    lost = False

    def write(self, text: str) -> int:
        self.lost = True
        return len(text)

    def flush(self) -> None:
        if self.lost:
            self.lost = False
            raise JpegDlmError("Standard output is closed, so what was printed is lost: leave it open, or send it to a file.")


def ready_streams() -> None:
    """Open closed standard streams, whose descriptors other files would get, and let standard output accept any text."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
    sys.stdout = sys.stdout or ClosedOutput()
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - lives as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error always does


def tell(sentence: str) -> None:
    """Print an error as one line on standard error, with control characters escaped to protect the terminal."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence)
    with contextlib.suppress(OSError):
        print(f"error: {shown}", file=sys.stderr)


def drop_unwritable_output() -> None:
    """Redirect standard output to /dev/null if it cannot be written: the interpreter flushes it again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    raise SystemExit(main())
