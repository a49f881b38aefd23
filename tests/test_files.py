"""Durable files, against an independent reading: hashlib, json, os, and the safetensors package."""

import errno
import hashlib
import json
import os
import pickle
import random
import stat
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jpeg_dlm import files
from jpeg_dlm.errors import CheckpointError, UsageError


def names(path):
    return sorted(p.name for p in path.iterdir())


def folder(tmp_path, **content):
    path = tmp_path / "whole"
    path.mkdir()
    for name, data in content.items():
        (path / name).write_bytes(data)
    files.write_manifest(path, {"step": 3})
    return path


def test_sha256_is_hashlibs(tmp_path):
    data = random.Random(0).randbytes(3_000_000)
    (tmp_path / "f").write_bytes(data)
    assert files.sha256_file(tmp_path / "f") == hashlib.sha256(data).hexdigest()


def test_write_atomic_replaces_and_respects_umask(tmp_path):
    path = tmp_path / "f"
    before = os.umask(0o027)
    try:
        files.write_atomic(path, "one")
        files.write_atomic(path, b"two")
    finally:
        os.umask(before)
    assert path.read_bytes() == b"two" and names(tmp_path) == ["f"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_write_atomic_failure_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "f"
    files.write_atomic(path, "one")

    def full(handle, data):
        handle.write(data[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "_write", full)
    with pytest.raises(OSError):
        files.write_atomic(path, "two")
    assert path.read_text() == "one" and names(tmp_path) == ["f"]


def test_atomic_directory_appears_only_at_the_end(tmp_path):
    path = tmp_path / "d"
    with files.atomic_directory(path) as temp:
        (temp / "a").write_text("1")
        assert not path.exists() and temp.parent == tmp_path and temp.name.startswith(".tmp-")
    assert names(tmp_path) == ["d"] and names(path) == ["a"]
    with files.atomic_directory(path) as temp:  # replacing leaves nothing of the old one
        (temp / "b").write_text("2")
    assert names(tmp_path) == ["d"] and names(path) == ["b"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, SystemExit])
def test_atomic_directory_failure_leaves_the_old_one(tmp_path, error):
    path = tmp_path / "d"
    with files.atomic_directory(path) as temp:
        (temp / "a").write_text("1")
    with pytest.raises(error), files.atomic_directory(path) as temp:
        (temp / "b").write_text("2")
        raise error
    assert names(tmp_path) == ["d"] and names(path) == ["a"]


def test_atomic_directory_puts_the_old_one_back_when_the_last_rename_fails(tmp_path, monkeypatch):
    path = tmp_path / "d"
    with files.atomic_directory(path) as temp:
        (temp / "a").write_text("1")
    rename = os.rename

    def fail(source, target):
        if target == path and not str(source).endswith(".old"):
            raise OSError(errno.EIO, "I/O error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError), files.atomic_directory(path) as temp:
        (temp / "b").write_text("2")
    assert names(tmp_path) == ["d"] and names(path) == ["a"]


def test_what_must_be_new_is_never_replaced(tmp_path):
    with pytest.raises(UsageError, match="'.*/texts' already exists"), files.atomic_file(tmp_path / "texts", new=True) as mine:
        mine.write(b"mine")
        files.write_atomic(tmp_path / "texts", "theirs", new=True)  # another process is sooner
    with pytest.raises(CheckpointError, match="'.*/model' already exists"):
        with files.atomic_directory(tmp_path / "model", new=True) as mine:
            (mine / "a").write_text("mine")
            with files.atomic_directory(tmp_path / "model", new=True) as theirs:
                (theirs / "a").write_text("theirs")
    assert (tmp_path / "texts").read_text() == (tmp_path / "model" / "a").read_text() == "theirs"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "texts"]


def test_errors_name_the_file_and_not_its_temporary(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "missing" / "texts", tmp_path / "file" / "texts"):
        for write in (lambda path: files.write_atomic(path, "x"), lambda path: files.atomic_directory(path).__enter__()):
            with pytest.raises(OSError) as error:
                write(path)
            assert error.value.filename == str(path)
    with pytest.raises(OSError) as error, files.atomic_directory(tmp_path / "model") as temp:
        files.write_atomic(temp / "missing" / "weights", "x")
    assert error.value.filename == str(tmp_path / "model" / "missing" / "weights")
    with pytest.raises(CheckpointError) as refused, files.atomic_directory(tmp_path / "model") as temp:
        files.save_tensors(temp / "weights", {"a": torch.zeros(2, dtype=torch.complex64)}, {})
    assert f"'{tmp_path / 'model' / 'weights'}'" in str(refused.value)


def test_a_sealed_directory_is_complete_only_with_its_manifest(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("one")
    files.write_sealed(tmp_path, ["a"], "last", "two")
    assert files.check_listed(tmp_path) and files.verify_manifest(tmp_path)["files"].keys() == {"a", "last"}
    (tmp_path / "a").write_text("other")
    real, left = files.write_atomic, []
    monkeypatch.setattr(files, "write_atomic", lambda *a: (left.append((tmp_path / "last").exists()), real(*a)))
    files.write_sealed(tmp_path, ["a"], "last", "three")
    assert left == [False, False] and files.check_listed(tmp_path)  # the manifest comes first, the mark of completeness last
    (tmp_path / "last").write_text("THREE")
    with pytest.raises(CheckpointError, match="last' is damaged.*: make it again"):
        files.check_listed(tmp_path, "last", remedy="make it again")
    with pytest.raises(CheckpointError, match="b' is not in the manifest"):
        files.check_listed(tmp_path, "b")


def test_sweep_spares_the_living_and_removes_the_dead(tmp_path):
    mine = files.temp_name(tmp_path / "mine")
    mine.mkdir()
    make = f"from pathlib import Path; from jpeg_dlm.files import temp_name as t; p=t(Path({str(tmp_path / 'x')!r})); p.mkdir()"
    with subprocess.Popen(
        [sys.executable, "-c", make + "; print(p.name, flush=True); input()"], stdin=-1, stdout=-1, text=True
    ) as child:
        other = tmp_path / child.stdout.readline().strip()
        assert files.sweep_temps(tmp_path) == [] and mine.exists() and other.exists()
        child.kill()
        child.wait()
    # The same process id but another start time is another process.
    pid, _, rest = mine.name.partition("@")
    reborn = tmp_path / f".tmp-{os.getpid()}.1@{rest}"
    reborn.mkdir()
    foreign = tmp_path / ".tmp-1.1@elsewhere@abc-x"
    foreign.mkdir()
    assert sorted(files.sweep_temps(tmp_path)) == sorted([other, reborn])
    os.utime(foreign, (0, 0))
    assert files.sweep_temps(tmp_path) == [foreign]
    assert names(tmp_path) == [mine.name]


def test_manifest_says_what_is_there(tmp_path):
    path = folder(tmp_path, a=b"hello", b=b"")
    manifest = files.verify_manifest(path)
    assert manifest == json.loads((path / "manifest.json").read_text())
    assert manifest["files"]["a"] == {"sha256": hashlib.sha256(b"hello").hexdigest(), "size": 5}
    assert manifest["extra"] == {"step": 3} and manifest["threads"] == torch.get_num_threads()
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["versions"]["python"] == sys.version.split()[0] and "jpeg_dlm" in manifest["versions"]


def test_bits_all_over_a_manifest_count(tmp_path):
    path = folder(tmp_path, a=b"hello")
    manifest = path / "manifest.json"
    data = manifest.read_bytes()
    for bit in range(0, 8 * len(data), 7):  # every byte, and every place within a byte
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        manifest.write_bytes(flipped)
        with pytest.raises(CheckpointError, match="manifest.json"):
            files.verify_manifest(path)
    manifest.write_bytes(data)
    files.verify_manifest(path)


@pytest.mark.parametrize("spoil, named", [
    (lambda p: (p / "a").unlink(), "a' is missing"),
    (lambda p: (p / "a").write_bytes(b"hellp"), "a' is damaged"),
    (lambda p: (p / "a").write_bytes(b"hell"), "a' is damaged"),
    (lambda p: (p / "c").write_bytes(b""), "c' is not in the manifest"),
    (lambda p: (p / "c").mkdir(), "c' is not a plain file"),
    (lambda p: os.mkfifo(p / "c"), "c' is not a plain file"),
    (lambda p: ((p / "a").rename(p.parent / "a"), (p / "a").symlink_to(p.parent / "a")), "a' is a symbolic link"),
    (lambda p: (p / "manifest.json").unlink(), "manifest.json' is missing"),
    (lambda p: (p / "manifest.json").write_bytes(b""), "manifest.json' is damaged"),
    (lambda p: (p / "manifest.json").write_bytes(b"[]"), "manifest.json' is not a JSON object"),
    (lambda p: (p / "manifest.json").write_bytes(b'{"a":' * 100_000), "manifest.json' is damaged"),
    (lambda p: (p / "manifest.json").write_bytes(b'{"a":' * 40 + b"1" + b"}" * 40), "nested too deeply"),
    (lambda p: (p / "manifest.json").write_bytes(b" " * (2 << 20)), "larger than"),
    (lambda p: (p / "manifest.json").write_bytes(b'{"a":' + b"9" * 10_000 + b"}"), "manifest.json' is damaged"),
    (lambda p: (p / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json' is damaged"),
])  # fmt: skip
def test_damage_is_named(tmp_path, spoil, named):
    path = folder(tmp_path, a=b"hello", b=b"there")
    spoil(path)
    with pytest.raises(CheckpointError) as error:
        files.verify_manifest(path)
    assert named in str(error.value)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a\\b", "..", "", "a\0"])
def test_a_manifest_cannot_point_outside(tmp_path, name):
    path = folder(tmp_path, a=b"hello")
    body = files.verify_manifest(path)
    del body["digest"]
    body["files"][name] = body["files"]["a"]
    (path / "manifest.json").write_text(files._sealed(body))  # an attacker can seal, too
    with pytest.raises(CheckpointError, match="not a file name"):
        files.verify_manifest(path)


def test_json_refuses_what_json_cannot_say():
    for value in [float("nan"), {1, 2}, object()]:
        with pytest.raises(CheckpointError, match="cannot be saved as JSON"):
            files.dump_json({"x": value})


# ---------------------------------------------------------------- tensors

KINDS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
         torch.uint8, torch.bool]  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    spec=st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda s: s.isprintable()),
        st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 4), max_size=3)),
        max_size=5,
    )  # fmt: skip
)
def test_tensors_read_by_the_package_are_ours(tmp_path_factory, spec):
    path = tmp_path_factory.mktemp("t") / "x.safetensors"
    g = torch.Generator().manual_seed(0)
    tensors = {name: (torch.randn(shape, generator=g) * 3).to(kind) for name, (kind, shape) in spec.items()}
    files.save_tensors(path, tensors, {"format": "pt", "b": "é"})
    for read in (safetensors.torch.load_file(path), files.load_tensors(path)):
        assert set(read) == set(tensors)
        for name, value in tensors.items():
            assert read[name].dtype == value.dtype and read[name].shape == value.shape and torch.equal(read[name], value)
    with safetensors.safe_open(path, "pt") as handle:
        assert handle.metadata() == {"format": "pt", "b": "é"}


def test_tensors_written_by_the_package_are_readable(tmp_path):
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5)}
    safetensors.torch.save_file(tensors, tmp_path / "x")
    read = files.load_tensors(tmp_path / "x")
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_shared_and_strided_tensors(tmp_path):
    base = torch.randn(4, 6)
    tensors = {"base": base, "same": base, "turned": base.t(), "part": base[1:3, ::2], "param": torch.nn.Parameter(base[0])}
    tensors["nan"] = torch.tensor([float("nan"), -0.0])
    files.save_tensors(tmp_path / "x", tensors, {})
    read = files.load_tensors(tmp_path / "x")
    for name, value in tensors.items():
        assert read[name].numpy().tobytes() == value.detach().contiguous().numpy().tobytes()
    read["base"].zero_()
    assert torch.equal(read["same"], base)


def test_same_tensors_same_bytes_and_mode(tmp_path):
    a, b = torch.randn(3), torch.randn(2)
    before = os.umask(0o022)
    try:
        files.save_tensors(tmp_path / "x", {"a": a, "b": b}, {"p": "1", "q": "2"})
        files.save_tensors(tmp_path / "y", {"b": b, "a": a}, {"q": "2", "p": "1"})
    finally:
        os.umask(before)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o644


def test_loaded_tensors_outlive_the_file(tmp_path):
    files.save_tensors(tmp_path / "x", {"a": torch.ones(10_000)}, {})
    read = files.load_tensors(tmp_path / "x")
    os.truncate(tmp_path / "x", 0)  # a mapped tensor would end the process here
    assert read["a"].sum() == 10_000


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


@pytest.mark.parametrize("content", [
    b"", b"\0" * 7, b"\0" * 8, b"\xff" * 64, (1 << 62).to_bytes(8, "little") + b"{}", pickle.dumps(Bomb()),
    (2).to_bytes(8, "little") + b"[]", (30).to_bytes(8, "little") + b"{" * 30,
    (17 << 20).to_bytes(8, "little") + b" " * (17 << 20),
], ids=["empty", "short", "zero", "ones", "endless", "pickle", "list", "deep", "large"])  # fmt: skip
def test_foreign_files_are_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="model.safetensors"):
        files.load_tensors(tmp_path / "model.safetensors")


def test_torch_save_is_refused(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "m")
    with pytest.raises(CheckpointError, match="m'"):
        files.load_tensors(tmp_path / "m")
    with pytest.raises(CheckpointError, match="Cannot read"):
        files.load_tensors(tmp_path / "absent")


@pytest.mark.parametrize("tensor", [torch.ones(2, dtype=torch.complex64), torch.eye(2).to_sparse()])
def test_unsupported_tensors_are_refused(tmp_path, tensor):
    with pytest.raises(CheckpointError, match="cannot be saved"):
        files.save_tensors(tmp_path / "x", {"a": tensor}, {})
    assert names(tmp_path) == []
