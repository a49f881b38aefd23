"""Crash-safe files: atomic writes, atomic directories, manifests, and tensors as safetensors.

A write goes to a temporary name next to its target, is flushed and then renamed. Functions that need torch import it, because
modules that must start quickly use the others.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import os
import platform
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from jpeg_dlm.util.errors import CheckpointError, UsageError
from jpeg_dlm.util.json import dump_json, load_json

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"
MANIFEST_BYTES = 1 << 20  # a manifest lists a handful of files; a larger one was not written by this package
TEMP_PREFIX = ".tmp-"
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
RESTORE = "restore it from a copy"


# ---------------------------------------------------------------- durable writes


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def cache_dir() -> Path:
    """Return the folder for what is fetched or measured once per machine: $JPEG_DLM_CACHE, else ~/.cache/jpeg-dlm."""
    named = os.environ.get("JPEG_DLM_CACHE")
    return Path(os.path.expanduser(named or "~/.cache/jpeg-dlm"))  # Path.expanduser fails for a user without a home


def free_bytes(path: Path) -> int:
    """Return the bytes that this user may still write on the disk of `path`."""
    return shutil.disk_usage(path).free


def fsync(path: Path) -> None:
    """Make a file, or the names in a directory, durable; a power failure may undo a rename without it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents, each durable in its own parent directory."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        fsync(folder.parent)


def temp_name(path: Path) -> Path:
    """Return a new temporary name next to `path`."""
    return path.parent / f"{TEMP_PREFIX}{uuid.uuid4().hex[:8]}-{path.name[:60]}"


def sweep_temps(parent: Path) -> None:
    """Remove the temporaries of killed processes; call it only under the lock of a folder, which no other process writes."""
    for entry in parent.glob(TEMP_PREFIX + "*"):
        shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_file(path: Path, new: bool = False) -> Iterator[IO[bytes]]:
    """Yield a handle to write to; replace `path` once everything is on the disk. With `new`, never replace a file."""
    temp = temp_name(path)
    try:
        with open(temp, "xb") as handle:  # plain open, so the mode is 0666 minus the umask as usual
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        if new:
            open(path, "xb").close()  # of several processes only one succeeds
        os.replace(temp, path)
    except BaseException as error:
        temp.unlink(missing_ok=True)
        if new and isinstance(error, FileExistsError):
            raise UsageError(f"'{path}' already exists: name another file, nothing was overwritten.") from error
        _name_target(error, temp, path)
        raise
    fsync(path.parent)


def _name_target(error: BaseException, temp: Path, path: Path) -> None:
    """Replace the temporary name in an error by the final name, which the user knows."""
    if isinstance(error, OSError) and error.filename:
        error.filename = str(error.filename).replace(str(temp), str(path))


def write_atomic(path: Path, content: bytes | str, new: bool = False) -> None:
    """Write a whole file or leave the previous one unchanged; with `new`, raise `UsageError` if one exists."""
    with atomic_file(path, new) as handle:
        # Paths may contain bytes that are not valid in the system's encoding; write them unchanged.
        handle.write(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)


@contextlib.contextmanager
def atomic_directory(path: Path, new: bool = False) -> Iterator[Path]:
    """Yield a temporary directory to fill, and rename it to `path` once every file in it is on the disk.

    An existing `path` is removed just before. With `new`, only an empty directory is replaced.
    """
    temp = temp_name(path)
    try:
        temp.mkdir()
        yield temp
        for entry in (*temp.iterdir(), temp):
            fsync(entry)
        if not new:
            remove_directory(path)
        os.rename(temp, path)  # fails for an existing file or a directory that is not empty
    except BaseException as error:
        shutil.rmtree(temp, ignore_errors=True)
        if new and isinstance(error, OSError) and error.errno in TAKEN:
            raise CheckpointError(f"'{path}' already exists: name another folder, nothing was overwritten.") from error
        _name_target(error, temp, path)
        raise
    fsync(path.parent)


def remove_directory(path: Path) -> None:
    """Delete a directory so that a kill midway leaves a temporary one, never a partial directory under its real name."""
    if path.exists():
        temp = temp_name(path)
        os.rename(path, temp)
        shutil.rmtree(temp, ignore_errors=True)


# ---------------------------------------------------------------- manifests


def write_manifest(directory: Path, extra: Mapping[str, Any]) -> None:
    """Write `manifest.json`: hash and size of every file in `directory`, the versions of the writer, and `extra`."""
    _write_manifest(directory, {e.name: _record(e) for e in sorted(directory.iterdir()) if e.name != MANIFEST}, extra)


def write_sealed(directory: Path, written: Iterable[str], last: str, content: bytes | str) -> None:
    """Write the manifest of the files `written` and `last`, then `last`, whose presence marks a complete directory."""
    raw = content.encode() if isinstance(content, str) else content
    (directory / last).unlink(missing_ok=True)  # an earlier one does not match this manifest
    promised = {last: {"sha256": hashlib.sha256(raw).hexdigest(), "size": len(raw)}}
    _write_manifest(directory, {name: _record(directory / name) for name in sorted(written)} | promised, {})
    write_atomic(directory / last, raw)


def _record(path: Path) -> dict[str, Any]:
    return {"sha256": sha256_file(path), "size": path.stat().st_size}


def _write_manifest(directory: Path, files: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    body = {"format": 1, "files": files, **environment(), "extra": dict(extra)}
    write_atomic(directory / MANIFEST, dump_json({**body, "digest": _digest(body)}))


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(dump_json(body).encode()).hexdigest()


def environment() -> dict[str, Any]:
    """Return the versions and thread count of this process, on which the last bits of a result depend."""
    import torch

    versions = {"torch": torch.__version__, "python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["jpeg_dlm"] = importlib.metadata.version("jpeg-dlm")
    return {"versions": versions, "threads": torch.get_num_threads()}


def verify_manifest(directory: Path) -> dict[str, Any]:
    """Check that `directory` holds the files of its manifest and no others; return the manifest."""
    manifest = check_listed(directory)
    if manifest is None:
        raise CheckpointError(f"'{directory / MANIFEST}' is missing: {RESTORE}.")
    entries = {entry.name for entry in directory.iterdir() if not entry.name.startswith(TEMP_PREFIX)}
    if unknown := entries - {MANIFEST, *manifest["files"]}:
        raise CheckpointError(f"'{directory / min(unknown)}' is not in the manifest: remove it.")
    return manifest


def check_listed(directory: Path, *names: str, remedy: str = RESTORE) -> dict[str, Any] | None:
    """Check these files, or all listed ones, against the manifest beside them; return it, or None if there is none.

    A manifest has a digest of itself, which detects damage to it.
    """
    path = directory / MANIFEST
    if not path.is_file():
        return None
    manifest = load_json(path, MANIFEST_BYTES)
    digest, listed = manifest.pop("digest", None), manifest.get("files")
    is_ours = digest == _digest(manifest) and manifest.get("format") == 1 and isinstance(manifest.get("extra"), dict)
    if not is_ours or not isinstance(listed, dict):
        raise CheckpointError(f"'{path}' is damaged, its digest does not match: restore '{directory.name}' from a copy.")
    for name in names or listed:
        if name not in listed:
            raise CheckpointError(f"'{directory / name}' is not in the manifest beside it: {remedy}.")
        _compare(directory, name, listed[name], remedy)
    return manifest


def _compare(directory: Path, name: str, record: Any, remedy: str) -> None:
    """Raise `CheckpointError` unless a file of `directory` is a plain one with the size and hash of its record."""
    if name in ("", ".", "..") or any(c in name for c in "/\\\0"):
        raise CheckpointError(f"The manifest of '{directory}' lists {name!r}, which is not a file name: do not use it.")
    path = directory / name
    if not path.exists():
        raise CheckpointError(f"'{path}' is missing: {remedy}.")
    if not stat.S_ISREG(path.lstat().st_mode):
        raise CheckpointError(f"'{path}' is a link or no plain file, which a manifest never lists: remove it.")
    if not isinstance(record, dict) or record.get("size") != path.stat().st_size or record.get("sha256") != sha256_file(path):
        raise CheckpointError(f"'{path}' is damaged, its size or SHA-256 does not match: {remedy}.")


# ---------------------------------------------------------------- tensors


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors as one safetensors file, atomically and durably, which the package's own `save_file` is not."""
    from safetensors.torch import save

    plain: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.is_sparse or tensor.is_complex():
            raise CheckpointError(f"Tensor '{name}' of type {tensor.dtype} cannot be saved in '{path}': convert it.")
        t = tensor.detach().cpu().contiguous()
        plain[name] = t.clone() if t.untyped_storage().data_ptr() in storages else t  # tied weights are written twice
        storages.add(t.untyped_storage().data_ptr())
    write_atomic(path, save(plain, dict(metadata)))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Load the tensors of a safetensors file to the CPU, independent of the file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        # Clone, because the file is memory-mapped and could not be deleted or replaced while its tensors are in use.
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except OSError as error:
        raise CheckpointError(f"Cannot read '{path}' ({error.strerror or error}): {RESTORE}.") from error
    except (SafetensorError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"'{path}' is damaged or not a safetensors file ({error}): {RESTORE}.") from error
