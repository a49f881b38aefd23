"""GGUF files written by hand and read back; what they score against a slow second version; the converted copy."""

import contextlib
import struct

import numpy as np
import pytest
import torch
from reference import made_up_llama, slow_llama

from jpeg_dlm.errors import AssetError
from jpeg_dlm.scorers import smollm2
from jpeg_dlm.scorers.gguf_files import read_gguf
from jpeg_dlm.scorers.language_models import build_scorer
from jpeg_dlm.scorers.smollm2 import convert_gguf, gguf_tokenizer

F32, F16, Q4_0, Q4_1, Q8_0 = 0, 1, 2, 3, 8


def text(s):
    raw = s.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(key, value):
    if isinstance(value, bool):
        body = struct.pack("<I?", 7, value)
    elif isinstance(value, int):
        body = struct.pack("<II", 4, value)
    elif isinstance(value, float):
        body = struct.pack("<If", 6, value)
    elif isinstance(value, str):
        body = struct.pack("<I", 8) + text(value)
    elif isinstance(value[0], str):
        body = struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    else:
        body = struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    return text(key) + body


def gguf(metadata, tensors, version=3):
    """`tensors` maps a name to (type, torch-order shape, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)) + b"".join(entry(*kv) for kv in metadata.items())
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1]) + struct.pack("<IQ", kind, len(data))
        data += raw + b"\0" * (-len(raw) % 32)
    return head + b"\0" * (-len(head) % 32) + data


def half(raw):
    return float(np.frombuffer(raw, "<f2")[0])


def slow_values(kind, raw):
    """Value by value, as the format describes it."""
    out = []
    size = {Q4_0: 18, Q4_1: 20, Q8_0: 34}[kind]
    for at in range(0, len(raw), size):
        block = raw[at : at + size]
        d = half(block[:2])
        if kind == Q8_0:
            out += [d * struct.unpack("<b", block[2 + i : 3 + i])[0] for i in range(32)]
            continue
        m, packed = (half(block[2:4]), block[4:]) if kind == Q4_1 else (-8 * d, block[2:])
        out += [d * (packed[i] & 15) + m for i in range(16)] + [d * (packed[i] >> 4) + m for i in range(16)]
    return out


def random_blocks(kind, count, seed):
    random = np.random.default_rng(seed)
    scales = {Q4_0: 1, Q4_1: 2, Q8_0: 1}[kind]
    body = {Q4_0: 16, Q4_1: 16, Q8_0: 32}[kind]
    pairs = [(random.normal(size=scales).astype("<f2"), random.integers(0, 256, body, np.uint8)) for _ in range(count)]
    return b"".join(scale.tobytes() + packed.tobytes() for scale, packed in pairs)


def test_metadata_and_every_tensor_type_are_read(tmp_path):
    metadata = {"name": "tiny — é", "n": 7, "eps": 0.5, "flag": True, "words": ["a", "", "b c"], "numbers": [-1, 2]}
    blocks = {kind: random_blocks(kind, 6, kind) for kind in (Q4_0, Q4_1, Q8_0)}
    floats = np.arange(6, dtype="<f4").reshape(2, 3)
    tensors = {
        "floats": (F32, (2, 3), floats.tobytes()),
        "halves": (F16, (3,), np.array([1, -0.5, 3], "<f2").tobytes()),
        **{f"q{kind}": (kind, (3, 64), raw) for kind, raw in blocks.items()},
    }
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf(metadata, tensors))
    file = read_gguf(path)
    assert file.metadata == metadata
    assert np.array_equal(file.tensors["floats"], floats) and file.tensors["halves"].tolist() == [1, -0.5, 3]
    for kind, raw in blocks.items():
        got = file.tensors[f"q{kind}"]
        assert got.shape == (3, 64) and got.dtype == np.float32
        np.testing.assert_allclose(got.reshape(-1), slow_values(kind, raw), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04 something else entirely",
        gguf({"a": 1}, {}, version=1),
        gguf({"a": "text"}, {})[:30],
        gguf({}, {"t": (F32, (8,), b"\0" * 4)})[:-20],
        gguf({}, {"t": (24, (256,), b"\0" * 256)}),
        gguf({}, {"t": (Q8_0, (33,), b"\0" * 68)}),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60),
    ],
)
def test_damaged_or_foreign_files_are_refused(tmp_path, data):
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(AssetError, match="GGUF"):
        read_gguf(path)


def test_a_file_of_endless_values_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("jpeg_dlm.scorers.gguf_files.MAX_READS", 1000)
    for count, refused in ((900, False), (1100, True)):
        (tmp_path / "x.gguf").write_bytes(gguf({"numbers": [1] * count}, {}))
        with pytest.raises(AssetError, match="too many") if refused else contextlib.nullcontext():
            assert len(read_gguf(tmp_path / "x.gguf").metadata["numbers"]) == count


# ---------------------------------------------------------------- llama


def tokenizer_metadata():
    letters = ["<|endoftext|>", "Ġ", *"abcdefgh0123456789."]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*letters, "ab", "Ġc", "abc", "01"],
        "tokenizer.ggml.merges": ["a b", "Ġ c", "ab c", "0 1"],
    }


def llama_metadata(**changes):
    return {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.freq_base": 1000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.context_length": 64,
        **tokenizer_metadata(),
        **changes,
    }


def test_tokenizer_merges_words_and_splits_digits():
    tokenizer = gguf_tokenizer(tokenizer_metadata())
    encoding = tokenizer.encode("abc c01.")
    assert encoding.tokens == ["abc", "Ġc", "0", "1", "."]  # the merge '0 1' is never reached: digits stand alone
    assert tokenizer.decode(encoding.ids) == "abc c01."
    with pytest.raises(AssetError, match="pre-tokenizer"):
        gguf_tokenizer({**tokenizer_metadata(), "tokenizer.ggml.pre": "unheard-of"})


def llama_file(path, **changes):
    """Write a file by hand and return the tensors in it."""
    tensors = made_up_llama(26, 32, 48, 2, 4, 2, tied=True)
    stored = {name: (F32, tuple(t.shape), t.numpy().tobytes()) for name, t in tensors.items()}
    path.write_bytes(gguf({k: v for k, v in llama_metadata(**changes).items() if v is not None}, stored))
    return tensors


def nll(tensors, ids):
    logits = slow_llama(tensors, 4, 2, 1000.0, 1e-5, ids)
    return float(torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum"))


def test_scorer_sums_what_the_slow_version_gives(tmp_path):
    tensors = llama_file(tmp_path / "tiny.gguf")
    scorer = build_scorer(f"gguf:{tmp_path / 'tiny.gguf'}")
    texts = ["abc cab 42.", "a", "hg fe 0", "abcabc " * 30]
    scores = scorer.nll(texts, bos=True)
    assert scorer.name == "tiny" and scorer.bos_id == scorer.eos_id == 0 and scorer.context == 64
    for words, score in zip(texts, scores, strict=True):
        ids = torch.tensor([0, *scorer.encode(words, 63)])
        assert score.n_tokens == len(ids) - 1 and score.nll_sum == pytest.approx(nll(tensors, ids), rel=1e-4)


def test_other_architectures_are_refused(tmp_path):
    path = tmp_path / "x.gguf"
    wrong = {
        "mamba": {"general.architecture": "mamba"},
        "yarn": {"llama.rope.scaling.type": "yarn"},
        "block_count": {"llama.block_count": None},
        "names 3": {"llama.block_count": 3},
    }
    for word, change in wrong.items():
        llama_file(path, **change)
        with pytest.raises(AssetError, match=word):
            convert_gguf(path)


# ---------------------------------------------------------------- the converted copy


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder, and a list of the times that the pinned file was asked for."""
    llama_file(tmp_path / "pinned.gguf")
    asked = []
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "fetch", lambda name, console: asked.append(name) or tmp_path / "pinned.gguf")
    return tmp_path / "cache", asked


def test_the_pinned_file_is_converted_once(cache, tmp_path):
    folder, asked = cache
    plain = build_scorer(f"gguf:{tmp_path / 'pinned.gguf'}").nll(["abc cab 42."])
    for _ in range(3):
        scorer = build_scorer("smollm2")
        assert scorer.nll(["abc cab 42."]) == plain and (scorer.bos_id, scorer.context) == (0, 64)
    assert asked == ["smollm2"] and scorer.name == "SmolLM2-135M-Instruct-Q4_1" and len(scorer.hash) == 64
    assert [p.name for p in folder.iterdir()] == ["smollm2-1"]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "manifest.json"])
def test_a_damaged_copy_is_converted_again(cache, name):
    folder, asked = cache
    score = build_scorer("smollm2").nll(["abc cab 42."])
    file = folder / "smollm2-1" / name
    whole = file.read_bytes()
    file.write_bytes(whole[:-9] + b"x" + whole[-8:])
    assert build_scorer("smollm2").nll(["abc cab 42."]) == score and len(asked) == 2
    assert build_scorer("smollm2").nll(["abc cab 42."]) == score and len(asked) == 2
    assert name == "manifest.json" or file.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_no_hindrance(cache):
    folder, asked = cache
    folder.write_text("in the way")
    assert build_scorer("smollm2").nll(["abc cab"])[0].n_tokens > 0 and asked == ["smollm2"]
    assert folder.read_text() == "in the way"
