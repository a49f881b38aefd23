"""The causal codec: what a latent and a token depend on, from token ids to logits; known latents; and the default unchanged."""

import pytest
import torch
from conftest import perturb

from jpeg_dlm.config import validate
from jpeg_dlm.config_io import override
from jpeg_dlm.encoders import build_encoder
from jpeg_dlm.errors import UsageError
from jpeg_dlm.flow.control import Control
from jpeg_dlm.flow.guides import contains
from jpeg_dlm.flow.known import Known
from jpeg_dlm.methods.base import FREE, Batch
from jpeg_dlm.methods.jpeg_dlm import JpegDlm, Noisy
from jpeg_dlm.nn.dit import Context
from jpeg_dlm.nn.spans import span_ends, token_spans
from jpeg_dlm.presets import preset
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.sampling.engine import accelerated

B, L, N, D, VOCAB = 3, 10, 4, 12, 40  # spans of 2, 3, 2 and 3 tokens
ENDS, SPANS = span_ends(L, N), token_spans(L, N)
SIZES = {
    "data.vocab_size": VOCAB, "data.token_len": L, "encoder.kind": "random", "encoder.feature_dim": 16, "encoder.depth": 2,
    "encoder.heads": 2, "encoder.scale": "none", "model.latent_len": N, "model.latent_dim": D, "model.bottleneck_dim": 8,
    "model.codec_layers": 2, "model.codec_heads": 2, "model.proj_dim": 10, "model.hidden": 16, "model.heads": 2,
    "model.depth": 2, "model.freq_dim": 8, "objective.sigreg_slices": 8, "sampler.steps": 4,
}  # fmt: skip
CAUSAL = {"model.codec": "causal", "encoder.causal": True}


def made(**options) -> JpegDlm:
    config = validate(override(preset("smoke"), SIZES | CAUSAL | {k.replace("__", "."): v for k, v in options.items()}))
    torch.manual_seed(0)
    return perturb(JpegDlm(config, build_encoder(config.encoder, VOCAB)), 0.2).eval()


def rows(n=B, seed=7) -> torch.Tensor:
    return torch.randint(0, VOCAB, (n, L), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def through(method: JpegDlm, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(latents, logits) of token ids."""
    z = method.encode(Batch(tokens, mask))
    return z, method.logits(z, 1.5)


# ---------------------------------------------------------------- what depends on what


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_a_changed_token_changes_its_own_span_and_what_follows_alone(shared, residual):
    method, tokens = made(model__shared=shared, model__decode_residual=residual), rows()
    z, logits = through(method, tokens)
    for j in range(L):
        other = tokens.clone()
        other[:, j] = (other[:, j] + 1) % VOCAB
        z_other, logits_other = through(method, other)
        first = int(SPANS[j])
        assert torch.equal(z_other[:, :first], z[:, :first])
        assert torch.equal(logits_other[:, SPANS < first], logits[:, SPANS < first])
        assert (z_other[:, first:] != z[:, first:]).any(-1).all()  # and from there on, every latent knows
        assert (logits_other[:, SPANS >= first] != logits[:, SPANS >= first]).any(-1).all()


def test_a_perceiver_and_a_bidirectional_encoder_fail_the_same_test():
    """So the test above can fail: each part of the way needs its mask."""
    tokens, last = rows(), rows().clone()
    last[:, -1] = (last[:, -1] + 1) % VOCAB
    method = made()
    for part in ("compressor", "decoding", "encoder"):
        broken = made()
        if part == "encoder":
            broken.encoder.model.causal = False
        elif part == "compressor":
            broken.target.seen = None
        else:
            broken.dit.decode_seen = None
        (z, logits), (z_last, logits_last) = through(broken, tokens), through(broken, last)
        assert torch.equal(z[:, 0], z_last[:, 0]) == (part == "decoding")
        assert not torch.equal(logits[:, 0], logits_last[:, 0])
    assert torch.equal(through(method, tokens)[1][:, 0], through(method, last)[1][:, 0])


def test_latents_after_a_span_do_not_change_its_tokens_in_either_network():
    method = made()
    z = RowNoise(0, range(B)).normal("z", N, D)
    with torch.no_grad():
        logits, tokens = method.logits(z, 1.5), accelerated(method).tokens(z, 1.5)
        for n in range(N):
            other = z.clone()
            other[:, n:] += 1
            assert torch.equal(method.logits(other, 1.5)[:, SPANS < n], logits[:, SPANS < n])
            assert torch.equal(accelerated(method).tokens(other, 1.5)[:, SPANS < n], tokens[:, SPANS < n])


def test_denoising_stays_bidirectional_and_does_not_see_the_mask_of_decoding():
    method, noise = made(), RowNoise(0, range(B))
    z, s = noise.normal("z", N, D), noise.normal("s", N, D)
    t, w = torch.full((B,), 0.3), torch.full((B,), 1.5)
    with torch.no_grad():
        x = method.dit(z, t, s, w)
        other = z.clone()
        other[:, -1] += 1
        assert (method.dit(other, t, s, w)[:, 0] - x[:, 0]).abs().max() > 1e-5
        zhat, x_both = method.both_branches(
            z, Noisy(z, z, t, s, w, t > 0, torch.arange(B))
        )  # in one pass with rows that decode
        torch.testing.assert_close(x_both, x)
        torch.testing.assert_close(zhat, method.decode_latents(z, w))


@pytest.mark.parametrize("context", [0, 1])
def test_rows_do_not_depend_on_their_batch(context):
    method, tokens = made(model__context_blocks=context, data__packing="padded"), rows(5)
    mask = torch.arange(L) < torch.tensor([[10], [3], [7], [1], [5]])
    z, logits = through(method, tokens, mask)
    for i in range(5):
        one = slice(i, i + 1)
        z_one, logits_one = through(method, tokens[one], mask[one])
        torch.testing.assert_close(z_one, z[one])
        torch.testing.assert_close(logits_one, logits[one])


def test_padding_is_not_seen():
    method, tokens = made(), rows()
    mask = torch.arange(L) < torch.tensor([[10], [4], [0]])
    z, _ = through(method, tokens, mask)
    z_other, _ = through(method, torch.where(mask, tokens, rows(seed=8)), mask)
    assert torch.equal(z, z_other) and z.isfinite().all()
    whole, _ = through(method, tokens)
    assert torch.equal(z[0], whole[0])  # no padding, no mask
    assert torch.equal(z[1, 0], whole[1, 0]) and not torch.equal(z[1, 2], whole[1, 2])  # span 0 ends before the padding


def test_every_trainable_parameter_gets_a_gradient():
    method = made(train__steps=100).train()
    mask = torch.arange(L) < torch.tensor([[10], [6], [9]])
    method.total_loss(method.losses(Batch(rows(), mask), RowNoise(0, range(B), 50))).backward()
    found = {n: p.grad for n, p in method.named_parameters() if p.requires_grad}
    assert all(g is not None and g.isfinite().all() for g in found.values())
    moved = ("compressor.latents", "compressor.pos_emb.weight", "decompressor.pos_latent.weight", "dit.in_proj.proj1.weight")
    assert all(found[name].any() for name in moved)


def test_the_mask_has_no_part_in_files_weights_or_random_numbers():
    """A perceiver is as it was: a causal model has the same tensors, made of the same numbers."""
    config = override(preset("smoke"), SIZES)
    torch.manual_seed(5)
    plain, drawn = JpegDlm(config), torch.rand(3)
    torch.manual_seed(5)
    causal = JpegDlm(override(config, CAUSAL))
    assert torch.equal(torch.rand(3), drawn)
    ours, theirs = causal.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert plain.compressor.seen is None and plain.decompressor.seen is None and plain.dit.decode_seen is None
    assert plain.latent_sampler.known is None


# ---------------------------------------------------------------- known latents


def given(length: int, tokens: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(L) < length, tokens, FREE)


class Seen:
    """States, and what they decode to, of each step."""

    def __init__(self):
        self.times, self.states, self.tokens = [], [], []

    def __call__(self, step, steps, t, prediction):
        self.times.append(t)
        self.states.append(prediction.state_BND.clone())
        self.tokens.append(prediction().clone())


@pytest.mark.parametrize("solver", ["euler", "heun", "multistep"])
@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("length", [5, 6, 9])
def test_complete_spans_of_a_prompt_are_its_latents_on_their_way_and_at_its_end(solver, engine, length):
    method, tokens = made(sampler__solver=solver), rows()
    z, _ = through(method, tokens)
    noise, seen = RowNoise(3, range(B)), Seen()
    writer = accelerated(method) if engine else method
    out = writer.sample(method.config.sampler, noise, seen, given(length, tokens))
    fixed = sum(end <= length for end in ENDS)
    eps = noise.normal("sample", N, D)
    for t, state in zip(seen.times[:-1], seen.states[:-1], strict=True):
        torch.testing.assert_close(state[:, :fixed], (t * z + (1 - t) * eps)[:, :fixed], atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        own = method.tokens(z, method.config.sampler.w)[:, : ENDS[fixed - 1]]
    for found in seen.tokens:  # of every prediction, and at the end
        assert torch.equal(found[:, : ENDS[fixed - 1]], own)
    assert torch.equal(out[:, :length], tokens[:, :length])  # what is given is kept in any case


def test_the_network_sees_known_latents_without_noise():
    noise = RowNoise(0, range(B))
    z, x, state = (noise.normal(name, N, D) for name in ("z", "x", "state"))
    there = torch.tensor([[True, True, False, False]] * 2 + [[False] * 4])
    known, seen = Known(z, there, there[:, SPANS]), []
    out = known.within(lambda *inputs: seen.append(inputs) or x)(state, 0.3, None)
    for found, other in ((seen[0][0], state), (out, x)):
        assert torch.equal(found[there], z[there]) and torch.equal(found[~there], other[~there])


def test_other_seeds_and_batches_share_the_fixed_spans_and_differ_after_them():
    method, row = made(), rows()[:1]
    seen = []
    for seed in (1, 2):
        watch = Seen()
        method.sample(method.config.sampler, RowNoise(seed, range(4)), watch, given(5, row).expand(4, -1))
        seen.append(watch)
    assert torch.equal(seen[0].tokens[-1][:, :5], seen[1].tokens[-1][:, :5])
    assert (seen[0].tokens[-1][:, :5] == seen[0].tokens[-1][:1, :5]).all()
    assert not torch.equal(seen[0].states[-1][:, 2:], seen[1].states[-1][:, 2:])
    mixed = torch.cat([given(5, row), given(1, row), given(9, row)])  # with a guide for the rest, and without
    together = method.sample(method.config.sampler, RowNoise(1, range(3)), None, mixed)
    for i in range(3):
        alone = method.sample(method.config.sampler, RowNoise(1, [i]), None, mixed[i : i + 1])
        assert torch.equal(together[i : i + 1], alone)


def test_a_prompt_shorter_than_a_span_and_a_hole_are_left_to_the_guide():
    method, tokens = made(), rows()
    assert method.known_latents(given(1, tokens)) is None
    hole = tokens.clone()
    hole[:, 3] = FREE
    known = method.known_latents(hole)
    assert known is not None and known.there_BN.tolist() == [[True, False, False, False]] * B
    rest = known.undetermined(hole)
    assert rest is not None and (rest[:, :2] == FREE).all() and torch.equal(rest[:, 2:], hole[:, 2:])
    assert known.undetermined(given(2, tokens)) is None
    out = method.sample(method.config.sampler, RowNoise(0, range(B)), None, hole)
    assert torch.equal(torch.where(hole < 0, hole, out), hole)


def test_latents_are_held_after_a_context_too():
    method, tokens = made(model__context_blocks=1, data__packing="padded"), rows()
    before = Context(RowNoise(5, range(B)).normal("context", N, D), torch.ones(B, N, dtype=torch.bool))
    held, alone = Seen(), Seen()
    for seen, writer in ((held, method.latent_sampler.after(before, 2.0)), (alone, method.latent_sampler)):
        writer.sample(method.config.sampler, RowNoise(0, range(B)), seen, given(5, tokens))
    assert torch.equal(held.tokens[-1][:, :5], alone.tokens[-1][:, :5])
    assert not torch.allclose(held.states[-1][:, 2:], alone.states[-1][:, 2:], atol=1e-3)


def test_a_guide_moves_the_other_latents_alone():
    method, tokens = made(), rows()
    control, seen = Control(contains([[[3], [4]]])), Seen()
    method.sample(method.config.sampler, RowNoise(0, range(B)), seen, given(5, tokens), control)
    free = Seen()
    method.sample(method.config.sampler, RowNoise(0, range(B)), free, given(5, tokens))
    assert torch.allclose(seen.states[-1][:, :2], free.states[-1][:, :2], atol=1e-5)
    assert not torch.allclose(seen.states[-1][:, 2:], free.states[-1][:, 2:], atol=1e-3)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"encoder.causal": False}, "use --encoder.causal true"),
        ({"encoder.kind": "hf"}, "'hf' attends in both directions: use --encoder.kind small"),
        ({"encoder.kind": "flan-t5-small"}, "both directions"),
    ],
)
def test_an_encoder_that_sees_later_tokens_is_refused(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        validate(override(preset("smoke"), SIZES | CAUSAL | options))
