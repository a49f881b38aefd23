"""Our own AR method as a scorer, against its likelihood."""

import pytest
import torch

from jpeg_dlm.api import load
from jpeg_dlm.encoders.frozen import tensors_sha256
from jpeg_dlm.errors import UsageError
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.scorers.language_models import ArScorer, build_scorer

pytest_plugins = ["tiny_evaluation", "stand_in"]  # fixtures

TEXTS = ["The farmer plants corn.", "The smith forges", "near the river in the valley"]


def shaken(model):
    """Fresh heads are zero; numbers make every token's probability depend on what is before it."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=g))
    return model


def own_nats(method, rows):
    return [float(method.likelihood(Batch(torch.tensor([row])), RowNoise(0, [0])).nats_B) for row in rows]


# What stands before the first token: the start of the model's own, a frame's begin token, or a token rows begin with.
@pytest.mark.parametrize("changes, lead", [({}, []), ({"data__frame": True}, [4]), ({"model__start_id": 7}, [7])])
def test_scores_are_the_models_own(changes, lead, micro_folders):
    folder = micro_folders("ar", **changes)
    scorer = build_scorer(f"ar:{folder}")
    assert isinstance(scorer, ArScorer) and scorer.context == 12 and scorer.name == f"ar:{folder.name}"
    shaken(scorer.model)
    rows = [scorer.encode(text, 100)[: 12 - 1] for text in TEXTS]
    assert len({len(row) for row in rows}) > 1  # so that padding is seen
    whole, head = own_nats(scorer.model, [lead + row for row in rows]), own_nats(scorer.model, [lead + r[:1] for r in rows])
    begun = own_nats(scorer.model, [lead] * 3) if lead == [4] else [0.0] * 3  # a begin token itself never counts
    with_start = scorer.nll(TEXTS, bos=True)
    assert [s.nll_sum for s in with_start] == pytest.approx([w - b for w, b in zip(whole, begun, strict=True)], rel=1e-5)
    assert [s.n_tokens for s in with_start] == [len(row) for row in rows]
    if not lead:
        without = scorer.nll(TEXTS, max_tokens=11)  # the first token is context, so it costs nothing
        assert [s.nll_sum for s in without] == pytest.approx([w - h for w, h in zip(whole, head, strict=True)], rel=1e-5)
        assert [s.n_tokens for s in without] == [len(row) - 1 for row in rows]


def test_features_are_the_state_after_the_last_token(micro_folders):
    scorer = build_scorer(f"ar:{micro_folders('ar')}")
    shaken(scorer.model)
    found = scorer.features(TEXTS, 12)
    for text, h in zip(TEXTS, found, strict=True):
        ids = torch.tensor([scorer.encode(text, 12)])
        assert torch.allclose(h, scorer.model.hidden_states(ids)[0, -1], atol=1e-5)
    assert scorer.decode(scorer.encode(TEXTS[0], 100)).strip() == TEXTS[0]


def test_only_ar_can_score(micro_folder, micro_folders):
    with pytest.raises(UsageError, match="JPEG-DLM model, which cannot score"):
        build_scorer(f"ar:{micro_folder}")
    with pytest.raises(UsageError, match="ar:CHECKPOINT"):
        build_scorer("ar:")
    state = load(micro_folders("ar"), "cpu").method.export_state()
    assert build_scorer(f"ar:{micro_folders('ar')}").hash == tensors_sha256(state)
