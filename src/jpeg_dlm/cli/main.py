"""`jpeg-dlm VERB ...`: finds the verb, shows help without importing torch, and turns errors into one sentence."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module

from jpeg_dlm import __version__
from jpeg_dlm.allocator import keep_freed_memory
from jpeg_dlm.cli.options import refused_override, split_overrides
from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.errors import JpegDlmError

VERBS = {
    "demo": "see the bundled model write, reconstruct and interpolate",
    "generate": "write text with a model (the bundled one by default)",
    "reconstruct": "send text through the codec and back: what the latents keep",
    "interpolate": "walk between two texts in latent space",
    "prepare": "turn text into packed token blocks on disk",
    "train": "train a model; stop and resume exactly",
    "evaluate": "score generated, real and shuffled text with a language model",
    "compare": "train, score and time several systems with an equal budget: the table of all methods",
    "study": "the paper's ablations, sweeps and latent-space figures, on your text and at your size",
    "report": "one page with tables, figures and samples of runs, evaluations, comparisons and studies",
    "benchmark": "how fast models write, measured in turns",
    "info": "what a run or model is and how to go on; or sizes, operations and memory of a preset",
    "tune": "find the few sampling times that serve a model best, for generate --fast",
    "import": "bring in a published checkpoint: JPEG-DLM, MDLM, SEDD, Duo, AR, ELF, LangFlow, FLM",
    "export": "write a model folder, or its networks for ONNX or OpenVINO",
    "verify": "check every file of a run or model against its hashes",
    "doctor": "what this machine has, what is missing, how to mend it",
    "completion": "print a script with which a shell completes verbs, options and values",
}


def build_parser(verb: str | None) -> Parser:
    """The parser; only the asked verb's module is imported, the others are names."""
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
    """Parse and run; the exit code."""
    verb = next((word for word in words if not word.startswith("-")), None)
    args, unknown = build_parser(verb).parse_known_args(words)
    error = args.parser.unknown(unknown) or refused_override(overrides, args.accepts, args.parser)
    if error:
        raise error
    args.command = shlex.join(["jpeg-dlm", *words, *overrides])  # results say what made them
    return import_module(f"jpeg_dlm.cli.{args.verb}_verb").run(args, overrides) or 0


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit code."""
    ready_streams()
    if argv is None:  # this process is the program
        keep_freed_memory()
    # Options of the config leave first: argparse would take the value of one it does not know for a positional argument.
    words, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return run_verb(words, overrides)
        finally:
            sys.stdout.flush()  # here, where a reader that went away can still be told from an error
    except BrokenPipeError:
        return 0  # the reader went away (`| head`): not an error
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
    """What to say about an error; None for one that only a programming mistake explains."""
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


# ---------------------------------------------------------------- standard streams that are closed, full or of few characters


class ClosedOutput(io.TextIOBase):
    """Standard output that was closed before the program began; the work is done and its files written before it is told."""

    lost = False

    def write(self, text: str) -> int:
        self.lost = True
        return len(text)

    def flush(self) -> None:
        if self.lost:
            self.lost = False
            raise JpegDlmError("Standard output is closed, so what was printed is lost: leave it open, or send it to a file.")


def ready_streams() -> None:
    """Standard streams that exist and take any text.

    Without them the next files to be opened would get their numbers, and with it whatever libraries print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    sys.stdout = sys.stdout or ClosedOutput()
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - lives as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error always does


def tell(sentence: str) -> None:
    """One line on standard error; control characters of a hostile name would otherwise command the terminal."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence)
    with contextlib.suppress(OSError):
        print(f"error: {shown}", file=sys.stderr)


def drop_unwritable_output() -> None:
    """The interpreter flushes once more when it ends, and would complain about what could not be written."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    raise SystemExit(main())
