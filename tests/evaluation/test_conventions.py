"""Perplexities and features equal transformers called directly, under each convention and in any batch."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from tiny_evaluation import evaluation

from jpeg_dlm.evaluation import scorer as scoring
from jpeg_dlm.evaluation.protocols import PROTOCOLS
from jpeg_dlm.evaluation.scorer import Scorer
from jpeg_dlm.evaluation.texts import file_sources

pytest_plugins = ["tiny_evaluation"]  # fixtures


TEXTS = ["The smith forges nails.", "", "a", "Boats and ships<|endoftext|>and <|endoftext|>boats.", "long " * 40, "Ünï çödé"]


@pytest.fixture(scope="module")
def parts_of(byte_gpt2):
    tokenizer = transformers.AutoTokenizer.from_pretrained(byte_gpt2)
    return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(byte_gpt2).eval(), Scorer(str(byte_gpt2))


@torch.no_grad()
def direct(tokenizer, model, text, bos, scored, longest, limit=96):
    """(nll, tokens) of one text, alone and unpadded but for the end token that the 'eos' rule adds."""
    ids = tokenizer(text, add_special_tokens=False).input_ids if text.strip() else []
    ids = [0, *ids[: limit - 1]] if bos and ids else ids[:limit]
    if scored == "eos" and ids and len(ids) < longest:
        ids = [*ids, 0]
    if len(ids) < 2:
        return 0.0, 0
    losses = torch.nn.functional.cross_entropy(
        model(torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:]), reduction="none"
    )
    ends = np.cumsum([i == 0 for i in ids])[1:]
    keep = [scored == "all" or i != 0 or (scored == "eos" and n == 1) for i, n in zip(ids[1:], ends, strict=True)]
    return float(losses[torch.tensor(keep)].double().sum()), sum(keep)


@pytest.mark.parametrize("name", ["lm1b", "owt1024", "mdlm", "sedd", "default"])
def test_gen_ppl_equals_transformers_called_directly(parts_of, tmp_path, name, monkeypatch):
    monkeypatch.setattr(scoring, "TOKENS_PER_BATCH", 120)  # several batches
    monkeypatch.setattr(scoring, "ROWS_PER_CHUNK", 7)
    tokenizer, model, scorer = parts_of
    rule = replace(PROTOCOLS[name], batch_rule=0)
    (tmp_path / "s.txt").write_text("\n".join(TEXTS) + "\n", "utf-8")
    (tmp_path / "r.txt").write_text("A real text.\nAnother real text of some length.\n")
    [source] = file_sources([tmp_path / "s.txt"], tmp_path / "r.txt")
    found = evaluation(scorer, rule).entry(source, {})
    longest = min(96, max(len(tokenizer(t).input_ids) for t in TEXTS))
    rows = [direct(tokenizer, model, t, rule.bos, rule.scored, longest) for t in TEXTS]
    rows = [(nll, n) for nll, n in rows if n]
    if rule.aggregate == "corpus":
        want = math.exp(sum(nll for nll, _ in rows) / sum(n for _, n in rows))
    else:
        want = sum(math.exp(nll / n) for nll, n in rows) / len(rows)
    figures = found.stats["generated"]
    assert figures.gen_ppl == pytest.approx(want, rel=1e-4) and figures.tokens == sum(n for _, n in rows)
    assert figures.truncated == 1 and figures.skipped == len(TEXTS) - len(rows)
    assert figures.gen_ppl_low <= figures.gen_ppl <= figures.gen_ppl_high


def test_features_are_the_states_at_the_last_retained_token(parts_of):
    tokenizer, model, scorer = parts_of
    found = scorer.features(TEXTS, 20)
    kept = [t for t in TEXTS if t.strip()]
    assert found.shape == (len(kept), 16)
    for text, row in zip(kept, found, strict=True):
        ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids[:20]])
        with torch.no_grad():
            want = model(ids, output_hidden_states=True).hidden_states[-1][0, -1]
        assert torch.allclose(row, want, atol=1e-4)
    assert scorer.features(["", " "], 20).shape[0] == 0
