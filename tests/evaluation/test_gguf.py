"""GGUF files written by hand and read back; the llama forward against transformers."""

import struct

import numpy as np
import pytest
import torch
import transformers

from jpeg_dlm.errors import AssetError
from jpeg_dlm.evaluation.gguf import read_gguf
from jpeg_dlm.evaluation.scoring import build_scorer
from jpeg_dlm.evaluation.smollm2 import gguf_tokenizer, llama_sizes, load_gguf_llama
from jpeg_dlm.nn.llama import Llama, LlamaSizes

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
        gguf({}, {"t": (14, (256,), b"\0" * 210)}),
        gguf({}, {"t": (Q8_0, (33,), b"\0" * 68)}),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60),
    ],
)
def test_damaged_or_foreign_files_are_refused(tmp_path, data):
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(AssetError, match="GGUF"):
        read_gguf(path)


# ---------------------------------------------------------------- llama


def neighbor_pairs(weight, heads):
    """Rows of a transformers q or k weight (pairs are halves) in the order of GGUF (pairs are neighbors)."""
    out, width = weight.shape
    return weight.view(heads, 2, out // heads // 2, width).transpose(1, 2).reshape(out, width)


def gguf_names(model):
    config, state = model.config, model.state_dict()
    names = {
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    out = {"token_embd.weight": state["model.embed_tokens.weight"], "output_norm.weight": state["model.norm.weight"]}
    if not config.tie_word_embeddings:
        out["output.weight"] = state["lm_head.weight"]
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}."
        out |= {f"blk.{i}.{ours}.weight": state[f"{layer}{theirs}.weight"] for theirs, ours in names.items()}
        q, k = (state[f"{layer}self_attn.{part}_proj.weight"] for part in "qk")
        out[f"blk.{i}.attn_q.weight"] = neighbor_pairs(q, config.num_attention_heads)
        out[f"blk.{i}.attn_k.weight"] = neighbor_pairs(k, config.num_key_value_heads)
    return out


def tiny_llama(tied):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_theta=1000.0,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_forward_equals_transformers(tied):
    reference = tiny_llama(tied)
    model = Llama(LlamaSizes(2, 4, 2, 1000.0, 1e-5), gguf_names(reference))
    x = torch.randint(0, 96, (3, 11), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model.logits(model.hidden(x)), reference(x).logits, atol=2e-4, rtol=1e-4)
    longer = torch.cat((x, x), dim=1)  # what follows never changes what came before
    torch.testing.assert_close(model.hidden(longer)[:, :11], model.hidden(x), atol=1e-5, rtol=1e-4)
    assert not any(p.requires_grad for p in model.parameters())


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


@pytest.fixture
def tiny_file(tmp_path):
    """A file by hand, and the transformers model whose weights it holds."""
    reference = tiny_llama(tied=True)
    tensors = {name: (F32, tuple(t.shape), t.contiguous().numpy().tobytes()) for name, t in gguf_names(reference).items()}
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf(llama_metadata(), tensors))
    return path, reference


@torch.no_grad()
def test_a_whole_file_gives_transformers_logits(tiny_file):
    path, reference = tiny_file
    model, tokenizer, metadata = load_gguf_llama(path)
    x = torch.tensor([tokenizer.encode("abc cab 42.").ids])
    torch.testing.assert_close(model.logits(model.hidden(x)), reference(x).logits, atol=2e-4, rtol=1e-4)
    assert metadata["llama.context_length"] == 64


def test_scorer_sums_what_transformers_gives(tiny_file):
    path, reference = tiny_file
    scorer = build_scorer(f"gguf:{path}")
    texts = ["abc cab 42.", "a", "hg fe 0", "abcabc " * 30]
    scores = scorer.nll(texts, bos=True)
    assert scorer.name == "tiny" and scorer.bos_id == 0 and scorer.context == 64
    for words, score in zip(texts, scores, strict=True):
        ids = torch.tensor([[0, *scorer.encode(words, 63)]])
        with torch.no_grad():
            want = torch.nn.functional.cross_entropy(reference(ids).logits[0, :-1], ids[0, 1:], reduction="sum")
        assert score.n_tokens == ids.shape[1] - 1 and score.nll_sum == pytest.approx(float(want), rel=1e-4)


def test_other_architectures_are_refused():
    for change in ({"general.architecture": "mamba"}, {"llama.rope.scaling.type": "yarn"}):
        with pytest.raises(AssetError):
            llama_sizes(llama_metadata(**change))
    incomplete = llama_metadata()
    del incomplete["llama.block_count"]
    with pytest.raises(AssetError, match="block_count"):
        llama_sizes(incomplete)
