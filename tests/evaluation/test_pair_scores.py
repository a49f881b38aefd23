"""Targets of sources: figures by sacrebleu's own functions, all references, the control, and the command."""

import json

import pytest
import sacrebleu
from micro import MICRO, as_flags

from jpeg_dlm.api import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.evaluation.cache import DiskCache
from jpeg_dlm.evaluation.likelihood import heldout_nats
from jpeg_dlm.evaluation.pairs import heldout_pairs, pair_scores, scores
from jpeg_dlm.evaluation.texts import ModelSource, heldout_blocks
from jpeg_dlm.methods.registry import for_method
from jpeg_dlm.options import option_names
from jpeg_dlm.presets import preset
from jpeg_dlm.text.pairs import task
from jpeg_dlm.training.data import batch_of
from jpeg_dlm.util.console import Console

pytest_plugins = ["tiny_evaluation"]  # fixtures

REFERENCES = [
    ["the cat sat on the mat today", "a cat was sitting on a mat"],
    ["two dogs run across a wide green field"],
    ["she reads an old book near the window", "near the window she reads a book", "she is reading"],
    ["my brother bought five red apples yesterday"],
]
OUTPUTS = ["a cat sat on a mat", "two dogs run in a green field", "she reads an old book", "birds"]


def test_figures_are_those_of_sacrebleu():
    streams = [[refs[i] if i < len(refs) else None for refs in REFERENCES] for i in range(3)]
    found = scores([OUTPUTS], REFERENCES)
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(OUTPUTS, streams).score)
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(OUTPUTS, streams).score)
    assert found["bleu_low"] <= found["bleu"] <= found["bleu_high"] and found["exact"] == 0
    assert "self_bleu" not in found
    first_only = scores([OUTPUTS], [refs[:1] for refs in REFERENCES])
    assert found["bleu"] > first_only["bleu"] and found["rouge_l"] > first_only["rouge_l"]


@pytest.mark.parametrize("which", [0, -1])
def test_any_reference_is_right_and_another_source_s_is_not(which):
    copies = [refs[which] for refs in REFERENCES]
    found = scores([copies], REFERENCES)
    assert found["bleu"] == pytest.approx(100) == found["rouge_l"] and found["exact"] == 1
    assert found["bleu_low"] == pytest.approx(100) == found["bleu_high"] and found["bleu_other_references"] < 5


def test_several_seeds_are_averaged_and_compared():
    copies = [refs[0] for refs in REFERENCES]
    one, other, both = (scores(texts, REFERENCES) for texts in ([OUTPUTS], [copies], [OUTPUTS, copies]))
    for name in ("bleu", "chrf", "rouge_l", "exact", "bleu_other_references"):
        assert both[name] == pytest.approx((one[name] + other[name]) / 2)
    assert both["self_bleu"] == pytest.approx(sacrebleu.corpus_bleu(OUTPUTS, [copies]).score)
    assert both["bleu_low"] <= both["bleu"] <= both["bleu_high"]
    assert scores([copies, copies], REFERENCES)["self_bleu"] == pytest.approx(100)


# ---------------------------------------------------------------- models

PAIRS = {"data.tokenizer": "words", "data.packing": "padded", "data.vocab_size": 32, "data.source_len": 10}
WORDS = MICRO | PAIRS | {"data.token_len": 10, "data.holdout": 0.1, "train.steps": 3, "train.encoder_steps": 3}
ONLY_AR = pytest.mark.parametrize("run", ["ar"], indirect=True)


@pytest.fixture(scope="module", params=["ar", "jpeg-dlm"])
def run(request, tmp_path_factory):
    """A model that copies, after three steps."""
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "copy.tsv").write_text("\n".join(task("copy", 600)))
    known = option_names(for_method(preset("smoke"), request.param))
    words = ["train", "--preset", "smoke", "--method", request.param, "--data", str(folder / "copy.tsv"), "--quiet"]
    flags = as_flags({name: value for name, value in WORDS.items() if name in known})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JPEG_DLM_CACHE", str(folder / "cache"))
        assert main([*words, *flags, "--out", str(folder / request.param)]) == 0
        yield folder / request.param


@pytest.fixture
def source(run):
    model = load(run, "cpu")
    return ModelSource(model, "m", 64, heldout_blocks(model, None, Console(quiet=True)))


def test_the_command(run, tmp_path, capsys):
    words = ["evaluate", str(run), "--pairs", "-n", "12", "--seeds", "2", "--candidates", "2", "--steps", "1,2", "--quiet"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    rows = result["pairs"]
    assert "scorer" not in result and "another source's references" in shown and "best of 2" in shown
    assert [row["evaluations"] for row in rows] == ([20] if run.name == "ar" else [4, 6])  # of two candidates
    for row in rows:
        assert row["n"] == 12 and row["seeds"] == [0, 1] and row["texts_per_second"] > 0
        assert row["bleu_low"] <= row["bleu_high"] and 0 <= row["exact"] <= 1 and "self_bleu" in row
        assert len(row["samples"]) == 8 and all(s["source"] == s["references"][0] for s in row["samples"])  # copies
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == shown  # also the speed, from the parts


def test_batches_do_not_change_the_targets(source):
    found = []
    for source.batch in (3, 64):
        found.append(pair_scores(source, DiskCache(), Console(quiet=True), 8, [1], {}, candidates=2))
    whole = source.model.generate(source=[pair["source"] for pair in heldout_pairs(source, 8)], seed=1, candidates=2)
    assert [sample["written"] for sample in found[1]["samples"]] == whole
    assert found[0]["samples"] == found[1]["samples"] and found[0]["bleu"] == found[1]["bleu"]


@ONLY_AR  # the other has not learned to write anything
def test_free_evaluation_gives_held_out_sources(run, source, byte_gpt2, tmp_path):
    words = ["evaluate", str(run), "-n", "4", "--scorer", f"hf:{byte_gpt2}", "--quiet", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    [entry] = json.loads((tmp_path / "out" / "results.json").read_text())["entries"]
    model, blocks = source.model, source.blocks
    assert entry["runs"][0]["samples"] == model.to_text(model.sample(4, source=blocks.sources(range(4))))
    assert source.identity(0, {})["sources"] == blocks.fingerprint
    blocks._ends[-1] = 3  # as if there were three rows: their sources repeat
    assert source.write(0, 4, {}, False).texts == model.to_text(model.sample(4, source=blocks.sources([0, 1, 2, 0])))


@ONLY_AR  # the other has none
def test_likelihood_is_of_the_targets_given_their_sources(run, source):
    method, blocks = source.model.method, source.blocks
    nats, tokens = heldout_nats(method, blocks, 5, 1, 0, 2)
    joined = batch_of(blocks, range(5), method.device, joined=True)
    each_BL = method.token_nll(joined.tokens_BL, 0)[:, blocks.source_len :]
    real_BL = blocks.mask(blocks.rows(range(5)))
    assert nats.tolist() == pytest.approx((each_BL * real_BL).sum(1).tolist(), rel=1e-5)
    assert tokens.tolist() == real_BL.sum(1).tolist()


@pytest.mark.parametrize("words", [["--task", "pairs"], ["--pairs", "--candidates", "4"]])
def test_models_without_sources_are_refused(words, micro_folders, capsys):
    assert main(["evaluate", str(micro_folders()), *words, "--quiet"]) == 2
    error = capsys.readouterr().err
    assert "reads no sources" in error and len(error.strip().splitlines()) == 1
