"""The Python interface: load, generate, encode, decode, reconstruct, interpolate, save, and what it refuses."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import MICRO, made_up_text, micro_flags

from jpeg_dlm import Model, load
from jpeg_dlm.cli.main import main
from jpeg_dlm.cli.watch import Watcher
from jpeg_dlm.errors import CheckpointError, DataError, UsageError
from jpeg_dlm.evaluation.sources import ModelSource
from jpeg_dlm.machine.dist import Ranks
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.registry import names
from jpeg_dlm.sampling.given import template_ids
from jpeg_dlm.studies.workshop import parameter_count
from jpeg_dlm.text.packing import step
from jpeg_dlm.text.rows import Layout, first_copy
from jpeg_dlm.text.tokenizer import train_bpe, train_words
from jpeg_dlm.texts import Texts
from jpeg_dlm.training.run import sample_rows, write_samples

pytest_plugins = ["stand_in"]  # fixtures

L, N, D = MICRO["data.token_len"], MICRO["model.latent_len"], MICRO["model.latent_dim"]


@pytest.fixture(scope="session")
def trained(corpus_file, tmp_path_factory):
    """A finished run of the smallest model."""
    out = tmp_path_factory.mktemp("api") / "run"
    command = ["train", "--preset", "smoke", "--data", str(corpus_file), "--out", str(out), "--quiet", "--device", "cpu"]
    assert main([*command, *micro_flags()]) == 0
    return out


@pytest.fixture(scope="session")
def folder(trained, tmp_path_factory):
    """The same model, shaken until what it says depends on what it is given."""
    model = load(trained, "cpu")
    method, g = model.method, torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in method.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=g))
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


# ---------------------------------------------------------------- in a notebook


def test_a_model_says_what_it_is(model, folder, micro_folders):
    said = repr(model)
    assert said.startswith("<JPEG-DLM: ") and f"{N} latents for {L} tokens" in said and f"from '{folder}'" in said
    assert f" {parameter_count(model):,} parameters" in said
    model.complete_method()
    assert repr(model) == said  # the frozen encoder is not counted
    assert "latents" not in repr(load(micro_folders("ar"), "cpu"))
    assert "from the package" in repr(load(device="cpu"))


def test_texts_are_a_list_that_a_notebook_displays(model, block_texts):
    texts = model.generate(2, seed=0)
    assert isinstance(texts, list) and texts == list(texts) and texts + ["x"] == [*texts, "x"] and json.dumps(texts)
    for found in (texts, model.decode(model.encode(block_texts[:1])), model.reconstruct(block_texts[:1])):
        assert found._repr_html_().count("<li") == len(found) and repr(found) == repr(list(found))
    shown = Texts(["a <b> & c", "two\nlines"])._repr_html_()
    assert "a &lt;b&gt; &amp; c" in shown and "two\nlines" in shown and "pre-wrap" in shown and "<b>" not in shown


# ---------------------------------------------------------------- loading and saving


def test_importing_the_package_does_not_import_torch():
    code = "import sys, jpeg_dlm; assert jpeg_dlm.__version__ and 'torch' not in sys.modules; assert callable(jpeg_dlm.load)"
    subprocess.run([sys.executable, "-c", code], check=True)


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
    from jpeg_dlm.files import load_tensors

    ema = load_tensors(trained / "checkpoints" / "step-00000012" / "ema.safetensors")
    live = load_tensors(trained / "checkpoints" / "step-00000012" / "model.safetensors")
    weight = load(trained, "cpu").method.state_dict()["dit.in_proj.proj1.weight"]
    assert torch.equal(weight, ema["dit.in_proj.proj1.weight"])
    assert not torch.equal(weight, live["dit.in_proj.proj1.weight"])


def test_saving_and_loading_changes_no_sample(model, folder, tmp_path):
    again = load(model.save(tmp_path / "again"), "cpu")
    assert again.config == model.config
    assert torch.equal(again.sample(4, seed=3), model.sample(4, seed=3))
    for name in ("model.safetensors", "tokenizer.json", "encoder.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_saving_refuses_to_overwrite(model, folder):
    before = (folder / "manifest.json").read_bytes()
    with pytest.raises(CheckpointError, match="nothing was overwritten"):
        model.save(folder)
    assert (folder / "manifest.json").read_bytes() == before


def test_a_saved_model_names_no_path_of_the_machine_that_trained_it(trained, folder, corpus_file):
    text = (folder / "config.json").read_text()
    assert str(corpus_file.parent) not in text and str(trained.parent) not in text


def test_the_hub_way_of_saving_and_loading(model, tmp_path):
    model.save_pretrained(tmp_path / "hub")
    assert (tmp_path / "hub" / "README.md").is_file()  # the hub's model card is beside the model
    again = Model.from_pretrained(str(tmp_path / "hub"))
    assert isinstance(again, Model) and again.config == model.config
    shutil.rmtree(tmp_path / "hub")  # nothing is read later from where it came
    assert torch.equal(again.sample(3, seed=5), model.sample(3, seed=5))
    assert again.reconstruct(["The smith forges nails"]) == model.reconstruct(["The smith forges nails"])


def test_the_hub_card_names_data_and_license_where_they_are_known(model, tmp_path):
    from huggingface_hub import ModelCard

    load(None, "cpu").save_pretrained(tmp_path / "bundled")
    known = ModelCard.load(tmp_path / "bundled" / "README.md")
    assert known.data.to_dict() == {
        "library_name": "jpeg-dlm", "pipeline_tag": "text-generation", "tags": ["jpeg-dlm", "diffusion", "language-model"],
        "language": "en", "license": "mit", "datasets": ["stanfordnlp/snli"],
    }  # fmt: skip
    assert "CC BY-SA 4.0" in known.text and "Stanford NLP Group" in known.text
    model.save_pretrained(tmp_path / "own", model_card_kwargs={"license": "cc-by-4.0", "language": "de"})
    own = ModelCard.load(tmp_path / "own" / "README.md")
    assert (own.data.license, own.data.language, own.data.datasets) == ("cc-by-4.0", "de", None)
    model.save_pretrained(tmp_path / "plain")
    assert ModelCard.load(tmp_path / "plain" / "README.md").data.license is None  # nobody has chosen one


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("/home/alice/private/diary.txt", "`diary.txt`"),
        ("hf:/home/alice/set", "`set`"),
        ("hf:owner/set:train", "`hf:owner/set:train`"),
    ],
)
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
    assert shown in pushed["README.md"].decode()
    assert json.loads(pushed["config.json"])["data"]["source"] == shown.strip("`")


def test_the_hub_cache_of_links_can_be_loaded(folder, model, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert torch.equal(Model.from_pretrained(str(tmp_path)).sample(2), model.sample(2))
    with pytest.raises(UsageError, match="nonsense"):
        Model.from_pretrained(str(tmp_path), nonsense=1)


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


# ---------------------------------------------------------------- generating


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


@pytest.mark.parametrize("method", names("system"))
@pytest.mark.parametrize("packing", ["padded", "continuous"])
def test_text_ends_at_the_first_end_where_rows_end(method, packing, micro_folders, monkeypatch, capsys, tmp_path):
    """Of every method, in everything that shows its text; rows of other packings stay whole."""
    model = load(micro_folders(method, data__packing=packing), "cpu")
    rows, ended, kept = row_with_ends(model.tokenizer)

    def sample(sampler, noise, watch=None, given_BL=None):
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
        model.method, "sample", lambda s, noise, w=None, given_BL=None: torch.where(given_BL < 0, eos, given_BL)
    )
    assert model.generate(1, template="The farmer [MASK] steers") == ["The farmer steers"]


@pytest.mark.parametrize("frame", [False, True])
def test_texts_are_encoded_as_the_rows_of_training_were(frame, micro_folders):
    """Against what `prepare` makes of the same text."""
    model = load(micro_folders("jpeg-dlm", data__packing="padded", data__frame=frame), "cpu")
    tok = model.tokenizer
    layout = Layout("padded", L, tok.eos_id, tok.pad_id, frame, tok.bos_id, tok.boundary_id)
    for text in ("The farmer", "The captain steers ships", "books " * (10 if frame else 12)):
        ids = tok.encode(text)
        if len(ids) <= model.layout.payload:
            assert model._rows([model._ids(text)])[0].tolist() == step(layout, [], [ids])[0][:1]


def test_sampler_options_are_keywords(model):
    assert not torch.equal(model.sample(4, steps=2), model.sample(4, steps=16))
    watched = []
    model.sample(2, steps=4, watch=lambda step, steps, t, tokens: watched.append((step, steps, t, tokens().shape)))
    assert [w[0] for w in watched] == [0, 1, 2, 3, 4] and watched[-1][2] == 1.0 and {w[3] for w in watched} == {(2, L)}


@pytest.mark.parametrize("options", [{"stepz": 4}, {"steps": 0}, {"solver": "magic"}, {"w": "warm"}])
def test_wrong_sampler_options_are_refused(model, options):
    with pytest.raises(UsageError):
        model.sample(1, **options)


def test_no_samples_and_no_batch_are_refused(model):
    for options in ({"n": 0}, {"n": 2, "batch": 0}):
        with pytest.raises(UsageError, match="at least 1"):
            model.sample(**options)


def test_the_released_protocol_cannot_begin_in_the_middle(model):
    with pytest.raises(UsageError, match="in order"):
        model.sample(2, first=3, protocol="released")


def test_generating_needs_no_encoder(folder):
    fresh = load(folder, "cpu")
    fresh.generate(1)
    assert "encoder" not in vars(fresh) and fresh.method.encoder is None


# ---------------------------------------------------------------- the codec


def test_latents_are_standardized_vectors(model, block_texts):
    z = model.encode(block_texts[:3])
    assert z.shape == (3, N, D) and z.isfinite().all()
    assert torch.allclose(z[1:2], model.encode(block_texts[1:2]), atol=1e-5)
    assert not torch.allclose(z[0], z[1], atol=1e-2)


def test_decoding_the_latents_of_a_block_is_reconstructing_it(model, block_texts):
    back = model.reconstruct(block_texts[:3])
    assert model.decode(model.encode(block_texts[:3])) == back
    assert len(set(back)) > 1  # what comes back depends on what went in


def test_an_interpolation_ends_at_both_reconstructions(model, block_texts):
    a, b = block_texts[:2]
    path = model.interpolate(a, b, points=4)
    assert len(path) == 4 and [path[0], path[-1]] == model.reconstruct([a, b])
    with pytest.raises(UsageError, match="at least 2"):
        model.interpolate(a, b, points=1)


def test_a_long_text_is_reconstructed_block_by_block(model, corpus_file):
    words = corpus_file.read_text("utf-8").split()
    lengths = {n: len(model.tokenizer.encode(" ".join(words[:n]))) for n in range(20, 200)}
    text = " ".join(words[: next(n for n, tokens in lengths.items() if tokens % L == 0)])
    rows = torch.tensor(model.tokenizer.encode(text)).view(-1, L)
    assert len(rows) >= 3
    z = model.method.encode(Batch(rows))
    expected = model.method.tokens(z, model.config.sampler.w).flatten().tolist()
    assert model.reconstruct([text]) == [model.tokenizer.decode(expected)]


def test_a_short_text_gives_back_no_more_tokens_than_it_has(model):
    (row,), (n,) = model._rows([model._ids("The farmer")])
    assert len(row) == L and n == len(model.tokenizer.encode("The farmer")) < L
    tokens = model.method.tokens(model._encode_rows(row[None]), model.config.sampler.w)[0, :n].tolist()
    assert model.reconstruct(["The farmer"]) == [model.tokenizer.decode(tokens)]


@pytest.mark.parametrize("shape", [(N, D), (1, N + 1, D), (1, N, D - 1), (1, 1, N, D)])
def test_latents_of_another_shape_are_refused(model, shape):
    with pytest.raises(UsageError, match=r"\(B, 3, 16\)"):
        model.decode(torch.zeros(shape))


@pytest.mark.parametrize("call", ["encode", "reconstruct"])
@pytest.mark.parametrize("text", ["", " \n\t "])
def test_an_empty_text_is_refused(model, call, text):
    with pytest.raises(DataError, match="empty"):
        getattr(model, call)([text])


def test_more_tokens_than_the_model_takes_are_refused(model, block_texts):
    with pytest.raises(DataError, match=f"the model takes {L}"):
        model.encode([block_texts[0] + " and more"])


# ---------------------------------------------------------------- arguments of any kind


def test_a_string_is_one_text(model, block_texts):
    text = block_texts[0]
    assert torch.equal(model.encode(text), model.encode([text])) and len(model.encode(text)) == 1
    assert model.reconstruct(text) == model.reconstruct((text,)) == model.reconstruct(iter([text]))


NAN = float("nan")


@pytest.mark.parametrize("call", [
    lambda m: m.encode([3]), lambda m: m.encode(3), lambda m: m.encode(None), lambda m: m.encode(b"bytes"),
    lambda m: m.encode(["a", None]), lambda m: m.reconstruct([["a"]]), lambda m: m.decode(NAN), lambda m: m.decode([[0.0]]),
    lambda m: m.decode(None), lambda m: m.decode(torch.zeros(1, N, D).long()), lambda m: m.decode(torch.zeros(0, N, D)),
    lambda m: m.interpolate("a", 3), lambda m: m.interpolate("a", "b", 2.5), lambda m: m.interpolate("a", "b", 1),
    lambda m: m.sample(2.5), lambda m: m.sample("3"), lambda m: m.sample(True), lambda m: m.sample(None),
    lambda m: m.sample(1, seed="0"), lambda m: m.sample(1, batch=1.0), lambda m: m.sample(1, first=-1),
    lambda m: m.sample(1, seed=torch.zeros(2)), lambda m: m.sample(1, given=[1] * L),
    lambda m: m.sample(1, given=torch.zeros(L)),
    lambda m: m.sample(1, given=torch.full((L,), -2)), lambda m: m.sample(1, given=torch.full((L,), 10**6)),
    lambda m: m.generate(1, prompt=3), lambda m: m.generate(1, template=["[MASK]"]), lambda m: m.to_text(torch.zeros(1, L)),
    lambda m: m.to_text([[1]]), lambda m: load(3),
])  # fmt: skip
def test_what_is_no_text_number_or_tensor_is_one_clear_error(model, call):
    with pytest.raises(UsageError) as raised:
        call(model)
    assert str(raised.value).endswith(".") and "\n" not in str(raised.value)


@pytest.mark.parametrize("call", [
    lambda m: m.encode([]), lambda m: m.reconstruct([]), lambda m: m.interpolate("", "b"),
    lambda m: m.decode(torch.full((1, N, D), NAN)), lambda m: m.decode(torch.full((1, N, D), float("inf"))),
])  # fmt: skip
def test_no_text_and_latents_that_no_text_has_are_refused(model, call):
    with pytest.raises(DataError):
        call(model)


# ---------------------------------------------------------------- damage and mistakes


def test_a_flipped_byte_is_refused_by_name(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*SHA-256"):
        load(tmp_path / "model")


def test_another_tokenizer_is_not_the_models_own(trained, corpus_file, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    train_bpe([corpus_file.read_text("utf-8")], 270).save(tmp_path / "run" / "tokenizer.json")
    wrong = load(tmp_path / "run", "cpu")
    assert wrong.sample(1).shape == (1, L)  # tokens need no tokenizer
    with pytest.raises(CheckpointError, match="not the tokenizer of this model"):
        wrong.generate(1)


def test_a_tokenizer_with_fewer_ids_than_the_model_is_refused(model, corpus_file, tmp_path):
    train_bpe([corpus_file.read_text("utf-8")], 270).save(tmp_path / "tokenizer.json")
    parts = replace(model.parts, tokenizer=tmp_path / "tokenizer.json", tokenizer_fingerprint=None)
    with pytest.raises(CheckpointError, match="270 ids, the model 300"):
        Model(parts).generate(1)


def test_folders_without_a_model_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="neither a model nor a run"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / "nothing")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        load(tmp_path / "run")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="jpeg-dlm import"):
        load(tmp_path / "file")


def test_an_unknown_device_is_refused(folder):
    with pytest.raises(UsageError, match="'toaster' is not a device"):
        load(folder, "toaster")


# ---------------------------------------------------------------- prompts and templates


@pytest.fixture(params=["ar", "unigram"])
def writer(request, stand_ins, micro_folders):
    """A model that can keep what it is given."""
    return load(micro_folders(request.param), "cpu")


def test_texts_begin_with_the_prompt(writer):
    prompt = "The farmer plants"
    ids = writer.tokenizer.encode(prompt)
    rows = writer.sample(4, given=writer.given(prompt)).tolist()
    assert all(row[: len(ids)] == ids and -1 not in row for row in rows)
    assert len({tuple(row[len(ids) :]) for row in rows}) > 1  # the rest is written
    texts = writer.generate(4, prompt=prompt)
    assert texts == writer.to_text(torch.tensor(rows)) and all(text.startswith(prompt) for text in texts)


def test_a_template_is_kept_around_its_holes(writer):
    given = writer.given(template="The farmer [MASK:2] corn")
    before, after = writer.tokenizer.encode("The farmer"), writer.tokenizer.encode("corn")
    free = [-1, -1]
    assert given.tolist() == [*before, *free, *after] + [-1] * (L - len(before) - 2 - len(after))
    for row in writer.sample(3, given=given):
        assert torch.equal(row[given >= 0], given[given >= 0])


def test_after_a_frames_begin_token(micro_folders):
    model = load(micro_folders("ar", data__frame=True), "cpu")
    given = model.given("The farmer").tolist()
    ids = model.tokenizer.encode("The farmer")
    assert given[: len(ids) + 1] == [model.tokenizer.bos_id, *ids] and set(given[len(ids) + 1 :]) == {-1}


@pytest.mark.parametrize("whole, template", [
    ("The farmer plants corn.", "The farmer [MASK] corn."), ("The farmer plants corn.", "The farmer plants [MASK]."),
    ("The farmer plants corn.", "[MASK] farmer plants corn[MASK]"), ("The smith reads, near", "The smith [MASK], near"),
])  # fmt: skip
@pytest.mark.parametrize("train", [train_bpe, train_words])
def test_pieces_of_a_template_are_the_tokens_of_the_whole_text(whole, template, train):
    """Filled with the right tokens, a template gives the ids of the text: a full stop stays one without a space before it."""
    tokenizer = train([made_up_text(), whole], 600)  # enough for every word to be a token
    ids, found = tokenizer.encode(whole), template_ids(tokenizer, template)
    assert len(found) == len(ids) and [a for a, b in zip(ids, found, strict=True) if b != -1] == [b for b in found if b != -1]


def test_unknown_words_of_a_template_are_named():
    tokenizer = train_words([made_up_text()], 600)
    with pytest.raises(DataError, match="does not know 'zebra':"):
        template_ids(tokenizer, "The [MASK:2] zebra [MASK].")


@pytest.mark.parametrize("given, error", [
    ({"prompt": "a", "template": "[MASK]"}, "not both"), ({"prompt": "word " * 20}, "shorten it"), ({"prompt": " "}, "empty"),
    ({"template": "no hole"}, "has no hole"), ({"template": " "}, "template is empty"),
    ({"template": "[MASK:9999999999]"}, "shorten it"),
    ({"template": "a [MASK:0]"}, "holds no token"),
    ({"template": "[MASK:13]"}, "13 tokens"), ({"given": torch.zeros(3)}, "shape"),
])  # fmt: skip
def test_what_cannot_be_kept_is_refused(given, error, writer):
    with pytest.raises((UsageError, DataError), match=error):
        writer.generate(1, **given)


def test_the_released_order_of_random_numbers_writes_freely(model):
    with pytest.raises(UsageError, match="The released protocol writes whole texts freely"):
        model.generate(1, prompt="The", protocol="released", grid="random")


def test_an_unknown_option_names_those_of_the_sampler(model, writer):
    with pytest.raises(UsageError, match="The sampler of JPEG-DLM has no option 'temperature': it has steps, solver, grid, w"):
        model.generate(1, temperature=0.5)
    with pytest.raises(UsageError, match="has no option 'steps': it has temperature"):
        writer.generate(1, steps=4)


def test_what_fills_a_block_by_repetition_is_one_text():
    end = 0
    assert first_copy([5, 6, 7, end, 5, 6, 7, end, 5, 6], end) == [5, 6, 7]
    assert first_copy([5, 6, 7, end, 5, 9, 7, end, 5, 6], end) == [5, 6, 7]  # the codec changed a token of a copy
    assert first_copy([5, 6, 9, 7, 5, 6, 7, end, 5, 6, 9], end) == [5, 6, 9, 7, 5, 6, 7]
    assert first_copy([5, 6, 7, end, 8, 9, 4, end, 3, 2], end) == [5, 6, 7, end, 8, 9, 4, end, 3, 2]  # three texts
    assert first_copy([5, 6, 7, end], end) == [5, 6, 7, end] and first_copy([5, 5, 5, 5], end) == [5, 5, 5, 5]
