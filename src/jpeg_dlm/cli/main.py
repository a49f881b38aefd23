"""`jpeg-dlm VERB ...`: finds the verb, shows help without importing torch, and turns errors into one sentence."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from jpeg_dlm import __version__
from jpeg_dlm.cli.options import split_overrides, unknown_option
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
    "info": "sizes, operations and memory of a preset",
    "import": "bring in a published checkpoint: JPEG-DLM, MDLM, SEDD, Duo, AR, ELF, LangFlow, FLM",
    "export": "write a run's averaged weights as a model folder",
    "verify": "check every file of a run or model against its hashes",
    "doctor": "what this machine has, what is missing, how to mend it",
}


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, with exit code 2."""

    def error(self, message: str) -> None:  # type: ignore[override]
        print(f"error: {message[0].upper() + message[1:]}. See  {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def build_parser(verb: str | None) -> argparse.ArgumentParser:
    """The parser; only the asked verb's module is imported, the others are names."""
    parser = Parser(prog="jpeg-dlm", description="Train, sample and study JPEG-DLM and its relatives.")
    parser.add_argument("--version", action="version", version=f"jpeg-dlm {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    for name, summary in VERBS.items():
        sub = verbs.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        )  # fmt: skip
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        if name == verb:
            import_module(f"jpeg_dlm.cli.{name}_verb").add_arguments(sub)
            sub.set_defaults(known=sorted(sub._option_string_actions))
    return parser


def run_verb(words: Sequence[str], overrides: Sequence[str]) -> int:
    """Parse and run; the exit code."""
    verb = next((word for word in words if not word.startswith("-")), None)
    args, unknown = build_parser(verb).parse_known_args(words)
    if unknown:
        raise unknown_option(unknown, args.known, hasattr(args, "preset"))
    return import_module(f"jpeg_dlm.cli.{args.verb}_verb").run(args, overrides) or 0


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit code."""
    # Options of the config leave first: argparse would take the value of one it does not know for a positional argument.
    words, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return run_verb(words, overrides)
        finally:
            sys.stdout.flush()  # here, where a reader that went away can still be told from an error
    except JpegDlmError as error:
        if "--debug" in words:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader went away (`| head`): not an error. The interpreter would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if "--debug" in words:
            raise
        where = f" '{error.filename}'" if error.filename else ""
        print(f"error: {error.strerror or error}{where}: check the path, its permissions and the free space.", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
