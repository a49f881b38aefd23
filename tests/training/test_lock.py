"""The run lock between real processes."""

import os
import signal
import subprocess
import sys

import pytest

from jpeg_dlm.training.lock import run_lock
from jpeg_dlm.util.errors import UsageError

HOLD = """
import sys
from pathlib import Path
from jpeg_dlm.training.lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    input()
"""


def test_a_killed_holder_leaves_no_lock(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"process {child.pid} on "), run_lock(tmp_path):
            pass
        assert (tmp_path / "lock").read_text().startswith(f"process {child.pid} ")  # a refused process writes nothing
        child.send_signal(signal.SIGKILL)
        child.wait()
    with run_lock(tmp_path):
        assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} ")
