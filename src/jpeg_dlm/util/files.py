"""Files: strict JSON, atomic writes, atomic directories, manifests, and tensors as safetensors.

A write goes to a temporary name next to its target, is flushed and then renamed. Functions that need torch import it, because
modules that must start quickly use the others.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import platform
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from jpeg_dlm import __version__
from jpeg_dlm.util.errors import CheckpointError, JpegDlmError, UsageError, reason_of

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"
MANIFEST_BYTES = 1 << 20  # a manifest lists a handful of files; a larger one was not written by this package
TEMP_PREFIX = ".tmp-"
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
RESTORE = "restore it from a copy"


# ---------------------------------------------------------------- JSON without NaN, repeated keys or deep nesting


def parse_json(raw: bytes | str) -> Any:
    """Parse a JSON text: UTF-8, finite numbers, unique keys; raise ValueError for any other."""
    text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return pairs as a dictionary; raise ValueError if a key is repeated."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"the key {name[:80]!r} is repeated")
        values[name] = value
    return values


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not a finite number")
    return number


def dump_json(values: Mapping[str, Any]) -> str:
    """Return standard JSON; raise `CheckpointError` for values that JSON cannot represent, such as NaN."""
    try:
        return json.dumps(values, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"The values cannot be saved as JSON ({error}): use finite numbers and strings.") from error


def load_json(
    path: Path,
    max_bytes: int,
    error: type[JpegDlmError] = CheckpointError,
    remedy: str = RESTORE,
    parse: Callable[[bytes], Any] = parse_json,
) -> dict[str, Any]:
    """Load a JSON object of bounded size, or one that `parse` reads; raise `error` with a remedy if there is none."""
    try:
        with open(path, "rb") as handle:
            raw = handle.read(max_bytes + 1)
        values = parse(raw) if len(raw) <= max_bytes else None
        if not isinstance(values, dict):
            raise ValueError(f"it is not an object of at most {max_bytes} bytes")
    except (OSError, ValueError) as cause:
        kind = "JSON" if parse is parse_json else "YAML"
        raise error(f"'{path}' is not valid {kind} ({getattr(cause, 'strerror', None) or cause}): {remedy}.") from cause
    return values


# ---------------------------------------------------------------- durable writes


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def cache_dir() -> Path:
    """Return the folder for what is fetched or measured once per machine: $JPEG_DLM_CACHE, else ~/.cache/jpeg-dlm."""
    named = os.environ.get("JPEG_DLM_CACHE")
    return Path(os.path.expanduser(named or "~/.cache/jpeg-dlm"))  # Path.expanduser fails for a user without a home


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


def _delete(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def sweep_temps(parent: Path) -> None:
    """Remove the temporaries of killed processes; call it only under the lock of a folder, which no other process writes."""
    for entry in parent.glob(TEMP_PREFIX + "*"):
        _delete(entry)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Yield a temporary name next to `path` and delete what has it afterwards; errors name `path`, which the user knows."""
    temp = path.parent / f"{TEMP_PREFIX}{uuid.uuid4().hex[:8]}-{path.name[:60]}"
    try:
        yield temp
    except OSError as error:
        error.filename = error.filename and str(error.filename).replace(str(temp), str(path))
        raise
    finally:
        _delete(temp)


@contextlib.contextmanager
def atomic_file(path: Path, new: bool = False) -> Iterator[IO[bytes]]:
    """Yield a handle to write to; replace `path` once everything is on the disk. With `new`, never replace a file."""
    with _temporary(path) as temp:
        with open(temp, "xb") as handle:  # plain open, so the mode is 0666 minus the umask as usual
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        try:
            if new:
                open(path, "xb").close()  # of several processes only one succeeds
        except FileExistsError as error:
            raise UsageError(f"'{path}' already exists: name another file, nothing was overwritten.") from error
        os.replace(temp, path)
    fsync(path.parent)


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
    with _temporary(path) as temp:
        temp.mkdir()
        yield temp
        for entry in (*temp.iterdir(), temp):
            fsync(entry)
        if not new:
            remove_directory(path)
        try:
            os.rename(temp, path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise CheckpointError(f"'{path}' already exists: name another folder, nothing was overwritten.") from error
    fsync(path.parent)


def remove_directory(path: Path) -> None:
    """Delete a directory so that a kill midway leaves a temporary one, never a partial directory under its real name."""
    if path.exists():
        with _temporary(path) as temp:
            os.rename(path, temp)


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

    versions = {"torch": torch.__version__, "python": platform.python_version(), "jpeg_dlm": __version__}
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
        if name in ("", ".", "..") or any(c in name for c in "/\\\0"):
            raise CheckpointError(f"The manifest of '{directory}' lists {name!r}, which is not a file name: do not use it.")
        file = directory / name
        if not file.exists():
            raise CheckpointError(f"'{file}' is missing: {remedy}.")
        if file.is_symlink() or not file.is_file():
            raise CheckpointError(f"'{file}' is a link or no plain file, which a manifest never lists: remove it.")
        if listed[name] != _record(file):
            raise CheckpointError(f"'{file}' is damaged, its size or SHA-256 does not match: {remedy}.")
    return manifest


# ---------------------------------------------------------------- tensors


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as one safetensors file, atomically and durably, which the package's own `save_file` is not."""
    from safetensors.torch import save

    plain: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        t = tensor.detach().cpu().contiguous()
        plain[name] = t.clone() if t.untyped_storage().data_ptr() in storages else t  # tied weights are written twice
        storages.add(t.untyped_storage().data_ptr())
    write_atomic(path, save(plain, {"format": "pt"}))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Load the tensors of a safetensors file to the CPU, independent of the file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        # Clone, because the file is memory-mapped and could not be deleted or replaced while its tensors are in use.
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"Cannot read '{path}' as a safetensors file ({reason_of(error)}): {RESTORE}.") from error
