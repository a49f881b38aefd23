"""Crash-safe files: atomic writes, atomic directories, manifests, and tensors as safetensors.

A write goes to a temporary file next to its target, is flushed and then renamed. Functions that need torch import it, because
modules that must start quickly use the others. Packages for atomic writes do not handle directories or killed processes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from jpeg_dlm.errors import CheckpointError, UsageError
from jpeg_dlm.strict_json import parse_json

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"
MANIFEST_BYTES = 1 << 20  # a manifest lists a handful of files; a larger one was not written by this package
TEMP_PREFIX = ".tmp-"
TEMP_NAME = re.compile(re.escape(TEMP_PREFIX) + r"((\d{1,9})\.\d+)@([^@]*)@[0-9a-f]+-.*", re.DOTALL)
OLD_SUFFIX = ".old"
FOREIGN_TEMP_S = 86400.0  # processes on other machines cannot be checked, so their temporaries are kept for a day
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
RESTORE = "restore it from a copy"


# ---------------------------------------------------------------- durable writes


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def free_bytes(path: Path) -> int:
    """Return the bytes that this user may still write on the disk of `path`."""
    return shutil.disk_usage(path).free


def fsync_dir(path: Path) -> None:
    """Make the names in a directory durable; a power failure may undo a rename without it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents, each durable in its own parent directory."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        fsync_dir(folder.parent)


def _write(handle: IO[bytes], data: Any) -> None:
    """Write bytes to the disk; the only place that does, so that tests can simulate a full disk at any point."""
    handle.write(data)


def temp_name(path: Path) -> Path:
    """Return a new temporary name next to `path` that identifies the owning process and machine."""
    return path.parent / f"{TEMP_PREFIX}{_process_key(os.getpid())}@{_host()}@{uuid.uuid4().hex[:8]}-{path.name[:60]}"


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
            _claim(path)
        os.replace(temp, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temp.unlink()
        _rename_in(error, temp, path)
        raise
    fsync_dir(path.parent)


def _claim(path: Path) -> None:
    """Create an empty file; if several processes try, only one succeeds."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
    except FileExistsError as error:
        raise UsageError(f"'{path}' already exists: name another file, nothing was overwritten.") from error


def _rename_in(error: BaseException, temp: Path, path: Path) -> None:
    """Replace the temporary name in an error by the final name, which the user knows."""
    if isinstance(error, OSError) and isinstance(error.filename, (str, os.PathLike)):
        error.filename = str(error.filename).replace(str(temp), str(path))
    error.args = tuple(arg.replace(str(temp), str(path)) if isinstance(arg, str) else arg for arg in error.args)


def write_atomic(path: Path, content: bytes | str, new: bool = False) -> None:
    """Write a whole file or leave the previous one unchanged; with `new`, raise `UsageError` if one exists."""
    with atomic_file(path, new) as handle:
        # Paths may contain bytes that are not valid in the system's encoding; write them unchanged.
        _write(handle, content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)


@contextlib.contextmanager
def atomic_directory(path: Path, new: bool = False) -> Iterator[Path]:
    """Yield a temporary directory to fill, and rename it to `path` once every file in it is on the disk.

    An existing `path` becomes `path.old` until the new one is durable, so after a kill readers may have to look at both names.
    With `new`, only an empty directory is replaced.
    """
    temp, old = temp_name(path), path.with_name(path.name + OLD_SUFFIX)
    try:
        temp.mkdir()
        yield temp
        for entry in temp.iterdir():
            with open(entry, "rb") as handle:
                os.fsync(handle.fileno())
        fsync_dir(temp)
        if path.exists() and not new:
            remove_directory(old)
            os.rename(path, old)
        os.rename(temp, path)  # fails for an existing file or a directory that is not empty
    except BaseException as error:
        if not new and old.exists() and not path.exists():
            os.rename(old, path)
        shutil.rmtree(temp, ignore_errors=True)
        if new and isinstance(error, OSError) and error.errno in TAKEN:
            raise CheckpointError(f"'{path}' already exists: name another folder, nothing was overwritten.") from error
        _rename_in(error, temp, path)
        raise
    fsync_dir(path.parent)
    if not new:
        remove_directory(old)


def remove_directory(path: Path) -> None:
    """Delete a directory so that a kill midway leaves a temporary one, never a partial directory under its real name."""
    if not path.exists():
        return
    temp = temp_name(path)
    os.rename(path, temp)
    shutil.rmtree(temp, ignore_errors=True)


def sweep_temps(parent: Path) -> list[Path]:
    """Remove temporaries in `parent` whose process has ended, and return them."""
    removed = []
    for entry in parent.glob(TEMP_PREFIX + "*"):
        if not _owner_alive(entry):
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
            removed.append(entry)
    return removed


def _owner_alive(temp: Path) -> bool:
    """Return True if the process that a temporary name identifies may still be running."""
    match = TEMP_NAME.fullmatch(temp.name)
    if not match:
        return True  # not made by `temp_name`, so not ours
    key, pid, host = match.groups()
    if host == _host():
        return _process_key(int(pid)) == key
    try:
        return time.time() - temp.lstat().st_mtime < FOREIGN_TEMP_S
    except FileNotFoundError:
        return False


def _process_key(pid: int) -> str | None:
    """Identify a process by id and start time, as ids repeat: a restarted container often reuses the same id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # it runs under another user
    try:
        start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]  # field 22 of proc(5)
    except (OSError, IndexError):
        start = "0"  # a system without /proc: use the id alone
    return f"{pid}.{start}"


def _host() -> str:
    return socket.gethostname().replace("/", "_").replace("@", "_")[:64]


# ---------------------------------------------------------------- JSON and manifests


def dump_json(values: Mapping[str, Any]) -> str:
    """Return standard JSON; raise `CheckpointError` for values that JSON cannot represent, such as NaN."""
    try:
        return json.dumps(values, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"The values cannot be saved as JSON ({error}): use finite numbers and strings.") from error


def load_json(path: Path, max_bytes: int) -> dict[str, Any]:
    """Load a JSON object of bounded size and depth."""
    try:
        with open(path, "rb") as handle:
            raw = handle.read(max_bytes + 1)
        if len(raw) > max_bytes:
            raise CheckpointError(f"'{path}' is larger than {max_bytes} bytes and is not read: restore it from a copy.")
        values = parse_json(raw)
    except OSError as error:
        raise CheckpointError(f"Cannot read '{path}' ({error.strerror or error}): restore it from a copy.") from error
    except ValueError as error:
        raise CheckpointError(f"'{path}' is damaged, it is not valid JSON ({error}): restore it from a copy.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"'{path}' is not a JSON object: restore it from a copy.")
    return values


def _sealed(body: Mapping[str, Any]) -> str:
    """Return the text of a manifest with a digest of its content, so that damage to the manifest is detected too."""
    return dump_json({**body, "digest": hashlib.sha256(dump_json(body).encode()).hexdigest()})


def write_manifest(directory: Path, extra: Mapping[str, Any]) -> None:
    """Write `manifest.json`: hash and size of every file in `directory`, the versions of the writer, and `extra`."""
    for entry in sorted(directory.iterdir()):
        _check_entry(entry)
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
    write_atomic(directory / MANIFEST, _sealed({"format": 1, "files": files, **writer(), "extra": dict(extra)}))


def writer() -> dict[str, Any]:
    """Return the versions and thread count of this process, on which the last bits of a result depend."""
    import torch

    versions = {"torch": torch.__version__, "python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["jpeg_dlm"] = importlib.metadata.version("jpeg-dlm")
    return {"versions": versions, "threads": torch.get_num_threads()}


def verify_manifest(directory: Path) -> dict[str, Any]:
    """Check every file of `directory` against its manifest, and return the manifest."""
    try:
        # Ignore temporaries of killed processes.
        entries = [entry for entry in sorted(directory.iterdir()) if not TEMP_NAME.fullmatch(entry.name)]
    except OSError as error:
        raise CheckpointError(f"Cannot read the directory '{directory}' ({error.strerror or error}).") from error
    for entry in entries:
        _check_entry(entry)
    if directory / MANIFEST not in entries:
        raise CheckpointError(
            f"'{directory / MANIFEST}' is missing, so '{directory.name}' cannot be trusted: restore it from a copy."
        )
    manifest = _read_manifest(directory)
    for name, record in manifest["files"].items():
        compare_file(directory, name, [record])
    for name in sorted({entry.name for entry in entries} - {MANIFEST, *manifest["files"]}):
        raise CheckpointError(f"'{directory / name}' is not in the manifest: remove it.")
    return manifest


def check_listed(directory: Path, *names: str, remedy: str = RESTORE) -> bool:
    """Check these files, or all listed ones, against the manifest beside them; return False if there is none."""
    if not (directory / MANIFEST).is_file():
        return False
    listed = _read_manifest(directory)["files"]
    for name in names or listed:
        if name not in listed:
            raise CheckpointError(f"'{directory / name}' is not in the manifest beside it: {remedy}.")
        compare_file(directory, name, [listed[name]], remedy)
    return True


def _read_manifest(directory: Path) -> dict[str, Any]:
    """Read a manifest and check its own digest."""
    path = directory / MANIFEST
    _check_entry(path)
    manifest = load_json(path, MANIFEST_BYTES)
    body = {k: v for k, v in manifest.items() if k != "digest"}
    # Comparing whole texts also detects changes that parse to the same values: repeated keys, other spellings, spaces.
    if not _same_text(path, body) or manifest.get("format") != 1 or not isinstance(manifest.get("files"), dict):
        raise CheckpointError(f"'{path}' is damaged, its digest does not match: restore '{directory.name}' from a copy.")
    return manifest


def _same_text(path: Path, body: Mapping[str, Any]) -> bool:
    try:
        return path.read_bytes() == _sealed(body).encode()
    except CheckpointError:  # NaN is never written
        return False


def _check_entry(entry: Path) -> None:
    mode = entry.lstat().st_mode
    if not stat.S_ISREG(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "not a plain file"
        raise CheckpointError(f"'{entry}' is {kind}, which a checkpoint never holds: remove it.")


def compare_file(directory: Path, name: str, records: Iterable[Any], remedy: str = RESTORE) -> None:
    """Raise `CheckpointError` unless a file of `directory` matches the size and hash of one of these records."""
    if any(part in ("", ".", "..") for part in name.split("/")) or any(c in name for c in "\\\0"):
        raise CheckpointError(f"The manifest of '{directory}' lists {name!r}, which is not a file name: do not use it.")
    path = directory / name
    if not path.is_file():
        raise CheckpointError(f"'{path}' is missing: {remedy}.")
    _check_entry(path)
    size = path.stat().st_size
    fitting = [record for record in records if isinstance(record, dict) and record.get("size") == size]
    if not fitting:
        raise CheckpointError(f"'{path}' is damaged, it has {size} bytes: {remedy}.")
    if sha256_file(path) not in [record.get("sha256") for record in fitting]:
        raise CheckpointError(f"'{path}' is damaged, its SHA-256 does not match: {remedy}.")


# ---------------------------------------------------------------- tensors

HEADER_BYTES = 16 << 20  # enough for a hundred thousand tensors; a larger header is damaged or malicious
DTYPE_NAMES = {  # the type names of the safetensors format
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors as one safetensors file, each in full and one at a time.

    The package's own writer reports a full disk without an error number, orders metadata at random, does not flush to the disk
    and sets the file mode 0600.
    """
    import torch

    # Widest types first keeps tensors aligned; sorting by name makes the bytes a function of the content.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    offset = 0
    for name in order:
        dtype = str(tensors[name].dtype).removeprefix("torch.")
        kind = DTYPE_NAMES.get(dtype)
        if kind is None or name == "__metadata__" or tensors[name].layout != torch.strided:
            raise CheckpointError(f"Tensor '{name}' of type {dtype} cannot be saved in '{path}': convert or rename it.")
        end = offset + tensors[name].nbytes
        header[name] = {"dtype": kind, "shape": list(tensors[name].shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(path) as handle:
        _write(handle, len(text).to_bytes(8, "little") + text)
        for name in order:
            flat = tensors[name].detach().to("cpu").contiguous().view(-1)
            _write(handle, flat.view(torch.uint8).numpy())


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Load the tensors of a safetensors file to the CPU, independent of the file."""
    from safetensors import SafetensorError, safe_open

    try:
        size = path.stat().st_size
        with open(path, "rb") as handle:
            header = int.from_bytes(handle.read(8), "little")
        if size < 8 or header > min(HEADER_BYTES, size - 8):
            raise CheckpointError(f"'{path}' is not a whole safetensors file: restore it from a copy.")
        with safe_open(path, framework="pt", device="cpu") as file:
            # Clone, because the file is memory-mapped and could not be deleted or replaced while its tensors are in use.
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
    except OSError as error:
        raise CheckpointError(f"Cannot read '{path}' ({error.strerror or error}): restore it from a copy.") from error
    except (SafetensorError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"'{path}' is damaged or not a safetensors file ({error}): restore it from a copy.") from error
