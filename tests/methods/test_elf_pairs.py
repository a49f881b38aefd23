"""ELF on pairs: the layout of its authors' batches, both modes against plain loops, and sampling with the source put back."""

import pytest
import torch
import torch.nn.functional as F
from micro import micro_model

from jpeg_dlm.config import validate
from jpeg_dlm.flow.path import make_grid
from jpeg_dlm.methods import elf
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.elf_pairs import PairRows
from jpeg_dlm.options import override
from jpeg_dlm.util.errors import UsageError
from jpeg_dlm.util.rng import RowNoise

S, L, WIDTH, VOCAB, PAD, END = 5, 4, 16, 40, 0, 1
J = S + L
SOURCES = torch.tensor([[11, 12, END, PAD, PAD], [13, 14, 15, 16, END], [17, END, PAD, PAD, PAD], [18, 19, 20, END, PAD]])
TARGETS = torch.tensor([[21, 22, END, PAD], [23, 24, 25, END], [26, END, PAD, PAD], [END, PAD, PAD, PAD]])
B = len(SOURCES)
PAIRS = Batch(TARGETS, TARGETS != PAD, source=Batch(SOURCES, SOURCES != PAD))
NONE_DROPPED = torch.zeros(B, dtype=torch.bool)


def build(**options):
    sizes = {"data__vocab_size": VOCAB, "data__token_len": L, "data__source_len": S, "data__packing": "padded"}
    noise = {"objective__noise_scale": 2.0, "objective__decode_noise_scale": 3.0}
    return micro_model("elf", 0.1, **sizes | noise | options)


# ---------------------------------------------------------------- rows

# What the authors' collator gives for these ids with max_input_length 5, max_length 9 and end tokens as padding.
ROWS = [
    [11, 12, 1, 21, 22, 1, 1, 1, 1],
    [13, 14, 15, 16, 1, 23, 24, 25, 1],
    [17, 1, 26, 1, 1, 1, 1, 1, 1],
    [18, 19, 20, 1, 1, 1, 1, 1, 1],
]
CONDITION = ["111000000", "111110000", "110000000", "111100000"]
SEEN_BY_CONDITION = CONDITION
SEEN_BY_TARGET = ["111111000", "111111111", "111100000", "111110000"]
SEEN_WITHOUT_CONDITION = ["000111000", "000001111", "001100000", "000010000"]


def bits(rows):
    return torch.tensor([[c == "1" for c in row] for row in rows])


@pytest.mark.parametrize("dropped", [False, True])
def test_rows_are_those_of_the_authors_collator(dropped):
    rows = PairRows.of(PAIRS)
    assert rows.tokens_BJ.tolist() == ROWS
    assert torch.equal(rows.source_BJ, bits(CONDITION))
    seen = rows.attention(torch.full((B,), dropped))
    for i in range(B):
        for query in range(J):
            of_target = SEEN_WITHOUT_CONDITION if dropped else SEEN_BY_TARGET
            keys = SEEN_BY_CONDITION if CONDITION[i][query] == "1" else of_target
            assert torch.equal(seen[i, query], bits([keys[i]])[0])


# ---------------------------------------------------------------- training


@torch.no_grad()
def slow_losses(method, n, decode_share, drop_share):
    """One row after the other: its source's features are clean, or zero where dropped, and have no loss."""
    coin, scale, sc, drop = (n.uniform(purpose) for purpose in ("mode", "scale", "self_condition", "context_drop"))
    time, share, eps = n.normal("time"), n.normal("decode_share", J), n.normal("latent", J, WIDTH)
    flow = ce = total = 0.0
    for i in range(B):
        c, row, dropped = CONDITION[i].count("1"), torch.tensor(ROWS[i : i + 1]), drop[i] < drop_share
        seen = bits([SEEN_WITHOUT_CONDITION[i] if dropped else SEEN_BY_TARGET[i]])
        x = method.encoder(row, seen)  # as the target sees the row
        x[:, :c] = 0 if dropped else method.encoder(row[:, :c])
        w, off, on = 1.5 * 4 ** scale[i : i + 1] - 1, torch.tensor([False]), torch.tensor([True])
        total += J - c
        if coin[i] < decode_share:
            keep = torch.sigmoid(0.8 + 0.8 * share[i])[:, None]
            z = keep * x + (1 - keep) * 3.0 * eps[i]
            logits = method.dit.logits(method.dit(z, torch.ones(1), None, w, on)[1])[0]
            ce += F.cross_entropy(logits[c:], row[0, c:], reduction="sum")
            continue
        t = torch.sigmoid(-1.5 + 0.8 * time[i : i + 1])
        z = t * x + (1 - t) * 2.0 * eps[i]
        s = torch.zeros_like(x)
        z[:, :c] = s[:, :c] = x[:, :c]
        target = x
        if sc[i] < 0.5:
            first = method.dit(z, t, s, w, off)[0]
            first[:, :c] = x[:, :c]
            second = method.dit(z, t, first, w, off)[0]
            s, target = first, x + (1 - 1 / w) * (second - first)
        error = (method.dit(z, t, s, w, off)[0] - target) / max(1 - t, 0.05)
        flow += (error[0, c:] ** 2).mean(-1).sum()
    return flow / total, ce / total


@pytest.mark.parametrize("step", [0, 1, 2])
@torch.no_grad()
def test_losses_follow_the_description(step, monkeypatch):
    monkeypatch.setattr(elf, "DECODE_PROB", 0.4)
    monkeypatch.setattr(elf, "SOURCE_DROP", 0.4)
    method, n = build().train(), RowNoise(0, range(B), step)
    found = method.losses(PAIRS, n)
    flow, ce = slow_losses(method, n, 0.4, 0.4)
    assert found["flow"].item() == pytest.approx(float(flow), rel=1e-4)
    assert found["ce"].item() == pytest.approx(float(ce), rel=1e-4)


def test_features_that_change_with_a_source_are_not_cached():
    with pytest.raises(UsageError, match="cache_features"):
        validate(override(build().config, {"data.cache_features": True}))


# ---------------------------------------------------------------- sampling


@pytest.mark.parametrize("scale", [1.0, 2.0])
@torch.no_grad()
def test_sampling_is_euler_from_noise_with_the_source_put_back(scale):
    method, n = build(sampler__source_scale=scale, sampler__grid="uniform"), RowNoise(3, range(B))
    sampler = method.config.sampler
    grid = make_grid("uniform", sampler.steps, 0.0, 1.0, n.shared("grid")).tolist()
    start = 2.0 * n.normal("sample", J, WIDTH)
    found = method.sample(sampler, n, source=PAIRS.source)
    for i in range(B):
        c = CONDITION[i].count("1")
        features = method.encoder(SOURCES[i : i + 1, :c])
        z, s = start[i : i + 1].clone(), torch.zeros(1, J, WIDTH)

        def with_source(z, source, c=c):
            return torch.cat([source, z[:, c:]], 1)

        for t, u in zip(grid, grid[1:], strict=False):
            x = [
                method.denoise(with_source(z, source), t, with_source(s, source), sampler.w)
                for source in (torch.zeros_like(features), features)
            ]
            s = x[0] + scale * (x[1] - x[0])
            z = z + (u - t) * (s - z) / max(1 - t, 0.05)
        expected = method.tokens(with_source(z, features), sampler.w)[:, c : c + L]
        assert torch.equal(found[i : i + 1], expected)


@torch.no_grad()
def test_given_tokens_are_those_of_the_target():
    method, fixed = build(), torch.full((B, L), -1)
    fixed[:, 1] = 7
    rows = method.sample(method.config.sampler, RowNoise(0, range(B)), None, fixed, source=PAIRS.source)
    assert rows.shape == (B, L) and (rows[:, 1] == 7).all()


@torch.no_grad()
def test_the_reconstruction_is_that_of_targets():
    method = build()
    features = method.pair_features(PairRows.of(PAIRS), NONE_DROPPED)
    rows = zip(method.tokens(features), CONDITION, strict=True)
    targets = torch.stack([row[condition.count("1") :][:L] for row, condition in rows])
    right = (targets == TARGETS) & PAIRS.real_BL
    assert method.reconstruction(PAIRS).item() == pytest.approx(float(right.sum() / PAIRS.real_BL.sum()))
