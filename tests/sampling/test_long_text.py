"""Long texts: every block sees the right context, in any batch, up to the length or the end of the document."""

from __future__ import annotations

import json
import math

import pytest
import torch
from conftest import MICRO, made_up_text, perturb

from jpeg_dlm import load
from jpeg_dlm.api import Model
from jpeg_dlm.cli.main import main
from jpeg_dlm.config_io import override
from jpeg_dlm.continuing import LongTexts
from jpeg_dlm.errors import DataError, UsageError
from jpeg_dlm.flow.latent_sampler import LatentSampler
from jpeg_dlm.folders.model_folder import ModelParts, write_model
from jpeg_dlm.methods.registry import build_method
from jpeg_dlm.nn.dit import Context
from jpeg_dlm.presets import preset
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.sampling.long_text import BlockWriter
from jpeg_dlm.text.tokenizer import train_bpe

L, N, D, K = 12, 3, 16, 2
CONTEXT = MICRO | {"encoder.kind": "random", "encoder.scale": "none", "data.packing": "padded", "model.context_blocks": K}


def made(tmp_path_factory, **changes) -> Model:
    folder = tmp_path_factory.mktemp("context")
    train_bpe([made_up_text()], 300).save(folder / "tokenizer.json")
    config = override(preset("smoke"), CONTEXT | {name.replace("__", "."): value for name, value in changes.items()})
    method = perturb(build_method(config).eval(), 0.3)
    with torch.no_grad():
        method.decompressor.pos_emb.weight.mul_(4)  # so that places differ in their tokens
    return load(write_model(ModelParts(method, config, folder, folder / "tokenizer.json", None), folder / "model"), "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    return made(tmp_path_factory)


@pytest.fixture(scope="module")
def prompt(model) -> str:
    """A prompt of exactly three blocks, of which the model sees two."""
    return model.tokenizer.decode(model.tokenizer.encode(made_up_text())[: 3 * L])


class Script:
    """Stands for a sampler: block b of sample i is [100 (i + 1) + b, ...]; it keeps the contexts that it was given."""

    def __init__(self, config, ends: dict[int, int]) -> None:
        self.config, self.device, self.ends = config, torch.device("cpu"), ends
        self.contexts: list[Context] = []
        self.noises: list[RowNoise] = []

    def after(self, context, scale):
        self.contexts.append(context)
        return self

    def sample(self, sampler, noise, watch=None, given_BL=None, control=None):
        assert (control is None) == (given_BL is None) and (control is None or control.end_id == 1)
        self.noises.append(noise)
        rows = torch.tensor([[100 * (i + 1) + noise.step] * L for i in noise.rows])
        for place, i in enumerate(noise.rows):
            if self.ends.get(i) == noise.step:
                rows[place, 5] = 1  # the end token
        return rows if given_BL is None else torch.where(given_BL < 0, rows, given_BL)


def encode(rows_BL):
    """Latents that name their row."""
    return rows_BL[:, :1, None].float().expand(-1, N, D)


def names(context: Context) -> list[list[float]]:
    """What each row sees, block by block; 0 is before the beginning of a text."""
    assert context.present_BC.all()
    return context.z_BCD[:, ::N, 0].tolist()


def test_each_block_sees_the_blocks_before_it(model):
    script = Script(model.config, ends={2: 1})
    prompts = [[7] * L + [8] * L + [9] * L, [5] * L, [], [6] * (L + 4)]
    pieces = list(BlockWriter(script, encode, end_id=1).pieces(None, 3, range(4), prompts, 30))  # type: ignore[arg-type]
    seen = list(map(names, script.contexts))
    assert seen[0] == [[8, 9], [0, 5], [0, 0], [0, 6]]
    assert seen[1] == [[9, 100], [5, 200], [0, 300], [6, 6]]  # the block that the last prompt began, encoded as a whole
    assert seen[2] == [[100, 101], [200, 201], [6, 401]]  # without the text that has ended
    assert [noise.step for noise in script.noises] == [0, 1, 2] and {noise.seed for noise in script.noises} == {3}
    texts = {i: [token for piece in pieces if piece.sample == i for token in piece.ids] for i in range(4)}
    assert texts[1] == [200] * L + [201] * L + [202] * 6 and len(texts[3]) == 30
    assert texts[2] == [300] * L + [301] * 5
    assert texts[3][: L - 4] == [400] * (L - 4) and texts[3][L - 4] == 401  # the block in which the prompt ended goes on
    assert [piece.last for piece in pieces if piece.sample == 0] == [False, False, True]


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_text_is_the_same_in_any_batch(model, prompt, scale):
    long = LongTexts.of(model, prompt, 5 * L, scale)
    together = long.tokens(4, seed=1, batch=4)
    apart = [long.tokens(1, seed=1, first=i)[0] for i in range(4)]
    same = [sum(a == b for a, b in zip(x, y, strict=False)) / max(len(x), len(y)) for x, y in zip(together, apart, strict=True)]
    assert min(same) > 0.9  # rounding, whose direction the CPU decides, may turn over a few
    assert all(row[: 3 * L] == together[0][: 3 * L] for row in together) and len({tuple(row) for row in together}) == 4


def test_without_a_prompt_a_text_begins_and_an_ordinary_sample_may_be_from_anywhere(model):
    """Both of the same noise: after latents of zero, and without a context."""
    ordinary, writer = model.sample(3, seed=4).tolist(), model.writer.latent_sampler
    noise, options = RowNoise(4, range(3)), model.sampler_options()
    assert writer.sample(options, noise).tolist() == ordinary
    zeros = Context(torch.zeros(3, 2 * N, D), torch.ones(3, 2 * N, dtype=torch.bool))
    beginnings = writer.after(zeros).sample(options, noise).tolist()
    assert beginnings != ordinary
    for row, text in zip(beginnings, LongTexts.of(model, None, L).tokens(3, seed=4), strict=True):
        assert row[: len(text)] == text


def test_prepared_weights_write_the_same(model, prompt, tmp_path_factory):
    long = LongTexts.of(model, prompt, 3 * L, 1.5)
    plain = long.tokens(2)
    fast = LongTexts.of(load(model.parts.origin, "cpu").accelerate(), prompt, 3 * L, 1.5).tokens(2)
    assert sum(a == b for x, y in zip(plain, fast, strict=True) for a, b in zip(x, y, strict=False)) > 0.9 * sum(
        map(len, plain)
    )


def test_a_prompt_beyond_the_window_is_cut_with_a_notice(model, prompt):
    with pytest.warns(UserWarning, match=f"The prompt has {3 * L} tokens, of which the model sees the last {2 * L}"):
        text = model.generate(1, prompt=prompt, length=L)[0]
    assert text.startswith(prompt)
    ids = model.tokenizer.encode(prompt)
    assert LongTexts(model, [ids[L:]], L, 1.0).notice is None
    cut = LongTexts(model, [ids[L:]], L, 1.0).tokens(1)[0]
    assert LongTexts(model, [ids], L, 1.0).tokens(1)[0][-L:] == cut[-L:]  # what is cut has no effect


@pytest.mark.parametrize("extra", [1, 5, L - 1])
def test_a_prompt_that_ends_inside_a_block_goes_on_inside_it(model, prompt, extra):
    ids = model.tokenizer.encode(prompt)[: L + extra]
    rows = LongTexts(model, [ids], 2 * L).tokens(2, seed=1)
    assert all(row[: len(ids)] == ids and len(row) <= len(ids) + 2 * L for row in rows)
    block = LongTexts(model, [ids], L - extra).tokens(2, seed=1)
    assert [row[: 2 * L] for row in rows] == block


def test_by_default_a_text_goes_on_to_the_end_of_its_block(model):
    text = "The farmer plants corn"
    ids = model.tokenizer.encode(text)
    long = LongTexts.of(model, text)
    assert long.length == L - len(ids) % L
    assert model.generate(2, prompt=text, seed=1) == long.texts(2, seed=1)


def test_a_guide_is_asked_in_every_block(model):
    asked = []

    def guide(logits_BLV):
        asked.append(logits_BLV.shape)
        return -logits_BLV.log_softmax(-1)[:, 3, 7]

    pieces = list(LongTexts.of(model, None, 3 * L, guide=guide).pieces(2, seed=1))
    steps = model.config.sampler.steps
    assert len(asked) >= (steps + 1) * max(sum(p.sample == i for p in pieces) for i in (0, 1))  # and in refinement


@pytest.mark.parametrize(("guide", "said"), [
    (lambda x: x.sum(), "one loss per row"), (lambda x: x.flatten(1).sum(1) * math.nan, "not finite"),
])  # fmt: skip
def test_a_guide_that_cannot_guide_is_one_sentence(model, guide, said):
    with pytest.raises(UsageError, match=said):
        model.generate(2, length=2 * L, guide=guide)


@pytest.mark.parametrize("length", [0, -3, 1.5, True])
def test_impossible_lengths(model, length):
    with pytest.raises(UsageError, match="length"):
        model.generate(1, prompt="The farmer", length=length)


@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf, "2"])
def test_impossible_scales(model, scale):
    with pytest.raises(UsageError, match="context_scale"):
        model.generate(1, length=L, context_scale=scale)


def test_empty_prompts_templates_and_models_without_context(model):
    with pytest.raises(DataError, match="prompt is empty"):
        model.generate(1, prompt="", length=L)
    with pytest.raises(UsageError, match="template"):
        model.generate(1, template="The [MASK:2].", length=L)
    with pytest.raises(UsageError, match="does not take long text: use jpeg-dlm trained with --model.context-blocks"):
        load().generate(1, length=40)


# ---------------------------------------------------------------- from the command line


def words(model: Model, *more: str) -> list[str]:
    return ["generate", str(model.parts.origin), "--device", "cpu", *more]


def test_streaming_prints_the_same_texts(model, prompt, capsys):
    asked = ["--prompt", prompt, "--length", "30", "-n", "2", "--batch", "1"]
    assert main(words(model, *asked)) == 0
    plain = capsys.readouterr()
    assert "of which the model sees the last" in plain.err and "new tokens in" in plain.err
    assert main(words(model, *asked, "--stream", "--watch")) == 0
    streamed = capsys.readouterr()
    assert streamed.out == plain.out and streamed.err.count("step   0/3") == 3  # the blocks of the first text


@pytest.mark.parametrize("batch", [1, 3])
def test_a_line_says_how_many_tokens_of_the_prompt_latents_decode_to(model, batch, capsys, monkeypatch):
    steered, integrate = [], LatentSampler.integrate

    def recording(self, z, grid, sampler, watch=None, steer=None, noise=None):
        tokens = integrate(self, z, grid, sampler, watch, steer, noise)
        steered.extend(tokens.tolist() if steer else [])  # blocks with given tokens, before these are put in place
        return tokens

    monkeypatch.setattr(LatentSampler, "integrate", recording)
    text = "The farmer plants corn in the valley"
    head = model.tokenizer.encode(text)[L:]
    assert 0 < len(head) < L
    assert main(words(model, "--prompt", text, "--length", "30", "-n", "3", "--batch", str(batch))) == 0
    kept = sum(a == b for row in steered for a, b in zip(row, head, strict=False))
    rest = "" if kept == 3 * len(head) else "; the others were put in their place"
    line = f"{kept} of {3 * len(head)} given tokens are what the latents decode to{rest}."
    assert line in capsys.readouterr().err and len(steered) == 3
    assert main(words(model, "--prompt", text, "--length", "30", "-n", "3", "--stream")) == 0
    assert line in capsys.readouterr().err
    assert main(words(model, "--length", "3", "-n", "1")) == 0
    assert "given token" not in capsys.readouterr().err


def test_prompts_of_whole_blocks_are_context_and_no_block_is_completed(model):
    assert LongTexts(model, [[5] * 2 * L], L).counter() is None
    found = LongTexts(model, [[5] * 2 * L, [6] * (L + 2)], L).counter()
    assert found is not None and found.given.tolist() == [[-1] * L, [6, 6, *[-1] * (L - 2)]]


def test_files_hold_texts_of_their_own_length(model, tmp_path):
    assert main(words(model, "--length", "30", "-n", "3", "--out", str(tmp_path / "texts.jsonl"))) == 0
    rows = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2] and all(len(row["token_ids"]) <= 30 for row in rows)
    assert all(row["prediction"] == model.tokenizer.decode(row["token_ids"]) for row in rows)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--length", "0"], "at least 1"),
        (["--length", "-5"], "at least 1"),
        (["--length", "9", "--template", "The [MASK]."], "single block"),
        (["--length", "9", "--svg", "picture.svg"], "single block"),
        (["--length", "9", "--stream", "--out", "texts.jsonl"], "leave out --out"),
        (["--length", "9", "--prompt", ""], "prompt is empty"),
    ],
)
def test_bad_requests_are_one_sentence_and_write_nothing(model, flags, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with_status = main(words(model, *flags))
    error = capsys.readouterr().err
    assert with_status != 0 and said in error and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []
