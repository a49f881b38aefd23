"""Whole texts of a model with a context, scored beside whole held-out documents."""

from __future__ import annotations

import json

from jpeg_dlm import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.config import DataConfig
from jpeg_dlm.evaluation.whole_texts import documents
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.prepare import prepare

pytest_plugins = ["tiny_evaluation"]  # fixtures


def test_documents_are_those_of_the_file(document_file, tmp_path):
    prepare(
        DataConfig(source=str(document_file), vocab_size=300, token_len=12, packing="padded", holdout=0.2), tmp_path / "rows"
    )
    blocks = Blocks(tmp_path / "rows", "heldout")
    texts = {" ".join(json.loads(line)["text"].split()) for line in document_file.read_text().splitlines()}
    found = list(documents(blocks))
    assert len(found) > 8 and {blocks.tokenizer().decode(ids) for ids in found} <= texts
    rows = blocks.rows(range(len(blocks)))
    assert sum(map(len, found)) == int(((rows != blocks.pad_id) & (rows != blocks.index["eos_id"])).sum())


def test_whole_texts_beside_whole_documents(byte_gpt2, context_folder, document_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    words = [
        "evaluate",
        str(context_folder),
        "--length",
        "30",
        "-n",
        "6",
        "--scorer",
        f"hf:{byte_gpt2}",
        "--quiet",
        "--device",
        "cpu",
    ]
    words += ["--data", str(document_file), "--out", str(tmp_path / "out"), "--context-scale", "2"]
    assert main(words) == 0
    [entry] = json.loads((tmp_path / "out" / "results.json").read_text())["entries"]
    model = load(context_folder, "cpu")
    expected = list(model.generate(6, length=30, context_scale=2))
    same = sum(a == b for a, b in zip(entry["runs"][0]["samples"], expected, strict=True))
    assert same >= 5  # rounding may turn a token over
    assert entry["evaluations"] == 3 * 2 * model.config.sampler.evaluations(12)  # three blocks, each step twice
    assert entry["identity"]["length"] == 30


def test_other_uses_are_refused(context_folder, micro_folder, tmp_path, capsys):
    (tmp_path / "texts.txt").write_text("A text.\n")
    reference = ["--reference", str(tmp_path / "texts.txt")]
    for words in ([str(context_folder), "--task", "continue"], [str(tmp_path / "texts.txt"), *reference]):
        assert main(["evaluate", *words, "--length", "30", "--quiet"]) == 2
        assert "--length is for models that write freely" in capsys.readouterr().err
    assert main(["evaluate", str(micro_folder), "--length", "30", "--quiet", *reference]) == 2
    assert "context-blocks" in capsys.readouterr().err
