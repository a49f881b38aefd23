"""Checkpoints under kills, flipped bits and full disks."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from jpeg_dlm import files
from jpeg_dlm.errors import CheckpointError
from jpeg_dlm.training import checkpoint as ck


def groups(step, size=50):
    g = torch.Generator().manual_seed(step)
    names = ("model", "ema", "optimizer")
    return {name: {"w": torch.randn(size, generator=g), "step": torch.tensor(float(step))} for name in names}


def save(run, step, keep=10, **options):
    return ck.save_checkpoint(run, step, groups(step), {"step": step, "note": "ü"}, keep, **({"wait_s": 0.0} | options))


def steps(run):
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def quiet(sentence):
    pytest.fail(f"unexpected warning: {sentence}")


def test_round_trip(tmp_path):
    assert ck.latest_checkpoint(tmp_path, quiet) is None
    path = save(tmp_path, 1234)
    assert path == tmp_path / "checkpoints" / "step-00001234"
    expected = ["ema.safetensors", "manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert sorted(p.name for p in path.iterdir()) == expected
    found = ck.latest_checkpoint(tmp_path, quiet)
    assert found and found.step == 1234 and found.state == {"step": 1234, "note": "ü"} and found.path == path
    for name, group in groups(1234).items():
        read = found.tensors(name)
        assert set(read) == set(group) and all(torch.equal(read[k], group[k]) for k in group)


def test_retention_keeps_the_newest(tmp_path):
    for step in (5, 10, 100, 99_999_999, 100_000_000):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == ["step-100000000", "step-99999999"]
    assert ck.latest_checkpoint(tmp_path, quiet).step == 100_000_000


def test_retention_leaves_a_later_step_alone(tmp_path):
    for step in (1, 2, 9):
        save(tmp_path, step)
    save(tmp_path, 3, keep=2)
    assert steps(tmp_path) == ["step-00000002", "step-00000003", "step-00000009"]


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 4)
    ck.save_checkpoint(tmp_path, 4, {"model": {"v": torch.ones(2)}}, {"again": True}, 2)
    assert steps(tmp_path) == ["step-00000004"]
    found = ck.latest_checkpoint(tmp_path, quiet)
    assert found.state == {"again": True} and set(found.tensors("model")) == {"v"}


def test_a_replacement_cut_short_still_has_the_old_one(tmp_path):
    path = save(tmp_path, 4)
    save(tmp_path, 3)
    path.rename(path.with_name(path.name + ".old"))  # where a kill between the two renames leaves things
    assert ck.latest_checkpoint(tmp_path, quiet).step == 4
    save(tmp_path, 4)
    assert steps(tmp_path) == ["step-00000003", "step-00000004"]


def test_fifty_flipped_bits_are_caught_and_passed_over(tmp_path):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    rng = random.Random(0)
    entries = sorted(path.iterdir())
    for i in range(50):
        target = entries[i % len(entries)]
        data = target.read_bytes()
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        target.write_bytes(flipped)
        warnings = []
        assert ck.latest_checkpoint(tmp_path, warnings.append).step == 1
        assert len(warnings) == 1 and str(target) in warnings[0] and "step 1" in warnings[0]
        assert [r.error is None for r in ck.verify_run(tmp_path)] == [True, False]
        target.write_bytes(data)
    assert ck.latest_checkpoint(tmp_path, quiet).step == 2


def test_no_whole_checkpoint_is_an_error_that_names_all(tmp_path):
    for step in (1, 2):
        (save(tmp_path, step) / "ema.safetensors").unlink()
    with pytest.raises(CheckpointError) as error:
        ck.latest_checkpoint(tmp_path, quiet)
    assert "step-00000001/ema.safetensors" in str(error.value) and "step-00000002/ema.safetensors" in str(error.value)


def test_a_renamed_checkpoint_is_refused(tmp_path):
    save(tmp_path, 1).rename(tmp_path / "checkpoints" / "step-00000009")
    with pytest.raises(CheckpointError, match="holds step 1, not 9"):
        ck.latest_checkpoint(tmp_path, quiet)


def test_verify_run_reports_sizes(tmp_path):
    path = save(tmp_path, 7)
    (report,) = ck.verify_run(tmp_path)
    assert (report.path, report.step, report.error) == (path, 7, None)
    assert report.size == sum(p.stat().st_size for p in path.iterdir())
    assert ck.verify_run(tmp_path / "nothing") == []


# ---------------------------------------------------------------- full disks


class Disk:
    """Accepts a number of bytes and is full from then on, in the middle of a write."""

    def __init__(self, room):
        self.room = room

    def __call__(self, handle, data):
        data = memoryview(data).cast("B")
        handle.write(data[: max(self.room, 0)])
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_disk_full_at_any_point_keeps_what_was(tmp_path, monkeypatch):
    save(tmp_path, 1, keep=1)
    total = sum(p.stat().st_size for p in (tmp_path / "checkpoints" / "step-00000001").iterdir())
    for room in range(0, total, 97):
        monkeypatch.setattr(files, "_write", Disk(room))
        with pytest.raises(CheckpointError, match="needs .* MB but .* MB are free"):
            save(tmp_path, 2, keep=1)
        assert steps(tmp_path) == ["step-00000001"]
    assert ck.latest_checkpoint(tmp_path, quiet).step == 1


def test_disk_with_room_again_is_used(tmp_path, monkeypatch):
    save(tmp_path, 1, keep=1)
    disk = Disk(500)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        disk.room = 10**6 if len(waits) == 2 else 500

    monkeypatch.setattr(files, "_write", disk)
    monkeypatch.setattr(ck.time, "sleep", sleep)
    save(tmp_path, 2, keep=1, attempts=3, wait_s=7.0)
    assert waits == [7.0, 7.0] and steps(tmp_path) == ["step-00000002"]
    assert ck.latest_checkpoint(tmp_path, quiet).step == 2


def test_too_little_space_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(ck, "free_bytes", lambda path: 1_000_000)
    monkeypatch.setattr(files, "_write", lambda handle, data: pytest.fail("wrote"))
    with pytest.raises(CheckpointError, match=r"needs 1\.0 MB but 1\.0 MB are free"):
        save(tmp_path, 1)


def test_other_disk_errors_are_told_at_once(tmp_path, monkeypatch):
    def fail(handle, data):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(files, "_write", fail)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        save(tmp_path, 1, attempts=1)
    assert steps(tmp_path) == []


@pytest.mark.slow
def test_a_really_full_disk(tmp_path):
    """A file system of one megabyte, mounted in a name space of its own."""
    script = tmp_path / "fill.py"
    script.write_text(
        "import sys, torch; from pathlib import Path; from jpeg_dlm.training import checkpoint as ck\n"
        "from jpeg_dlm.errors import CheckpointError\n"
        "run = Path(sys.argv[1]); ck.MARGIN_BYTES = -10**9  # trust nothing but the write itself\n"
        "t = {'model': {'w': torch.randn(150_000)}}\n"
        "ck.save_checkpoint(run, 1, t, {}, 1, wait_s=0.0)\n"
        "try: ck.save_checkpoint(run, 2, t, {}, 1, wait_s=0.0)\n"
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
    assert "MB are free" in done.stdout


# ---------------------------------------------------------------- kills

LOOP = """
import sys, torch
from pathlib import Path
from jpeg_dlm.training.checkpoint import save_checkpoint
run, again = Path(sys.argv[1]), int(sys.argv[2])
step = int(sys.argv[3])
while True:
    step += 0 if again else 1
    groups = {n: {"w": torch.full((20_000,), float(step))} for n in ("model", "ema", "optimizer")}
    save_checkpoint(run, step, groups, {"step": step}, 2)
    print(step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("again", [0, 1], ids=["next step", "same step"])
def test_killed_savers_leave_no_torn_checkpoint(tmp_path, again):
    rng = random.Random(0)
    reached = 1
    for _ in range(10):
        with subprocess.Popen(
            [sys.executable, "-c", LOOP, str(tmp_path), str(again), str(reached)], stdout=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        ) as child:  # fmt: skip
            reported = int(child.stdout.readline())
            time.sleep(rng.uniform(0.0, 0.15))
            child.send_signal(signal.SIGKILL)
            reported = max([reported, *map(int, child.stdout.read().split())])
        found = ck.latest_checkpoint(tmp_path, quiet)
        assert found and found.step in (reported, reported + 1)
        for name in ("model", "ema", "optimizer"):
            assert (found.tensors(name)["w"] == found.step).all()
        assert all(r.error is None for r in ck.verify_run(tmp_path))
        reached = found.step
    save(tmp_path, reached + 1, keep=1)  # the next save clears up after the dead
    assert steps(tmp_path) == [f"step-{reached + 1:08d}"]


# ---------------------------------------------------------------- optimizer state


def trained(seed=0, steps=3, **options):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    model.register_parameter("idle", torch.nn.Parameter(torch.ones(3)))
    groups = [{"params": list(model[0].parameters()), "lr": 1e-2}, {"params": [*model[2].parameters(), model.idle]}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, **options)
    for i in range(steps):
        one_step(model, optimizer, i)
    return model, optimizer, dict(model.named_parameters())


def one_step(model, optimizer, i):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(i))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"fused": True}, {"foreach": True}])
def test_optimizer_round_trip_is_exact(tmp_path, options):
    model, optimizer, params = trained(**options)
    flat = ck.optimizer_tensors(optimizer, params)
    assert "exp_avg/0.weight" in flat and "step/2.bias" in flat and "untouched/idle" in flat
    files.save_tensors(tmp_path / "o", flat, {})

    copy, fresh, names = trained(seed=1, steps=0, **options)
    copy.load_state_dict(model.state_dict())
    ck.load_optimizer_tensors(fresh, names, files.load_tensors(tmp_path / "o"))
    for i in range(10, 13):
        one_step(model, optimizer, i)
        one_step(copy, fresh, i)
    for a, b in zip(model.parameters(), copy.parameters(), strict=True):
        assert torch.equal(a, b)
    again = ck.optimizer_tensors(fresh, names)
    now = ck.optimizer_tensors(optimizer, params)
    assert set(again) == set(now) and all(torch.equal(again[k], now[k]) for k in now)


def test_optimizer_state_is_copied(tmp_path):
    _, optimizer, params = trained()
    _, fresh, names = trained(seed=1, steps=0)
    flat = ck.optimizer_tensors(optimizer, params)
    ck.load_optimizer_tensors(fresh, names, flat)
    assert fresh.state[names["0.weight"]]["exp_avg"].data_ptr() != flat["exp_avg/0.weight"].data_ptr()


@pytest.mark.parametrize("spoil, named", [
    (lambda f: f.pop("exp_avg/0.weight"), "0.weight"),
    (lambda f: f.pop("untouched/idle"), "lacks optimizer state for 'idle'"),
    (lambda f: [f.pop(k) for k in list(f) if k.startswith("exp_avg_sq/")], "exp_avg_sq"),
    (lambda f: f.update({"exp_avg/other": torch.ones(1)}), "'other'"),
    (lambda f: f.update({"stray": torch.ones(1)}), "'stray'"),
    (lambda f: f.update({"momentum/0.bias": torch.ones(8)}), "0.bias"),
    (lambda f: f.update({"exp_avg/0.weight": torch.ones(4, 8)}), r"shape \(4, 8\) but the parameter \(8, 4\)"),
])  # fmt: skip
def test_misfits_are_named_and_change_nothing(spoil, named):
    _, optimizer, params = trained()
    flat = dict(ck.optimizer_tensors(optimizer, params))
    spoil(flat)
    _, other, names = trained(seed=1)
    before = {k: v.clone() for k, v in ck.optimizer_tensors(other, names).items()}
    with pytest.raises(CheckpointError, match=named):
        ck.load_optimizer_tensors(other, names, flat)
    after = ck.optimizer_tensors(other, names)
    assert set(after) == set(before) and all(torch.equal(after[k], before[k]) for k in before)


def test_other_optimizers(tmp_path):
    model, _, params = trained(steps=0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    one_step(model, sgd, 0)
    flat = ck.optimizer_tensors(sgd, params)
    assert {k.partition("/")[0] for k in flat} == {"momentum_buffer", "untouched"}
    ck.load_optimizer_tensors(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), params, flat)
    with pytest.raises(CheckpointError, match="no name"):
        ck.optimizer_tensors(sgd, {})
