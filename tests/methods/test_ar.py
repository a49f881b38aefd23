"""The autoregressive system: its likelihood by the chain rule, its sampler by enumeration, caches, prompts and files."""

import itertools
import math

import pytest
import torch

from jpeg_dlm.config import validate
from jpeg_dlm.config_io import from_dict, override, to_dict
from jpeg_dlm.errors import CheckpointError, UsageError
from jpeg_dlm.methods.ar import Ar, ArSampler, next_token_probabilities
from jpeg_dlm.methods.base import FREE, Batch
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.presets import PRESETS, preset
from jpeg_dlm.rng import RowNoise

B, L, VOCAB = 4, 9, 13
TINY = {
    "data.vocab_size": VOCAB, "data.token_len": L, "model.hidden": 16, "model.heads": 2, "model.depth": 2,
    "train.precision": "fp32",
}  # fmt: skip
STARTS = [{}, {"model.start_id": 5}, {"model.mask_id": 3}, {"model.mask_id": 3, "model.start_id": 5}]


def build(options=None, perturbed=0.5) -> Ar:
    """A tiny model; perturbed, because a fresh head is zero and every token equally probable."""
    method = build_method(override(for_method(preset("smoke"), "ar"), TINY | (options or {})))
    assert isinstance(method, Ar)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in method.parameters():
            p.add_(perturbed * torch.randn(p.shape, generator=g))
    return method.eval()


def tokens(rows=B, length=L, method=None):
    x = torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(7))
    if method is not None:  # rows as that model knows them: without its mask, with its start
        x[x == method.mask_id] = 0
        if method.config.model.start_id >= 0:
            x[:, 0] = method.config.model.start_id
    return x


def noise(rows=B, seed=0):
    return RowNoise(seed, range(rows))


def slow_probabilities(method, row, i):
    """p(x_i | x_<i) of one row: the network run on exactly what comes before, the mask's share removed afterwards."""
    start = method.config.model.start_id
    read = [*([method.mask_id] if start == -1 else []), *row[:i].tolist()]
    p = method.backbone(torch.tensor([read]))[0, -1].double().softmax(-1)
    p[method.mask_id] = 0
    return p / p.sum()


# ---------------------------------------------------------------- likelihood


@torch.no_grad()
@pytest.mark.parametrize("options", STARTS)
def test_likelihood_is_the_product_of_next_token_probabilities(options):
    method = build(options)
    x = tokens(method=method)
    first = 0 if method.config.model.start_id == -1 else 1
    wanted = torch.zeros(B, L, dtype=torch.float64)
    for b, i in itertools.product(range(B), range(first, L)):
        wanted[b, i] = -slow_probabilities(method, x[b], i)[x[b, i]].log()
    assert torch.allclose(method.token_nll(x).double(), wanted, atol=1e-5) and wanted.std() > 0.3
    known = method.likelihood(Batch(x), noise())
    assert torch.allclose(known.nats_B, wanted.sum(1), atol=1e-4) and known.tokens_B.tolist() == [L - first] * B
    assert method.losses(Batch(x), noise())["ce"].item() == pytest.approx(wanted[:, first:].mean().item(), rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("options", [{"data.token_len": 3}, {"data.token_len": 4, "model.start_id": 5, "model.mask_id": 2}])
def test_probabilities_of_all_rows_sum_to_one(options):
    method = build(options | {"data.vocab_size": 8})
    length, start = method.config.data.token_len, method.config.model.start_id
    free = length if start == -1 else length - 1
    rows = torch.tensor(list(itertools.product(range(8), repeat=free)))
    rows = rows if start == -1 else torch.cat([torch.full((len(rows), 1), start), rows], dim=1)
    assert method.likelihood(Batch(rows), noise(len(rows))).nats_B.neg().exp().sum().item() == pytest.approx(1, abs=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("options", STARTS[:2])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_sum"])
def test_only_real_tokens_count(options, reduction):
    method = build(options | {"objective.reduction": reduction})
    mask = torch.arange(L) < torch.tensor([L, 3, 5, 2])[:, None]
    x = tokens(method=method)
    first = 0 if method.config.model.start_id == -1 else 1
    nll = method.token_nll(x)
    places = [(b, i) for b, i in mask.nonzero().tolist() if i >= first]
    total = sum(nll[b, i].item() for b, i in places)
    wanted = total / (len(places) if reduction == "token_mean" else B)
    for padding in (x, torch.where(mask, x, 1)):
        assert method.losses(Batch(padding, mask), noise())["ce"].item() == pytest.approx(wanted, rel=1e-5)
    known = method.likelihood(Batch(x, mask), noise())
    assert known.tokens_B.tolist() == [n - first for n in (L, 3, 5, 2)]
    assert known.nats_B.sum().item() == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("options", STARTS[:2])
def test_chunks_change_neither_loss_nor_gradient(options):
    results = []
    for chunk in (0, 5):
        method = build(options | {"objective.ce_chunk": chunk})
        loss = method.losses(Batch(tokens(method=method)), noise())["ce"]
        loss.backward()
        results.append((loss.item(), torch.cat([p.grad.flatten() for p in method.parameters()])))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-6) and results[0][1].abs().max() > 0.01


@torch.no_grad()
def test_rows_longer_than_the_models_own_can_be_scored():
    method = build()
    x = tokens(2, 3 * L)
    nll = method.token_nll(x)
    assert nll.shape == (2, 3 * L) and torch.allclose(nll[:, :L], method.token_nll(x[:, :L]), atol=1e-5)
    assert nll[0, 20].item() == pytest.approx(-slow_probabilities(method, x[0], 20)[x[0, 20]].log().item(), abs=1e-5)
    assert build({"model.start_id": 5}).token_nll(x[:, :1]).tolist() == [[0], [0]]


@torch.no_grad()
@pytest.mark.parametrize("options", STARTS[:2])
def test_hidden_states_have_read_their_own_token(options):
    method = build(options)
    x = tokens(method=method)
    h = method.hidden_states(x)
    assert h.shape == (B, L, 16)
    for i in (0, 4, L - 2):
        p = method.logits(h[:, i]).double().softmax(-1)
        assert torch.allclose(p[2], slow_probabilities(method, x[2], i + 1), atol=1e-6)
    changed = x.clone()
    changed[:, -1] = (changed[:, -1] + 1) % VOCAB
    moved = (method.hidden_states(changed) - h).abs().amax(-1) > 1e-4
    assert moved[:, -1].all() and not moved[:, :-1].any()


def test_a_fresh_model_finds_every_token_but_the_mask_equally_probable():
    method = build(perturbed=0)
    assert torch.allclose(method.token_nll(tokens()), torch.full((B, L), math.log(VOCAB)))
    method = build({"model.mask_id": 3}, perturbed=0)
    assert torch.allclose(method.token_nll(tokens(method=method)), torch.full((B, L), math.log(VOCAB - 1)))


def test_a_literal_mask_in_the_text_does_not_stop_a_run():
    method = build({"model.mask_id": 3})
    loss = method.losses(Batch(torch.full((B, L), 3)), noise())["ce"]
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() and p.grad.abs().max() < 100 for p in method.parameters())


def test_every_parameter_is_trained_and_a_batch_is_learned():
    method = build({"model.dropout": 0.0}, perturbed=0).train()
    (group,) = method.parameter_groups()
    assert group.name == "flow" and group.parameters.keys() == dict(method.named_parameters()).keys()
    optimizer = torch.optim.AdamW(group.parameters.values(), lr=1e-2)
    for step in range(60):
        optimizer.zero_grad()
        loss = method.total_loss(method.losses(Batch(tokens()), noise()))
        loss.backward()
        if step == 1:  # in the first step the zero head stops what is behind it
            assert [n for n, p in method.named_parameters() if p.grad is None or not p.grad.any()] == []
        optimizer.step()
    assert loss.item() < 0.5
    greedy = method.eval().sample(ArSampler(temperature=0), noise(), given_BL=prompt(tokens(), 2))
    assert torch.equal(greedy, tokens())


# ---------------------------------------------------------------- drawing a token


def brute_force(logits, sampler):
    """Sets built token by token."""
    if sampler.temperature == 0:
        return [float(i == max(range(len(logits)), key=logits.__getitem__)) for i in range(len(logits))]
    p = {i: math.exp(x / sampler.temperature) for i, x in enumerate(logits)}
    ranked = sorted(p, key=p.__getitem__, reverse=True)[: sampler.top_k or None]
    total, kept = sum(p[i] for i in ranked), []
    for i in ranked:
        if sum(p[j] for j in kept) / total >= sampler.top_p:
            break
        kept.append(i)
    mass = sum(p[i] for i in kept)
    return [p[i] / mass if i in kept else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 4, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-9])
def test_truncation_against_brute_force(temperature, top_k, top_p):
    sampler = ArSampler(temperature, top_k, top_p)
    logits = 2 * torch.randn(5, 17, generator=torch.Generator().manual_seed(3))
    wanted = torch.tensor([brute_force(row, sampler) for row in logits.double().tolist()], dtype=torch.float64)
    got = next_token_probabilities(logits, sampler)
    assert got.dtype == torch.float64 and torch.allclose(got, wanted, atol=1e-12)


def test_the_token_that_crosses_p_is_kept():
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    kept = {
        p: int((next_token_probabilities(logits, ArSampler(top_p=p)) > 0).sum()) for p in (0.49, 0.51, 0.74, 0.76, 0.89, 0.91)
    }
    assert kept == {0.49: 1, 0.51: 2, 0.74: 2, 0.76: 3, 0.89: 3, 0.91: 4}


# ---------------------------------------------------------------- sampling


def distinct(rows):
    return len({tuple(row) for row in rows.tolist()})


SAMPLERS = [ArSampler(), ArSampler(temperature=0), ArSampler(0.8, top_k=6), ArSampler(top_p=0.8)]


@torch.no_grad()
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("options", STARTS)
def test_each_token_is_drawn_given_those_before_it(options, sampler):
    """The sampler replayed with the network run anew for each row and token, and the sum of probabilities inverted by hand."""
    method = build(options)
    got = method.sample(sampler, noise(3))
    start = method.config.model.start_id
    for b, row in enumerate(got):
        u = RowNoise(0, [b]).streams("sample").uniform(L)[0].tolist()
        assert start == -1 or row[0] == start
        for i in range(0 if start == -1 else 1, L):
            logits = slow_probabilities(method, row, i).clamp_min(1e-300).log().tolist()
            p = brute_force(logits, sampler)
            assert row[i] == next(v for v in range(len(p)) if sum(p[: v + 1]) > u[i])
    assert got.shape == (3, L) and distinct(got) == (1 if sampler.temperature == 0 else 3)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("options", STARTS)
def test_with_and_without_cache_the_tokens_are_the_same(options, sampler):
    method = build(options)
    plain = ArSampler(sampler.temperature, sampler.top_k, sampler.top_p, kv_cache=False)
    for given in (None, prompt(tokens(8, method=method), 4), template(method)):
        assert torch.equal(method.sample(sampler, noise(8), given_BL=given), method.sample(plain, noise(8), given_BL=given))


def counted(method, sampler, given=None):
    """Positions read by the blocks and states multiplied by the head, call by call."""
    read, headed = [], []
    hooks = [
        method.backbone.blocks[0].register_forward_hook(lambda m, i, out: read.append(out.shape[1])),
        method.backbone.output_layer.linear.register_forward_hook(lambda m, i, out: headed.append(out.shape[:-1])),
    ]
    method.sample(sampler, noise(2), given_BL=given)
    for hook in hooks:
        hook.remove()
    assert headed == [(2,)] * len(read)
    return read


def test_what_is_read_with_and_without_cache():
    """Without a cache the whole prefix is read again for each token, which is the paper's speed of 1; the head only once."""
    method, framed = build(), build({"model.start_id": 5})
    with_cache, without = ArSampler(), ArSampler(kv_cache=False)
    assert counted(method, without) == list(range(1, L + 1)) and counted(method, with_cache) == [1] * L
    assert counted(framed, without) == list(range(1, L)) and counted(framed, with_cache) == [1] * (L - 1)
    assert len(counted(method, with_cache)) == with_cache.evaluations(L)
    assert counted(method, with_cache, prompt(tokens(2), 4)) == [5] + [1] * (L - 5)
    assert counted(method, without, prompt(tokens(2), 4)) == list(range(5, L + 1))


@pytest.mark.parametrize("options", STARTS[:2])
def test_a_sample_is_the_same_in_any_batch(options):
    method = build(options)
    together = method.sample(ArSampler(), noise(6))
    assert distinct(together) == 6
    assert torch.equal(torch.cat([method.sample(ArSampler(), RowNoise(0, [i])) for i in range(6)]), together)
    assert torch.equal(method.sample(ArSampler(), RowNoise(0, [4, 1])), together[[4, 1]])
    assert not torch.equal(method.sample(ArSampler(), noise(6, seed=1)), together)


def test_samples_follow_the_models_distribution():
    """Two tokens of eight: frequencies of all 64 rows against their exact probabilities."""
    method = build({"data.vocab_size": 8, "data.token_len": 2})
    rows = torch.tensor(list(itertools.product(range(8), repeat=2)))
    p = method.likelihood(Batch(rows), noise(64)).nats_B.neg().exp()
    n = 4000
    drawn = method.sample(ArSampler(), noise(n))
    counts = torch.bincount(8 * drawn[:, 0] + drawn[:, 1], minlength=64)
    chi2 = ((counts - n * p) ** 2 / (n * p)).sum().item()
    assert p.max() > 0.05 and chi2 < 63 + 5 * math.sqrt(2 * 63)


def test_the_mask_is_never_written():
    method = build({"model.mask_id": 3})
    with torch.no_grad():
        method.backbone.output_layer.linear.bias[3] = 50.0
    assert not (method.sample(ArSampler(), noise(32)) == 3).any()
    with torch.no_grad():
        unmasked = build()
        unmasked.backbone.output_layer.linear.bias[VOCAB] = 50.0
    assert unmasked.sample(ArSampler(), noise(32)).max() < VOCAB


# ---------------------------------------------------------------- given tokens


def prompt(x, length):
    """The first tokens of x given, the rest free."""
    given = torch.full_like(x, FREE)
    given[:, :length] = x[:, :length]
    return given


def template(method, rows=8):
    """Given tokens in the middle and at the end, in places that differ between rows but for two columns."""
    keep = torch.rand(rows, L, generator=torch.Generator().manual_seed(2)) < 0.4
    keep[:, 5:7] = True
    return torch.where(keep, tokens(rows, method=method), FREE)


@pytest.mark.parametrize("options", STARTS[:2])
def test_given_tokens_are_kept_and_continued(options):
    method = build(options)
    for given in (template(method), prompt(tokens(8, method=method), 3), tokens(8, method=method)):
        out = method.sample(ArSampler(), noise(8), given_BL=given)
        assert torch.equal(out[given != FREE], given[given != FREE]) and (out >= 0).all()
        alone = torch.cat([method.sample(ArSampler(), RowNoise(0, [i]), given_BL=given[i : i + 1]) for i in range(8)])
        assert torch.equal(alone, out)


def test_giving_a_sample_its_own_beginning_changes_nothing():
    method = build()
    out = method.sample(ArSampler(), noise())
    for length in (0, 1, 5, L):
        assert torch.equal(method.sample(ArSampler(), noise(), given_BL=prompt(out, length)), out)


def test_a_given_first_token_replaces_the_start():
    method = build({"model.start_id": 5})
    assert method.sample(ArSampler(), noise(), given_BL=prompt(torch.full((B, L), 2), 1))[:, 0].tolist() == [2] * B
    given = torch.full((1, L), FREE).expand(B, -1)  # as a caller passes one template for all rows
    assert torch.equal(method.sample(ArSampler(), noise(), given_BL=given), method.sample(ArSampler(), noise()))
    assert (given == FREE).all()


def test_watching_shows_the_tokens_so_far_and_changes_nothing():
    method = build()
    given = prompt(tokens(method=method), 2)
    given[:, 6] = 4
    seen = []
    out = method.sample(ArSampler(), noise(), lambda k, n, t, decode: seen.append((k, n, t, decode())), given)
    assert torch.equal(out, method.sample(ArSampler(), noise(), given_BL=given))
    assert [(k, n) for k, n, *_ in seen] == [(k, L) for k in range(L + 1)]
    assert [t for *_, t, _ in seen] == pytest.approx([k / L for k in range(L + 1)])
    for k, *_, shown in seen:
        known = (torch.arange(L) < max(k, 2)) | (torch.arange(L) == 6)
        assert torch.equal(shown, torch.where(known, out, 0))


# ---------------------------------------------------------------- options and files


def test_presets():
    configs = {name: validate(for_method(preset(name), "ar")) for name in PRESETS}
    assert all(c.method == "ar" and from_dict(to_dict(c)) == c for c in configs.values())
    lm1b, owt = configs["lm1b"], configs["owt1024"]
    for config, parameters in ((lm1b, 131_912_250), (owt, 162_246_482)):  # BERT; GPT-2 with its row for the mask
        with torch.device("meta"):
            assert sum(p.numel() for p in Ar(config).parameters()) == parameters
        assert config.train.batch * config.train.accumulation * config.train.devices == 512 and config.train.lr == 3e-4
    assert (lm1b.model.mask_id, lm1b.model.start_id) == (103, 101)  # framed rows begin with [CLS]
    assert (owt.model.mask_id, owt.model.start_id) == (-1, 50_256)  # and with <|endoftext|>
    assert configs["tiny"].data == preset("tiny").data and configs["tiny"].train.steps == preset("tiny").train.steps


def test_impossible_options_are_refused():
    config = for_method(preset("smoke"), "ar")
    for option, value in (
        ("model.heads", 5), ("model.dropout", 1.0), ("model.mask_id", 512), ("model.start_id", -2), ("data.token_len", 0),
        ("sampler.temperature", -1.0), ("sampler.top_k", -1), ("sampler.top_p", 0.0), ("sampler.top_p", 1.1),
    ):  # fmt: skip
        with pytest.raises(UsageError):
            validate(override(config, {option: value}))
    with pytest.raises(UsageError, match="token_len of at least 2"):
        validate(override(config, {"model.start_id": 1, "data.token_len": 1}))


def test_labels():
    assert ArSampler().label() == "KV cache" and ArSampler(temperature=0, kv_cache=False).label() == "greedy, no KV cache"
    assert ArSampler(0.7, 5, 0.9).label() == "KV cache, temperature 0.7, top-k 5, top-p 0.9"


def published(ids, hidden=128, depth=3):
    """Shapes of a published checkpoint of other sizes."""
    config = override(for_method(preset("tiny"), "ar"), {
        "data.vocab_size": ids - 1, "model.hidden": hidden, "model.depth": depth, "model.heads": 2,
    })  # fmt: skip
    with torch.device("meta"):
        return Ar(config).export_state()


@pytest.mark.parametrize(
    ("ids", "vocab_size", "mask_id", "start_id", "tokenizer"),
    [(30_522, 30_522, 103, 101, "bert-base-uncased"), (50_258, 50_257, -1, 50_256, "gpt2"), (700, 699, -1, 6, "bpe")],
)
def test_sizes_of_a_published_checkpoint(ids, vocab_size, mask_id, start_id, tokenizer):
    base = override(for_method(preset("tiny"), "ar"), {"model.start_id": 6})
    tensors = published(ids)
    config = validate(Ar.config_of(tensors, base))
    assert (config.data.vocab_size, config.data.tokenizer) == (vocab_size, tokenizer)
    m = config.model
    assert (m.hidden, m.depth, m.heads, m.mask_id, m.start_id) == (128, 3, 2, mask_id, start_id)
    with torch.device("meta"):
        Ar(config).import_state(tensors, "file")  # refuses any tensor without a place


def test_a_diffusion_checkpoint_is_refused():
    tensors = published(700) | {"backbone.sigma_map.mlp.0.weight": torch.empty(128, 256)}
    with pytest.raises(CheckpointError, match="diffusion"):
        Ar.config_of(tensors, for_method(preset("tiny"), "ar"))


def test_a_saved_model_writes_the_same():
    method, fresh = build(), build(perturbed=0)
    fresh.import_state(method.export_state(), "file")
    assert all(name.startswith("backbone.") for name in method.export_state())
    assert torch.equal(fresh.sample(ArSampler(), noise()), method.sample(ArSampler(), noise()))
