"""The adapter in the real lm-evaluation-harness, on tasks made of local files, and its likelihoods against the models' own."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from jpeg_dlm.methods.base import Batch
from jpeg_dlm.util.errors import UsageError
from jpeg_dlm.util.rng import RowNoise

pytest.importorskip("lm_eval", reason="the package lm-eval is not installed: pip install 'jpeg-dlm[lm-eval]'")

CHOICE = """task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
WRITE = """task: local_write
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 4}}
metric_list: [{{metric: exact_match}}]
"""
DOCUMENTS = [
    {"question": "One two", "choices": [" three", " house", " a much longer text than a row can hold"], "answer": 0},
    {"question": "The", "choices": [" cat", " of", " and"], "answer": 1},
    {"question": "", "choices": ["Some", "The", "x"], "answer": 2},
]


def harness(model, **options):
    from jpeg_dlm.integrations.lm_eval import HarnessModel

    return HarnessModel(str(model), device="cpu", **options)


def requests(*args):
    return [SimpleNamespace(args=each) for each in args]


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, text in (("choice", CHOICE), ("write", WRITE)):
        (tmp_path / f"{name}.yaml").write_text(text.format(file=file))
    return tmp_path


@torch.no_grad()
def test_ar_is_exact_and_knows_its_greedy_texts(micro_folders):
    lm = harness(micro_folders("ar"))
    ids = lm.model.tokenizer.encode("One two three")
    context = len(lm.model.tokenizer.encode("One two"))
    want = -lm.method.token_nll(torch.tensor([ids]), context).sum()
    (found, greedy), (whole, _) = lm.loglikelihood(requests(("One two", " three"), ("", "One two three")))
    assert found == pytest.approx(float(want), rel=1e-5) and not greedy
    assert whole == pytest.approx(-float(lm.method.token_nll(torch.tensor([ids]), 0).sum()), rel=1e-5)
    head = lm.method.token_nll(torch.tensor([ids[:context]]), 0).sum()
    assert whole == pytest.approx(found - float(head), rel=1e-5)  # the chain rule
    assert lm.loglikelihood_rolling(requests(("One two three",), ("",))) == [pytest.approx(whole), 0.0]
    best = lm.method.most_probable(torch.tensor([ids]), 0)[0]
    assert best[0] == lm.method.logits(lm.method._states(torch.tensor([ids]), 0))[0, 0].argmax()


@pytest.mark.parametrize("frame", [False, True])
def test_a_long_text_counts_every_token_once(micro_folders, frame):
    lm = harness(micro_folders("ar", data__frame=frame))
    seen = []
    lm.log_p = lambda rows: seen.extend(rows) or [0.0] * len(rows)
    text = "A text that is longer than one row of this model, and then some more."
    lm.loglikelihood_rolling(requests((text,)))
    assert [i for row in seen for i in row.ids[row.first : row.end]] == lm.model.tokenizer.encode(text)
    assert len(seen[-1].ids) == lm.layout.token_len  # the last row has as much context as fits


def test_a_bound_keeps_the_context_and_does_not_depend_on_batches(micro_folders):
    pairs = requests(("One two", " three"), ("One two", " house"), ("The", " cat and the"))
    lm, other = harness(micro_folders("mdlm"), draws=4), harness(micro_folders("mdlm"), draws=4, batch_size=1)
    found = [value for value, _ in lm.loglikelihood(pairs)]
    assert found == pytest.approx([value for value, _ in other.loglikelihood(pairs)], rel=1e-5)
    row = lm.continuation("One two", " three")
    batch = Batch(torch.tensor([row.ids]), source_len=row.first)
    draws = [lm.method.likelihood(batch, RowNoise(0, [d], 0, "cpu", 4)).nats_B for d in range(4)]
    assert found[0] == pytest.approx(-float(torch.cat(draws).mean()), rel=1e-5)


def test_systems_without_a_likelihood_say_so_and_write(micro_folders):
    lm = harness(micro_folders("flm"))
    with pytest.raises(UsageError, match="FLM gives no likelihood"):
        lm.loglikelihood_rolling(requests(("Some text.",)))
    texts = lm.generate_until(requests(("One two", {"until": [" "], "max_gen_toks": 3}), ("", {})))
    assert len(texts) == 2 and " " not in texts[0]
    assert texts == lm.generate_until(requests(("One two", {"until": " ", "max_gen_toks": 3}), ("", {})))


@pytest.mark.slow
def test_the_harness_runs_local_tasks(micro_folders, tasks):
    words = ["--model", "jpeg_dlm", "--model_args", f"model={micro_folders('ar')}", "--tasks", "local_choice,local_write"]
    words += ["--include_path", str(tasks), "--output_path", str(tasks / "out"), "--batch_size", "8", "--device", "cpu"]
    done = subprocess.run([sys.executable, "-m", "jpeg_dlm", "lm-eval", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = (tasks / "out").rglob("results_*.json")
    results = json.loads(path.read_text())["results"]
    lm = harness(micro_folders("ar"))
    right = 0
    for document in DOCUMENTS:
        values = [value for value, _ in lm.loglikelihood(requests(*((document["question"], c) for c in document["choices"])))]
        right += values.index(max(values)) == document["answer"]
    assert results["local_choice"]["acc,none"] == pytest.approx(right / len(DOCUMENTS))
    assert 0 <= results["local_write"]["exact_match,none"] <= 1
