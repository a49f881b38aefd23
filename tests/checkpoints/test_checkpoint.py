"""Checkpoints under kills, flipped bits and full disks."""

import errno
import random
import shutil
import subprocess
import sys
import time

import pytest
import torch

from jpeg_dlm.checkpoints import checkpoint as ck
from jpeg_dlm.training.lock import run_lock
from jpeg_dlm.util import files
from jpeg_dlm.util.errors import CheckpointError


def groups(step, size=50):
    g = torch.Generator().manual_seed(step)
    names = ("model", "ema", "optimizer")
    return {name: {"w": torch.randn(size, generator=g), "step": torch.tensor(float(step))} for name in names}


def save(run, step, keep=10):
    return ck.save_checkpoint(run, step, groups(step), {"step": step, "note": "ü"}, keep)


def steps(run):
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def quiet(sentence):
    pytest.fail(f"unexpected warning: {sentence}")


def test_retention_keeps_the_newest(tmp_path):
    for step in (5, 10, 100, 99_999_999, 100_000_000):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == ["step-100000000", "step-99999999"]
    assert ck.latest_checkpoint(tmp_path, quiet).step == 100_000_000
    save(tmp_path, 3, keep=1)  # a later step was passed over by a fallback, and stays
    assert len(steps(tmp_path)) == 3


def test_flipped_bits_are_caught_and_passed_over(tmp_path):
    """In every file, the manifest included: the file is named and the step before is loaded."""
    save(tmp_path, 1)
    path, rng = save(tmp_path, 2), random.Random(0)
    for target in sorted(path.iterdir()) * 10:
        data = target.read_bytes()
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        target.write_bytes(flipped)
        warnings = []
        assert ck.latest_checkpoint(tmp_path, warnings.append).step == 1
        assert len(warnings) == 1 and f"'{target}'" in warnings[0]
        target.write_bytes(data)
    assert ck.latest_checkpoint(tmp_path, quiet).step == 2


def test_no_whole_checkpoint_is_an_error_that_names_all(tmp_path):
    for step in (1, 2):
        (save(tmp_path, step) / "ema.safetensors").unlink()
    with pytest.raises(CheckpointError) as error:
        ck.latest_checkpoint(tmp_path, quiet)
    assert "step-00000001/ema.safetensors" in str(error.value) and "step-00000002/ema.safetensors" in str(error.value)


# ---------------------------------------------------------------- full disks


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("name, file", [("save_tensors", "optimizer.safetensors"), ("write_atomic", "state.json")])
def test_a_failing_disk_keeps_what_was(name, file, number, tmp_path, monkeypatch):
    """Half of a file is written, and then the disk is full or gone; later there is room again."""
    save(tmp_path, 1, keep=1)
    real = getattr(ck.files, name)

    def fail(path, *rest):
        real(path, *rest)
        if path.name == file:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            raise OSError(number, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="No space left"):
        patch.setattr(ck.files, name, fail)
        save(tmp_path, 2, keep=1)
    assert steps(tmp_path) == ["step-00000001"] and ck.latest_checkpoint(tmp_path, quiet).step == 1
    save(tmp_path, 2, keep=1)
    assert steps(tmp_path) == ["step-00000002"]


@pytest.mark.slow
def test_a_really_full_disk(tmp_path):
    """A file system of one megabyte, mounted in a name space of its own."""
    script = tmp_path / "fill.py"
    script.write_text(
        "import sys, torch; from pathlib import Path; from jpeg_dlm.checkpoints import checkpoint as ck\n"
        "from jpeg_dlm.util.errors import CheckpointError\n"
        "run = Path(sys.argv[1])\n"
        "t = {'model': {'w': torch.randn(150_000)}}\n"
        "ck.save_checkpoint(run, 1, t, {}, 1)\n"
        "try: ck.save_checkpoint(run, 2, t, {}, 1)\n"
        "except CheckpointError as e: print(e)\n"
        "else: sys.exit('the disk was not full')\n"
        "assert [p.name for p in (run / 'checkpoints').iterdir()] == ['step-00000001']\n"
        "assert ck.latest_checkpoint(run, print).step == 1\n"
    )
    mount = tmp_path / "m"
    mount.mkdir()
    command = 'mount -t tmpfs -o size=1m none "$1" || exit 77; exec "$2" "$3" "$1/run"'
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command, "-", str(mount), sys.executable, str(script)], capture_output=True, text=True
    )
    if done.returncode != 0 and "Traceback" not in done.stderr and "full" not in done.stderr:
        pytest.skip(f"cannot mount here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert "No space left" in done.stdout


# ---------------------------------------------------------------- kills

SAVER = """
import sys, torch
from pathlib import Path
from jpeg_dlm.checkpoints.checkpoint import save_checkpoint
run, step = Path(sys.argv[1]), int(sys.argv[2])
while True:
    step += 1
    groups = {name: {"w": torch.full((200_000,), float(step))} for name in ("model", "ema", "optimizer")}
    save_checkpoint(run, step, groups, {"step": step}, keep=2)
    print(step, flush=True)
"""


@pytest.mark.slow
def test_killed_savers_leave_no_torn_checkpoint(tmp_path):
    """SIGKILL at random moments of a process that saves without pause, until several fell into a save."""
    rng, step, midway = random.Random(0), 1, 0
    while midway < 4:
        saver = subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path), str(step)], stdout=subprocess.PIPE, text=True)
        saver.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.2))
        saver.kill()
        told = int((saver.communicate()[0].splitlines() or [step])[-1])
        midway += any((tmp_path / "checkpoints").glob(".tmp-*"))
        found = ck.latest_checkpoint(tmp_path, quiet)
        assert found.step >= told and all(
            bool((found.tensors(n)["w"] == found.step).all()) for n in ("model", "ema", "optimizer")
        )
        step = found.step
    save(tmp_path, step + 1, keep=1)  # the next save clears up after the dead
    assert steps(tmp_path) == [f"step-{step + 1:08d}"]


def test_taking_the_lock_clears_up_after_the_killed(tmp_path):
    run = tmp_path / "run"
    dead = [run / place / f"{files.TEMP_PREFIX}1" for place in (".", "samples", "data")]
    for temp in dead:
        temp.mkdir(parents=True)
    (dead[0] / "file").write_text("half of it")
    with run_lock(run):
        assert not any(temp.exists() for temp in dead)
    assert sorted(path.name for path in run.iterdir()) == ["data", "lock", "samples"]


def test_other_threads_are_told(tmp_path):
    save(tmp_path, 1)
    found = ck.latest_checkpoint(tmp_path, quiet)
    threads = torch.get_num_threads()
    assert found.changed_environment() is None and found.manifest["threads"] == threads
    torch.set_num_threads(threads + 1)
    try:
        assert f"threads {threads}, not {threads + 1}" in found.changed_environment()
    finally:
        torch.set_num_threads(threads)
