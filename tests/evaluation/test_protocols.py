"""Each difference between published evaluations, on texts whose figures can be worked out by hand."""

import json
import math
from dataclasses import replace

import pytest
import torch
from tiny_evaluation import evaluation

from jpeg_dlm.evaluation.protocols import PROTOCOLS, Protocol
from jpeg_dlm.evaluation.results import LengthLimits
from jpeg_dlm.evaluation.table import to_json
from jpeg_dlm.evaluation.texts import SourceTexts, file_sources
from jpeg_dlm.util.errors import UsageError

pytest_plugins = ["tiny_evaluation"]  # fixtures


TEXTS = ["w1 w2 w3", "w4 w4"]
REAL = ["w1 w1 w1", "w1 w2 w2"]


def entry(fake, tmp_path, found: Protocol, texts=TEXTS, ids=None, real=REAL):
    lines = [{"prediction": text} | ({"token_ids": ids[i]} if ids else {}) for i, text in enumerate(texts)]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "r.txt").write_text("\n".join(real) + "\n")
    [source] = file_sources([tmp_path / "s.jsonl"], tmp_path / "r.txt")
    return to_json(evaluation(fake, found).entry(source, {}))


def ppl(fake, tmp_path, found: Protocol, texts=TEXTS, ids=None) -> tuple[float, int]:
    f = entry(fake, tmp_path, found, texts, ids)["stats"]["generated"]
    return math.log(f["gen_ppl"]), f["tokens"]


def test_names():
    assert set(PROTOCOLS) == {"default", "lm1b", "lm1b-lower", "owt1024", "owt128", "mdlm", "duo", "bd3lms", "sedd"}
    assert all(name == p.name for name, p in PROTOCOLS.items())
    lm1b, owt1024, owt128 = (PROTOCOLS[name] for name in ("lm1b", "owt1024", "owt128"))
    assert (lm1b.bos, lm1b.mauve_tokens) == (False, 96)
    assert (owt1024.bos, owt1024.mauve_tokens, owt128.mauve_tokens) == (True, 768, 96)
    assert {(p.n, p.seeds) for name, p in PROTOCOLS.items() if name != "default"} == {(1024, 5)}


def test_lower_case_is_that_of_both_sides(fake, tmp_path):
    class Cased(type(fake)):
        """A word in capitals costs ten times as much."""

        def encode(self, text, max_tokens):
            return [int(word[1:]) * (10 if word[0] == "W" else 1) for word in text.split()][:max_tokens]

    texts = ["w1 W2 w3", "w4 W4"]
    assert ppl(Cased(), tmp_path, PROTOCOLS["lm1b"], texts) == (pytest.approx((20 + 3 + 40) / 3), 3)
    found = entry(Cased(), tmp_path, PROTOCOLS["lm1b-lower"], texts, real=["w1 W1 W1", "w1 W2 w2"])
    generated, real = found["stats"]["generated"], found["stats"]["real"]
    assert math.log(generated["gen_ppl"]) == pytest.approx((2 + 3 + 4) / 3)
    assert math.log(real["gen_ppl"]) == pytest.approx((1 + 1 + 2 + 2) / 4)
    assert found["runs"][0]["samples"] == ["w1 w2 w3", "w4 w4"]


def test_beginning_token(fake, tmp_path):
    # Without it the first token is context: 2 + 3 + 4 over 3 tokens. With it every token counts: 14 over 5.
    assert ppl(fake, tmp_path, PROTOCOLS["lm1b"]) == (pytest.approx(9 / 3), 3)
    assert ppl(fake, tmp_path, PROTOCOLS["owt1024"]) == (pytest.approx(14 / 5), 5)
    texts = ["w1 w2", "w9"]  # one token counts only after a beginning token
    assert ppl(fake, tmp_path, PROTOCOLS["lm1b"], texts) == (pytest.approx(2), 1)
    assert ppl(fake, tmp_path, PROTOCOLS["owt1024"], texts) == (pytest.approx(12 / 3), 3)


def test_windows_of_a_long_text(fake, tmp_path, monkeypatch):
    """Each word costs what it says plus ten for every word before it in its window, so the figure tells the windows."""
    monkeypatch.setattr(type(fake), "context", 4)
    monkeypatch.setattr(
        type(fake), "token_nll", lambda self, tokens, mask: tokens[:, 1:] + 10.0 * torch.arange(1, tokens.shape[1])
    )
    rule = replace(PROTOCOLS["bd3lms"], max_tokens=1024, stride=2)
    texts = ["w1 w2 w3 w4 w5 w6 w7", "w1 w1"]
    # Windows 1234, 3456, 567: the first three costs with 1 to 3 words before, then 5 and 6 with 2 and 3, then 7 with 2.
    nats = (2 + 10) + (3 + 20) + (4 + 30) + (5 + 20) + (6 + 30) + (7 + 20)
    assert ppl(fake, tmp_path, rule, texts) == (pytest.approx((nats + 11) / 7), 7)
    assert entry(fake, tmp_path, rule, texts)["stats"]["generated"]["truncated"] == 0
    cut = (2 + 10) + (3 + 20) + (4 + 30)  # without a stride only the first window counts
    assert ppl(fake, tmp_path, replace(rule, stride=0), texts) == (pytest.approx((cut + 11) / 4), 4)
    assert entry(fake, tmp_path, replace(rule, stride=0), texts)["stats"]["generated"]["truncated"] == 1
    with pytest.raises(UsageError, match="stride"):
        fake.nll(texts, stride=4)


def test_ends_of_text(fake, tmp_path):
    # Row 1 is the longest: 'w1 END w2 END w3' counts its first end (10), w2 and w3, not the second end.
    # Row 2 is padded with one end, which is its first: w4 and 10.
    texts = ["w1 END w2 END w3", "w4 w4"]
    rule = replace(PROTOCOLS["mdlm"], batch_rule=0)
    assert ppl(fake, tmp_path, rule, texts) == (pytest.approx((10 + 2 + 3 + 4 + 10) / 5), 5)
    assert ppl(fake, tmp_path, replace(rule, scored="all"), texts) == (pytest.approx((10 + 2 + 10 + 3 + 4) / 5), 5)
    assert ppl(fake, tmp_path, replace(rule, scored="non_eos"), texts) == (pytest.approx((2 + 3 + 4) / 3), 3)
    # An end in the first place uses up the allowance although the first place is never scored.
    assert ppl(fake, tmp_path, rule, ["END w2 END", "w1 w2 w1"]) == (pytest.approx((2 + 2 + 1) / 3), 3)


def test_batches_that_are_not_full_are_dropped(fake, tmp_path):
    rule = replace(PROTOCOLS["default"], batch_rule=2)
    found = entry(fake, tmp_path, rule, ["w1 w2", "w1 w2", "w9 w9"])
    assert found["stats"]["generated"]["dropped"] == 1 and math.log(found["stats"]["generated"]["gen_ppl"]) == 2
    assert any("last full batch" in note for note in found["notes"])


def test_raw_ids_are_scored_where_they_are_the_scorers(fake, tmp_path):
    rule = replace(PROTOCOLS["sedd"], aggregate="corpus")
    found = entry(fake, tmp_path, rule, TEXTS, [[1, 2, 3], [4, 4]])
    assert found["limits"]["score_raw_ids"] and math.log(found["stats"]["generated"]["gen_ppl"]) == pytest.approx(3)
    other = entry(fake, tmp_path, rule, TEXTS, [[7, 7, 7], [7, 7]])  # ids of another tokenizer: the text is scored
    assert not other["limits"]["score_raw_ids"] and math.log(other["stats"]["generated"]["gen_ppl"]) == pytest.approx(3)


def test_entropy_over_the_models_own_ids(fake, micro):
    """The model's ids and the scorer's differ, and so do the entropies; real text is treated alike."""
    texts = SourceTexts(["w1 w1 w2", "w1 w2 w3"], [[5, 6], [7, 7]])
    for name, want, whose in (("duo", math.log(2) / 2, "model"), ("default", None, "scorer")):
        rule = replace(PROTOCOLS[name], batch_rule=0)
        frame = LengthLimits(8, None, 2, rule.entropy == "model", False)
        found = evaluation(fake, rule).text_stats("x", texts, frame, 8)
        assert found.entropy_ids == whose
        by_scorer = (math.log(3) + (math.log(3) - 2 / 3 * math.log(2))) / 2
        assert found.entropy == pytest.approx(by_scorer if want is None else want)
