"""Frozen encoders: equal to transformers called directly, independent of padding, and frozen."""

from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from jpeg_dlm.config import EncoderConfig
from jpeg_dlm.encoders import SmallEncoder, build_encoder
from jpeg_dlm.encoders.frozen import load_statistics, measure_statistics, save_statistics
from jpeg_dlm.encoders.small import CONFIG_FILE, WEIGHTS_FILE, load_small_encoder, save_small_encoder
from jpeg_dlm.util.errors import AssetError, CheckpointError, DataError, UsageError

RANDOM = EncoderConfig(kind="random", feature_dim=16, depth=3, heads=2)


def tokens(rows: int, length: int, vocab: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def padding(lengths: list[int], length: int) -> torch.Tensor:
    return torch.arange(length)[None] < torch.tensor(lengths)[:, None]


# ---------------------------------------------------------------- transformers


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny T5, saved with its decoder, and a tiny BERT."""
    torch.manual_seed(0)
    t5, bert = tmp_path_factory.mktemp("t5"), tmp_path_factory.mktemp("bert")
    sizes = {"vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 3, "num_heads": 4}
    transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).save_pretrained(t5)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24}
    transformers.BertModel(transformers.BertConfig(**sizes, max_position_embeddings=32)).save_pretrained(bert)
    return {"t5": t5, "bert": bert}


def hf(folder, vocab_size: int = 50, **options):
    return build_encoder(EncoderConfig(kind="hf", name=str(folder), **{"feature_dim": 16} | options), vocab_size)


@pytest.mark.parametrize(("family", "cls"), [("t5", transformers.T5EncoderModel), ("bert", transformers.BertModel)])
@pytest.mark.parametrize("layer", [-1, -2, 0, 3])
def test_hf_encoder_equals_transformers(family, cls, layer, folders):
    direct, x = cls.from_pretrained(folders[family]).eval(), tokens(3, 9)
    encoder = hf(folders[family], layer=layer, scale="none")
    for mask in (None, padding([9, 5, 7], 9)):
        with torch.no_grad():
            output = direct(input_ids=x, attention_mask=None if mask is None else mask.long(), output_hidden_states=True)
        torch.testing.assert_close(encoder(x, mask), output.hidden_states[layer], rtol=0, atol=1e-6)
        if layer == -1:
            torch.testing.assert_close(encoder(x, mask), output.last_hidden_state, rtol=0, atol=1e-6)
    fixed = hf(folders[family], layer=layer, scale="fixed")  # ELF's constant for T5-small
    torch.testing.assert_close(fixed(x, mask), output.hidden_states[layer] / 0.2, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["t5", "bert", "random"])
def test_each_query_sees_its_own_keys(kind, folders):
    """Where the first four tokens see each other and the others all of the row, the first are encoded as alone."""
    encoder = build_encoder(RANDOM, 50) if kind == "random" else hf(folders[kind], scale="none")
    x, seen = tokens(2, 9), torch.ones(2, 9, 9, dtype=torch.bool)
    seen[:, :4, 4:] = False
    torch.testing.assert_close(encoder(x, seen)[:, :4], encoder(x[:, :4]), rtol=0, atol=1e-5)
    assert not torch.allclose(encoder(x, seen)[:, 4:], encoder(x[:, 4:]))
    whole = padding([9, 5], 9)
    torch.testing.assert_close(encoder(x, whole[:, None].expand(2, 9, 9)), encoder(x, whole), rtol=0, atol=1e-5)


def test_hf_per_channel_needs_statistics_and_keeps_them(folders, tmp_path):
    encoder = hf(folders["t5"])
    x, mask = tokens(40, 8), padding([8, 5] * 20, 8)
    with pytest.raises(UsageError):
        encoder(x)
    encoder.set_feature_statistics(*measure_statistics(encoder, [(x[:17], mask[:17]), (x[17:], mask[17:])]))
    h = encoder(x, mask)[mask]
    torch.testing.assert_close(h.mean(0), torch.zeros(16), atol=1e-5, rtol=0)
    torch.testing.assert_close(h.std(0, correction=0), torch.ones(16), atol=1e-4, rtol=0)
    save_statistics(tmp_path, encoder)
    again = build_encoder(EncoderConfig(kind="hf", name=str(folders["t5"]), feature_dim=16), 50, folder=tmp_path)
    assert torch.equal(again(x), encoder(x)) and again.fingerprint == encoder.fingerprint
    with pytest.raises(DataError):
        load_statistics(tmp_path, hf(folders["t5"], layer=-2))


def test_hf_refusals(folders, tmp_path):
    with pytest.raises(AssetError, match="--encoder.name"):
        hf(tmp_path)
    with pytest.raises(UsageError, match="--encoder.name"):
        hf("")
    with pytest.raises(UsageError, match="--encoder.feature-dim 16"):
        hf(folders["t5"], feature_dim=32)
    with pytest.raises(UsageError, match="tokenizer"):
        hf(folders["t5"], vocab_size=51)
    with pytest.raises(UsageError, match="encoder.layer"):
        hf(folders["t5"], layer=4)


# ---------------------------------------------------------------- the small encoder


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 2**20))
def test_padding_never_changes_real_features(lengths, seed):
    encoder = build_encoder(RANDOM, 50)
    x, mask = tokens(len(lengths), 9, seed=seed), padding(lengths, 9)
    h = encoder(x, mask)
    assert torch.equal(h[mask], encoder(torch.where(mask, x, 7), mask)[mask])
    for i, n in enumerate(lengths):
        torch.testing.assert_close(h[i : i + 1, :n], encoder(x[i : i + 1, :n]), atol=1e-5, rtol=1e-5)


def test_features_depend_on_seed_alone():
    x = tokens(2, 6)
    torch.manual_seed(1)
    a = build_encoder(RANDOM, 50, seed=3)
    torch.manual_seed(2)
    b = build_encoder(RANDOM, 50, seed=3)
    assert torch.equal(a(x), b(x)) and a.fingerprint == b.fingerprint
    assert a.fingerprint != build_encoder(RANDOM, 50, seed=4).fingerprint
    assert a.fingerprint != build_encoder(replace(RANDOM, layer=1), 50, seed=3).fingerprint


def test_small_encoder_survives_its_folder(tmp_path):
    trained = SmallEncoder(50, 16, 3, 2).initialize(1)
    trained.set_feature_statistics(torch.linspace(-1, 1, 16), torch.linspace(0.5, 2, 16))
    save_small_encoder(tmp_path, trained, tokenizer_fingerprint="abc")
    loaded = load_small_encoder(tmp_path)
    assert all(torch.equal(v, loaded.state_dict()[k]) for k, v in trained.state_dict().items())
    config, x = EncoderConfig(kind="small", name=str(tmp_path), feature_dim=16, depth=3, heads=2), tokens(2, 6)
    standardized = (trained.hidden(x) - trained.feature_mean) / trained.feature_std
    torch.testing.assert_close(build_encoder(config, 50)(x), standardized)
    assert torch.equal(build_encoder(replace(config, name=""), 50, folder=tmp_path)(x), build_encoder(config, 50)(x))
    with pytest.raises(UsageError):
        build_encoder(config, 51)
    with pytest.raises(UsageError, match="--encoder.name"):
        build_encoder(replace(config, name=""), 50)


@pytest.mark.parametrize("damage", ["no config", "no weights", "cut weights", "other sizes", "unknown key", "not json"])
def test_damaged_small_encoder_is_refused(tmp_path, damage):
    save_small_encoder(tmp_path, SmallEncoder(50, 16, 2, 2).initialize(1))
    config, weights = tmp_path / CONFIG_FILE, tmp_path / WEIGHTS_FILE
    match damage:
        case "no config":
            config.unlink()
        case "no weights":
            weights.unlink()
        case "cut weights":
            weights.write_bytes(weights.read_bytes()[:-7])
        case "other sizes":
            config.write_text(config.read_text().replace('"depth": 2', '"depth": 3'))
        case _:
            config.write_text('{"extra": 1}' if damage == "unknown key" else "{")
    with pytest.raises(CheckpointError):
        load_small_encoder(tmp_path)


def test_inner_layers_count_blocks():
    encoder, x = SmallEncoder(50, 16, 2, 2).initialize(0), tokens(1, 4)
    torch.testing.assert_close(encoder.hidden(x, layer=0), encoder.embedding(x) * 4.0)
    one = encoder.hidden(x, layer=1)  # -2 of three hidden states
    assert torch.equal(encoder.hidden(x, layer=-2), one) and not torch.equal(one, encoder.hidden(x, layer=2))
    with pytest.raises(UsageError, match="encoder.layer"):
        encoder.hidden(x, layer=3)


@pytest.mark.parametrize("std", [torch.zeros(16), torch.full((16,), torch.nan), torch.ones(15)])
def test_statistics_that_cannot_be_used_are_refused(std):
    with pytest.raises(UsageError):
        SmallEncoder(50, 16, 2, 2).set_feature_statistics(torch.zeros(16), std)
