"""Atomic files and directories, manifests and tensors."""

import errno
import json
import os

import pytest
import torch

from jpeg_dlm.util import files
from jpeg_dlm.util.errors import CheckpointError, UsageError
from jpeg_dlm.util.files import dump_json


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_write_atomic_replaces_and_respects_umask(tmp_path):
    before = os.umask(0o027)
    try:
        files.write_atomic(tmp_path / "f", "one")
        files.write_atomic(tmp_path / "f", b"two")
        files.save_tensors(tmp_path / "t", {"a": torch.ones(2)})
    finally:
        os.umask(before)
    assert (tmp_path / "f").read_bytes() == b"two" and names(tmp_path) == ["f", "t"]
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in "ft"] == [0o640] * 2


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), SystemExit()])
def test_a_failure_keeps_the_old_file_and_directory(tmp_path, error):
    files.write_atomic(tmp_path / "f", "one")
    with pytest.raises(type(error)), files.atomic_file(tmp_path / "f") as handle:
        handle.write(b"tw")
        raise error
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").write_text("one")
    with pytest.raises(type(error)), files.atomic_directory(tmp_path / "d") as temp:
        (temp / "x").write_text("two")
        assert (tmp_path / "d" / "x").read_text() == "one"
        raise error
    assert names(tmp_path) == ["d", "f"]
    assert (tmp_path / "f").read_text() == (tmp_path / "d" / "x").read_text() == "one"


def test_what_must_be_new_is_never_replaced(tmp_path):
    files.write_atomic(tmp_path / "f", "one", new=True)
    with pytest.raises(UsageError, match="/f'"):
        files.write_atomic(tmp_path / "f", "two", new=True)
    (tmp_path / "d").mkdir()
    with files.atomic_directory(tmp_path / "d", new=True) as temp:
        (temp / "x").write_text("one")
    with pytest.raises(CheckpointError, match="/d'"), files.atomic_directory(tmp_path / "d", new=True) as temp:
        (temp / "x").write_text("two")
    assert names(tmp_path) == ["d", "f"]
    assert (tmp_path / "f").read_text() == (tmp_path / "d" / "x").read_text() == "one"


# ---------------------------------------------------------------- manifests


def sealed(folder):
    (folder / "a").write_text("one")
    (folder / "b").write_text("two")
    files.write_manifest(folder, {"step": 3})
    return folder / files.MANIFEST


def test_a_manifest_lists_what_is_there(tmp_path):
    sealed(tmp_path)
    (tmp_path / ".tmp-of-a-killed-process").mkdir()
    manifest = files.verify_manifest(tmp_path)
    assert manifest["files"].keys() == {"a", "b"} and manifest["extra"] == {"step": 3}
    assert manifest["threads"] == torch.get_num_threads() and manifest["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: (d / "a").write_text("onE"),
        lambda d: (d / "a").write_text("on"),
        lambda d: (d / "a").unlink(),
        lambda d: ((d / "a").unlink(), (d / "a").symlink_to(d / "b")),
        lambda d: (d / "c").write_text("not listed"),
        lambda d: (d / files.MANIFEST).unlink(),
        lambda d: (d / files.MANIFEST).write_text("{" * 10_000),
        lambda d: (d / files.MANIFEST).write_bytes(b" " * (files.MANIFEST_BYTES + 1)),
    ],
)
def test_damage_is_found(tmp_path, spoil):
    sealed(tmp_path)
    spoil(tmp_path)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        files.verify_manifest(tmp_path)


def test_a_manifest_cannot_point_outside(tmp_path):
    path = sealed(tmp_path)
    body = json.loads(path.read_text())
    del body["digest"]
    for name in ["../secret", "/etc/passwd", "a\\b", "..", "", "a\0"]:
        changed = body | {"files": {name: body["files"]["a"]}}
        path.write_text(dump_json({**changed, "digest": files._digest(changed)}))
        with pytest.raises(CheckpointError):
            files.verify_manifest(tmp_path)


def test_a_sealed_directory_is_complete_only_with_its_manifest(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("one")
    files.write_sealed(tmp_path, ["a"], "last", "two")
    assert files.check_listed(tmp_path) and files.verify_manifest(tmp_path)["files"].keys() == {"a", "last"}
    left, real = [], files._write_manifest
    monkeypatch.setattr(files, "_write_manifest", lambda *args: (left.append((tmp_path / "last").exists()), real(*args)))
    files.write_sealed(tmp_path, ["a"], "last", "three")
    assert left == [False] and files.check_listed(tmp_path)
    (tmp_path / "last").write_text("thReE")
    with pytest.raises(CheckpointError, match="make it again"):
        files.check_listed(tmp_path, "last", remedy="make it again")
    with pytest.raises(CheckpointError, match="not in the manifest"):
        files.check_listed(tmp_path, "b")


# ---------------------------------------------------------------- tensors


def test_tensors_come_back_also_shared_and_strided_ones_in_equal_bytes(tmp_path):
    a = torch.arange(12.0).view(3, 4)
    tensors = {"a": a, "same": a, "turned": a.t(), "row": a[1], "scalar": torch.tensor(2.0, requires_grad=True)}
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.bool):
        tensors[str(dtype)] = torch.ones(2, 0, 3, dtype=dtype)
    files.save_tensors(tmp_path / "x", tensors)
    files.save_tensors(tmp_path / "y", dict(reversed(tensors.items())))
    again = files.load_tensors(tmp_path / "x")
    assert again.keys() == tensors.keys()
    assert all(t.dtype == tensors[name].dtype and torch.equal(t, tensors[name]) for name, t in again.items())
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


@pytest.mark.parametrize(
    "content", [b"", b"abc", b"\xff" * 100, (1 << 40).to_bytes(8, "little") + b"{}", b"\x02" + b"\0" * 7 + b"[]"]
)
def test_foreign_files_are_refused(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(CheckpointError, match="/x'"):
        files.load_tensors(tmp_path / "x")
