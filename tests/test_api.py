"""The Python interface: load, generate, encode, decode, reconstruct, interpolate, save, and what it refuses."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import MICRO, assert_same_tokens, micro_flags, perturb
from huggingface_hub import ModelCard

from jpeg_dlm import Model, load
from jpeg_dlm.cli.live_view import Watcher
from jpeg_dlm.cli.main import main
from jpeg_dlm.evaluation.texts import ModelSource
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.text.packing import RowLayout, pack_document
from jpeg_dlm.text.tokenizer import train_bpe
from jpeg_dlm.training.run import sample_rows, write_samples
from jpeg_dlm.util.distributed import Ranks
from jpeg_dlm.util.errors import CheckpointError, DataError, UsageError
from jpeg_dlm.util.files import load_tensors

pytest_plugins = ["stand_in"]  # fixtures

L, N, D = MICRO["data.token_len"], MICRO["model.latent_len"], MICRO["model.latent_dim"]


@pytest.fixture(scope="session")
def trained(micro_folders):
    """A finished run of the smallest model."""
    return micro_folders.run()


@pytest.fixture(scope="session")
def folder(trained, tmp_path_factory):
    """The same model, shaken until what it says depends on what it is given."""
    model = load(trained, "cpu")
    method, g = perturb(model.method), torch.Generator().manual_seed(1)
    with torch.no_grad():
        z, w = torch.randn(64, N, D, generator=g), torch.full((64,), 3.0)
        logits = method.project(method.decompressor(method.unstandardize(method.decode_latents(z, w)))).flatten(0, 1)
        scale = 1 / logits.std(0)  # every token gets the same chance
        method.lm_head.bias.sub_(logits.mean(0)).mul_(scale)
        method.lm_head.weight.mul_(scale[:, None])
    return model.save(tmp_path_factory.mktemp("shaken") / "model")


@pytest.fixture(scope="session")
def model(folder):
    return load(folder, "cpu")


@pytest.fixture(scope="session")
def block_texts(model, corpus_file):
    """Texts that fill a block exactly."""
    ids = model.tokenizer.encode(corpus_file.read_text("utf-8"))
    texts = [model.tokenizer.decode(ids[i : i + L]) for i in range(0, 40 * L, L)]
    whole = [t for t in texts if len(model.tokenizer.encode(t)) == L]
    assert len(whole) >= 3
    return whole


def test_a_run_its_last_checkpoint_and_its_export_are_one_model(trained, tmp_path):
    run = load(trained, "cpu")
    checkpoint = load(trained / "checkpoints" / "step-00000012", "cpu")
    saved = load(run.save(tmp_path / "model"), "cpu")
    state = run.method.export_state()
    for other in (checkpoint, saved):
        assert all(torch.equal(tensor, state[name]) for name, tensor in other.method.export_state().items())
        assert torch.equal(other.sample(3, seed=1), run.sample(3, seed=1))
        assert torch.equal(other.encode(["The farmer"]), run.encode(["The farmer"]))


def test_a_run_gives_the_averaged_weights(trained):
    averaged, live = (load_tensors(trained / "checkpoints" / "step-00000012" / f"{n}.safetensors") for n in ("ema", "model"))
    weights = load(trained, "cpu").method.state_dict()
    assert averaged and all(torch.equal(weights[name], t) for name, t in averaged.items())
    assert any(not torch.equal(live[name], t) for name, t in averaged.items())


def test_the_hub_card_names_data_and_license_where_they_are_known(model, tmp_path):
    for name, saved, options in (("bundled", load(None, "cpu"), {}), ("own", model, {"license": "cc-by-4.0"})):
        saved.save_pretrained(tmp_path / name, model_card_kwargs=options)
    known, own = (ModelCard.load(tmp_path / name / "README.md") for name in ("bundled", "own"))
    tags = ["jpeg-dlm", "diffusion", "language-model"]
    plain = {"library_name": "jpeg-dlm", "pipeline_tag": "text-generation", "tags": tags}
    assert known.data.to_dict() == plain | {"language": "en", "license": "mit", "datasets": ["stanfordnlp/snli"]}
    assert "CC BY-SA 4.0" in known.text and own.data.to_dict() == plain | {"license": "cc-by-4.0"}


def test_the_hub_way_of_saving_and_loading(model, tmp_path):
    model.save_pretrained(tmp_path / "hub")
    assert (tmp_path / "hub" / "README.md").is_file()  # the hub's model card is beside the model
    again = Model.from_pretrained(str(tmp_path / "hub"))
    assert isinstance(again, Model) and again.config == model.config
    shutil.rmtree(tmp_path / "hub")  # nothing is read later from where it came
    assert torch.equal(again.sample(3, seed=5), model.sample(3, seed=5))
    assert again.reconstruct(["The smith forges nails"]) == model.reconstruct(["The smith forges nails"])


SOURCES = {
    "/home/alice/private/diary.txt": "diary.txt",
    "hf:/home/alice/set": "set",
    "hf:owner/set:train": "hf:owner/set:train",
}


@pytest.mark.parametrize(("source", "shown"), SOURCES.items())
def test_no_pushed_file_names_a_folder_of_the_machine_that_trained_it(model, source, shown, monkeypatch):
    pushed = {}

    class Hub:
        def __init__(self, **_):
            pass

        def create_repo(self, repo_id, **_):
            return SimpleNamespace(repo_id=repo_id)

        def upload_folder(self, *, folder_path, **_):
            pushed.update({path.name: path.read_bytes() for path in Path(folder_path).iterdir()})

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Hub)
    config = replace(model.config, data=replace(model.config.data, source=source))
    Model(replace(model.parts, config=config)).push_to_hub("alice/model")
    assert {"README.md", "config.json", "model.safetensors"} <= pushed.keys()
    assert not [name for name, content in pushed.items() if b"alice" in content]
    assert f"`{shown}`" in pushed["README.md"].decode()
    assert json.loads(pushed["config.json"])["data"]["source"] == shown


def test_the_hub_cache_of_links_can_be_loaded(folder, model, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert torch.equal(Model.from_pretrained(str(tmp_path)).sample(2), model.sample(2))
    with pytest.raises(UsageError, match="'zzz'"):  # and not the allowed `config`
        Model.from_pretrained(str(tmp_path), config=None, zzz=1)


@pytest.mark.slow
def test_feature_statistics_of_a_foreign_encoder_travel_with_the_model(corpus_file, tmp_path):
    import transformers

    sizes = {"vocab_size": 300, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    transformers.T5EncoderModel(transformers.T5Config(**sizes)).save_pretrained(tmp_path / "t5")
    command = ["train", "--preset", "smoke", "--data", str(corpus_file), "--out", str(tmp_path / "run"), "--quiet"]
    flags = micro_flags(encoder__kind="hf", encoder__name=tmp_path / "t5", encoder__scale="per_channel", train__steps=2)
    assert main([*command, *flags, "--device", "cpu"]) == 0
    run = load(tmp_path / "run", "cpu")
    assert run.encoder.has_statistics and run.encoder.feature_std.std() > 0
    saved = load(run.save(tmp_path / "model"), "cpu")
    assert torch.equal(saved.encode(["The captain steers"]), run.encode(["The captain steers"]))


def test_a_seed_names_a_text_in_any_batch(model):
    whole = model.sample(7, seed=2)
    assert whole.shape == (7, L) and len({tuple(row) for row in whole.tolist()}) >= 5
    assert torch.equal(whole, model.sample(7, seed=2, batch=3))
    assert torch.equal(whole[4:6], model.sample(2, seed=2, first=4))
    assert not torch.equal(whole, model.sample(7, seed=3))
    assert model.generate(7, seed=2, batch=2) == model.to_text(whole)


def row_with_ends(tokenizer):
    """'The farmer' END 'steers' END 'books', and what a text that ends would be."""
    head, rest, more = (tokenizer.encode(word) for word in ("The farmer", "steers", "books"))
    row = [*head, tokenizer.eos_id, *rest, tokenizer.eos_id, *more]
    return torch.tensor([(row + row)[:L]]), "The farmer", [*head, tokenizer.eos_id]


@pytest.mark.parametrize("method", ["jpeg-dlm", "ar"])
@pytest.mark.parametrize("packing", ["padded", "continuous"])
def test_text_ends_at_the_first_end_where_rows_end(method, packing, micro_folders, monkeypatch, capsys, tmp_path):
    """In everything that shows text; rows of other packings stay whole."""
    model = load(micro_folders(method, data__packing=packing), "cpu")
    rows, ended, kept = row_with_ends(model.tokenizer)

    def sample(sampler, noise, watch=None, fixed_BL=None):
        if watch:
            watch(1, 1, 1.0, lambda: rows)
        return rows.expand(len(noise.rows), -1)

    monkeypatch.setattr(model.method, "sample", sample)
    whole = model.tokenizer.decode(rows[0].tolist())
    expected = ended if packing == "padded" else whole
    assert whole != ended and model.generate(2) == [expected] * 2 == model.to_text(rows) * 2
    tokens = model.sample(1)[0].tolist()
    assert tokens == (kept + [model.tokenizer.pad_id] * (L - len(kept)) if packing == "padded" else rows[0].tolist())
    found = ModelSource(model, "m", 4).write(0, 1, {}, specials=False)
    assert found.texts == [expected] and model.tokenizer.decode(found.ids[0]) == expected
    assert found.ids == [kept[:-1]] if packing == "padded" else found.ids == rows.tolist()
    named = ModelSource(model, "m", 4).write(0, 1, {}, specials=True).texts[0]
    assert named.count("</s>") == (0 if packing == "padded" else rows[0].tolist().count(model.tokenizer.eos_id))
    model.sample(1, watch=Watcher(model))
    assert capsys.readouterr().err.strip().endswith(f"t=1.00  {expected}")
    rows = sample_rows(model.method, model.config, model.tokenizer, Ranks(), 1)
    write_samples(rows, model.tokenizer, tmp_path, 3)
    assert (tmp_path / "samples" / "step-00000003.txt").read_text("utf-8") == f"[0] {expected}\n"


def test_a_template_is_kept_where_a_hole_was_filled_with_an_end(stand_ins, micro_folders, monkeypatch):
    model = load(micro_folders("unigram", data__packing="padded"), "cpu")
    eos = model.tokenizer.eos_id
    monkeypatch.setattr(
        model.method, "sample", lambda s, noise, w=None, fixed_BL=None: torch.where(fixed_BL < 0, eos, fixed_BL)
    )
    assert model.generate(1, template="The farmer [MASK] steers") == ["The farmer steers"]


def test_a_template_that_ends_with_text_is_the_whole_text(stand_ins, micro_folders):
    model = load(micro_folders("unigram", data__packing="padded"), "cpu")
    row = model.fixed_tokens(template="The farmer [MASK] steers").tolist()
    last = row.index(model.tokenizer.eos_id)
    assert row[:last] == model.fixed_tokens(template="[MASK] The farmer [MASK] steers [MASK]").tolist()[1 : last + 1]
    assert set(row[last + 1 :]) == {-1} and model.tokenizer.eos_id not in model.fixed_tokens(template="The [MASK]")
    assert all(text.endswith(" steers") for text in model.generate(8, template="The farmer [MASK] steers"))


@pytest.mark.parametrize("frame", [False, True])
def test_texts_are_encoded_as_the_rows_of_training_were(frame, micro_folders):
    """Against what `prepare` makes of the same text."""
    model = load(micro_folders("jpeg-dlm", data__packing="padded", data__frame=frame), "cpu")
    tok = model.tokenizer
    layout = RowLayout("padded", L, tok.eos_id, tok.pad_id, frame, tok.bos_id, tok.boundary_id)
    for text in ("The farmer", "The captain steers ships", "books " * (10 if frame else 12)):
        ids = tok.encode(text)
        if len(ids) <= model.layout.payload:
            assert model._rows([model._ids(text)])[0].tolist() == pack_document(layout, [], [ids])[0][:1]


def test_an_interpolation_ends_at_both_reconstructions(model, block_texts):
    a, b = block_texts[:2]
    path = model.interpolate(a, b, points=4)
    assert len(path) == 4 and [path[0], path[-1]] == model.reconstruct([a, b])


def test_a_long_text_is_reconstructed_block_by_block(model, corpus_file):
    words = corpus_file.read_text("utf-8").split()
    lengths = {n: len(model.tokenizer.encode(" ".join(words[:n]))) for n in range(20, 200)}
    text = " ".join(words[: next(n for n, tokens in lengths.items() if tokens % L == 0)])
    rows = torch.tensor(model.tokenizer.encode(text)).view(-1, L)
    assert len(rows) >= 3
    z = model.method.encode(Batch(rows))
    expected = model.method.tokens(z, model.config.sampler.w).flatten().tolist()
    assert model.reconstruct([text]) == [model.tokenizer.decode(expected)]


def test_latents_of_one_text_and_numpy_arrays_are_decoded(model, block_texts):
    z = model.encode(block_texts[:3])
    moved = z[2] + z[1] - z[0]
    text = model.decode(moved[None])
    assert model.decode(moved) == model.decode(moved.numpy()) == model.decode(moved.double().numpy()) == text
    assert model.decode(z.numpy()) == model.decode(z)
    assert model.decode(z.numpy()[::-1]) == model.decode(z.flip(0))


def test_the_codec_works_in_batches(model, corpus_file, monkeypatch):
    """Memory is bounded: of 200 rows, never more than 64 are in the networks."""
    sizes, compressor, tokens = [], model.method.target_latents, model.method.tokens
    text = " ".join((corpus_file.read_text("utf-8") * 2).split()[:1200])
    expected = model.round_trip(text)
    assert len(expected[0]) > 200 * L
    monkeypatch.setattr(model.method, "target_latents", lambda h, *more: sizes.append(len(h)) or compressor(h, *more))
    monkeypatch.setattr(model.method, "tokens", lambda z, w: sizes.append(len(z)) or tokens(z, w))
    assert model.round_trip(text) == expected
    rows = -(-len(expected[0]) // L)
    assert max(sizes) <= 64 and sum(sizes) == 2 * rows
    sizes.clear()
    assert len(model.decode(torch.zeros(150, N, D))) == 150 and max(sizes) <= 64
    sizes.clear()
    assert len(model.edit("The farmer", 5, noise=0.5)) == 5 and sizes[0] == 1  # a text is encoded once


def test_requests_that_need_gradients_work_with_every_backend(folder, model, block_texts):
    """ONNX networks have none, so that prompts, templates, guides and edits use torch's; long texts need a context."""
    onnx = load(folder, "cpu", backend="onnx")
    assert_same_tokens(onnx.sample(8, seed=3), model.sample(8, seed=3))
    assert onnx.dtype == "onnx fp32" and onnx.supports == model.supports
    for act in (
        lambda m: m.edit(block_texts[0], 2, noise=0.5),
        lambda m: m.generate(2, prompt="The farmer"),
        lambda m: m.generate(2, template="The [MASK:2] corn"),
        lambda m: m.generate(2, guide=m.contains("corn")),
        lambda m: m.reconstruct(block_texts[:2]),
    ):
        assert act(onnx) == act(model)


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_a_model_is_loaded_to_the_device_of_the_local_rank(folder, monkeypatch, local_rank):
    seen = []
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr("jpeg_dlm.util.distributed.torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("jpeg_dlm.util.distributed.torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(JpegDlm, "to", lambda self, device: seen.append(str(device)) or self)
    load(folder)
    assert seen == [f"cuda:{local_rank}"]


NAN, INF = float("nan"), float("inf")
REFUSED = {  # arguments of each method of `Model`
    "encode": [[3], 3, None, b"bytes", ["a", None]],
    "reconstruct": [[["a"]]],
    "decode": [NAN, [[0.0]], None, torch.zeros(1, N, D).long(), torch.zeros(0, N, D), np.zeros((N, D), int), np.zeros(3)],
    "sample": [0, 2.5, "3", True, None],
    "to_text": [torch.zeros(1, L), [[1]]],
}
SHAPES = [(D,), (N + 1, D), (1, N + 1, D), (1, N, D - 1), (1, 1, N, D)]
FIXED = [[1] * L, torch.zeros(L), torch.full((L,), -2), torch.full((L,), 10**6)]
SAMPLING = [{"stepz": 4}, {"steps": 0}, {"solver": "magic"}, {"w": "warm"}, {"batch": 0}, {"batch": 1.0}, {"first": -1}]
SAMPLING += [{"seed": "0"}, {"seed": torch.zeros(2)}, *({"fixed": fixed} for fixed in FIXED)]


def test_what_is_no_text_number_or_tensor_is_one_clear_error(model, folder):
    calls = [lambda m, name=name, value=value: getattr(m, name)(value) for name, values in REFUSED.items() for value in values]
    calls += [lambda m, shape=shape: m.decode(torch.zeros(shape)) for shape in SHAPES]
    calls += [lambda m, options=options: m.sample(1, **options) for options in SAMPLING]
    calls += [lambda m, more=more: m.interpolate("a", "b", *more) for more in ((3,), (2.5,))]
    calls += [lambda m, points=points: m.interpolate("a", "b", points=points) for points in (1, 2.5)]
    calls += [lambda m: m.edit("The farmer", 0), lambda m: m.edit("The farmer", batch="a")]
    calls += [lambda m: m.generate(1, prompt=3), lambda m: m.generate(1, template=["[MASK]"])]
    calls += [lambda m: load(3), lambda m: load(backend="tpu"), lambda m: load(precision="bf16"), lambda m: load(folder, "tpu")]
    for call in calls:
        with pytest.raises(UsageError) as raised:
            call(model)
        assert str(raised.value).endswith((".", "?")) and "\n" not in str(raised.value)


def test_no_text_too_much_text_and_latents_that_no_text_has_are_refused(model, block_texts):
    texts = ([], [" \n\t "], [block_texts[0] + " and more"])
    calls = [lambda texts=texts: model.encode(texts) for texts in texts]
    calls += [lambda: model.reconstruct([]), lambda: model.reconstruct([" \n"]), lambda: model.interpolate("", "b")]
    calls += [lambda value=value: model.decode(torch.full((1, N, D), value)) for value in (NAN, INF)]
    for call in calls:
        with pytest.raises(DataError):
            call()


def test_another_tokenizer_is_not_the_models_own(trained, corpus_file, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    train_bpe([corpus_file.read_text("utf-8")], 270).save(tmp_path / "run" / "tokenizer.json")
    wrong = load(tmp_path / "run", "cpu")
    assert wrong.sample(1).shape == (1, L)  # tokens need no tokenizer
    with pytest.raises(CheckpointError, match="not the tokenizer of this model"):
        wrong.generate(1)
