"""Files of torch.save, against torch.load; hostile and damaged ones, of which nothing is run."""

import collections
import contextlib
import io
import os
import pickle
import struct
import zipfile

import pytest
import torch
from torch import nn

from jpeg_dlm.importing.torch_files import Stub, read_torch_file
from jpeg_dlm.util.errors import CheckpointError


class Tokenizer:
    """A class that the reader does not know."""

    def __init__(self):
        self.vocab = {"a": 1}
        self.merges = {("a", "b"): 0}
        self.table = torch.arange(3)


class Names(dict):
    """A container that the reader does not know."""


def same(a, b):
    if isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b.detach())
    if isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in b)
    if isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


BASE = torch.arange(24.0).view(4, 6)
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8]
VALUES = {
    "types": [torch.arange(6).to(dtype) for dtype in (*DTYPES, torch.uint8, torch.bool)],
    "views": {"rows": BASE[1:3], "columns": BASE[:, 2:4], "whole": BASE, "turned": BASE.t(), "strided": BASE[::2, ::3]},
    "small": [torch.tensor(3.5), torch.empty(0), torch.empty(3, 0), torch.empty(0, 5, dtype=torch.int64)],
    "parameter": nn.Parameter(torch.randn(3)),
    "state_dict": nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict(),
    "ordered": collections.OrderedDict(b=torch.ones(2), a=collections.OrderedDict()),
    "nested": {"a": [{"b": (torch.ones(1), None, True, False, 3, -(2**70), 1.5, "text")}], 3: "int key", None: [], "s": {1}},
    "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": BASE}}, "param_groups": [{"betas": (0.9, 0.999)}]},
    "size": {"shape": torch.Size([2, 3]), "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("protocol", [2, 5])
def test_values_equal_those_of_torch_load(protocol, tmp_path):
    torch.save(VALUES, tmp_path / "file.pt", pickle_protocol=protocol)
    assert same(read_torch_file(tmp_path / "file.pt"), torch.load(tmp_path / "file.pt", weights_only=False))


def test_objects_of_other_classes_and_kinds_of_tensors_are_inert(tmp_path):
    others = {"complex": torch.ones(2, dtype=torch.complex64), "float8": torch.ones(2).to(torch.float8_e4m3fn)}
    others |= {"counts": collections.defaultdict(list, a=[1]), "names": Names(a=1)}
    torch.save(others | {"tokenizer": Tokenizer(), "weight": BASE}, tmp_path / "file.ckpt")
    values = read_torch_file(tmp_path / "file.ckpt")
    assert all(isinstance(values[name], Stub) for name in (*others, "tokenizer"))
    assert values["tokenizer"].name.endswith("Tokenizer") and values["tokenizer"].state["vocab"] == {"a": 1}
    assert torch.equal(values["weight"], BASE)


# ---------------------------------------------------------------- archives made by hand


def archive(path, program, members=()):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("root/data.pkl", program)
        for name, data in members:
            file.writestr(f"root/{name}", data)
    return path


class Call:
    """Pickles as a call of `what`, which unpickling would carry out."""

    def __init__(self, what, *args):
        self.what, self.args = what, args

    def __reduce__(self):
        return self.what, self.args


EVAL = "__import__('os').mkdir('mark')"
HOSTILE = {
    "GLOBAL and REDUCE": b"cos\nmkdir\n(S'mark'\ntR.",
    "STACK_GLOBAL": pickle.dumps(Call(os.mkdir, "mark"), 4),
    "INST": b"(S'mark'\nios\nmkdir\n.",
    "OBJ": b"(cos\nmkdir\nS'mark'\no.",
    "NEWOBJ": b"\x80\x02cos\nmkdir\nU\x04mark\x85\x81.",
    "nested names": b"\x80\x04\x8c\x02os\x8c\x0dpath.os.mkdir\x93\x8c\x04mark\x85R.",
    "eval": pickle.dumps(Call(eval, EVAL), 2),
    "calls of what calls return": b"cbuiltins\ngetattr\n(cos\nS'mkdir'\ntR(S'mark'\ntR.",
    "state of a known class": b"ccollections\nOrderedDict\n(tR(S'__class__'\ncos\nmkdir\ndb.",
    "state of a class itself": b"ctorch._utils\n_rebuild_tensor_v2\n(N(S'__new__'\ncos\nmkdir\ndtb(S'mark'\ntR.",
    "torch's hooks": pickle.dumps(Call(torch._utils._rebuild_parameter_with_state, 1, 2, 3, {"a": Call(eval, EVAL)}), 2),
    "a persistent id": b"(S'storage'\ncos\nmkdir\nS'../../mark'\nS'cpu'\nI1\ntQ.",
}
HARMFUL = ("GLOBAL and REDUCE", "STACK_GLOBAL", "INST", "OBJ", "eval", "torch's hooks")  # for pickle itself


def test_a_name_again_and_again_is_one_class(tmp_path):
    """Else a file of megabytes would take gigabytes."""
    values = read_torch_file(archive(tmp_path / "file.pt", b"(" + b"cos\nmkdir\n" * 1000 + b"l."))
    assert len(values) == 1000 and len(set(values)) == 1


@pytest.mark.parametrize("case", HOSTILE)
def test_nothing_in_a_file_is_run(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = archive(tmp_path / "file.pt", HOSTILE[case])
    with contextlib.suppress(CheckpointError):
        assert isinstance(read_torch_file(path), (Stub, dict))
    assert [p.name for p in tmp_path.iterdir()] == ["file.pt"]
    torch.save({"w": BASE}, path)
    assert torch.equal(read_torch_file(path)["w"], BASE), "the reader itself is as before"


def test_the_hostile_programs_do_work_elsewhere(tmp_path, monkeypatch):
    """Else the test above would show nothing."""
    monkeypatch.chdir(tmp_path)
    for case in HARMFUL:
        with contextlib.suppress(AttributeError, TypeError):  # after it did harm
            pickle.loads(HOSTILE[case])
        os.rmdir("mark")


def tensor_program(member="0", offset=0, size=(2, 3), stride=(3, 1), storage="FloatStorage"):
    """A pickle of one tensor, by pickle's own writer."""

    class Writer(pickle.Pickler):
        def persistent_id(self, obj):
            return ("storage", getattr(torch, storage), member, "cpu", 6) if obj == "the storage" else None

    buffer = io.BytesIO()
    call = Call(torch._utils._rebuild_tensor_v2, "the storage", offset, size, stride, False, collections.OrderedDict())
    Writer(buffer, 2).dump({"w": call})
    return buffer.getvalue()


SIX = [("data/0", struct.pack("<6f", *range(6)))]


@pytest.mark.parametrize(
    "changes",
    [{"offset": 1}, {"stride": (4, 1)}, {"size": (-2, 3)}, {"storage": "DoubleStorage"}, {"member": "../../etc/passwd"}],
    ids=str,
)
def test_a_tensor_that_does_not_fit_its_storage_is_refused(changes, tmp_path):
    path = archive(tmp_path / "file.pt", tensor_program(), SIX)
    assert torch.equal(read_torch_file(path)["w"], torch.arange(6.0).view(2, 3))
    archive(path, tensor_program(**changes), SIX)
    with pytest.raises(CheckpointError, match="file.pt"):
        read_torch_file(path)


def damaged(path):
    """One bit of a tensor is flipped."""
    archive(path, tensor_program(), SIX)
    content = bytearray(path.read_bytes())
    content[content.index(SIX[0][1])] ^= 1
    path.write_bytes(content)


BROKEN = {
    "legacy": lambda p: torch.save(BASE, p, _use_new_zipfile_serialization=False),
    "a bare pickle": lambda p: p.write_bytes(pickle.dumps({"a": 1})),
    "a damaged program": lambda p: archive(p, b"I1\n(NNu."),
    "big-endian numbers": lambda p: archive(p, tensor_program(), [*SIX, ("byteorder", "big")]),
    "a wrong checksum": damaged,
    "missing": lambda p: None,
}


@pytest.mark.parametrize("case", BROKEN)
def test_one_sentence_for(case, tmp_path):
    BROKEN[case](tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="file.pt") as caught:
        read_torch_file(tmp_path / "file.pt")
    assert "\n" not in str(caught.value)
