"""Checkpoints under kills, flipped bits and full disks."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from reliability import Flips, flip_bits, full_disk, kill_savers

from jpeg_dlm import files
from jpeg_dlm.errors import CheckpointError
from jpeg_dlm.folders import checkpoint as ck
from jpeg_dlm.training.lock import run_lock
from jpeg_dlm.training.optimizer_state import load_optimizer_tensors, optimizer_tensors


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
    save(tmp_path, 2)
    assert flip_bits(50, tmp_path) == Flips(flips=50, caught=50, files=5)
    assert ck.latest_checkpoint(tmp_path, quiet).step == 2
    (tmp_path / "checkpoints" / "step-00000002" / "state.json").write_text("{}")
    assert [report.error is None for report in ck.verify_run(tmp_path)] == [True, False]


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
def test_training_goes_on_exactly_after_a_full_disk(tmp_path):
    (figure,) = full_disk(True, tmp_path)
    assert figure.holds, figure.found


@pytest.mark.slow
def test_a_really_full_disk(tmp_path):
    """A file system of one megabyte, mounted in a name space of its own."""
    script = tmp_path / "fill.py"
    script.write_text(
        "import sys, torch; from pathlib import Path; from jpeg_dlm.folders import checkpoint as ck\n"
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


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step"])
def test_killed_savers_leave_no_torn_checkpoint(tmp_path, again):
    found = kill_savers(12, tmp_path, again)
    assert (found.kills, found.unreadable, found.torn) == (12, 0, 0) and found.midway > 3
    assert found.in_place_unreadable > 0  # the kills are such that a plain file does not survive them
    run = tmp_path / "run"
    reached = ck.latest_checkpoint(run, quiet).step
    save(run, reached + 1, keep=1)  # the next save clears up after the dead
    assert steps(run) == [f"step-{reached + 1:08d}"]


def dead_temporary(path):
    """What a killed process leaves: a temporary whose owner has this process's number and another start."""
    _, _, rest = files.temp_name(path).name.partition("@")
    temp = path.parent / f".tmp-{os.getpid()}.1@{rest}"
    temp.mkdir(parents=True)
    return temp


def test_taking_the_lock_clears_up_after_the_killed(tmp_path):
    run = tmp_path / "run"
    dead = [dead_temporary(run / place) for place in ("config.json", "samples/step-1.txt", "data/train-0.bin")]
    (dead[0] / "file").write_text("half of it")
    mine = files.temp_name(run / "metrics.jsonl")
    mine.write_text("still at work")
    (run / ".tmp-of-someone-else").mkdir()
    os.utime(run / ".tmp-of-someone-else", (0, 0))
    with run_lock(run):
        assert not any(temp.exists() for temp in dead) and mine.exists()
    assert sorted(path.name for path in run.iterdir()) == sorted([mine.name, ".tmp-of-someone-else", "data", "lock", "samples"])


def test_new_directories_are_durable_in_their_parents(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(files, "fsync_dir", synced.append)
    files.make_directory(tmp_path / "a" / "b" / "c")
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    files.make_directory(tmp_path / "a" / "b" / "c")
    assert len(synced) == 3


def test_other_threads_are_told(tmp_path):
    save(tmp_path, 1)
    found = ck.latest_checkpoint(tmp_path, quiet)
    threads = torch.get_num_threads()
    assert found.foreign() is None and found.manifest["threads"] == threads
    torch.set_num_threads(threads + 1)
    try:
        assert f"threads {threads}, not {threads + 1}" in found.foreign()
    finally:
        torch.set_num_threads(threads)


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
    flat = optimizer_tensors(optimizer, params)
    assert "exp_avg/0.weight" in flat and "step/2.bias" in flat and "untouched/idle" in flat
    files.save_tensors(tmp_path / "o", flat, {})

    copy, fresh, names = trained(seed=1, steps=0, **options)
    copy.load_state_dict(model.state_dict())
    load_optimizer_tensors(fresh, names, files.load_tensors(tmp_path / "o"))
    for i in range(10, 13):
        one_step(model, optimizer, i)
        one_step(copy, fresh, i)
    for a, b in zip(model.parameters(), copy.parameters(), strict=True):
        assert torch.equal(a, b)
    again = optimizer_tensors(fresh, names)
    now = optimizer_tensors(optimizer, params)
    assert set(again) == set(now) and all(torch.equal(again[k], now[k]) for k in now)


def test_optimizer_state_is_copied(tmp_path):
    _, optimizer, params = trained()
    _, fresh, names = trained(seed=1, steps=0)
    flat = optimizer_tensors(optimizer, params)
    load_optimizer_tensors(fresh, names, flat)
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
    flat = dict(optimizer_tensors(optimizer, params))
    spoil(flat)
    _, other, names = trained(seed=1)
    before = {k: v.clone() for k, v in optimizer_tensors(other, names).items()}
    with pytest.raises(CheckpointError, match=named):
        load_optimizer_tensors(other, names, flat)
    after = optimizer_tensors(other, names)
    assert set(after) == set(before) and all(torch.equal(after[k], before[k]) for k in before)


def test_other_optimizers(tmp_path):
    model, _, params = trained(steps=0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    one_step(model, sgd, 0)
    flat = optimizer_tensors(sgd, params)
    assert {k.partition("/")[0] for k in flat} == {"momentum_buffer", "untouched"}
    load_optimizer_tensors(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), params, flat)
    with pytest.raises(CheckpointError, match="no name"):
        optimizer_tensors(sgd, {})
