"""A GGUF file scores like a slow second version; its converted copy."""

import pytest
import torch
from reference import made_up_llama, slow_llama

from jpeg_dlm.evaluation.scorer import build_scorer
from jpeg_dlm.text import download

pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))


def llama_file(path):
    """Write a small model, and return its tensors."""
    gguf = pytest.importorskip("gguf")
    tensors, writer = made_up_llama(26, 32, 48, 2, 4, 2, tied=True), gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(1000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_context_length(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<|endoftext|>", "Ġ", *"abcdefgh0123456789.", "ab", "Ġc", "abc", "01", "zz"])
    writer.add_token_merges(["a b", "Ġ c", "ab c", "0 1"])
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
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


def test_the_pinned_file_is_converted_once_and_again_if_the_copy_is_damaged(tmp_path, monkeypatch):
    llama_file(tmp_path / "pinned.gguf")
    fetched = []
    monkeypatch.setattr(download, "fetch", lambda name, console: fetched.append(name) or tmp_path / "pinned.gguf")
    scores = [build_scorer("smollm2").nll(["abc cab 42."]) for _ in range(2)]
    (weights,) = (tmp_path / "cache").rglob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-8] + b"x" * 8)
    scores.append(build_scorer("smollm2").nll(["abc cab 42."]))
    assert scores[0] == scores[1] == scores[2] and fetched == ["smollm2"] * 2
