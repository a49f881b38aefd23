"""A whole evaluation of a micro model: exact repetition, reuse of results, sweeps, warnings, comparison with the paper."""

import json
import math
from dataclasses import fields, replace

import pytest
from conftest import made_up_text
from tiny_evaluation import evaluation, untimed

from jpeg_dlm.api import load
from jpeg_dlm.evaluation.paper import comparable_rows, paper_figures, paper_tables
from jpeg_dlm.evaluation.results import TextStats, mean_std, warnings
from jpeg_dlm.evaluation.scorer import Scorer
from jpeg_dlm.evaluation.table import markdown, to_json
from jpeg_dlm.evaluation.tables import evaluation_tables
from jpeg_dlm.evaluation.texts import REAL, ModelSource, file_sources, read_samples

pytest_plugins = ["tiny_evaluation", "stand_in"]  # fixtures


@pytest.fixture(scope="module")
def scorer(byte_gpt2):
    return Scorer(str(byte_gpt2))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "real.txt"
    path.write_text("\n".join(made_up_text(documents=6, seed=3).split("\n\n")), "utf-8")
    return read_samples(path, REAL)


def counted(scorer, monkeypatch):
    """Calls of the scorer's network from here on."""
    calls = []
    inner = scorer.token_nll
    monkeypatch.setattr(scorer, "token_nll", lambda *a: (calls.append(1), inner(*a))[1])
    return calls


def run(model, scorer, reference, folder=None, **request):
    asked = evaluation(scorer, "default", folder, **({"n": 5, "seeds": (0, 1)} | request))
    return asked.result(asked.entries(ModelSource(model, "micro", 4, None, reference)))


def test_resumed_evaluations_score_nothing_again(micro, scorer, reference, tmp_path, monkeypatch):
    calls = counted(scorer, monkeypatch)
    one = run(micro, scorer, reference, tmp_path, seeds=(0,))
    first = len(calls)
    both = run(micro, scorer, reference, tmp_path)  # only seed 1 is new, real text is not
    second = len(calls) - first
    assert 0 < second < first
    again = run(micro, scorer, reference, tmp_path)
    assert len(calls) == first + second and again == both
    assert both["entries"][0].runs[0] == one["entries"][0].runs[0]
    # A damaged part is made again, and only that one; without the folder everything is, with the same digits.
    next(tmp_path.glob("scores-micro-seed1-*")).write_text('{"key": "cut')
    assert run(micro, scorer, reference, tmp_path) == both and 0 < len(calls) - first - second < first
    assert untimed(to_json(run(micro, scorer, reference))) == untimed(to_json(both))


def test_real_texts_as_long_as_the_generated_ones_are_not_cut(scorer, tmp_path):
    """Sentences of varied length are scored whole; in the paper's protocols, real texts far longer than all
    generated ones are cut to their length."""
    lengths = [4, 8, 12, 16, 20, 24, 28, 32]
    for name, factor in (("ours.txt", 1), ("real.txt", 1), ("long.txt", 100)):
        (tmp_path / name).write_text("\n".join("x" * (factor * length) for length in lengths))
    for name, tokens in (("real.txt", lengths), ("long.txt", [max(lengths)] * len(lengths))):
        [source] = file_sources([tmp_path / "ours.txt"], tmp_path / name)
        [entry] = evaluation(scorer, "lm1b", mauve="off").entries(source)
        assert entry.limits.max_real_tokens == max(lengths)
        assert entry.stats["real"].tokens == sum(min(n, entry.limits.max_real_tokens) for n in tokens) - len(lengths)


def test_a_result_says_everything_needed_to_repeat_it(micro, scorer, reference):
    result = to_json(run(micro, scorer, reference))
    assert json.loads(json.dumps(result)) == result
    assert {"version", "protocol", "scorer", "scorer_hash", "scorer_precision", "scorer_context"} <= set(result)
    [entry] = result["entries"]
    assert entry["seeds"] == [0, 1] and len(entry["identity"]["checkpoint_sha256"]) == 64 and entry["config"]["method"]
    assert entry["identity"]["dtype"] == "float32" and {"steps", "solver", "grid", "w"} <= set(entry["sampler"])
    ppl = entry["measures"]["gen_ppl"]
    assert ppl["mean"] == pytest.approx(sum(ppl["values"]) / 2)
    assert ppl["sd"] == pytest.approx(abs(ppl["values"][0] - ppl["values"][1]) / math.sqrt(2))
    real, shuffled = entry["stats"]["real"], entry["stats"]["shuffled"]
    want = math.log(shuffled["gen_ppl"] / ppl["mean"]) / math.log(shuffled["gen_ppl"] / real["gen_ppl"])
    assert entry["log_ppl_position"] == pytest.approx(want)
    assert entry["entropy_gap"] == pytest.approx(entry["measures"]["entropy"]["mean"] - real["entropy"])
    assert any("at least 100" in note for note in entry["notes"])
    assert real["tokens"] <= real["texts"] * (entry["limits"]["max_real_tokens"] - 1)  # cut like the generated ones


def test_warnings_of_degenerate_text():
    nothing = dict.fromkeys((field.name for field in fields(TextStats)), 0)
    names = ("entropy", "repetition_4", "degenerate_share", "distinct_texts", "distinct_2")
    real = TextStats(**nothing | dict(zip(names, (4.0, 0.02, 0.0, 0.99, 0.6), strict=True)))
    measured = lambda *values: {name: mean_std([value]) for name, value in zip(names, values, strict=True)}  # noqa: E731
    assert warnings(measured(3.8, 0.05, 0.01, 0.9, 0.3), real) == []
    bad = warnings(measured(2.0, 0.6, 0.5, 0.5, 0.1), real)
    assert len(bad) == 5 and "2.00 nats" in bad[0] and "50% of texts are different" in bad[3] and "0.100" in bad[4]


# ---------------------------------------------------------------- the paper


def test_the_papers_tables_are_complete():
    tables = paper_tables()
    assert len(tables["main"]["lm1b"]) == len(tables["main"]["owt1024"]) == 8
    assert [len(tables[k]["rows"]) for k in ("ablation", "regularizers", "lm1b_steps", "cosmos_layers")] == [8, 4, 6, 3]
    ar = {"total": "130M", "gen_ppl": 41.06, "entropy": 5.583, "mauve": 0.93, "speed": 1.0, "speed_kv_cache": 7.14}
    assert paper_figures("owt1024", "AR") == ar and paper_figures("tiny", "AR") == {}
    noted = {row["name"]: row["note"] for row in comparable_rows("owt1024", "gpt2-large", "owt1024") if "note" in row}
    assert noted == dict.fromkeys(("MDLM", "SEDD-Absorb"), "float32 sampling")


@pytest.mark.parametrize(
    ("protocol", "preset", "title", "first", "count"),
    [
        ("lm1b", "lm1b", None, "AR", 13),
        ("lm1b", None, None, "AR", 13),  # texts of another program
        ("lm1b", "lm1b", "MDLM", "MDLM", 8),  # the sweep over steps is JPEG-DLM's own
        ("lm1b", "lm1b", "JPEG-DLM", "JPEG-DLM", 13),
        ("owt128", "owt128", None, "JPEG-DLM, Base", 8),
        ("owt128", "owt128", "COSMOS", "COSMOS, r = 1, layer -1", 11),
        ("lm1b-lower", "lm1b", "ELF", "ELF", 1),
        ("lm1b-lower", "lm1b", "JPEG-DLM", None, 0),
        ("lm1b", "tiny", None, None, 0),
        ("owt1024", "lm1b", None, None, 0),
        ("mdlm", "lm1b", None, None, 0),
    ],
)
def test_the_paper_stands_beside_ours_only_where_they_compare(protocol, preset, title, first, count):
    names = [row["name"] for row in comparable_rows(protocol, "openai-community/gpt2-large", preset, title)]
    assert len(names) == count and (names or [None])[0] == first
    assert comparable_rows(protocol, "SmolLM2-135M-Instruct-Q4_1", preset, title) == []


def test_several_systems_in_one_table(micro, micro_folders, scorer, reference):
    mdlm, ar = (load(micro_folders(name), "cpu") for name in ("mdlm", "ar"))
    sources = [ModelSource(model, model.config.method, 4, None, reference) for model in (mdlm, ar, micro)]
    asked = evaluation(scorer, n=3, sampler={"solver": ("euler",), "steps": (1, 2)})
    entries = [entry for source in sources for entry in asked.entries(source)]
    # A sampler without steps is evaluated once, one without solvers for each number of steps.
    assert [entry.model.method for entry in entries] == ["mdlm", "mdlm", "ar", "jpeg-dlm", "jpeg-dlm"]
    entries = [replace(entry, model=replace(entry.model, preset="lm1b")) for entry in entries]
    result = {"scorer": "gpt2-large", "protocol": {"name": "lm1b"}, "entries": entries}
    rows = [line.split(" | ")[0] for line in markdown(evaluation_tables(result)).splitlines() if line.startswith("| ")][2:]
    ours = [row for row in rows if "1 x 3" in row]
    assert ours == ["| mdlm (MDLM, 1 x 3)"] * 2 + ["| ar (AR, 1 x 3)"] + ["| jpeg-dlm (JPEG-DLM, 1 x 3)"] * 2
    papers = rows.index("| *MDLM*")
    assert rows[papers - 2 : papers] == ["| real (3)", "| shuffled (3)"]  # no perplexity stands alone
    papers = rows[papers:]  # those of the systems above first
    assert papers[:3] == ["| *MDLM*", "| *AR*", "| *JPEG-DLM*"] and "| *Duo*" in papers[3:]
    assert "reconstructed" not in markdown(evaluation_tables(result))
