"""stories15M is read as llama2.c wrote it, and its stories equal those of a slow plain sampler, even when interrupted."""

import json
import math
import struct

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from jpeg_dlm.errors import AssetError, UsageError
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.scorers.language_models import build_scorer
from jpeg_dlm.text import corpora, stories
from jpeg_dlm.text.stories import NUCLEUS, StoryWriter, nucleus_draw, stories_of
from jpeg_dlm.text.stories15m import load_stories15m

WORDS = [" a", "b", "ab", " ab", "ba", " b", "aba", ".", " .", "a", "\n", " "]
PIECES = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{i:02X}>" for i in range(256)), *WORDS]
SCORES = [0.0] * 259 + [-float((7 * i) % len(WORDS)) for i in range(len(WORDS))]
DIM, HEADS, KV_HEADS, INNER, LAYERS, CONTEXT = 16, 4, 2, 24, 2, 24


def neighbors(weight, heads):
    """Rows of a transformers q or k weight (pairs are halves) as llama2.c keeps them (pairs are neighbors)."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def twin():
    """A random Llama of transformers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(PIECES), hidden_size=DIM, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, tie_word_embeddings=True,
        initializer_range=0.5,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)  # so that few pieces are probable
    return model


@pytest.fixture(scope="module")
def path(twin, tmp_path_factory):
    """The same weights in llama2.c's layout, with a tokenizer behind them."""
    state, blocks = twin.state_dict(), [f"model.layers.{i}." for i in range(LAYERS)]
    q, k = ([neighbors(state[b + f"self_attn.{n}_proj.weight"], h) for b in blocks] for n, h in (("q", HEADS), ("k", KV_HEADS)))
    order = [
        [state["model.embed_tokens.weight"]], [state[b + "input_layernorm.weight"] for b in blocks], q, k,
        *([state[b + f"{name}.weight"] for b in blocks] for name in (
            "self_attn.v_proj", "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj", "mlp.up_proj",
        )),
        [state["model.norm.weight"]], [torch.zeros(2 * CONTEXT * DIM // HEADS // 2)],
    ]  # fmt: skip
    raw = struct.pack("<7i", DIM, INNER, LAYERS, HEADS, KV_HEADS, len(PIECES), CONTEXT)
    raw += b"".join(t.detach().numpy().astype("<f4").tobytes() for group in order for t in group)
    raw += struct.pack("<i", 8)
    for piece, score in zip(PIECES, SCORES, strict=True):
        raw += struct.pack("<fi", score, len(piece.encode())) + piece.encode()
    path = tmp_path_factory.mktemp("stories15m") / "llama2.data"
    path.write_bytes(raw)
    return path


def test_the_model_is_that_of_transformers(path, twin):
    model, _, context = load_stories15m(path)
    tokens = torch.randint(len(PIECES), (3, CONTEXT), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = twin(tokens).logits
    assert context == CONTEXT and torch.allclose(model(tokens).logits, expected, atol=1e-4, rtol=1e-4)


def test_token_by_token_is_all_at_once_and_rows_may_leave(path):
    model, _, _ = load_stories15m(path)
    tokens = torch.randint(len(PIECES), (4, 9), generator=torch.Generator().manual_seed(1))
    expected, cache, rows = model.model(tokens).last_hidden_state, None, torch.arange(4)
    for place in range(9):
        if place == 5:
            kept = torch.tensor([True, False, True, True])
            cache.batch_select_indices(kept)
            rows = rows[kept]
        found = model.model(tokens[rows, place : place + 1], past_key_values=cache, use_cache=True)
        cache = found.past_key_values
        assert torch.allclose(found.last_hidden_state[:, 0], expected[rows, place], atol=1e-5)


def merged(text):
    """llama2.c's own way: characters or their bytes, then again and again the pair whose piece has the highest score."""
    ids = []
    for c in " " + text:
        ids += [PIECES.index(c, 259)] if c in WORDS else [3 + byte for byte in c.encode()]
    while True:
        pairs = [
            (SCORES[PIECES.index(w, 259)], -i)
            for i in range(len(ids) - 1)
            if (w := PIECES[ids[i]] + PIECES[ids[i + 1]]) in WORDS
        ]
        if not pairs:
            return ids
        i = -max(pairs)[1]
        ids[i : i + 2] = [PIECES.index(PIECES[ids[i]] + PIECES[ids[i + 1]], 259)]


def test_the_tokenizer_merges_as_llama2c_does_and_gives_text_back(path):
    _, tokenizer, _ = load_stories15m(path)
    random = np.random.default_rng(0)
    for _ in range(60):
        text = "".join(random.choice(list("aabb. \né"), size=random.integers(1, 14)))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == merged(text) and tokenizer.decode(ids, skip_special_tokens=False) == text


def slow_draw(p, u):
    """Pieces from the most probable on until they have the nucleus, then the one at u of their sum."""
    order, kept, total = sorted(range(len(p)), key=lambda i: -p[i]), [], 0.0
    for i in order:
        kept.append(i)
        total += p[i]
        if total >= NUCLEUS:
            break
    at = 0.0
    for i in kept:
        at += p[i]
        if u * total < at:
            return i, kept
    return kept[-1], kept


@pytest.mark.parametrize("top", [512, 2])
def test_a_draw_is_from_the_nucleus(top, monkeypatch):
    """Also where more pieces are in it than are sorted at first."""
    monkeypatch.setattr(stories, "TOP", top)
    g = torch.Generator().manual_seed(0)
    p, u = (3 * torch.randn(200, 9, generator=g)).softmax(-1).double(), torch.rand(200, generator=g)
    slow = [slow_draw(row, float(x)) for row, x in zip(p.tolist(), u, strict=True)]
    drawn, kept = nucleus_draw(p, u)
    assert drawn.tolist() == [i for i, _ in slow]
    assert sorted(kept.tolist()) == sorted(i for _, pieces in slow for i in pieces)


def slow_story(model, tokenizer, number, pieces):
    """One story alone, the whole prefix read again for every token."""
    ids, uniform = [1], RowNoise(0, [number]).uniform("story", CONTEXT)[0]
    for u in uniform.tolist():
        logits = model(torch.tensor([ids])).logits[0, -1]
        p = logits[pieces].double().softmax(-1)
        ids.append(pieces[slow_draw(p.tolist(), u)[0]])
        if ids[-1] < 3:
            return tokenizer.decode(ids[1:-1], skip_special_tokens=False).strip()
    text = tokenizer.decode(ids[1:], skip_special_tokens=False).strip()
    ends = [
        i
        for i in range(1, len(text) + 1)
        if text[i - 1] in ".!?" or (text[i - 1] in "\"'" and text[i - 2 : i - 1] in (*".!?",))
    ]
    ends = [i for i in ends if i == len(text) or text[i].isspace()]
    return text[: ends[-1]] if ends else text


def test_stories_are_those_of_a_slow_writer(path, tmp_path):
    model, tokenizer, context = load_stories15m(path)
    writer = StoryWriter(model, tokenizer, context, tmp_path, 6)
    assert writer.part(0) == [slow_story(model, tokenizer, i, list(range(len(PIECES)))) for i in range(6)]
    second = writer.part(1)
    pieces = json.loads((tmp_path / "pieces.json").read_text())
    assert second == [slow_story(model, tokenizer, i, pieces) for i in range(6, 12)]
    assert 3 < len(pieces) < len(PIECES) and len(set(second)) > 1


@pytest.fixture
def cache(path, tmp_path, monkeypatch):
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "one"))
    monkeypatch.setattr(stories, "fetch", lambda name, console: path)
    monkeypatch.setattr(stories, "PART", 4)
    return tmp_path


def test_a_stopped_writer_goes_on_and_leaves_the_same_bytes(cache, monkeypatch):
    def files():
        return {p.name: p.read_bytes() for p in stories.written(12)[0].parent.iterdir()}

    whole = files()
    assert sorted(whole) == ["part-00000.jsonl", "part-00001.jsonl", "part-00002.jsonl", "pieces.json"]
    monkeypatch.setenv("JPEG_DLM_CACHE", str(cache / "two"))
    write, calls = stories.write_atomic, []

    def stop_at_third(path, content):
        calls.append(path.name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        write(path, content)

    monkeypatch.setattr(stories, "write_atomic", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        stories.written(12)
    monkeypatch.setattr(stories, "write_atomic", write)
    assert calls[:2] == ["pieces.json", "part-00000.jsonl"] and files() == whole
    (stories.written(12)[0].parent / "pieces.json").unlink()
    stories.written(12)[2].unlink()
    assert files() == whole


def test_more_stories_begin_with_the_fewer_ones(cache, capsys):
    few = list(corpora.open_corpus("stories:5").stream(0))
    assert "Writing 8 stories" in capsys.readouterr().err
    many = corpora.open_corpus("stories:11")
    assert "Writing 4 stories" in capsys.readouterr().err
    assert len(few) == 5 and list(many.stream(0))[:5] == few and list(many.stream(3))[:2] == few[3:]
    assert len(list(many.stream(0))) == 11 and many.fingerprint != corpora.open_corpus("stories:5").fingerprint


def test_the_number_of_stories_is_part_of_the_name(tmp_path):
    assert stories_of("stories") == stories.STORIES and stories_of("stories:300") == 300 and stories_of("sotu") is None
    for wrong in ("stories:", "stories:many", "stories:-3", "stories:1", "stories:9000000000"):
        with pytest.raises(UsageError, match="stories:20000"):
            corpora.open_corpus(wrong)


def test_the_scorer_is_named_and_counts_from_the_beginning(path, twin, monkeypatch):
    monkeypatch.setattr("jpeg_dlm.fetch.assets.fetch", lambda name, console: path)
    scorer = build_scorer("stories15m")
    _, tokenizer, _ = load_stories15m(path)
    ids = [1, *tokenizer.encode("ab ba.", add_special_tokens=False).ids]
    with torch.no_grad():
        log_p = twin(torch.tensor([ids])).logits.double().log_softmax(-1)[0]
    expected = -math.fsum(log_p[i, token].item() for i, token in enumerate(ids[1:]))
    assert scorer.name == "stories15M" and scorer.context == CONTEXT
    assert scorer.nll(["ab ba."], bos=True)[0].nll_sum == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("cut", [0, 20, 400, -30])
def test_damaged_files_are_refused(path, tmp_path, cut):
    (tmp_path / "x.data").write_bytes(path.read_bytes()[:cut])
    with pytest.raises(AssetError, match="fetch it again"):
        load_stories15m(tmp_path / "x.data")
