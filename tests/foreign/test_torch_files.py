"""Files of torch.save, against torch.load; hostile and damaged ones, which must have no effect but one sentence."""

import collections
import contextlib
import io
import os
import pickle
import random
import struct
import tracemalloc
import zipfile

import pytest
import torch
from torch import nn

from jpeg_dlm.errors import CheckpointError
from jpeg_dlm.foreign.pickle_machine import Foreign, StoredTensor
from jpeg_dlm.foreign.torch_files import load_stored, read_torch_file


class Tokenizer:
    """A class that the reader does not know."""

    def __init__(self):
        self.vocab = {"a": 1}
        self.merges = {("a", "b"): 0}
        self.table = torch.arange(3)


def load(path, tensor):
    return load_stored(path, {"": tensor})[""]


def loaded(path):
    """What the reader gives, with its tensors read."""

    def walk(value):
        if isinstance(value, StoredTensor):
            return load(path, value)
        if isinstance(value, dict):
            return {key: walk(v) for key, v in value.items()}
        return type(value)(map(walk, value)) if isinstance(value, (list, tuple)) else value

    return walk(read_torch_file(path))


def same(a, b):
    if isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b.detach())
    if isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in b)
    if isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


BASE = torch.arange(24.0).view(4, 6)
VALUES = {
    **{str(d): torch.arange(6).to(d) for d in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    )},
    "views of one storage": {"rows": BASE[1:3], "columns": BASE[:, 2:4], "whole": BASE},
    "transposed": BASE.t(),
    "strided": BASE[::2, ::3],
    "a number": torch.tensor(3.5),
    "empty": [torch.empty(0), torch.empty(3, 0), torch.empty(0, 5, dtype=torch.int64)],
    "parameter": nn.Parameter(torch.randn(3)),
    "state_dict": nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict(),
    "ordered": collections.OrderedDict(b=torch.ones(2), a=collections.OrderedDict()),
    "nested": {"a": [{"b": (torch.ones(1), None, True, False, 3, -(2**70), 1.5, "text")}], 3: "int key", None: []},
    "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": BASE}}, "param_groups": [{"betas": (0.9, 0.999)}]},
    "size": {"shape": torch.Size([2, 3]), "dtype": torch.bfloat16},
    "long": list(range(3000)),
}  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("case", VALUES)
def test_values_equal_those_of_torch_load(case, protocol, tmp_path):
    path = tmp_path / "file.pt"
    torch.save(VALUES[case], path, pickle_protocol=protocol)
    assert same(loaded(path), torch.load(path, weights_only=False))


def test_objects_of_other_classes_keep_their_plain_state(tmp_path):
    torch.save({"tokenizer": Tokenizer(), "weight": BASE}, tmp_path / "file.ckpt")
    found = read_torch_file(tmp_path / "file.ckpt")
    assert isinstance(found["tokenizer"], Foreign) and found["tokenizer"].name.endswith("test_torch_files.Tokenizer")
    assert found["tokenizer"].state["vocab"] == {"a": 1}
    assert torch.equal(load(tmp_path / "file.ckpt", found["tokenizer"].state["table"]), torch.arange(3))
    assert torch.equal(load(tmp_path / "file.ckpt", found["weight"]), BASE)


def test_tensors_of_kinds_that_are_not_read_stay_inert(tmp_path):
    values = {"complex": torch.ones(2, dtype=torch.complex64), "float8": torch.ones(2).to(torch.float8_e4m3fn)}
    torch.save(values | {"weight": BASE}, tmp_path / "file.pt")
    found = read_torch_file(tmp_path / "file.pt")
    assert isinstance(found["complex"], Foreign) and isinstance(found["float8"], Foreign)
    assert torch.equal(load(tmp_path / "file.pt", found["weight"]), BASE)


def test_views_share_memory_as_they_did(tmp_path):
    path = tmp_path / "file.pt"
    torch.save({"rows": BASE[1:3], "whole": BASE, "other": BASE.clone()}, path)
    found = load_stored(path, read_torch_file(path))
    found["whole"].fill_(7)
    assert torch.equal(found["rows"], torch.full((2, 6), 7.0)) and torch.equal(found["other"], BASE)


# ---------------------------------------------------------------- archives made by hand


def archive(path, program, members=(), compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as file:
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


HOSTILE = {
    "GLOBAL and REDUCE": b"cos\nmkdir\n(S'mark'\ntR.",
    "STACK_GLOBAL": pickle.dumps(Call(os.mkdir, "mark"), 4),
    "INST": b"(S'mark'\nios\nmkdir\n.",
    "OBJ": b"(cos\nmkdir\nS'mark'\no.",
    "NEWOBJ": b"\x80\x02cos\nmkdir\nU\x04mark\x85\x81.",
    "nested names": b"\x80\x04\x8c\x02os\x8c\x0dpath.os.mkdir\x93\x8c\x04mark\x85R.",
    "eval": pickle.dumps(Call(eval, "__import__('os').mkdir('mark')"), 2),
    "a known name with BUILD": b"ccollections\nOrderedDict\n(tR(S'__class__'\ncos\nmkdir\ndb.",
    "calls of what calls return": b"cbuiltins\ngetattr\n(cos\nS'mkdir'\ntR(S'mark'\ntR.",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_nothing_in_a_file_is_run(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = archive(tmp_path / "file.pt", HOSTILE[case])
    try:
        assert isinstance(read_torch_file(path), (Foreign, dict))
    except CheckpointError:
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["file.pt"]


def test_the_hostile_programs_do_work_elsewhere(tmp_path, monkeypatch):
    """Else the test above would show nothing."""
    monkeypatch.chdir(tmp_path)
    for case in ("GLOBAL and REDUCE", "STACK_GLOBAL", "INST", "OBJ", "eval"):
        pickle.loads(HOSTILE[case])
        os.rmdir("mark")


def tensor_program(member="0", numel=6, offset=0, size=(2, 3), stride=(3, 1), storage="FloatStorage"):
    """A pickle of one tensor, by pickle's own writer."""

    class Writer(pickle.Pickler):
        def persistent_id(self, obj):
            return ("storage", getattr(torch, storage), member, "cpu", numel) if obj == "the storage" else None

    buffer = io.BytesIO()
    hooks = collections.OrderedDict()
    call = Call(torch._utils._rebuild_tensor_v2, "the storage", offset, size, stride, False, hooks)
    Writer(buffer, 2).dump({"w": call})
    return buffer.getvalue()


SIX = [("data/0", struct.pack("<6f", *range(6)))]


def test_a_tensor_made_by_hand(tmp_path):
    path = archive(tmp_path / "file.pt", tensor_program(), SIX)
    assert torch.equal(loaded(path)["w"], torch.arange(6.0).view(2, 3)) and read_torch_file(path)["w"].nbytes == 24


WRONG_TENSORS = {
    "beyond its storage": {"offset": 1},
    "with a stride beyond": {"stride": (4, 1)},
    "larger than its storage": {"size": (1 << 30, 1 << 30), "stride": (0, 0)},
    "with a negative size": {"size": (-2, 3)},
    "with a negative offset": {"offset": -1},
    "with a negative stride": {"offset": 5, "stride": (-3, -1)},
    "with a shape of another length": {"stride": (1,)},
    "with a float as size": {"size": (2.0, 3)},
    "of a storage that says more": {"numel": 7},
    "of a storage that says less": {"numel": 5, "size": (5,), "stride": (1,)},
    "of another type": {"storage": "DoubleStorage"},
    "of a missing storage": {"member": "1"},
    "of a file elsewhere": {"member": "../../etc/passwd"},
    "with endless axes": {"size": (1,) * 65, "stride": (1,) * 65},
    "empty with impossible axes": {"size": (1 << 62, 0), "stride": (1, 1)},
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_a_tensor_is_refused(case, tmp_path):
    path = archive(tmp_path / "file.pt", tensor_program(**WRONG_TENSORS[case]), SIX)
    with pytest.raises(CheckpointError, match="file.pt"):
        read_torch_file(path)


def twice(path):
    with pytest.warns(UserWarning, match="Duplicate"):
        archive(path, tensor_program(), SIX * 2)


def other_zip(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x", "y")


LONG_LIST = b"(" + b"(NNt" * 1000 + b"lp0\n0"  # a thousand pairs
BROKEN = {
    "legacy": (lambda p: torch.save(BASE, p, _use_new_zipfile_serialization=False), "newer torch"),
    "empty": (lambda p: p.write_bytes(b""), "not a file of torch.save"),
    "text": (lambda p: p.write_text("hello"), "not a file of torch.save"),
    "a bare pickle": (lambda p: p.write_bytes(pickle.dumps({"a": 1})), "not a file of torch.save"),
    "a zip of something else": (other_zip, "data.pkl"),
    "no pickle": (lambda p: archive(p, b""), "damaged"),
    "a pickle without an end": (lambda p: archive(p, b"N"), "damaged"),
    "a pickle of unknown instructions": (lambda p: archive(p, b"\xff."), "damaged"),
    "an extension code": (lambda p: archive(p, b"\x82\x01."), "EXT1"),
    "an empty stack": (lambda p: archive(p, b"R."), "damaged"),
    "a group without a mark": (lambda p: archive(p, b"t."), "inconsistent"),
    "an odd number of items": (lambda p: archive(p, b"}(Nu."), "damaged"),
    "a memo that is not there": (lambda p: archive(p, b"h\x07."), "damaged"),
    "items of a number": (lambda p: archive(p, b"I1\n(NNu."), "no dict"),
    "a name that is no text": (lambda p: archive(p, b"NN\x93."), "inconsistent"),
    "too many instructions": (lambda p: archive(p, b"N0" * 5000 + b"N."), "too long"),
    "copies of a long list": (lambda p: archive(p, LONG_LIST + b"ccollections\nOrderedDict\n(g0\ntR0" * 9), "too long"),
    "compression": (lambda p: archive(p, tensor_program(), SIX, zipfile.ZIP_DEFLATED), "compressed"),
    "big-endian numbers": (lambda p: archive(p, tensor_program(), [*SIX, ("byteorder", "big")]), "big-endian"),
    "a member twice": (twice, "same name"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_one_sentence_for(case, tmp_path, monkeypatch):
    monkeypatch.setattr("jpeg_dlm.foreign.pickle_machine.WORK", 10_000)
    make, word = BROKEN[case]
    make(tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="file.pt") as caught:
        read_torch_file(tmp_path / "file.pt")
    assert word in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        read_torch_file(tmp_path / "none.pt")


def test_keys_that_would_take_forever_to_hash_are_left_out(tmp_path):
    for twice in (b"2\x86", b"q\x00h\x00\x86"):  # (x, x) sixty times: 2 ** 60 leaves, two or five bytes a level
        program = b"\x80\x02}(N\x85" + twice * 60 + b"NU\x01aNu."
        assert read_torch_file(archive(tmp_path / "file.pt", program)) == {"a": None}


HUGE = {
    "a memo index": b"Nr\xff\xff\xff\xff.",
    "a memo index in words": b"Np%d\n." % (1 << 62),
    "bytes": b"B\xff\xff\xff\xff.",
    "more bytes": b"\x8e" + struct.pack("<Q", 1 << 40) + b".",
    "a byte array": b"\x96" + struct.pack("<Q", 1 << 40) + b".",
    "a text": b"\x8d" + struct.pack("<Q", 1 << 40) + b".",
    "a number": b"\x8b\xff\xff\xff\x7f.",
    "a frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
}


@pytest.mark.parametrize("case", HUGE)
def test_a_few_bytes_never_take_much_memory(case, tmp_path):
    path = archive(tmp_path / "file.pt", HUGE[case])
    tracemalloc.start()
    try:
        with contextlib.suppress(CheckpointError):
            assert read_torch_file(path) is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_deep_value_needs_no_recursion(tmp_path):
    depth = 30_000
    read_torch_file(archive(tmp_path / "file.pt", b"]" * depth + b"a" * (depth - 1) + b"."))


# ---------------------------------------------------------------- damage


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "file.pt"
    torch.save({"a": torch.arange(40.0), "b": {"c": torch.ones(7, dtype=torch.int64)}, "n": [1, "x", Tokenizer()]}, path)
    return path, path.read_bytes()


def test_a_truncated_file_is_refused(saved):
    path, data = saved
    for size in range(0, len(data), 17):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            read_torch_file(path)


def test_a_flipped_bit_is_refused_or_changes_nothing(saved):
    path, data = saved
    expected, rng, refused = loaded(path), random.Random(0), 0
    for _ in range(250):
        at = rng.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :])
        try:
            found = loaded(path)
        except CheckpointError:
            refused += 1
        else:
            assert same(found["a"], expected["a"]) and same(found["b"], expected["b"]) and found["n"][:2] == [1, "x"]
    assert refused > 30  # the rest hit padding and dates


def test_a_flipped_bit_of_a_number_is_found_by_its_checksum(saved):
    path, data = saved
    at = data.index(struct.pack("<4f", 1, 2, 3, 4))
    path.write_bytes(data[:at] + b"\x01" + data[at + 1 :])
    with pytest.raises(CheckpointError, match="CRC"):
        loaded(path)


@pytest.mark.filterwarnings("ignore:invalid escape:DeprecationWarning")
def test_random_programs_give_a_value_or_one_sentence(tmp_path):
    rng = random.Random(1)
    program = tensor_program()
    for _ in range(300):
        changed = bytearray(program)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(changed))
            changed[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
        try:
            loaded(archive(tmp_path / "file.pt", bytes(changed), SIX))
        except CheckpointError as error:
            assert "\n" not in str(error) and "file.pt" in str(error)
