"""The run lock between real processes."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from jpeg_dlm.errors import UsageError
from jpeg_dlm.training.lock import run_lock

HOLD = """
import sys
from pathlib import Path
from jpeg_dlm.training.lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    input()
"""


def test_lock_is_released_and_taken_again(tmp_path):
    run = tmp_path / "new" / "run"
    for _ in range(2):
        with run_lock(run):
            assert (run / "lock").read_text() == f"{os.getpid()} {socket.gethostname()}\n"
    with pytest.raises(RuntimeError), run_lock(run):
        raise RuntimeError
    with run_lock(run):
        pass


def test_the_holder_is_named(tmp_path):
    with run_lock(tmp_path), pytest.raises(UsageError) as error, run_lock(tmp_path):
        pass
    assert f"process {os.getpid()} on {socket.gethostname()}" in str(error.value)


def test_a_killed_holder_leaves_no_lock(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"process {child.pid} on "), run_lock(tmp_path):
            pass
        assert (tmp_path / "lock").read_text().startswith(f"{child.pid} ")  # a refused process writes nothing
        child.send_signal(signal.SIGKILL)
        child.wait()
    with run_lock(tmp_path):
        assert (tmp_path / "lock").read_text().startswith(f"{os.getpid()} ")


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(UsageError), run_lock(tmp_path):
        pass
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_file_is_no_run_directory(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(UsageError, match="Cannot write"), run_lock(tmp_path / "run"):
        pass
