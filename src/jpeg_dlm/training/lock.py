"""Locks a folder for one process: one trainer per run, one writer of prepared text or of results.

The kernel holds the lock (`flock`) and releases it however the process ends, so there are no stale locks. The file only
names the holder.
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
from jpeg_dlm.machine.collectives import on_main

LOCK = "lock"


class Locked(UsageError):
    """Another process is using the folder."""

    def __init__(self, run: Path, holder: str) -> None:
        super().__init__(f"'{run}' is in use by {holder}: wait for it, stop it, or name another folder.")
        self.run, self.holder = run, holder


@contextlib.contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Lock the folder within the block; create it if needed and remove temporary files of killed processes."""
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
        for folder in (run, *run.glob("*/"), *run.glob("*/*/")):  # deeper files of a run are never replaced
            sweep_temps(folder)
        yield
    finally:
        # Closing releases the lock. The file stays: deleting it would let two processes lock two files of one name.
        os.close(fd)


@contextlib.contextmanager
def lock_together(run: Path) -> Iterator[None]:
    """Lock the folder for all processes of a command; the main one holds the lock, and an error is raised on every one."""
    with contextlib.ExitStack() as stack:
        on_main(lambda: stack.enter_context(run_lock(run)))
        yield


def _take(fd: int, run: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise UsageError(f"The disk of '{run}' cannot lock files ({error.strerror}): put the run elsewhere.") from error
        pid, _, host = os.pread(fd, 300, 0).decode(errors="replace").strip().partition(" ")
        holder = f"process {pid} on {host}" if pid and host else "another process"
        raise Locked(run, holder) from error
