"""Scores equal to transformers called one text at a time; metrics by hand."""

import math

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from jpeg_dlm.errors import AssetError, DataError, UsageError
from jpeg_dlm.evaluation.summary import scorer_said
from jpeg_dlm.scorers import language_models, scoring
from jpeg_dlm.scorers.language_models import TransformersScorer, build_scorer
from jpeg_dlm.text.text_metrics import (
    TextScore,
    distinct_n,
    perplexity,
    perplexity_interval,
    repetition_rate,
    shuffle_words,
    unigram_entropy,
)

TEXTS = ["ab cab abba", "", "c", "   \n", "a b c a b c a b c", "cabcabcab acb", "ba", "b a c " * 12]


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = ["<|endoftext|>", "a", "b", "c", "Ġ", "ab", "Ġa", "Ċ"]
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(letters)}, merges=[("a", "b"), ("Ġ", "a")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    ends = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, **ends)
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=8, n_positions=32, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5)
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer.save_pretrained(folder)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@torch.no_grad()
def direct_nll(folder, text, max_tokens, bos):
    """One text, no batch, no padding, through transformers' own loss."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False).input_ids
    ids = [0, *ids[: max_tokens - 1]] if bos else ids[:max_tokens]
    if len(ids) < 2:
        return 0.0, 0
    x = torch.tensor([ids])
    return float(model(x, labels=x).loss) * (len(ids) - 1), len(ids) - 1


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("max_tokens", [6, 1024])
def test_scores_equal_transformers_called_directly(gpt2_folder, bos, max_tokens, monkeypatch):
    monkeypatch.setattr(scoring, "TOKENS_PER_BATCH", 40)  # several batches
    monkeypatch.setattr(language_models, "ROWS_PER_CHUNK", 7)
    seen = []
    scores = build_scorer(f"hf:{gpt2_folder}").nll(TEXTS, max_tokens, bos, lambda done, total: seen.append((done, total)))
    for text, score in zip(TEXTS, scores, strict=True):
        want, count = direct_nll(gpt2_folder, text, min(max_tokens, 32), bos) if text.strip() else (0.0, 0)
        assert score.n_tokens == count and score.nll_sum == pytest.approx(want, abs=1e-4, rel=1e-5)
    assert seen[-1] == (len(TEXTS), len(TEXTS))
    # Blank texts are always skipped; a single token has nothing to be scored on unless something precedes it.
    assert sum(score.skipped for score in scores) == (2 if bos else 3)
    total = sum(score.nll_sum for score in scores) / sum(score.n_tokens for score in scores)
    assert perplexity(scores) == pytest.approx(math.exp(total))


def test_a_text_scores_the_same_in_any_company(gpt2_folder):
    scorer = TransformersScorer(str(gpt2_folder))
    alone = [scorer.nll([text])[0] for text in TEXTS]
    for a, b in zip(alone, scorer.nll(TEXTS), strict=True):
        assert a.token_ids == b.token_ids and a.nll_sum == pytest.approx(b.nll_sum, abs=1e-4)


def test_scorer_says_what_it_is(gpt2_folder):
    scorer = TransformersScorer(str(gpt2_folder))
    assert scorer.name == gpt2_folder.name and len(scorer.hash) == 64 and scorer.bos_id == 0 and scorer.context == 32
    assert scorer.hash == TransformersScorer(str(gpt2_folder)).hash
    assert not any(p.requires_grad for p in scorer.model.parameters())
    assert TransformersScorer(str(gpt2_folder), precision="bf16").nll(["abc abc"])[0].nll_sum > 0


def test_features_are_those_of_fp32_in_any_precision(gpt2_folder):
    """As mauve-text computes them, whose value moves with the precision."""
    fp32, bf16 = (TransformersScorer(str(gpt2_folder), precision=p) for p in ("fp32", "bf16"))
    assert torch.equal(bf16.features(TEXTS, 16), fp32.features(TEXTS, 16))
    assert bf16.nll(TEXTS)[0].nll_sum != fp32.nll(TEXTS)[0].nll_sum  # the likelihoods do follow it


def test_requests_that_cannot_work_are_refused(gpt2_folder, tmp_path):
    for spec in ("gpt2-large", "hf:", "gguf:", ""):
        with pytest.raises(UsageError, match="smollm2"):
            build_scorer(spec)
    with pytest.raises(AssetError, match="smollm2") as caught:
        build_scorer(f"hf:{tmp_path}")
    assert "\n" not in str(caught.value)
    with pytest.raises(AssetError):
        build_scorer(f"gguf:{tmp_path / 'none.gguf'}")
    scorer = TransformersScorer(str(gpt2_folder))
    with pytest.raises(UsageError, match="max_tokens"):
        scorer.nll(["a b"], max_tokens=1)
    scorer.bos_id = None
    with pytest.raises(UsageError, match="beginning"):
        scorer.nll(["a b"], bos=True)
    with pytest.raises(UsageError, match="precision"):
        TransformersScorer(str(gpt2_folder), precision="fp8")


# ---------------------------------------------------------------- metrics


def test_gen_ppl_weighs_tokens_not_texts():
    scores = [TextScore(2.0, 1, (1, 2)), TextScore(3.0, 9, tuple(range(10))), TextScore(0.0, 0, ())]
    assert perplexity(scores) == pytest.approx(math.exp(0.5))
    with pytest.raises(DataError):
        perplexity(scores[2:])


def test_entropy_by_hand():
    assert unigram_entropy([[5, 5, 5]]) == 0
    assert unigram_entropy([[1, 2, 3, 4]]) == pytest.approx(math.log(4))
    # (3/4, 1/4) and a uniform pair, averaged over texts; blank texts do not count.
    want = (-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) + math.log(2)) / 2
    assert unigram_entropy([[7, 7, 7, 1], [], [0, 9]]) == pytest.approx(want)
    with pytest.raises(DataError):
        unigram_entropy([[]])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_entropy_is_between_zero_and_log_of_kinds(ids):
    assert -1e-12 <= unigram_entropy([ids]) <= math.log(len(set(ids))) + 1e-12


def test_distinct_and_repetition_by_hand():
    texts = [[1, 2, 1, 2], [1, 2, 3]]
    assert distinct_n(texts, 1) == pytest.approx(3 / 7)
    assert distinct_n(texts, 2) == pytest.approx(3 / 5)  # 12 21 23 of 12 21 12 12 23
    assert distinct_n(texts, 9) == 0
    assert repetition_rate(texts, 2) == pytest.approx((1 / 3 + 0) / 2)
    assert repetition_rate([[4] * 10], 4) == pytest.approx(6 / 7)
    assert repetition_rate([[1]], 4) == 0


def test_shuffle_keeps_words_and_follows_its_generator():
    text = "the quick brown fox jumps over the lazy dog"
    one, same, other = (shuffle_words(text, torch.Generator().manual_seed(s)) for s in (0, 0, 1))
    assert one == same != other and one != text and sorted(one.split()) == sorted(text.split())
    assert shuffle_words("", torch.Generator()) == ""


def test_bootstrap_interval_covers_a_mean():
    values = torch.randn(400, generator=torch.Generator().manual_seed(0))
    scores = [TextScore(value, 1, (0,)) for value in values.tolist()]
    low, high = perplexity_interval(scores, resamples=400)
    mean, half = values.mean().item(), 1.96 * values.std().item() / 20
    assert math.log(low) == pytest.approx(mean - half, abs=0.02) and math.log(high) == pytest.approx(mean + half, abs=0.02)
    assert (low, high) == perplexity_interval(scores, resamples=400)
    with pytest.raises(DataError):
        perplexity_interval([])


def test_bf16_scores_are_near_those_of_fp32_and_named(gpt2_folder):
    plain, half = (build_scorer(f"hf:{gpt2_folder}", precision=precision) for precision in ("auto", "bf16"))
    assert (plain.precision, half.precision.split()[0]) == ("fp32", "bf16")
    for a, b in zip(plain.nll(TEXTS), half.nll(TEXTS), strict=True):
        assert a.n_tokens == b.n_tokens and b.nll_sum == pytest.approx(a.nll_sum, rel=0.02)
    assert any(a.nll_sum != b.nll_sum for a, b in zip(plain.nll(TEXTS), half.nll(TEXTS), strict=True) if a.n_tokens)
    result = {"scorer": "gpt2", "scorer_precision": half.precision}
    assert scorer_said(result).startswith("gpt2 in bf16") and scorer_said({"scorer": "gpt2"}) == "gpt2"
