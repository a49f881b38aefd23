"""JPEG-DLM with a contextual token decoder: losses, sampling, control, files, engine, exports and accounting."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from closed_forms import attention_macs, own_parameters, own_sampling_macs
from conftest import MICRO, assert_same_tokens, made_up_text, micro_flags, perturb
from test_every_method_learns import real_pairs_share

from jpeg_dlm import load
from jpeg_dlm.accounting.info import describe, format_description, sampling_macs
from jpeg_dlm.accounting.info import own_parameters as measured_parameters
from jpeg_dlm.cli.main import main
from jpeg_dlm.config import Config, validate
from jpeg_dlm.config_io import override
from jpeg_dlm.encoders import build_encoder
from jpeg_dlm.errors import UsageError
from jpeg_dlm.export.fastest import available_forms
from jpeg_dlm.export.folder import write_exported
from jpeg_dlm.flow.control import Control, Origin
from jpeg_dlm.flow.guides import contains
from jpeg_dlm.folders.model_folder import ModelParts, read_model, write_model
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.common.decoder_gap import decoder_measures
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.methods.registry import build_method
from jpeg_dlm.presets import PRESETS, preset
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.sampling.engine import accelerated
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.training import run as training
from jpeg_dlm.training.metrics import read_metrics

B, VOCAB, L = 4, 300, 12
CONTEXTUAL = ("autoregressive", "two_pass")
SMALL = MICRO | {"encoder.kind": "random", "encoder.scale": "none", "model.decoder_layers": 2}


def config_of(decoder: str, **options: object) -> Config:
    return override(preset("smoke"), SMALL | {"model.decoder": decoder} | {k.replace("__", "."): v for k, v in options.items()})


def build(decoder: str, perturbed: float = 0.3, **options: object) -> JpegDlm:
    config = config_of(decoder, **options)
    torch.manual_seed(0)
    method = build_method(config, build_encoder(config.encoder, VOCAB))
    assert isinstance(method, JpegDlm)
    return perturb(method, perturbed)


def batch(seed: int = 7, **options: object) -> Batch:
    return Batch(torch.randint(0, VOCAB, (B, L), generator=torch.Generator().manual_seed(seed)), **options)


def noise(rows: int = B, seed: int = 0) -> RowNoise:
    return RowNoise(seed, range(rows), 50)


# ---------------------------------------------------------------- nothing changes by default


def test_presets_have_the_papers_projection():
    assert {PRESETS[name]().model.decoder for name in PRESETS} == {"projection"}


@pytest.mark.parametrize("decoder", CONTEXTUAL)
def test_the_other_weights_and_random_numbers_do_not_depend_on_the_decoder(decoder):
    plain, own = build("projection", 0.0), build(decoder, 0.0)
    state = own.state_dict()
    assert all(state[name].equal(tensor) for name, tensor in plain.state_dict().items())
    assert {n.split(".")[0] for n in state.keys() - plain.state_dict().keys()} == {"token_decoder"}
    expected, found = (m.train().losses(batch(), noise()) for m in (plain, own))
    # A fresh decoder corrects nothing, so all terms are equal, with and without it.
    assert all(found[name].equal(value) for name, value in expected.items())
    assert found.keys() - expected.keys() == {"ce_first"} and found["ce_first"].equal(expected["ce"])


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("decoder", CONTEXTUAL)
def test_the_loss_is_the_mean_over_real_tokens(decoder):
    method = build(decoder).eval()
    mask = torch.arange(L) < torch.tensor([12, 3, 8, 1])[:, None]
    data = batch(mask_BL=mask)
    found = method.losses(data, noise())
    z_c = method.standardize(method.compressor(method.corrupted(method.features(data), noise()), mask))
    w = 1.5 * 4 ** noise().uniform("scale") - 1
    hhat = method.decompressor(method.unstandardize(method.decode_latents(z_c, w)))
    first = method.project(hhat)
    read = data.tokens_BL if decoder == "autoregressive" else first.argmax(-1)
    logits = method.project(method.token_decoder.corrected(hhat, read, method.reader.W))

    def mean(logits):
        nll = F.cross_entropy(logits.flatten(0, 1), data.tokens_BL.flatten(), reduction="none").view(B, L)
        return (nll * mask).sum().item() / mask.sum().item()

    assert found["ce"].item() == pytest.approx(mean(logits), rel=1e-5)
    assert found["ce_first"].item() == pytest.approx(mean(first), rel=1e-5)


@pytest.mark.parametrize("decoder", CONTEXTUAL)
def test_tokens_of_padding_do_not_matter(decoder):
    method = build(decoder, objective__ce_time_min=0.0).train()
    mask = torch.arange(L) < torch.tensor([12, 3, 8, 1])[:, None]
    features = method.features(batch())
    terms = []
    for seed in (7, 8):
        tokens = torch.where(mask, batch().tokens_BL, batch(seed).tokens_BL)
        terms.append(method.losses(Batch(tokens, mask, features), noise()))
    assert all(terms[0][name].item() == pytest.approx(terms[1][name].item(), rel=1e-6) for name in terms[0])


@pytest.mark.parametrize("decoder", CONTEXTUAL)
def test_the_decoder_learns_from_the_token_loss_alone(decoder):
    method = build(decoder).train()
    terms = method.losses(batch(), noise())

    def moved(loss):
        method.zero_grad(set_to_none=True)
        loss.backward(retain_graph=True)
        return {n.split(".")[0] for n, p in method.named_parameters() if p.grad is not None and p.grad.any()}

    codec = {"compressor", "dit", "decompressor", "unembed_proj", "lm_head"}
    assert moved(terms["ce"]) == codec | {"token_decoder"}
    assert not any("token_decoder" in moved(terms[name]) for name in ("jep", "flow", "feat"))
    assert moved(terms["ce_first"]) == codec
    method.zero_grad(set_to_none=True)
    method.total_loss(method.losses(batch(), noise())).backward()
    assert [n for n, p in method.named_parameters() if p.requires_grad and p.grad is None] == []
    groups = {g.name: g.parameters for g in method.parameter_groups()}
    assert {n for n, _ in method.named_parameters() if n.startswith("token_decoder.")} <= groups["flow"].keys()


# ---------------------------------------------------------------- sampling and control


@pytest.mark.parametrize("decoder", CONTEXTUAL)
@torch.no_grad()
def test_texts_do_not_depend_on_their_batch_and_the_engine_writes_the_same(decoder):
    method = build(decoder).eval()
    together = method.sample(method.config.sampler, noise(6))
    alone = torch.cat([method.sample(method.config.sampler, RowNoise(0, [i], 50)) for i in range(6)])
    assert_same_tokens(alone, together)
    fast = accelerated(method)
    assert_same_tokens(fast.sample(method.config.sampler, noise(6)), together)
    with pytest.MonkeyPatch.context() as patched:  # weights that change later are not seen
        patched.setattr(method.token_decoder.out, "bias", torch.nn.Parameter(torch.full((16,), 9.0)))
        assert_same_tokens(fast.sample(method.config.sampler, noise(6)), together)


def test_preparing_weights_leaves_the_mode_of_a_model_alone():
    method = build("two_pass").train()
    accelerated(method)
    assert all(module.training for module in method.token_decoder.modules())


@pytest.mark.parametrize("decoder", CONTEXTUAL)
@pytest.mark.parametrize("fast", [False, True])
def test_given_tokens_guides_and_edits(decoder, fast):
    method = build(decoder).eval()
    writer = accelerated(method) if fast else method
    given = torch.full((B, L), -1)
    given[:, :3] = batch().tokens_BL[:, :3]
    seen = []
    tokens = writer.sample(method.config.sampler, noise(), lambda k, n, t, decode: seen.append(decode()), given)
    assert tokens[:, :3].equal(given[:, :3])
    assert seen[-1][:, 3:].equal(tokens[:, 3:])  # the free tokens were written after the given ones
    guided = writer.sample(method.config.sampler, noise(), control=Control(contains([[[5]]]), 1.0))
    free = writer.sample(method.config.sampler, noise())
    assert (guided == 5).any(1).sum() >= (free == 5).any(1).sum() and not guided.equal(free)
    z = method.encode(batch())
    edited = writer.sample(method.config.sampler, noise(), control=Control(origin=Origin(z, batch().tokens_BL, 0.0)))
    assert edited.shape == (B, L)


@torch.no_grad()
def test_latents_decode_the_same_everywhere():
    method = build("autoregressive").eval()
    z = method.encode(batch())
    assert method.tokens(z, 1.0).equal(method.logits(z, 1.0).argmax(-1))
    assert method.latent_space(batch()).decode(z).equal(method.tokens(z, 1.0))
    assert method.latent_view().decode(z).equal(method.reader.logits(method.decompressed(z)).argmax(-1))


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("decoder", CONTEXTUAL)
def test_a_model_folder_keeps_the_decoder(decoder, tmp_path):
    method = build(decoder).eval()
    parts = ModelParts(method, method.config, tmp_path, None, None)
    model = load(write_model(parts, tmp_path / "model"), "cpu")
    assert model.config.model.decoder == decoder
    assert model.sample(3).equal(method.sample(method.config.sampler, RowNoise(0, range(3))))
    sizes = JpegDlm.config_of(method.export_state(), preset("smoke")).model
    assert (sizes.decoder, sizes.decoder_layers, sizes.decoder_width) == (decoder, 2, 16)


def test_other_runtimes_are_refused_and_not_offered(tmp_path):
    method = build("autoregressive").eval()
    folder = write_model(ModelParts(method, method.config, tmp_path, None, None), tmp_path / "model")
    parts = read_model(folder)
    for kind in ("onnx", "openvino"):
        with pytest.raises(UsageError, match="contextual token decoder"):
            write_exported(parts, kind, tmp_path / kind)
    assert {form.runtime for form in available_forms(parts, reduced=True)} == {"torch"}
    assert load(folder, "cpu", dtype="exact").sample(3).shape == (3, L)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"model.decoder_hidden": 18}, "even number"),
        ({"model.decoder_layers": 0}, "decoder_layers"),
        ({"model.decoder_corrupt": 1.5}, "decoder_corrupt"),
    ],
)
def test_impossible_sizes_are_refused(options, wrong):
    with pytest.raises(UsageError, match=wrong):
        validate(override(config_of("two_pass"), options))


# ---------------------------------------------------------------- accounting


@pytest.mark.parametrize("decoder", CONTEXTUAL)
def test_parameters_and_operations_are_counted(decoder):
    config = config_of(decoder, model__decoder_hidden=20)
    m, f, p, h, layers = config.model, 16, 16, 20, 2
    layer = 4 * h * h + 2 * h * 4 * h
    parameters = (f + 1) * h + (p + 1) * h + layers * (layer + 5 * h + 2 * h) + h + (h + 1) * f
    parameters += p if decoder == "autoregressive" else 0  # the start vector
    plain, found = own_parameters(config), measured_parameters(config)
    assert found["token_decoder"] == parameters and found["total"] == plain["total"] + parameters

    inputs_and_output = L * (2 * f + p) * h
    if decoder == "autoregressive":
        attention = attention_macs(L, L, h) + sum(attention_macs(1, L + i + 1, h) for i in range(L))
        steps, positions, projections = L, 2 * L, 1
    else:
        attention, steps, positions, projections = attention_macs(L, L, h), 1, L, 2
    macs = inputs_and_output + layers * (positions * layer + attention)
    plain, found = own_sampling_macs(config), sampling_macs(config)
    assert (found["token_decoder"], found["decoder_steps"]) == (macs, steps)
    assert found["projection"] == projections * plain["projection"]
    assert found["total"] == plain["total"] + (projections - 1) * plain["projection"] + macs
    text = format_description(describe(config))
    assert f"{decoder}, {m.decoder_layers} / 20" in text and "token decoder, sequential steps" in text


@torch.no_grad()
def test_the_gap_is_zero_for_a_decoder_that_ignores_its_latents():
    method = build("autoregressive").eval()
    data = batch()
    latents = method.latent_space(data)
    everything = lambda tokens: torch.ones_like(tokens, dtype=torch.bool)  # noqa: E731
    found = decoder_measures([(latents, data, latents.z_BND)], everything)
    nll = -latents.logits(latents.z_BND, data.tokens_BL).log_softmax(-1)
    assert found["decoder_nll"] == pytest.approx(nll.gather(-1, data.tokens_BL[..., None]).mean().item(), rel=1e-5)
    assert found["decoder_gap"] != 0 and found["decoder_changed"] > 0
    assert found["decoder_confidence"] == pytest.approx(found["decoder_confidence_generated"])
    greedy = method.tokens(latents.z_BND, 1.0)
    log_p = method.logits(latents.z_BND, 1.0).log_softmax(-1).amax(-1)
    assert found["decoder_confidence"] == pytest.approx(log_p.mean().item(), rel=1e-4) and greedy.shape == (B, L)

    method.decompressor.out_proj.up.weight.zero_()  # all features are equal
    found = decoder_measures([(latents, data, latents.z_BND)], everything)
    assert found["decoder_gap"] == pytest.approx(0, abs=1e-6) and found["decoder_changed"] == 0


# ---------------------------------------------------------------- a short run, and one to a quality bar


def train(folder, data, decoder, *flags):
    """The last evaluation of a run."""
    words = ["train", "--preset", "smoke", "--data", str(data), "--out", str(folder / decoder), "--quiet", "--device", "cpu"]
    assert main([*words, "--threads", "1", "--model.decoder", decoder, *flags]) == 0
    return [row for row in read_metrics(folder / decoder / "metrics.jsonl") if "heldout_accuracy" in row][-1]


def test_a_run_reports_the_decoder(corpus_file, tmp_path, monkeypatch):
    """And a student of it keeps the decoder, which it does not train."""
    monkeypatch.setattr(training, "plot_if_measured", lambda run: None)  # pictures take longer than all of it
    flags = [*micro_flags(encoder__kind="random", encoder__scale="none", train__diagnose="true"), "--model.decoder-layers", "1"]
    found = train(tmp_path, corpus_file, "autoregressive", *flags)
    names = ("nll", "nll_other", "gap", "changed", "confidence", "confidence_generated")
    assert all(math.isfinite(found[f"diag_decoder_{name}"]) for name in names)
    assert found["diag_decoder_gap"] == pytest.approx(found["diag_decoder_nll_other"] - found["diag_decoder_nll"])
    words = ["train", "--method", "finish", "--teacher", str(tmp_path / "autoregressive"), "--out", str(tmp_path / "more")]
    assert main([*words, "--train.steps", "2", "--quiet", "--device", "cpu", "--threads", "1"]) == 0
    before, after = (load(tmp_path / name, "cpu").method.export_state() for name in ("autoregressive", "more"))
    same = {name.split(".")[0] for name in before if before[name].equal(after[name])}
    assert "token_decoder" in same and any(not before[n].equal(after[n]) for n in before if n.startswith("dit."))


def reconstructed(run, real):
    """Shares of held-out tokens and of whole rows that come back, and of word pairs of new texts that the real text has."""
    model = load(run, "cpu")
    heldout = Blocks(run / "data", "heldout")
    tokens = heldout.rows(range(min(256, len(heldout))))
    with torch.no_grad():
        method = model.complete_method().eval()
        same = method.tokens(method.encode(Batch(tokens)), 1.0) == tokens
    return same.float().mean().item(), same.all(1).float().mean().item(), real_pairs_share(model.generate(64), real)


@pytest.mark.slow
def test_two_latents_for_sixteen_tokens(tmp_path):
    """At equal steps, a decoder that reads its own tokens gives back more whole rows and writes more coherent texts.

    The share of single tokens hardly changes: what is lost is in no latent, and of single tokens the most probable one at each
    position, which the projection takes, is right most often.
    """
    (tmp_path / "stories.txt").write_text(made_up_text(documents=400), "utf-8")
    found = {}
    for decoder in ("projection", *CONTEXTUAL):
        train(tmp_path, tmp_path / "stories.txt", decoder, "--model.latent-len", "2")
        found[decoder] = reconstructed(tmp_path / decoder, (tmp_path / "stories.txt").read_text())
    tokens, rows, pairs = found["projection"]  # measured: 0.81, 0.04, 0.57
    assert tokens > 0.6
    own_tokens, own_rows, own_pairs = found["autoregressive"]  # measured: 0.82, 0.16, 0.93
    assert own_tokens > tokens - 0.04 and own_rows > rows + 0.04 and own_pairs > pairs + 0.15
    own_tokens, own_rows, own_pairs = found["two_pass"]  # measured: 0.78, 0.05, 0.70
    assert own_tokens > tokens - 0.08 and own_pairs > pairs + 0.03
