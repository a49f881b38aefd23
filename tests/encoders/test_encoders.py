"""Frozen encoders: equal to transformers called directly, independent of padding, and frozen."""

import json
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from jpeg_dlm.config import EncoderConfig
from jpeg_dlm.encoders import SmallEncoder, build_encoder
from jpeg_dlm.encoders.flan_t5 import convert_t5_encoder, dequantize
from jpeg_dlm.encoders.frozen import load_statistics, measure_statistics, save_statistics
from jpeg_dlm.encoders.onnx_reader import OnnxGraph, OnnxNode, read_onnx
from jpeg_dlm.encoders.small import CONFIG_FILE, WEIGHTS_FILE, load_small_encoder, save_small_encoder
from jpeg_dlm.errors import AssetError, CheckpointError, DataError, UsageError

RANDOM = EncoderConfig(kind="random", feature_dim=16, depth=3, heads=2)


def tokens(rows: int, length: int, vocab: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def padding(lengths: list[int], length: int) -> torch.Tensor:
    return torch.arange(length)[None] < torch.tensor(lengths)[:, None]


# ---------------------------------------------------------------- transformers


@pytest.fixture(scope="module")
def t5_folder(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=4, d_ff=24, num_layers=3, num_heads=4, feed_forward_proj="gated-gelu"
    )
    folder = tmp_path_factory.mktemp("t5")
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)  # the encoder must load alone
    return folder


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory):
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=24,
        max_position_embeddings=32,
    )
    folder = tmp_path_factory.mktemp("bert")
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["t5", "bert"])
@pytest.mark.parametrize("layer", [-1, -2, -3, 0, 2, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_hf_encoder_equals_transformers(family, layer, padded, t5_folder, bert_folder):
    folder = t5_folder if family == "t5" else bert_folder
    reference = transformers.T5EncoderModel if family == "t5" else transformers.BertModel
    direct = reference.from_pretrained(folder).eval()
    x = tokens(3, 9)
    mask = padding([9, 5, 7], 9) if padded else None
    encoder = build_encoder(EncoderConfig(kind="hf", name=str(folder), layer=layer, feature_dim=16, scale="none"), 50)
    with torch.no_grad():
        want = direct(input_ids=x, attention_mask=None if mask is None else mask.long(), output_hidden_states=True)
    torch.testing.assert_close(encoder(x, mask), want.hidden_states[layer], rtol=0, atol=1e-6)
    if layer == -1:
        torch.testing.assert_close(encoder(x, mask), want.last_hidden_state, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["hf", "random"])
def test_several_layers_are_the_mean_of_normalized_states(kind, t5_folder):
    layers, x = (1, -2, -1), tokens(3, 9)
    config = EncoderConfig(kind=kind, name=str(t5_folder), layers=layers, feature_dim=16, depth=3, heads=2, scale="none")
    each = [build_encoder(replace(config, layers=(), layer=layer), 50)(x).double() for layer in layers]
    wanted = sum(h / (h**2).mean(-1, keepdim=True).sqrt() for h in each) / 3
    encoder = build_encoder(config, 50)
    torch.testing.assert_close(encoder(x).double(), wanted, rtol=0, atol=1e-5)
    one = build_encoder(replace(config, layers=()), 50)
    assert len({e.fingerprint for e in (encoder, one, build_encoder(replace(config, layers=(1, -1)), 50))}) == 3
    with pytest.raises(UsageError, match="layer 7 does not exist"):
        build_encoder(replace(config, layers=(1, 7)), 50)


def test_hf_fixed_scale_divides_by_the_constant(t5_folder):
    def build(**options):
        return build_encoder(EncoderConfig(kind="hf", name=str(t5_folder), feature_dim=16, **options), 50)

    x = tokens(2, 6)
    plain, fixed = build(scale="none"), build(scale="fixed", std=0.2)
    torch.testing.assert_close(fixed(x), plain(x) / 0.2)
    assert plain.weights_fingerprint == fixed.weights_fingerprint
    assert plain.fingerprint != fixed.fingerprint


def test_hf_per_channel_needs_statistics_and_keeps_them(t5_folder, tmp_path):
    config = EncoderConfig(kind="hf", name=str(t5_folder), feature_dim=16, scale="per_channel")
    encoder = build_encoder(config, 50)
    x, mask = tokens(40, 8), padding([8, 5] * 20, 8)
    with pytest.raises(UsageError, match="statistics"):
        encoder(x)
    encoder.set_feature_statistics(*measure_statistics(encoder, [(x[:17], mask[:17]), (x[17:], mask[17:])]))
    h = encoder(x, mask)[mask]
    torch.testing.assert_close(h.mean(0), torch.zeros(16), atol=1e-5, rtol=0)
    torch.testing.assert_close(h.std(0, correction=0), torch.ones(16), atol=1e-4, rtol=0)
    save_statistics(tmp_path, encoder)
    again = build_encoder(config, 50, folder=tmp_path)
    assert torch.equal(again(x), encoder(x)) and again.fingerprint == encoder.fingerprint
    other = build_encoder(EncoderConfig(kind="hf", name=str(t5_folder), layer=-2, feature_dim=16), 50)
    with pytest.raises(DataError, match="another encoder"):
        load_statistics(tmp_path, other)


def test_hf_refusals_name_the_remedy(t5_folder, tmp_path):
    with pytest.raises(AssetError, match="--encoder.kind flan-t5-small") as caught:
        build_encoder(EncoderConfig(kind="hf", name=str(tmp_path)), 50)
    assert "local folder" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="--encoder.name"):
        build_encoder(EncoderConfig(kind="hf"), 50)
    with pytest.raises(UsageError, match="--encoder.feature-dim 16"):
        build_encoder(EncoderConfig(kind="hf", name=str(t5_folder)), 50)
    with pytest.raises(UsageError, match="tokenizer"):
        build_encoder(EncoderConfig(kind="hf", name=str(t5_folder), feature_dim=16), 51)
    with pytest.raises(UsageError, match="does not exist"):
        build_encoder(EncoderConfig(kind="hf", name=str(t5_folder), feature_dim=16, layer=4), 50)


# ---------------------------------------------------------------- the small encoder


def attention_by_hand(encoder: SmallEncoder, x: torch.Tensor, valid: int) -> torch.Tensor:
    """One row through the encoder with loops and complex numbers, for `valid` real tokens."""

    def norm(h, weight):
        return h / (h.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    width, heads = encoder.feature_dim, encoder.heads
    d = width // heads
    h = encoder.embedding.weight[x].double() * width**0.5
    for block in encoder.blocks:
        b = {name: p.double() for name, p in block.named_parameters()}
        q, k, v = (norm(h, b["norm_attention.weight"]) @ b["qkv.weight"].T).split(width, dim=-1)
        mixed = torch.zeros_like(h)
        for head in range(heads):
            part = slice(head * d, (head + 1) * d)

            def turned(y, part=part):
                pairs = torch.complex(y[:, part][:, : d // 2], y[:, part][:, d // 2 :])
                angle = torch.arange(len(y)).double()[:, None] * 10_000.0 ** (-2 * torch.arange(d // 2).double() / d)
                return pairs * torch.polar(torch.ones_like(angle), angle)

            scores = (turned(q)[:, None] * turned(k)[None].conj()).sum(-1).real / d**0.5
            scores[:, valid:] = -torch.inf
            mixed[:, part] = scores.softmax(-1) @ v[:, part]
        h = h + mixed @ b["out.weight"].T
        gate, up = (norm(h, b["norm_mlp.weight"]) @ b["gate_up.weight"].T).chunk(2, -1)
        h = h + (gate * torch.sigmoid(gate) * up) @ b["down.weight"].T
    return norm(h, encoder.final_norm.weight.double())


@torch.no_grad()
def test_small_encoder_equals_a_slow_reference():
    encoder = SmallEncoder(50, 16, 2, 2).initialize(3)
    x, mask = tokens(2, 7), padding([7, 4], 7)
    h = encoder.hidden(x, mask)
    for row, valid in ((0, 7), (1, 4)):
        torch.testing.assert_close(h[row].double(), attention_by_hand(encoder, x[row], valid), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(encoder.logits(h), h @ encoder.embedding.weight[:50].T)


@settings(max_examples=15, deadline=None)
@given(length=st.integers(1, 9), extra=st.integers(1, 6), filler=st.integers(0, 49))
def test_padding_does_not_change_the_features_of_others(length, extra, filler):
    encoder = build_encoder(RANDOM, 50)
    x = tokens(2, length)
    padded = torch.cat((x, torch.full((2, extra), filler)), dim=1)
    mask = padding([length, length], length + extra)
    torch.testing.assert_close(encoder(padded, mask)[:, :length], encoder(x), atol=1e-5, rtol=1e-5)


def test_a_row_of_padding_alone_is_finite():
    encoder = build_encoder(RANDOM, 50)
    assert torch.isfinite(encoder(tokens(2, 5), padding([5, 0], 5))).all()


def test_frozen_encoder_has_nothing_to_train_and_changes_nothing():
    encoder = build_encoder(RANDOM, 50)
    x = tokens(2, 5)
    before, fingerprint = encoder(x), encoder.fingerprint
    assert encoder.train() is encoder and not any(m.training for m in encoder.modules())
    assert not any(p.requires_grad for p in encoder.parameters())
    assert not before.requires_grad and before.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert encoder(x).dtype == torch.float32
    assert torch.equal(encoder(x), before) and encoder.fingerprint == fingerprint
    assert fingerprint != build_encoder(RANDOM, 50, seed=1).fingerprint


def test_random_encoder_depends_on_its_seed_alone():
    torch.manual_seed(5)
    a = build_encoder(RANDOM, 50, seed=7)
    torch.manual_seed(6)
    b = build_encoder(RANDOM, 50, seed=7)
    assert a.fingerprint == b.fingerprint and a.name.startswith("random")


def test_small_encoder_survives_its_folder(tmp_path):
    trained = SmallEncoder(50, 16, 3, 2).initialize(1)
    trained.set_feature_statistics(torch.linspace(-1, 1, 16), torch.linspace(0.5, 2, 16))
    save_small_encoder(tmp_path, trained, tokenizer_fingerprint="abc")
    loaded = load_small_encoder(tmp_path)
    assert all(torch.equal(v, loaded.state_dict()[k]) for k, v in trained.state_dict().items())
    config = EncoderConfig(kind="small", name=str(tmp_path), feature_dim=16, depth=3, heads=2)
    x = tokens(2, 6)
    want = (trained.hidden(x) - trained.feature_mean) / trained.feature_std
    torch.testing.assert_close(build_encoder(config, 50)(x), want)
    by_folder = build_encoder(EncoderConfig(kind="small", feature_dim=16, depth=3, heads=2), 50, folder=tmp_path)
    assert torch.equal(by_folder(x), build_encoder(config, 50)(x))
    with pytest.raises(UsageError, match="config has"):
        build_encoder(config, 51)


def test_a_causal_encoder_sees_no_later_token():
    causal = SmallEncoder(50, 16, 2, 2, causal=True).initialize(1)
    x = tokens(3, 7)
    h = causal.hidden(x)
    for i in range(7):
        torch.testing.assert_close(causal.hidden(x[:, : i + 1]), h[:, : i + 1])
    # In one block, a token sees what a bidirectional encoder shows it of the row that ends with it.
    both = SmallEncoder(50, 16, 1, 2).initialize(1)
    one = SmallEncoder(50, 16, 1, 2, causal=True).initialize(1)
    ends = torch.stack([both.hidden(x[:, : i + 1])[:, -1] for i in range(7)], dim=1)
    torch.testing.assert_close(one.hidden(x), ends)
    mask = padding([7, 4, 0], 7)
    padded = causal.hidden(x, mask)
    assert padded.isfinite().all() and torch.equal(padded[mask], causal.hidden(torch.where(mask, x, 9), mask)[mask])
    torch.testing.assert_close(padded[1, :4], h[1, :4])


def test_a_folder_tells_a_causal_encoder_from_others(tmp_path):
    for causal in (False, True):
        save_small_encoder(tmp_path / str(causal), SmallEncoder(50, 16, 2, 2, causal).initialize(1))
    assert "causal" not in (tmp_path / "False" / CONFIG_FILE).read_text()  # which earlier versions read
    config = EncoderConfig(kind="small", name=str(tmp_path / "True"), feature_dim=16, depth=2, heads=2, causal=True)
    plain = replace(config, name=str(tmp_path / "False"), causal=False)
    assert load_small_encoder(tmp_path / "True").causal and not load_small_encoder(tmp_path / "False").causal
    # The weights are the same, the features are not, so cached ones must not be taken for each other.
    assert build_encoder(config, 50).fingerprint != build_encoder(plain, 50).fingerprint
    for wrong in (replace(config, causal=False), replace(plain, causal=True)):
        with pytest.raises(UsageError, match="config has"):
            build_encoder(wrong, 50)
    (tmp_path / "True" / CONFIG_FILE).write_text(
        json.dumps({"vocab_size": 50, "feature_dim": 16, "depth": 2, "heads": 2, "causal": 1})
    )
    with pytest.raises(CheckpointError, match="wrong type"):
        load_small_encoder(tmp_path / "True")


@pytest.mark.parametrize("damage", ["no config", "no weights", "cut weights", "other sizes", "unknown key", "not json"])
def test_damaged_small_encoder_is_refused(tmp_path, damage):
    save_small_encoder(tmp_path, SmallEncoder(50, 16, 2, 2).initialize(1))
    config, weights = tmp_path / CONFIG_FILE, tmp_path / WEIGHTS_FILE
    if damage == "no config":
        config.unlink()
    elif damage == "no weights":
        weights.unlink()
    elif damage == "cut weights":
        weights.write_bytes(weights.read_bytes()[:-7])
    elif damage == "other sizes":
        config.write_text(config.read_text().replace('"depth": 2', '"depth": 3'))
    elif damage == "unknown key":
        config.write_text('{"extra": 1}')
    else:
        config.write_text("{")
    with pytest.raises(CheckpointError):
        load_small_encoder(tmp_path)


@pytest.mark.parametrize("layer", [0, 1, -2])
def test_inner_layers_count_blocks(layer):
    encoder = SmallEncoder(50, 16, 2, 2).initialize(0)
    x = tokens(1, 4)
    h = encoder.hidden(x, layer=layer)
    if layer == 0:
        torch.testing.assert_close(h, encoder.embedding(x) * 4.0)
    else:  # one block applied: -2 of three hidden states is 1
        assert torch.equal(h, encoder.hidden(x, layer=1)) and not torch.equal(h, encoder.hidden(x, layer=2))
    with pytest.raises(UsageError, match="does not exist"):
        encoder.hidden(x, layer=3)


@pytest.mark.parametrize("std", [torch.zeros(16), torch.full((16,), torch.nan), torch.ones(15)])
def test_statistics_that_cannot_be_used_are_refused(std):
    with pytest.raises(UsageError):
        SmallEncoder(50, 16, 2, 2).set_feature_statistics(torch.zeros(16), std)


# ---------------------------------------------------------------- ONNX


def varint(n: int) -> bytes:
    n &= (1 << 64) - 1
    out = b""
    while n > 127:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])


def field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def tensor(name: str, code: int, shape: tuple[int, ...], content: bytes, packed: bool) -> bytes:
    dims = field(1, b"".join(map(varint, shape))) if packed else b"".join(field(1, n) for n in shape)
    return field(5, dims + field(2, code) + content + field(8, name))


def onnx_bytes(graph: bytes) -> bytes:
    return field(1, 8) + field(2, "by hand") + field(7, graph) + field(8, field(2, 17))


def test_hand_written_onnx_is_read(tmp_path):
    q = np.array([[-3, 7], [127, -128]], np.int8)
    halves = np.array([0.5, -2.0], np.float16)
    graph = (
        field(1, field(1, "x") + field(1, "w") + field(2, "y") + field(3, "/enc/n") + field(4, "MatMul") + field(5, b""))
        + tensor("w", 3, (2, 2), field(9, q.tobytes()), packed=True)
        + tensor("floats", 1, (3,), field(4, struct.pack("<3f", 1, -2, 0.25)), packed=False)
        + tensor("ints", 7, (2,), field(7, varint(-5) + varint(1 << 40)), packed=True)
        + tensor("one at a time", 6, (2,), field(5, -1) + field(5, 300), packed=True)
        + tensor("halves", 10, (2,), field(5, b"".join(varint(int(h)) for h in halves.view(np.uint16))), packed=True)
        + tensor("scalar", 1, (), field(9, struct.pack("<f", 1.5)), packed=False)
    )
    path = tmp_path / "model.onnx"
    path.write_bytes(onnx_bytes(graph))
    read = read_onnx(path)
    assert read.nodes == (OnnxNode("/enc/n", ("x", "w")),)
    assert read.initializers["w"].dtype == np.int8 and np.array_equal(read.initializers["w"], q)
    assert read.initializers["floats"].tolist() == [1, -2, 0.25]
    assert read.initializers["ints"].tolist() == [-5, 1 << 40]
    assert read.initializers["one at a time"].tolist() == [-1, 300]
    assert read.initializers["halves"].tolist() == [0.5, -2.0]
    assert read.initializers["scalar"].shape == () and read.initializers["scalar"] == 1.5


@pytest.mark.parametrize("data", [b"", b"not a model at all", onnx_bytes(b"")[:-9], onnx_bytes(field(5, field(2, 99)))])
def test_foreign_or_cut_onnx_is_refused(tmp_path, data):
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(AssetError, match="fetch it again"):
        read_onnx(path)


def quantized_graph(model: transformers.T5EncoderModel) -> OnnxGraph:
    """The graph an int8 exporter would write for `model`, with every weight on a grid of 256 values."""
    weights, nodes = {}, []
    for name, parameter in model.encoder.state_dict().items():
        array = parameter.numpy()
        if array.ndim == 1:
            weights[f"enc.{name}"] = array
            continue
        scale, zero = np.float32(np.ptp(array) / 255), np.uint8(round(-array.min() / (np.ptp(array) / 255)))
        q = np.clip(np.round(array / scale) + zero, 0, 255).astype(np.uint8)
        linear = "embed_tokens" not in name and "relative" not in name
        base = f"onnx::MatMul_{len(nodes)}" if linear else f"enc.{name}"
        weights |= {f"{base}_quantized": q.T.copy() if linear else q, f"{base}_scale": scale, f"{base}_zero_point": zero}
        if linear:
            path = name.removesuffix(".weight").replace(".layer.", "/layer.").replace(".SelfAttention.", "/SelfAttention/")
            path = path.replace(".DenseReluDense.", "/DenseReluDense/")
            nodes.append(OnnxNode(f"/enc/{path}/MatMul_quant", ("x", f"{base}_quantized")))
    return OnnxGraph({k: np.asarray(v) for k, v in weights.items()}, tuple(nodes))


@pytest.mark.parametrize("kind", ["gated-gelu", "relu"])
def test_quantized_t5_is_converted(kind):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=50,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        feed_forward_proj=kind,
        relative_attention_num_buckets=8,
    )
    source = transformers.T5EncoderModel(config).eval()
    graph = quantized_graph(source)
    converted = convert_t5_encoder(graph)
    for name, want in source.state_dict().items():
        got = converted.state_dict()[name]
        assert got.shape == want.shape
        assert (got - want).abs().max() <= 0.51 * (want.max() - want.min()) / 255 + 1e-6, name
    x = tokens(1, 6)
    with torch.no_grad():  # the sizes that weights do not show must be right too
        a, b = converted(x).last_hidden_state, source(x).last_hidden_state
    assert torch.nn.functional.cosine_similarity(a, b, dim=-1).min() > 0.99
    missing = {k: v for k, v in graph.initializers.items() if k != "enc.final_layer_norm.weight"}
    with pytest.raises(AssetError, match="T5 encoder"):
        convert_t5_encoder(OnnxGraph(missing, graph.nodes))


def test_dequantize_takes_scales_per_tensor_and_per_column():
    q, zero = np.array([[0, 10], [200, 255]], np.uint8), np.array(100, np.uint8)
    assert dequantize(q, np.array(0.5, np.float32), zero).tolist() == [[-50, -45], [50, 77.5]]
    assert dequantize(q, np.array([1.0, 2.0], np.float32), zero).tolist() == [[-100, -180], [100, 310]]
