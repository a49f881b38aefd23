"""Files that lie or are damaged, at the borders of this package: each is refused in one sentence and leaves no trace."""

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refusal

from jpeg_dlm import load
from jpeg_dlm.checkpoints.checkpoint import save_checkpoint
from jpeg_dlm.checkpoints.model_folder import read_model
from jpeg_dlm.config import DataConfig
from jpeg_dlm.encoders.small import SmallEncoder, load_small_encoder, save_small_encoder
from jpeg_dlm.evaluation.texts import read_samples
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.prepare import prepare
from jpeg_dlm.text.sources import open_corpus
from jpeg_dlm.util.errors import CheckpointError, DataError, JpegDlmError
from jpeg_dlm.util.files import write_manifest

DEEP = "[" * 100_000 + "]" * 100_000


def below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def is_refused(read: Callable[[], object], allowed: type[JpegDlmError] = JpegDlmError) -> bool:
    """Whether `read` refused; anything but a value or an error of ours fails the test."""
    try:
        read()
    except allowed as error:
        assert "\n" not in str(error) and len(str(error)) < 1200
        return True
    return False


def mutations(data: bytes, count: int):
    """Copies of `data` with flipped bits, replaced, removed and inserted bytes, extreme numbers, or cut short."""
    rng = random.Random(0)
    extremes = [b"\xff" * 8, b"\x00" * 8, b"\xff\xff\xff\x7f", b"\x7f", struct.pack("<q", 1 << 40)]
    for _ in range(count):
        at = rng.randrange(len(data))
        new = rng.choice([bytes([data[at] ^ (1 << rng.randrange(8))]), rng.randbytes(3), b"", rng.choice(extremes)])
        yield data[:at] if rng.random() < 0.1 else data[:at] + new + data[at + rng.choice([0, 1, len(new)]) :]


# ---------------------------------------------------------------- JSON

BAD_JSON = {
    "nested": DEEP,
    "not a number": '{"a": NaN}',
    "a key twice": '{"train": {"lr": 1, "lr": 2}}',
    "a key twice of very many": "{" + ", ".join(f'"{i % 90_000}": 1' for i in range(90_001)) + "}",
    "too large": " " * (2 << 20),
    "a path as method": '{"method": "../../etc/passwd", "model": {}}',
}


@pytest.mark.parametrize("case", BAD_JSON)
def test_options_in_json_that_cannot_be_used(case, tmp_path, capsys):
    (tmp_path / "options.json").write_text(BAD_JSON[case])
    refusal(capsys, ["train", "--data", "x", "--out", tmp_path / "run", "--config", tmp_path / "options.json"], 2)
    assert below(tmp_path) == {"options.json"}


# ---------------------------------------------------------------- model folders and checkpoints


@pytest.fixture
def model(micro_folders, tmp_path):
    """A model folder to tamper with, whose manifest can be made to vouch for anything, as an attacker's would."""
    return shutil.copytree(micro_folders(), tmp_path / "model")


def vouch(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    write_manifest(folder, {})


LYING_CONFIGS = {
    "a larger vocabulary": {"data.vocab_size": 1 << 23},
    "an unknown key": {"model.colour": 3},
    "another method": {"method": "ar"},
    "no group": {"model": None},
    "a text as number": {"model.depth": "__import__('os')"},
    "infinite guidance": {"sampler.w": float("inf")},
    "steps without end": {"sampler.steps": 10**18},
}


@pytest.mark.parametrize("case", LYING_CONFIGS)
def test_a_config_that_is_not_the_models(case, model, tmp_path, capsys):
    values = json.loads((model / "config.json").read_text())
    for dotted, value in LYING_CONFIGS[case].items():
        group, _, name = dotted.rpartition(".")
        (values[group] if group else values)[name] = value
    (model / "config.json").write_text(json.dumps(values))
    vouch(model)
    before = below(tmp_path)
    refusal(capsys, ["generate", model, "--out", tmp_path / "texts.jsonl"], (1, 2))
    assert below(tmp_path) == before


def test_a_manifest_that_does_not_match(model, capsys):
    (model / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes()[:-1] + b" ")
    assert "tokenizer.json" in refusal(capsys, ["generate", model], 1)


def test_a_checkpoint_that_does_not_say_what_it_is(tmp_path):
    for state in ({}, {"config": 3}, {"config": {"method": "../x"}}, {"config": {}, "provenance": []}):
        save_checkpoint(tmp_path, 1, {"model": {"a": torch.zeros(1)}, "ema": {}}, state, 1)
        with pytest.raises(JpegDlmError):
            read_model(tmp_path)


def test_control_characters_of_a_name_do_not_reach_the_terminal(tmp_path, capsys):
    assert "\\x1b[2J\\nevil\\u202e" in refusal(capsys, ["generate", tmp_path / "\x1b[2J\nevil\u202e"], 1)


@pytest.mark.parametrize("changes", [{"vocab_size": 10**12}, {"heads": 0}, {"vocab_size": True}])
def test_an_encoder_that_says_it_is_larger_than_it_is(changes, tmp_path):
    save_small_encoder(tmp_path, SmallEncoder(20, 8, 1, 2).initialize(0))
    (tmp_path / "manifest.json").unlink()  # who lies leaves it out, or writes one that fits
    values = json.loads((tmp_path / "encoder.json").read_text()) | changes
    (tmp_path / "encoder.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError):
        load_small_encoder(tmp_path)


# ---------------------------------------------------------------- tokenizers


def test_text_whose_tokens_the_model_does_not_have(model):
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {k: i + 5000 * (i == 50) for k, i in tokenizer["model"]["vocab"].items()}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    vouch(model)
    text = "".join(map(chr, range(33, 127)))
    for call in (lambda m: m.reconstruct([text]), lambda m: m.fixed_tokens(text[40:48]), lambda m: m.encode([text[40:48]])):
        assert is_refused(lambda call=call: call(load(model, "cpu")))


# ---------------------------------------------------------------- prepared folders and texts


@pytest.fixture
def blocks(corpus_file, tmp_path):
    """Prepared text to tamper with."""
    prepare(DataConfig(source=str(corpus_file), vocab_size=300, token_len=12), tmp_path / "data")
    return tmp_path / "data"


LYING_INDEXES = {
    "a shard above": lambda i: i["splits"]["train"]["shards"][0].update(file="../../etc/passwd"),
    "more rows": lambda i: i["splits"]["train"]["shards"][0].update(rows=10**9),
    "objects": lambda i: i.update(dtype="object"),
    "no length": lambda i: i.pop("token_len"),
    "a smaller vocabulary": lambda i: i.update(vocab_size=9),
    "no split": lambda i: i["splits"].pop("heldout"),
    "another tokenizer": lambda i: i.update(tokenizer="0" * 64),
}


@pytest.mark.parametrize("case", LYING_INDEXES)
def test_an_index_that_disagrees_with_its_files(case, blocks):
    index = json.loads((blocks / "index.json").read_text())
    LYING_INDEXES[case](index)
    (blocks / "index.json").write_text(json.dumps(index))

    def use():
        train = Blocks(blocks, "train")
        Blocks(blocks, "heldout")
        train.tokenizer()
        train.rows(range(len(train)))

    assert is_refused(use, DataError)


def test_mutated_indexes_are_read_or_refused(blocks):
    data, refused = (blocks / "index.json").read_bytes(), 0
    for changed in mutations(data, 200):
        (blocks / "index.json").write_bytes(changed)
        refused += is_refused(lambda: Blocks(blocks, "heldout").rows([0]), DataError)
    assert refused > 60


def test_a_saved_preparation_that_lies_is_made_again(blocks, corpus_file):
    data = DataConfig(source=str(corpus_file), vocab_size=300, token_len=12)
    expected = (blocks / "train-00000.bin").read_bytes()
    objects = blocks / "objects.npz"  # an array of objects is a pickle
    np.savez(objects, state=np.array([{"a": 1}], object), train=np.zeros(3), heldout=np.zeros(3))
    for content in (b"PK\x03\x04", b"", os.urandom(64), objects.read_bytes()):
        (blocks / "index.json").unlink()
        (blocks / "state.npz").write_bytes(content)
        assert not prepare(replace(data), blocks).reused
        assert (blocks / "train-00000.bin").read_bytes() == expected


def test_names_of_files_and_homes_need_not_be_text(tmp_path, capsys):
    os.makedirs(os.fsencode(tmp_path) + b"/d\xff")
    with open(os.fsencode(tmp_path) + b"/d\xff/caf\xe9\n.txt", "w") as file:
        file.write("some words here\n")
    assert list(open_corpus(DataConfig(source=str(tmp_path))).stream(0)) == ["some words here"]
    assert "nobody-has" in refusal(capsys, ["prepare", "~nobody-has-this-name/x.txt", "--out", tmp_path / "out"], 1)


def test_token_ids_that_are_none(tmp_path):
    for ids in ([10**30], [-1], ["1"], [1.5], [True], "x"):
        (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a b", "token_ids": ids}) + "\n")
        assert read_samples(tmp_path / "a.jsonl").token_ids is None
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a"}}\n{DEEP}\n')
    with pytest.raises(JpegDlmError):
        read_samples(tmp_path / "a.jsonl")
