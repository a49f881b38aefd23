"""Locks a folder for one process: one trainer per run, one writer of prepared text or of results.

The kernel holds the lock (`flock`) and releases it however the process ends, so there are no stale locks. The file only
names the holder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from jpeg_dlm.util.distributed import on_main
from jpeg_dlm.util.errors import UsageError
from jpeg_dlm.util.files import make_directory, sweep_temps

LOCK = "lock"


class Locked(UsageError):
    """Another process is using the folder."""

    def __init__(self, run: Path, holder: str) -> None:
        super().__init__(f"'{run}' is in use by {holder}: wait for it, stop it, or name another folder.")
        self.run, self.holder = run, holder


@contextlib.contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Lock the folder within the block; create it if needed and remove temporary files of killed processes."""
    make_directory(run)
    with open(run / LOCK, "a+") as file:  # closing releases the lock; the file stays, or two processes could lock two files
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise Locked(run, file.read(300).strip() or "another process") from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        for folder in (run, *run.glob("*/"), *run.glob("*/*/")):  # deeper files of a run are never replaced
            sweep_temps(folder)
        yield


@contextlib.contextmanager
def lock_together(run: Path) -> Iterator[None]:
    """Lock the folder for all processes of a command; the main one holds the lock, and an error is raised on every one."""
    with contextlib.ExitStack() as stack:
        on_main(lambda: stack.enter_context(run_lock(run)))
        yield
