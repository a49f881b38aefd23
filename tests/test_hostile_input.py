"""Files that lie, are damaged or mean harm: each is refused in one sentence and leaves no trace."""

import gzip
import hashlib
import json
import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import made_up_text, micro_flags
from tiny_evaluation import micro_folder  # noqa: F401 - a fixture

from jpeg_dlm import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.config import DataConfig, validate
from jpeg_dlm.config_io import override, read_json_file
from jpeg_dlm.encoders.flan_t5 import convert_t5_encoder, dequantize
from jpeg_dlm.encoders.onnx_reader import read_onnx
from jpeg_dlm.encoders.small import SmallEncoder, load_small_encoder, save_small_encoder
from jpeg_dlm.errors import AssetError, CheckpointError, DataError, JpegDlmError, UsageError
from jpeg_dlm.evaluation.samples import read_samples
from jpeg_dlm.files import load_tensors, write_manifest
from jpeg_dlm.folders.model_folder import read_model
from jpeg_dlm.presets import preset
from jpeg_dlm.scorers.gguf_files import read_gguf
from jpeg_dlm.scorers.language_models import GgufScorer
from jpeg_dlm.strict_json import parse_json
from jpeg_dlm.text import corpora, text_files
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.prepare import prepare
from jpeg_dlm.text.tokenizer import TextTokenizer, train_bpe

DEEP = "[" * 100_000 + "]" * 100_000


def refusal(capsys, *words: object, code: int | None = None) -> str:
    """The one sentence with which a command is refused."""
    assert main([str(word) for word in words]) in ((1, 2) if code is None else (code,))
    seen = capsys.readouterr()
    lines = [line for line in seen.err.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("error: ") and seen.out == "", seen
    return lines[0]


def below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def survive(read: Callable[[], object], allowed: type[JpegDlmError] = JpegDlmError) -> bool:
    """Whether `read` refused; anything but a value or an error of ours fails the test."""
    try:
        read()
    except allowed as error:
        assert "\n" not in str(error) and len(str(error)) < 1200
        return True
    return False


def mutations(data: bytes, count: int, seed: int = 0):
    """Copies of `data` with flipped bits, replaced, removed and inserted bytes, extreme numbers, or cut short."""
    rng = random.Random(seed)
    extremes = [b"\xff" * 8, b"\x00" * 8, b"\xff\xff\xff\x7f", b"\x7f", struct.pack("<q", 1 << 40)]
    for _ in range(count):
        at = rng.randrange(len(data))
        new = rng.choice([bytes([data[at] ^ (1 << rng.randrange(8))]), rng.randbytes(3), b"", rng.choice(extremes)])
        yield data[:at] if rng.random() < 0.1 else data[:at] + new + data[at + rng.choice([0, 1, len(new)]) :]


# ---------------------------------------------------------------- JSON


BAD_JSON = {
    "nested": DEEP,
    "nested objects": '{"a":' * 900 + "1" + "}" * 900,
    "not a number": '{"a": NaN}',
    "infinite": '{"a": -Infinity}',
    "beyond numbers": '{"a": 1e999}',
    "a key twice": '{"train": {"lr": 1, "lr": 2}}',
    "endless digits": '{"a": %s}' % ("9" * 5000),
    "cut": '{"a": ',
    "a list": "[]",
    "empty": "",
}


@pytest.mark.parametrize("case", BAD_JSON)
def test_options_in_json_that_readers_could_understand_differently(case, tmp_path, capsys):
    (tmp_path / "options.json").write_text(BAD_JSON[case])
    assert "options.json" in refusal(capsys, "info", "--config", tmp_path / "options.json", code=2)


def test_options_that_are_no_text_or_endless(tmp_path, capsys):
    (tmp_path / "options.json").write_bytes(b'{"preset": "\xff\xfe"}')
    assert "not valid JSON" in refusal(capsys, "info", "--config", tmp_path / "options.json")
    (tmp_path / "options.json").write_text(" " * (2 << 20))
    assert "larger than" in refusal(capsys, "info", "--config", tmp_path / "options.json")
    assert "Cannot read" in refusal(capsys, "info", "--config", tmp_path)


def test_a_repeated_key_among_very_many_is_found_in_one_pass():
    """A search for each key would take many minutes."""
    text = "{" + ",".join(f'"{i}": 0' for i in range(300_000)) + ', "299999": 1}'
    with pytest.raises(ValueError, match="'299999' is repeated"):
        parse_json(text)


def test_strict_json_reads_what_json_reads():
    for value in ({"a": [1, -2.5e-3, None, True, "é\n"], "b": {}}, [[[]]], "x", 3, {"": "", " ": 1e308}):
        assert parse_json(json.dumps(value)) == value == parse_json(json.dumps(value).encode())
    assert parse_json("[" * 32 + "]" * 32) and pytest.raises(ValueError, parse_json, "[" * 33 + "]" * 33)


@pytest.mark.parametrize(
    "values",
    [
        {"model.depth": 10**9},
        {"data.vocab_size": 1 << 40},
        {"model.hidden": 10**300},
        {"train.steps": 1 << 63},
        {"encoder.depth": -(10**18)},
        {"data.token_len": "1e18"},
        {"train.seed": 10**40},
    ],
)
def test_huge_numbers(values):
    with pytest.raises(UsageError, match="must be at most"):
        validate(override(preset("smoke"), values))


@pytest.mark.parametrize("method", ["../../etc/passwd", "/bin/sh", "os", "jpeg_dlm.cli.main", "__class__", "ar\0", ["ar"], 7])
def test_names_of_methods_that_are_none(method, tmp_path, capsys):
    (tmp_path / "options.json").write_text(json.dumps({"method": method, "model": {}}))
    words = ["train", "--preset", "smoke", "--data", "x", "--out", tmp_path / "run", "--config", tmp_path / "options.json"]
    refusal(capsys, *words, code=2)
    assert below(tmp_path) == {"options.json"}


# ---------------------------------------------------------------- model folders


@pytest.fixture
def model(micro_folder, tmp_path):  # noqa: F811
    """A model folder to tamper with, whose manifest can be made to vouch for anything, as an attacker's would."""
    import shutil

    return shutil.copytree(micro_folder, tmp_path / "model")


def vouch(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    write_manifest(folder, {})


def change_config(folder: Path, changes: dict) -> None:
    values = json.loads((folder / "config.json").read_text())
    for dotted, value in changes.items():
        group, _, name = dotted.rpartition(".")
        (values[group] if group else values)[name] = value
    (folder / "config.json").write_text(json.dumps(values))
    vouch(folder)


LYING_CONFIGS = {
    "more layers": {"model.depth": 9_000_000},
    "wider": {"model.hidden": 1 << 22},
    "a larger vocabulary": {"data.vocab_size": 1 << 23},
    "another width": {"model.hidden": 32},
    "no heads": {"model.heads": 0},
    "an unknown key": {"model.colour": 3},
    "another method": {"method": "ar"},
    "a path as method": {"method": "../../../tmp/evil"},
    "no group": {"model": None},
    "a text as number": {"model.depth": "__import__('os')"},
    "an encoder elsewhere": {"encoder.kind": "small", "encoder.name": "/etc"},
    "a list as group": {"train": [1]},
    "longer rows than memory": {"data.token_len": 10**15},
}


@pytest.mark.parametrize("case", LYING_CONFIGS)
def test_a_config_that_is_not_the_models(case, model, tmp_path, capsys):
    change_config(model, LYING_CONFIGS[case])
    before = below(tmp_path)
    refusal(capsys, "generate", model, "--out", tmp_path / "texts.jsonl")
    refusal(capsys, "export", model, "--out", tmp_path / "copy")
    assert below(tmp_path) == before


def header(tensors: dict, data: bytes = b"", length: int | None = None) -> bytes:
    text = json.dumps(tensors).encode() if isinstance(tensors, dict) else tensors
    return struct.pack("<Q", len(text) if length is None else length) + text + data


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BAD_TENSORS = {
    "a header as long as the world": header({}, length=1 << 62),
    "a header beyond the file": header({}, length=1000),
    "a header of 100 MB": header(b" " * 8, length=100 << 20),
    "offsets that overlap": header({"a": F32, "b": F32 | {"data_offsets": [4, 12]}}, b"\0" * 12),
    "offsets that leave the file": header({"a": F32 | {"data_offsets": [0, 1 << 40]}}, b"\0" * 8),
    "offsets backwards": header({"a": F32 | {"data_offsets": [8, 0]}}, b"\0" * 8),
    "a hole": header({"a": F32 | {"data_offsets": [8, 16]}}, b"\0" * 16),
    "a huge shape": header({"a": F32 | {"shape": [1 << 40, 1 << 40]}}, b"\0" * 8),
    "a shape that wraps": header({"a": F32 | {"shape": [1 << 63, 2, 1 << 63]}}, b"\0" * 8),
    "a negative shape": header({"a": F32 | {"shape": [-2]}}, b"\0" * 8),
    "an unknown type": header({"a": F32 | {"dtype": "PICKLE"}}, b"\0" * 8),
    "a deep header": header(DEEP.encode()),
    "a tensor twice": header(b'{"a":%s,"a":%s}' % ((json.dumps(F32).encode(),) * 2), b"\0" * 8),
    "no UTF-8": header(b'{"\xff":{}}'),
    "a pickle": b"\x80\x04cos\nsystem\n(S'touch evil'\ntR.",
    "nothing": b"",
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_lie(case, model, tmp_path, capsys):
    (model / "model.safetensors").write_bytes(BAD_TENSORS[case])
    vouch(model)
    (tmp_path / "alone.safetensors").write_bytes(BAD_TENSORS[case])
    before = below(tmp_path)
    refusal(capsys, "generate", model, "--out", tmp_path / "texts.jsonl", code=1)
    refusal(capsys, "import", tmp_path / "alone.safetensors", "--out", tmp_path / "imported", code=1)
    assert below(tmp_path) == before


def test_mutated_tensors_are_read_or_refused(micro_folder, tmp_path):  # noqa: F811
    data = (micro_folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    path, refused = tmp_path / "x.safetensors", 0
    for changed in mutations(data[:start], 300):
        path.write_bytes(changed + data[start:])
        refused += survive(lambda: load_tensors(path), CheckpointError)
    assert refused > 200


STRANGE_TENSORS = {
    "missing": lambda t: t.pop(sorted(t)[0]),
    "spare": lambda t: t.update(spare=torch.zeros(2)),
    "whole numbers": lambda t: t.update({sorted(t)[0]: t[sorted(t)[0]].long()}),
    "bytes": lambda t: t.update({sorted(t)[0]: t[sorted(t)[0]].to(torch.uint8)}),
    "no axes": lambda t: t.update({name: torch.tensor(1.0) for name in t}),
    "empty": lambda t: t.update({name: torch.zeros(0, 3) for name in t}),
    "none": lambda t: t.clear(),
}


@pytest.mark.parametrize("case", STRANGE_TENSORS)
def test_foreign_checkpoints_whose_tensors_do_not_fit(case, micro_folder, tmp_path, capsys):  # noqa: F811
    from safetensors.torch import save_file

    tensors = load_tensors(micro_folder / "model.safetensors")
    STRANGE_TENSORS[case](tensors)
    save_file(tensors, tmp_path / "theirs.safetensors")
    torch.save(tensors, tmp_path / "theirs.pt")
    for name in ("theirs.safetensors", "theirs.pt"):
        for method in ((), ("--method", "ar"), ("--method", "elf"), ("--method", "langflow"), ("--method", "mdlm")):
            refusal(capsys, "import", tmp_path / name, *method, "--out", tmp_path / "imported")
    assert below(tmp_path) == {"theirs.safetensors", "theirs.pt"}


@pytest.mark.parametrize("file", ["../../etc/passwd", "/etc/passwd", "..", "", "a\0b", "x.safetensors/../../y", 3])
def test_an_index_of_shards_that_leaves_its_folder(file, tmp_path, capsys):
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    refusal(capsys, "import", tmp_path / "hub", "--out", tmp_path / "imported", code=1)
    assert below(tmp_path) == {"hub", "hub/model.safetensors.index.json"}


def test_links_and_names_that_leave_a_model_folder(model, tmp_path, capsys):
    (tmp_path / "secret").write_text("{}")
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").symlink_to(tmp_path / "secret")
    assert "symbolic link" in refusal(capsys, "generate", model, code=1)
    (model / "tokenizer.json").unlink()
    for name in ("../secret", "/etc/passwd", "a\\..\\b"):
        body = {"format": 1, "files": {name: {"sha256": "0" * 64, "size": 2}}}
        text = json.dumps(body, indent=1) + "\n"
        sealed = json.dumps(body | {"digest": hashlib.sha256(text.encode()).hexdigest()}, indent=1) + "\n"
        (model / "manifest.json").write_text(sealed)
        refusal(capsys, "verify", model, code=1)


def test_control_characters_of_a_name_do_not_reach_the_terminal(tmp_path, capsys):
    error = refusal(capsys, "generate", tmp_path / "\x1b[2J\nevil\u202e")
    assert "\\x1b[2J\\nevil\\u202e" in error


# ---------------------------------------------------------------- tokenizers


def tokenizer_file(path: Path, change: Callable[[dict], object]) -> Path:
    train_bpe([made_up_text(4)], 280).save(path)
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return path


def test_a_tokenizer_tells_the_ids_it_gives_and_not_how_many_there_are(tmp_path):
    honest = TextTokenizer.from_file(tokenizer_file(tmp_path / "a.json", lambda v: None))
    assert honest.vocab_size == 280
    letter = honest.encode("z")[-1]
    name = next(k for k, i in json.loads((tmp_path / "a.json").read_text())["model"]["vocab"].items() if i == letter)
    lying = TextTokenizer.from_file(
        tokenizer_file(tmp_path / "b.json", lambda v: v["model"]["vocab"].update({name: 4_000_000}))
    )
    assert max(lying.encode("zebra")) == 4_000_000 < lying.vocab_size


def test_text_whose_tokens_the_model_does_not_have(model, capsys):
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {k: i + 5000 * (i == 50) for k, i in tokenizer["model"]["vocab"].items()}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    vouch(model)
    text = "".join(map(chr, range(33, 127)))
    for call in (lambda m: m.reconstruct([text]), lambda m: m.given(prompt=text[40:48]), lambda m: m.encode([text[40:48]])):
        assert survive(lambda call=call: call(load(model, "cpu")))


def test_mutated_tokenizers_are_read_or_refused(tmp_path):
    path = tokenizer_file(tmp_path / "tokenizer.json", lambda v: None)
    data, refused = path.read_bytes(), 0

    def use():
        tokenizer = TextTokenizer.from_file(path)
        ids = tokenizer.encode("The farmer plants é.")
        assert not ids or max(ids) < tokenizer.vocab_size
        tokenizer.decode(ids)

    for changed in mutations(data, 300):
        path.write_bytes(changed)
        refused += survive(use, DataError)
    assert refused > 30


@pytest.mark.parametrize(
    "content", [DEEP, "[]", "{}", '{"model": NaN}', "", "\0", '{"version": "1.0", "model": {"type": "../x"}}']
)
def test_tokenizers_that_are_none(content, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        TextTokenizer.from_file(tmp_path / "tokenizer.json")


def test_a_tokenizer_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr("jpeg_dlm.text.tokenizer.LARGEST_FILE", 100)
    with pytest.raises(DataError, match="larger than"):
        TextTokenizer.from_file(tokenizer_file(tmp_path / "tokenizer.json", lambda v: None))


# ---------------------------------------------------------------- prepared text


DATA = DataConfig(vocab_size=300, token_len=12)


@pytest.fixture(scope="module")
def blocks_folder(corpus_file, tmp_path_factory):
    from dataclasses import replace

    folder = tmp_path_factory.mktemp("blocks") / "data"
    prepare(replace(DATA, source=str(corpus_file)), folder)
    return folder


@pytest.fixture
def blocks(blocks_folder, tmp_path):
    import shutil

    return shutil.copytree(blocks_folder, tmp_path / "data")


def change_index(folder: Path, change: Callable[[dict], object]) -> None:
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


def first(index: dict) -> dict:
    return index["splits"]["train"]["shards"][0]


LYING_INDEXES = {
    "a shard above": lambda i: first(i).update(file="../../etc/passwd"),
    "a shard elsewhere": lambda i: first(i).update(file="/etc/passwd"),
    "no shard": lambda i: first(i).update(file=""),
    "a folder as shard": lambda i: first(i).update(file=".."),
    "a number as shard": lambda i: first(i).update(file=3),
    "more rows": lambda i: first(i).update(rows=10**9),
    "fewer rows": lambda i: first(i).update(rows=1),
    "negative rows": lambda i: first(i).update(rows=-1),
    "no rows": lambda i: first(i).pop("rows"),
    "rows as text": lambda i: first(i).update(rows="9"),
    "no hash": lambda i: first(i).pop("sha256"),
    "objects": lambda i: i.update(dtype="object"),
    "another type": lambda i: i.update(dtype="uint32"),
    "no length": lambda i: i.pop("token_len"),
    "no tokens": lambda i: i.update(token_len=0),
    "longer rows": lambda i: i.update(token_len=1 << 60),
    "a smaller vocabulary": lambda i: i.update(vocab_size=9),
    "no split": lambda i: i["splits"].pop("heldout"),
    "no splits": lambda i: i.update(splits=[]),
    "a text as index": lambda i: i.update(data="x"),
    "another tokenizer": lambda i: i.update(tokenizer="0" * 64),
    "another format": lambda i: i.update(format=2),
    "a flag as number": lambda i: i.update(padded=1),
    "a padding of none": lambda i: i.update(pad_id=None),
}


@pytest.mark.parametrize("case", LYING_INDEXES)
def test_an_index_that_disagrees_with_its_files(case, blocks):
    change_index(blocks, LYING_INDEXES[case])

    def use():
        found = Blocks(blocks, "train")
        Blocks(blocks, "heldout")
        found.tokenizer()
        found.rows(range(len(found)))

    assert survive(use, DataError)


def test_mutated_indexes_are_read_or_refused(blocks):
    data, refused = (blocks / "index.json").read_bytes(), 0
    for changed in mutations(data, 300):
        (blocks / "index.json").write_bytes(changed)
        refused += survive(lambda: Blocks(blocks, "heldout").rows([0]), DataError)
    assert refused > 100


def test_shards_that_are_links_or_hold_unknown_ids(blocks, tmp_path):
    shard = blocks / "train-00000.bin"
    rows = np.fromfile(shard, "<u2")
    rows[-1] = 300
    rows.tofile(shard)
    with pytest.raises(DataError, match="ids that its tokenizer does not have"):
        found = Blocks(blocks, "train")
        found.rows([len(found) - 1])
    shard.rename(tmp_path / "elsewhere.bin")
    shard.symlink_to(tmp_path / "elsewhere.bin")
    with pytest.raises(DataError, match="symbolic link"):
        Blocks(blocks, "train")


def test_a_saved_preparation_that_lies_is_made_again(blocks, corpus_file, tmp_path):
    from dataclasses import replace

    data = replace(DATA, source=str(corpus_file))
    expected = (blocks / "train-00000.bin").read_bytes()
    for content in (b"PK\x03\x04", b"", os.urandom(64)):
        (blocks / "index.json").unlink()
        (blocks / "state.npz").write_bytes(content)
        prepare(data, blocks)
        assert (blocks / "train-00000.bin").read_bytes() == expected
    (blocks / "index.json").unlink()
    with open(blocks / "state.npz", "wb") as file:  # an array of objects is a pickle
        np.savez(file, state=np.array([{"a": 1}], object), train=np.zeros(3), heldout=np.zeros(3))
    prepare(data, blocks)
    assert (blocks / "train-00000.bin").read_bytes() == expected


# ---------------------------------------------------------------- text


def bomb(path: Path, megabytes: int, chunk: bytes) -> Path:
    with gzip.open(path, "wb", 9) as file:
        for _ in range(megabytes):
            file.write((chunk * ((1 << 20) // len(chunk) + 1))[: 1 << 20])
    return path


@pytest.mark.parametrize(
    "chunk",
    [b"a", b"some words, " * 9 + b"\n", b" " * 99 + b"\n", b'{"text": "%s"}\n' % (b"a" * 99)],
    ids=["one line", "lines", "blank", "records"],
)
@pytest.mark.parametrize("suffix", [".txt.gz", ".jsonl.gz"])
def test_a_small_file_that_unpacks_to_a_large_one(chunk, suffix, tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "BOMB_BYTES", 1 << 20)
    monkeypatch.setattr(text_files, "LONGEST", 1 << 20)
    path = bomb(tmp_path / f"bomb{suffix}", 12, chunk)
    assert path.stat().st_size < 200_000
    tracemalloc.start()  # what Python holds, whatever the system makes of it
    try:
        for source in (path, tmp_path):  # a file alone, and in a folder, where a small file is one document
            with pytest.raises(DataError, match="bomb"):
                for _ in corpora.open_corpus(str(source)).stream(0):
                    pass
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_line_or_a_document_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "LONGEST", 1000)
    (tmp_path / "a.txt").write_text("x" * 2000)
    (tmp_path / "b.txt").write_text("one\n\n" + "two\n" * 500)
    for name, word in (("a.txt", "line of more"), ("b.txt", "document of more")):
        with pytest.raises(DataError, match=word):
            list(corpora.open_corpus(str(tmp_path / name)).stream(0))


def test_ordinary_packed_text_is_no_bomb(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "BOMB_BYTES", 1)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(made_up_text(3).encode()))
    assert len(list(corpora.open_corpus(str(tmp_path / "a.txt.gz")).stream(0))) == 3


def test_names_of_files_need_not_be_text(tmp_path):
    os.makedirs(os.fsencode(tmp_path) + b"/d\xff")
    with open(os.fsencode(tmp_path) + b"/d\xff/caf\xe9\n.txt", "w") as file:
        file.write("some words here\n")
    assert list(corpora.open_corpus(str(tmp_path)).stream(0)) == ["some words here"]
    assert corpora.open_corpus(str(tmp_path)).fingerprint.startswith("files:")


def test_homes_that_do_not_exist(tmp_path, capsys):
    assert "No text at" in refusal(capsys, "prepare", "~nobody-has-this-name/x.txt", "--out", tmp_path / "out", "--quiet")
    assert not (tmp_path / "out").exists()


SAMPLE_FILES = {
    "a deep line": f'{{"text": "a"}}\n{DEEP}\n',
    "no text": '{"a": 1}\n',
    "a list": "[1]\n",
    "blank": "\n \n",
    "endless digits": "9" * 5000 + "\n",
}


@pytest.mark.parametrize("case", SAMPLE_FILES)
def test_files_of_texts_that_hold_none(case, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(SAMPLE_FILES[case])
    refusal(capsys, "evaluate", tmp_path / "a.jsonl", "--quiet", "--scorer", "smollm2", code=1)
    assert below(tmp_path) == {"a.jsonl"}


def test_token_ids_that_are_none(tmp_path):
    for ids in ([10**30], [-1], ["1"], [1.5], [True], "x"):
        (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a b", "token_ids": ids}) + "\n")
        assert read_samples(tmp_path / "a.jsonl").token_ids is None
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a b", "token_ids": [1, 2]}) + "\n")
    assert read_samples(tmp_path / "a.jsonl").token_ids == [[1, 2]]


# ---------------------------------------------------------------- encoders


def test_mutated_encoders_are_read_or_refused(tmp_path):
    save_small_encoder(tmp_path, SmallEncoder(20, 8, 1, 2).initialize(0))
    (tmp_path / "manifest.json").unlink()  # who lies leaves it out, or writes one that fits
    for name, count in (("encoder.json", 200), ("encoder.safetensors", 100)):
        data, refused = (tmp_path / name).read_bytes(), 0
        for changed in mutations(data[:900], count):
            (tmp_path / name).write_bytes(changed + data[900:])
            refused += survive(lambda: load_small_encoder(tmp_path), CheckpointError)
        (tmp_path / name).write_bytes(data)
        assert refused > count / 3


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 10**12},
        {"depth": 10**9},
        {"feature_dim": 1 << 40},
        {"heads": 0},
        {"depth": -1},
        {"vocab_size": True},
        {"heads": 10**4000},
    ],
)
def test_an_encoder_that_says_it_is_larger_than_it_is(changes, tmp_path):
    save_small_encoder(tmp_path, SmallEncoder(20, 8, 1, 2).initialize(0))
    (tmp_path / "manifest.json").unlink()  # who lies leaves it out, or writes one that fits
    values = json.loads((tmp_path / "encoder.json").read_text()) | changes
    (tmp_path / "encoder.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="train the encoder again"):
        load_small_encoder(tmp_path)


def field(number: int, content: bytes | int) -> bytes:
    def varint(value: int) -> bytes:
        return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)

    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def onnx(*tensor: bytes) -> bytes:
    return field(7, field(5, b"".join(tensor)))


BAD_ONNX = {
    "a name of 2^40 zeros": onnx(field(8, 1 << 40)),
    "data of 2^40 zeros": onnx(field(2, 1), field(9, 1 << 40)),
    "floats of 2^40 zeros": onnx(field(2, 1), field(4, 1 << 40)),
    "a graph that is a number": field(7, 1 << 40),
    "a tensor that is a number": field(7, field(5, 1 << 40)),
    "a node that is a number": field(7, field(1, 1 << 40)),
    "a negative size": onnx(field(1, (1 << 64) - 1), field(2, 1), field(9, b"\0" * 8)),
    "a huge shape": onnx(field(1, 1 << 60), field(1, 1 << 60), field(2, 1), field(9, b"\0" * 8)),
    "bits beyond their type": onnx(field(1, 1), field(2, 10), field(5, 1 << 40)),
    "an endless number": b"\xff" * 20,
    "a type that is a text": onnx(field(2, b"1"), field(9, b"\0" * 8)),
    "nothing": b"",
    "deep": b"\x3a\x80" * 1000,
}


@pytest.mark.parametrize("case", BAD_ONNX)
def test_onnx_files_that_lie(case, tmp_path):
    (tmp_path / "x.onnx").write_bytes(BAD_ONNX[case])
    with pytest.raises(AssetError):
        read_onnx(tmp_path / "x.onnx")


def two_tensors() -> bytes:
    names = [b"enc.embed_tokens.weight", b"enc.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    tensors = [field(5, field(1, 4) + field(1, 4) + field(2, 1) + field(8, name) + field(9, bytes(64))) for name in names]
    return field(7, b"".join(tensors))


def test_mutated_onnx_files_are_read_or_refused(tmp_path):
    refused = 0
    for changed in mutations(two_tensors(), 300):
        (tmp_path / "x.onnx").write_bytes(changed)
        refused += survive(lambda: read_onnx(tmp_path / "x.onnx"), AssetError)
    assert refused > 30  # most of the file are numbers


@pytest.mark.slow
def test_mutated_onnx_files_make_no_encoder(tmp_path):
    for changed in mutations(two_tensors(), 100):
        (tmp_path / "x.onnx").write_bytes(changed)
        assert survive(lambda: convert_t5_encoder(read_onnx(tmp_path / "x.onnx")), AssetError)


def test_scales_of_another_tensor_do_not_multiply():
    with pytest.raises(ValueError, match="do not match"):
        dequantize(np.zeros((30_000, 1), np.int8), np.zeros(30_000, np.float32), np.zeros(1, np.int8))


# ---------------------------------------------------------------- GGUF


def gguf(metadata: bytes = b"", n_keys: int = 0, tensors: bytes = b"", n_tensors: int = 0, data: bytes = b"") -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_keys) + metadata + tensors
    return head + b"\0" * (-len(head) % 32) + data


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def info(name: bytes, shape: tuple[int, ...], at: int = 0, kind: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, at)


NESTED = text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 0, 0)
BAD_GGUF = {
    "2^62 keys": gguf(n_keys=1 << 62),
    "2^62 tensors": gguf(n_tensors=1 << 62),
    "a key of 2^62 letters": gguf(struct.pack("<Q", 1 << 62), 1),
    "2^62 numbers": gguf(text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 62), 1),
    "2^62 texts": gguf(text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 62), 1),
    "deep lists": gguf(NESTED, 1),
    "alignment 0": gguf(text(b"general.alignment") + struct.pack("<II", 4, 0), 1),
    "alignment of a text": gguf(text(b"general.alignment") + struct.pack("<I", 8) + text(b"x"), 1),
    "alignment of a list": gguf(text(b"general.alignment") + struct.pack("<IIQ", 9, 4, 0), 1),
    "a huge shape": gguf(tensors=info(b"a", (1 << 62, 1 << 62)), n_tensors=1),
    "a shape that wraps": gguf(tensors=info(b"a", (1 << 32, 1 << 32)), n_tensors=1),
    "2^31 axes": gguf(tensors=text(b"a") + struct.pack("<I", 1 << 31), n_tensors=1),
    "an offset outside": gguf(tensors=info(b"a", (2,), 1 << 62), n_tensors=1),
    "shared bytes": gguf(tensors=b"".join(info(b"%d" % i, (64,)) for i in range(50)), n_tensors=50, data=bytes(256)),
    "a tensor twice": gguf(tensors=info(b"a", (1,)) * 2, n_tensors=2, data=bytes(64)),
    "an unknown type": gguf(tensors=info(b"a", (1,), 0, 77), n_tensors=1),
}


@pytest.mark.parametrize("case", BAD_GGUF)
def test_gguf_files_that_lie(case, tmp_path):
    (tmp_path / "x.gguf").write_bytes(BAD_GGUF[case])
    with pytest.raises(AssetError, match=r"x\.gguf"):
        read_gguf(tmp_path / "x.gguf")


def tiny_llama() -> bytes:
    """The smallest language model there is: one layer of width 4 over three tokens."""
    u32 = {b"llama.block_count": 1, b"llama.attention.head_count": 1, b"llama.context_length": 8}
    metadata = [text(key) + struct.pack("<II", 4, value) for key, value in u32.items()]
    metadata += [text(b"llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5)]
    words = {b"general.architecture": b"llama", b"tokenizer.ggml.model": b"gpt2", b"tokenizer.ggml.pre": b"gpt-2"}
    metadata += [text(key) + struct.pack("<I", 8) + text(value) for key, value in words.items()]
    tokens = [b"<|endoftext|>", b"a", b"b"]
    metadata += [text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 3) + b"".join(map(text, tokens))]
    metadata += [text(b"tokenizer.ggml.merges") + struct.pack("<IIQ", 9, 8, 0)]
    norms = {f"blk.0.{name}_norm": (4,) for name in ("attn", "ffn")} | {"output_norm": (4,)}
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {"token_embd": (4, 3)} | norms | {f"blk.0.{name}": (4, 4) for name in names}
    tensors, at = b"", 0
    for name, shape in shapes.items():
        tensors += info(f"{name}.weight".encode(), shape, at)
        at += 4 * int(np.prod(shape))
    numbers = np.random.default_rng(0).normal(size=at // 4).astype("<f4").tobytes()
    return gguf(b"".join(metadata), len(metadata), tensors, len(shapes), numbers)


def test_mutated_scorers_score_or_are_refused(tmp_path):
    data, path, refused = tiny_llama(), tmp_path / "x.gguf", 0
    path.write_bytes(data)
    assert GgufScorer(path).nll(["ab"])[0].n_tokens == 1
    for changed in mutations(data[:1500], 200):
        path.write_bytes(changed + data[1500:])
        refused += survive(lambda: GgufScorer(path).nll(["abba"]))
    assert refused > 100


# ---------------------------------------------------------------- runs whose surroundings changed


def micro_train(capsys, out: Path, data: Path, *more: object) -> int:

    flags = micro_flags(train__steps=2, train__encoder_steps=1, train__save_every=2, train__eval_every=0)
    code = main(
        [
            "train",
            "--preset",
            "smoke",
            "--data",
            str(data),
            "--out",
            str(out),
            "--quiet",
            "--device",
            "cpu",
            *flags,
            *map(str, more),
        ]
    )
    return code


@pytest.mark.slow
def test_text_that_changed_under_a_run(tmp_path, capsys):
    (tmp_path / "a.txt").write_text(made_up_text(20))
    assert micro_train(capsys, tmp_path / "run", tmp_path / "a.txt") == 0
    (tmp_path / "a.txt").write_text(made_up_text(20, seed=1))
    capsys.readouterr()
    resume = ["train", "--out", tmp_path / "run", "--resume", "--quiet", "--device", "cpu", "--train.steps", "4"]
    assert "has changed since" in refusal(capsys, *resume, code=1)
    (tmp_path / "a.txt").unlink()  # its blocks are still there
    change_index(tmp_path / "run" / "data", lambda i: i.update(source="files:other"))
    assert "data" in refusal(capsys, *resume, code=1)
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-00000002"]


def test_a_checkpoint_that_does_not_say_what_it_is(tmp_path, capsys):
    from jpeg_dlm.folders.checkpoint import save_checkpoint

    for state in ({}, {"config": 3}, {"config": {"method": "../x"}}, {"config": {}, "provenance": []}):
        save_checkpoint(tmp_path, 1, {"model": {"a": torch.zeros(1)}, "ema": {}}, state, 1)
        with pytest.raises(JpegDlmError):
            read_model(tmp_path)
        refusal(capsys, "generate", tmp_path)


def test_read_json_file_needs_no_memory_for_what_it_refuses(tmp_path):
    with open(tmp_path / "x.json", "wb") as file:
        file.truncate(1 << 34)  # sixteen gigabytes of nothing
    with pytest.raises(UsageError, match="larger than"):
        read_json_file(tmp_path / "x.json")
