"""Errors for users: one sentence that names the cause and the remedy; the command line prints it and exits with `exit_code`."""

import copyreg
import shlex
from collections.abc import Sequence
from typing import Any


class JpegDlmError(Exception):
    """An expected failure; `str(error)` is the sentence to show."""

    exit_code = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the sentence and the attributes: the arguments of a subclass may be others than the sentence."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # pyright: ignore[reportAttributeAccessIssue]


def reason_of(error: BaseException) -> str:
    """Return the first line of another library's error, shortened to fit into a sentence, or its type if it is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")


class UsageError(JpegDlmError):
    """The request itself is wrong: an unknown key, an impossible size, a missing argument."""

    exit_code = 2


class MissingPackageError(UsageError):
    """An optional package is missing; the sentence names the extra that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package '{package}': install it with  pip install 'jpeg-dlm[{extra}]'.")


class DataError(JpegDlmError):
    """Text or prepared data that cannot be used: empty, binary, damaged or changed."""


class CheckpointError(JpegDlmError):
    """A checkpoint that is missing, damaged, or does not fit the model."""


class AssetError(JpegDlmError):
    """A pretrained part or corpus that could not be fetched or whose hash is wrong."""


class NonFiniteError(JpegDlmError):
    """A loss or gradient is not finite."""


# ---------------------------------------------------------------- parts of sentences


def counted(number: int, noun: str) -> str:
    """Return the number with its noun in the singular or plural: "1 text", "2,000 texts"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def minutes(seconds: float) -> str:
    """Return a duration in a unit that fits it."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def either(names: Sequence[str]) -> str:
    """Return the names as alternatives: "a", "a or b", "a, b or c"."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def command(*words: object) -> str:
    """Return a command of this program, quoted for the shell."""
    return shlex.join(["jpeg-dlm", *map(str, words)])
