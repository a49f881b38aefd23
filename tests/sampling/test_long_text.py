"""Long texts: every block sees the right context, in any batch, up to the length or the end of the document."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from conftest import made_up_text, perturb

from jpeg_dlm import load
from jpeg_dlm.api import Model
from jpeg_dlm.cli.main import main
from jpeg_dlm.nn.dit import Context
from jpeg_dlm.sampling.long_text import BlockwiseSampler
from jpeg_dlm.util.errors import DataError, UsageError
from jpeg_dlm.util.rng import RowNoise

L, N, D, K = 12, 3, 16, 2


@pytest.fixture(scope="module")
def model(micro_folders, tmp_path_factory) -> Model:
    model = load(micro_folders(data__packing="padded", model__context_blocks=K), "cpu")
    perturb(model.method, 0.5)
    with torch.no_grad():
        model.method.decompressor.pos_emb.weight.mul_(4)  # so that places differ in their tokens
    return load(model.save(tmp_path_factory.mktemp("context") / "model"), "cpu")


@pytest.fixture(scope="module")
def prompt(model) -> str:
    """A prompt of exactly three blocks, of which the model sees two."""
    return model.tokenizer.decode(model.tokenizer.encode(made_up_text())[: 3 * L])


def after(model: Model, prompts: list[list[int]], length: int) -> BlockwiseSampler:
    """Texts of so many tokens after prompts of ids."""
    return replace(model.blockwise(None, length), prompts=prompts)


class Script:
    """Stands for a sampler: block b of sample i is [100 (i + 1) + b, ...]; it keeps the contexts that it was given."""

    def __init__(self, config, ends: dict[int, int]) -> None:
        self.config, self.device, self.ends = config, torch.device("cpu"), ends
        self.contexts: list[Context] = []
        self.noises: list[RowNoise] = []

    def sample(self, sampler, noise, watch, fixed_BL, guidance, context, context_scale):
        assert (guidance is None) == (fixed_BL is None) and (guidance is None or guidance.end_id == 1)
        self.contexts.append(context)
        self.noises.append(noise)
        rows = torch.tensor([[100 * (i + 1) + noise.step] * L for i in noise.rows])
        for place, i in enumerate(noise.rows):
            if self.ends.get(i) == noise.step:
                rows[place, 5] = 1  # the end token
        return rows if fixed_BL is None else torch.where(fixed_BL < 0, rows, fixed_BL)


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
    pieces = list(BlockwiseSampler(script, None, encode, 1, prompts, 30).stream(4, seed=3))  # type: ignore[arg-type]
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
    long = model.blockwise(prompt, 5 * L, scale)
    together = long.tokens(4, seed=1, batch=4)
    apart = [long.tokens(1, seed=1, first=i)[0] for i in range(4)]
    same = [sum(a == b for a, b in zip(x, y, strict=False)) / max(len(x), len(y)) for x, y in zip(together, apart, strict=True)]
    assert min(same) > 0.9  # rounding, whose direction the CPU decides, may turn over a few
    assert all(row[: 3 * L] == together[0][: 3 * L] for row in together) and len({tuple(row) for row in together}) == 4


def test_a_prompt_beyond_the_window_is_cut_with_a_notice(model, prompt):
    with pytest.warns(UserWarning, match=f"The prompt has {3 * L} tokens, of which the model sees the last {2 * L}"):
        text = model.generate(1, prompt=prompt, length=L)[0]
    assert text.startswith(prompt)
    ids = model.tokenizer.encode(prompt)
    assert after(model, [ids[L:]], L).notice is None
    cut = after(model, [ids[L:]], L).tokens(1)[0]
    assert after(model, [ids], L).tokens(1)[0][-L:] == cut[-L:]  # what is cut has no effect


@pytest.mark.parametrize("extra", [1, 5, L - 1])
def test_a_prompt_that_ends_inside_a_block_goes_on_inside_it(model, prompt, extra):
    ids = model.tokenizer.encode(prompt)[: L + extra]
    rows = after(model, [ids], 2 * L).tokens(2, seed=1)
    assert all(row[: len(ids)] == ids and len(row) <= len(ids) + 2 * L for row in rows)
    block = after(model, [ids], L - extra).tokens(2, seed=1)
    assert [row[: 2 * L] for row in rows] == block


def test_a_guide_is_asked_in_every_block(model):
    asked = []

    def guide(logits_BLV):
        asked.append(logits_BLV.shape)
        return -logits_BLV.log_softmax(-1)[:, 3, 7]

    pieces = list(model.blockwise(None, 3 * L, guide=guide).stream(2, seed=1))
    steps = model.config.sampler.steps
    assert len(asked) >= (steps + 1) * max(sum(p.sample == i for p in pieces) for i in (0, 1))  # and in refinement


IMPOSSIBLE = [{"length": n} for n in (0, -3, 1.5, True)] + [{"context_scale": s} for s in (-1.0, math.nan, math.inf, "2")]
IMPOSSIBLE += [{"guide": lambda x: x.sum()}, {"guide": lambda x: x.flatten(1).sum(1) * math.nan}, {"template": "The [MASK:2]."}]


def test_impossible_requests_are_refused(model):
    for request in IMPOSSIBLE:
        with pytest.raises(UsageError):
            model.generate(1, **{"length": L} | request)
    with pytest.raises(DataError):
        model.generate(1, prompt="", length=L)
    with pytest.raises(UsageError):
        load().generate(1, length=40)


def test_streaming_prints_the_same_texts(model, prompt, capsys):
    words = ["generate", str(model.parts.origin), "--device", "cpu", "--prompt", prompt]
    words += ["--length", "30", "-n", "2", "--batch", "1"]
    assert main(words) == 0
    plain = capsys.readouterr()
    assert "of which the model sees the last" in plain.err and "new tokens in" in plain.err
    assert main([*words, "--stream", "--watch"]) == 0
    streamed = capsys.readouterr()
    assert streamed.out == plain.out and streamed.err.count("step   0/3") == 3  # the blocks of the first text
