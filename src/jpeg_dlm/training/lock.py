"""One process at a time in a folder: one trainer per run, one writer of prepared text or of results.

The lock is the kernel's, not the file's: it ends with the process that holds it, however that process ended, so there is
no stale lock to clean up. The file only tells a second trainer whom it met.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from jpeg_dlm.errors import UsageError
from jpeg_dlm.files import make_directory, sweep_temps

LOCK = "lock"


class Locked(UsageError):
    """Another process is at work in the directory."""

    def __init__(self, run: Path, holder: str) -> None:
        super().__init__(f"'{run}' is in use by {holder}: wait for it, stop it, or name another folder.")
        self.run, self.holder = run, holder


@contextlib.contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Hold the folder for the duration of the block; creates it if needed and clears up after killed holders."""
    path = run / LOCK
    try:
        make_directory(run)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UsageError(f"Cannot write in '{run}' ({error.strerror or error}): name another folder.") from error
    try:
        _take(fd, run)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        for folder in (run, *run.glob("*/"), *run.glob("*/*/")):  # as deep as a run has files that are replaced
            sweep_temps(folder)
        yield
    finally:
        # Closing releases it. The file stays: deleting it would let two processes lock two files of one name.
        os.close(fd)


def _take(fd: int, run: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise UsageError(f"The disk of '{run}' cannot lock files ({error.strerror}): put the run elsewhere.") from error
        pid, _, host = os.pread(fd, 300, 0).decode(errors="replace").strip().partition(" ")
        holder = f"process {pid} on {host}" if pid and host else "another process"
        raise Locked(run, holder) from error
