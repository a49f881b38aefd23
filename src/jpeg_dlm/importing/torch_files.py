"""Read files of `torch.save` without running anything that is in them.

Such a file is a zip archive with one pickle and one member of raw numbers per storage. The names in the pickle are never
imported: the few that make tensors and containers are replaced by classes of this module, every other by an inert `Stub`.
`torch.load(weights_only=True)` does not suffice, because it refuses the configs and tokenizers in checkpoints of Lightning.
Tensors are views of the file in memory, so that the optimizer's part of a checkpoint takes none.
"""

from __future__ import annotations

import io
import mmap
import pickle  # noqa: TID251 - for the restricted reader below, which imports and calls nothing
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch

from jpeg_dlm.util.errors import CheckpointError, reason_of

NUMBERS = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Bool")  # torch's own names of types
STORAGES = {name: getattr(torch, name.lower()) for name in NUMBERS} | {"Char": torch.int8, "Byte": torch.uint8}
LOCAL_HEADER = 30  # bytes of a zip member before its name; the last four are the lengths of the name and of more


class Stub:
    """Stands for a class or function that is not known here, and for what calling it would have made."""

    name = ""
    state: Any = None  # what the object would have been given afterwards

    def __new__(cls, *args: Any, **options: Any) -> Stub:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __call__(self, *args: Any, **options: Any) -> Stub:
        return self

    def ignore(self, *values: Any) -> None:
        """Ignore values that a dictionary, a list or a set would take."""

    append = extend = add = __setitem__ = ignore


class _Fixed:
    """An object that a pickle cannot change once it is made."""

    def __setstate__(self, state: Any) -> None:
        """Ignore the state; that of a state_dict is only its version numbers."""


class _Dict(_Fixed, dict[Any, Any]):
    """Stands for OrderedDict."""


class _RebuildTensor(_Fixed):
    """Stands for torch's function that makes a tensor of (storage, offset, shape, stride, ...)."""

    def __new__(cls, storage: Any, offset: Any, shape: Any, stride: Any, *more: Any) -> Any:
        if not isinstance(storage, torch.Tensor):  # complex, quantized, 8-bit floats: fatal only if such a tensor is wanted
            return Stub()
        return storage.as_strided(shape, stride, offset)  # refuses what is not inside the storage


class _RebuildParameter(_Fixed):
    """Stands for torch's function that makes a parameter of a tensor."""

    def __new__(cls, data: Any, *more: Any) -> Any:
        return data


_KNOWN: dict[str, Any] = {
    "torch._utils._rebuild_tensor_v2": _RebuildTensor,
    "torch._utils._rebuild_parameter": _RebuildParameter,
    "collections.OrderedDict": _Dict,
    "torch.Size": tuple,
    **{f"builtins.{kind.__name__}": kind for kind in (dict, list, tuple, set, frozenset)},
    **{str(dtype): dtype for dtype in STORAGES.values()},
}


class _Unpickler(pickle.Unpickler):
    """Reads the pickle of an archive with `Stub` in place of every name that it does not know."""

    def __init__(self, archive: zipfile.ZipFile, content: mmap.mmap) -> None:
        self.archive, self.content, self.names = archive, content, dict(_KNOWN)
        program = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        self.folder = program.removesuffix("data.pkl")
        super().__init__(io.BytesIO(archive.read(program)), encoding="utf-8")

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}".replace("__builtin__.", "builtins.")  # the name of Python 2, which protocol 2 writes
        if full not in self.names:
            self.names[full] = type("Stub", (Stub,), {"name": full})
        return self.names[full]

    def persistent_load(self, pid: Any) -> Any:
        """Return a storage, given as ("storage", type, member, device, length), as a vector."""
        _, storage_type, member, _, _ = pid
        dtype = STORAGES.get(getattr(storage_type, "name", "").removeprefix("torch.").removesuffix("Storage"))
        if dtype is None:
            return Stub()
        info = self.archive.getinfo(f"{self.folder}data/{member}")
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError("its numbers are compressed")
        if not info.file_size:  # torch refuses an empty buffer
            return torch.empty(0, dtype=dtype)
        lengths = struct.unpack_from("<HH", self.content, info.header_offset + LOCAL_HEADER - 4)
        start = info.header_offset + LOCAL_HEADER + sum(lengths)
        return torch.frombuffer(self.content, dtype=dtype, count=info.file_size // dtype.itemsize, offset=start)


def read_torch_file(path: Path) -> Any:
    """Read a file of torch.save as plain values and tensors, with `Stub` for objects of other classes."""
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"the checksum of {damaged} is wrong")
            if any(name.endswith("/byteorder") and archive.read(name) != b"little" for name in archive.namelist()):
                raise ValueError("its numbers are big-endian")
            return _Unpickler(archive, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)).load()
    except Exception as error:  # a damaged archive or pickle makes the libraries raise any
        raise CheckpointError(
            f"'{path}' cannot be read as a file of torch.save since version 1.6 ({reason_of(error)}): name a .safetensors, "
            ".ckpt, .pth, .pt or .bin file, restore it from a copy, or save it again with a newer torch."
        ) from error
