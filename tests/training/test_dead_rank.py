"""If one process of a run dies, the others end soon, the checkpoints are whole, and the run resumes to the same bits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest
from conftest import micro_flags
from small_runs import launch

from jpeg_dlm.files import sha256_file
from jpeg_dlm.folders.checkpoint import verify_run
from jpeg_dlm.training.lifeline import LOST

LIFELINE = """
import os, signal, sys, time
from jpeg_dlm.machine import dist
from jpeg_dlm.training.lifeline import Lifeline
ranks = dist.setup("cpu")
with Lifeline(ranks):
    pass  # both leave in peace, and nobody minds
sys.stdout.write("ready\\n"); sys.stdout.flush()
with Lifeline(ranks):
    if ranks.rank == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)  # waits for nothing that would fail by itself
"""

FAULTY = """
import os, signal, sys, torch
from jpeg_dlm.cli.main import main
from jpeg_dlm.errors import NonFiniteError
from jpeg_dlm.training.loop import Trainer
fault, mark, words = sys.argv[1], sys.argv[2], sys.argv[3:]
real_step = Trainer.launch_step
def launch_step(self, *args):
    stats = real_step(self, *args)
    if self.step == 7 and self.ranks.rank == 1 and fault != "none":
        open(mark, "w").close()
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise NonFiniteError("the loss of this process alone stopped being a number")
    return stats
Trainer.launch_step = launch_step
raise SystemExit(main(words))
"""


@pytest.mark.parametrize("dead", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_end_of_one_process_is_the_end_of_the_other(tmp_path, dead):
    """Without a launcher, which might end them, and without a collective, which might fail."""
    script = tmp_path / "lifeline.py"
    script.write_text(LIFELINE)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    env = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    pair = [
        subprocess.Popen(
            [sys.executable, str(script), str(dead)], env=env | {"RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    told = [process.communicate(timeout=200) for process in pair]
    assert [out for out, _ in told] == ["ready\n", "ready\n"]
    assert pair[dead].returncode == -signal.SIGKILL
    assert pair[1 - dead].returncode == 1 and LOST in told[1 - dead][1]


def command(data, out, *extra):
    flags = micro_flags(train__steps=12, train__batch=4, train__save_every=3, train__eval_every=0, encoder__kind="random")
    where = ["--data", str(data), "--out", str(out), "--quiet", "--device", "cpu", "--threads", "1"]
    return ["train", "--preset", "smoke", *where, *flags, *extra]


def hashes(run):
    folder = run / "checkpoints" / "step-00000012"
    return {name: sha256_file(folder / f"{name}.safetensors") for name in ("model", "ema", "optimizer")}


@pytest.mark.slow
def test_a_run_survives_the_death_of_a_process(corpus_file, tmp_path):
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY)

    def run(fault, name, *extra):  # which waits less long than a collective does: no process waited for the dead one
        return launch(str(script), fault, str(tmp_path / f"{name}.mark"), *command(corpus_file, tmp_path / name, *extra))

    assert run("none", "straight").returncode == 0
    for fault in ("kill", "raise"):
        failed = run(fault, fault)
        assert failed.returncode != 0
        assert (tmp_path / f"{fault}.mark").exists()
        assert not (tmp_path / fault / "checkpoints" / "step-00000012").exists()
        reports = verify_run(tmp_path / fault)
        assert [(r.step, r.error) for r in reports] == [(3, None), (6, None)]
        if fault == "raise":
            assert "the loss of this process alone" in failed.stderr
        resumed = run("none", fault, "--resume")
        assert resumed.returncode == 0, resumed.stderr[-3000:]
        assert hashes(tmp_path / fault) == hashes(tmp_path / "straight")
