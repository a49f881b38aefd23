"""Read files of `torch.save` without running anything that is in them.

Such a file is a zip archive with one pickle, which `pickle_machine` interprets, and one member of raw numbers per storage.
Numbers are read when a tensor is requested, so that the optimizer's part of a checkpoint costs nothing.
"""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jpeg_dlm.errors import CheckpointError, reason_of
from jpeg_dlm.foreign.pickle_machine import PickleMachine, StoredTensor

ZIP_MAGIC = b"PK\x03\x04"
LEGACY_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # how files of torch before 1.6 begin
PICKLE_BYTES = 256 << 20  # a checkpoint's own is below 1 MB, a tokenizer in it adds some 20 MB

# What a damaged or hostile archive makes zipfile and the machine raise.
_DAMAGE = (
    zipfile.BadZipFile, ValueError, TypeError, LookupError, EOFError, RuntimeError, OverflowError, MemoryError,
    RecursionError, struct.error,
)  # fmt: skip


def load_stored(path: Path, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Load tensors of a file to the CPU and compare their checksums; those that shared memory still do."""
    storages: dict[str, bytearray] = {}
    tensors: dict[str, Tensor] = {}
    with _readable(path), zipfile.ZipFile(path) as archive:
        for name, t in stored.items():
            if t.nbytes and t.member not in storages:
                storages[t.member] = bytearray(archive.read(t.member))
            if t.nbytes:
                tensors[name] = torch.frombuffer(storages[t.member], dtype=t.dtype).as_strided(t.shape, t.stride, t.offset)
            else:  # torch refuses an empty buffer
                tensors[name] = torch.empty(t.shape, dtype=t.dtype)
    return tensors


def read_torch_file(path: Path) -> Any:
    """Read a file of torch.save as plain values, with `StoredTensor` for tensors and `Foreign` for objects of other classes.

    Sets come as lists, subclasses of dict and tuple as dict and tuple; entries whose key is not a plain value are left out.
    """
    with _readable(path):
        with open(path, "rb") as handle:
            start = handle.read(len(LEGACY_MAGIC))
        if start == LEGACY_MAGIC:
            raise CheckpointError(
                f"'{path}' is in torch's format before version 1.6, which is not read: save it again with a newer torch."
            )
        if not start.startswith(ZIP_MAGIC):
            raise CheckpointError(f"'{path}' is not a file of torch.save: name a .safetensors, .ckpt, .pth, .pt or .bin file.")
        with zipfile.ZipFile(path) as archive:
            sizes = _member_sizes(archive, path.stat().st_size)
            root = _root(list(sizes))
            if f"{root}byteorder" in sizes and archive.read(f"{root}byteorder") != b"little":
                raise ValueError("its numbers are big-endian")
            if sizes[f"{root}data.pkl"] > PICKLE_BYTES:
                raise ValueError("its pickle is too large")
            program = archive.read(f"{root}data.pkl")
        return PickleMachine(f"{root}data/", sizes).run(program)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise `CheckpointError` with one sentence for anything that is wrong with a file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"Cannot read '{path}' ({error.strerror or error}): restore it from a copy.") from error
    except _DAMAGE as error:
        raise CheckpointError(
            f"'{path}' is damaged or no file of torch.save ({reason_of(error)}): restore it from a copy."
        ) from error


def _member_sizes(archive: zipfile.ZipFile, file_size: int) -> dict[str, int]:
    """Return the size of every member; they are stored, so together they cannot be larger than the file."""
    members = archive.infolist()
    sizes = {member.filename: member.file_size for member in members}
    if len(sizes) != len(members):
        raise ValueError("two members have the same name")
    if any(m.compress_type != zipfile.ZIP_STORED or m.compress_size != m.file_size for m in members):
        raise ValueError("a member is compressed")
    if sum(sizes.values()) > file_size:
        raise ValueError("its members are larger than the file")
    return sizes


def _root(names: list[str]) -> str:
    """Return the folder inside the archive that holds everything."""
    roots = [name.removesuffix("data.pkl") for name in names if re.fullmatch(r"[^/]+/data\.pkl", name)]
    if len(roots) != 1:
        raise ValueError("it holds no data.pkl")
    return roots[0]
