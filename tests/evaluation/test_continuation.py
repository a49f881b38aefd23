"""Continuation of held-out prompts: cases from real documents, scores after a prompt by the chain rule, files and errors."""

from __future__ import annotations

import json
import math

import pytest
import torch

from jpeg_dlm.cli.main import main
from jpeg_dlm.config import DataConfig
from jpeg_dlm.evaluation.scorer import Scorer
from jpeg_dlm.evaluation.tasks import block_cases, completed, conditional
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.prepare import prepare

pytest_plugins = ["tiny_evaluation"]  # fixtures


def test_cases_are_consecutive_parts_of_one_document(document_file, tmp_path):
    data = DataConfig(source=str(document_file), vocab_size=300, token_len=12, packing="padded", holdout=0.2)
    prepare(data, tmp_path / "blocks")
    blocks = Blocks(tmp_path / "blocks", "heldout")
    tokenizer, texts = blocks.tokenizer(), [json.loads(line)["text"] for line in document_file.read_text().splitlines()]
    cases = block_cases(blocks, 2, 1000)
    assert len(cases) > 20 and {len(prompt) for prompt, _ in cases} == {12, 24}
    for prompt, real in cases:
        part = tokenizer.decode([*prompt, *real])
        assert any(part in text for text in texts)
    assert block_cases(blocks, 2, 5) == cases[:5]


def test_the_score_after_a_prompt_is_that_of_its_tokens(byte_gpt2):
    scorer = Scorer(str(byte_gpt2))
    prompts, wholes = ["The cat", "A", "So it"], ["The cat sat down.", "A dog", "Some other beginning"]
    for prompt, whole, score in zip(prompts, wholes, conditional(scorer, prompts, wholes), strict=True):
        ids = torch.tensor([scorer.encode(whole, 96)])
        nll = scorer.token_nll(ids, torch.ones_like(ids).bool())[0]
        shared = len(prompt) if whole.startswith(prompt) else 2  # bytes; 'So it' and 'Some' share two
        assert score.nll_sum == pytest.approx(nll[shared - 1 :].sum().item(), rel=1e-5)
        assert score.n_tokens == len(whole) - shared


def test_from_the_command_line(byte_gpt2, context_folder, document_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    words = ["evaluate", str(context_folder), "--task", "continue", "-n", "12", "--seeds", "2", "--scorer", f"hf:{byte_gpt2}"]
    words += ["--quiet", "--out", str(tmp_path / "out"), "--device", "cpu", "--data", str(document_file)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    rows = result["continue"]
    assert [row["seed"] for row in rows] == [0, 1] and result["entries"] == [] and {row["n"] for row in rows} == {12}
    for row in rows:
        assert set(row["scores"]) == {"written", "real", "written_elsewhere", "real_elsewhere"}
        assert all(math.isfinite(score["perplexity"]) for score in row["scores"].values())
        assert "skipped" in row["mauve"] and 0 <= row["repetition"]["written"] <= 1 and len(row["samples"]) == 8
    assert rows[0]["scores"]["real"] == rows[1]["scores"]["real"] and shown.count("real text") == 1
    assert "perplexity given its prompt" in shown and "given another prompt" in shown
    assert main(words) == 0 and capsys.readouterr().out == shown  # from the parts of before


def test_models_of_one_row_complete_its_second_half(byte_gpt2, micro_folders, micro, corpus_file, tmp_path, monkeypatch):
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    words = ["evaluate", str(micro_folders()), "--task", "continue", "-n", "5", "--scorer", f"hf:{byte_gpt2}", "--quiet"]
    assert main([*words, "--device", "cpu", "--data", str(corpus_file), "--out", str(tmp_path / "out")]) == 0
    [row] = json.loads((tmp_path / "out" / "results.json").read_text())["continue"]
    text = corpus_file.read_text()
    for sample in row["samples"]:
        assert sample["prompt"] in text and sample["real"].strip() in text and sample["written"]
    prompts = [[30, 40, 50], [60, 70]]
    for prompt, ids in zip(prompts, completed(micro, prompts, seed=1), strict=True):
        assert len(ids) == 12 - len(prompt)
