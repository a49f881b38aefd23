"""A whole evaluation of a micro model: exact repetition, reuse of results, sweeps, warnings, comparison with the paper."""

import json
import math
from dataclasses import fields, replace

import pytest
from conftest import made_up_text

from jpeg_dlm.accounting.info import describe, format_description
from jpeg_dlm.api import load
from jpeg_dlm.evaluation.entry import EvaluationResult
from jpeg_dlm.evaluation.entry_pictures import draw_lengths, draw_sweep
from jpeg_dlm.evaluation.entry_tables import evaluation_tables, texts_table
from jpeg_dlm.evaluation.evaluate import Evaluation, EvaluationRequest
from jpeg_dlm.evaluation.figures import TextFigures
from jpeg_dlm.evaluation.paper import comparable_rows, paper_figures, paper_tables
from jpeg_dlm.evaluation.protocols import PROTOCOLS
from jpeg_dlm.evaluation.samples import REAL, read_samples
from jpeg_dlm.evaluation.sources import ModelSource, file_sources
from jpeg_dlm.evaluation.summary import warnings, way
from jpeg_dlm.flow import latent_sampler
from jpeg_dlm.machine.console import Console
from jpeg_dlm.methods.registry import for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.results.plain import plain
from jpeg_dlm.results.resumable import Parts
from jpeg_dlm.results.spread import spread
from jpeg_dlm.results.table import markdown
from jpeg_dlm.scorers.language_models import TransformersScorer

pytest_plugins = ["tiny_evaluation", "stand_in"]  # fixtures


@pytest.fixture(scope="module")
def scorer(byte_gpt2):
    return TransformersScorer(str(byte_gpt2))


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
    asked = EvaluationRequest(PROTOCOLS["default"], **({"n": 5, "seeds": (0, 1)} | request))
    evaluation = Evaluation(scorer, asked, Parts(folder), Console(quiet=True))
    return evaluation.result(evaluation.entries(ModelSource(model, "micro", 4, None, reference)))


def without_times(value):
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in ("throughput", "texts_per_second")}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def test_resumed_evaluations_score_nothing_again(micro, scorer, reference, tmp_path, monkeypatch):
    calls = counted(scorer, monkeypatch)
    one = run(micro, scorer, reference, tmp_path, seeds=(0,))
    first = len(calls)
    both = run(micro, scorer, reference, tmp_path)  # only seed 1 is new, real text is not
    second = len(calls) - first
    assert 0 < second < first
    again = run(micro, scorer, reference, tmp_path)
    assert len(calls) == first + second and again == both
    assert both.entries[0].runs[0] == one.entries[0].runs[0]
    names = sorted(p.name.rsplit("-", 1)[0] for p in tmp_path.iterdir())
    assert names == [
        "codec-micro",
        "real",
        "scores-micro-seed0",
        "scores-micro-seed1",
        "texts-micro-seed0",
        "texts-micro-seed1",
    ]
    # A damaged part is made again, and only that one; without the folder everything is, with the same digits.
    next(tmp_path.glob("scores-micro-seed1-*")).write_text('{"key": "cut')
    assert run(micro, scorer, reference, tmp_path) == both and 0 < len(calls) - first - second < first
    assert without_times(plain(run(micro, scorer, reference))) == without_times(plain(both))
    # Another seed or number of steps is another part.
    run(micro, scorer, reference, tmp_path, seeds=(0,), steps=(2,))
    assert any(p.name.startswith("texts-micro-2-seed0") for p in tmp_path.iterdir())


def test_real_texts_as_long_as_the_generated_ones_are_not_cut(scorer, tmp_path):
    """Sentences of varied length are scored whole; real texts far longer than all generated ones are cut to their length."""
    lengths = [4, 8, 12, 16, 20, 24, 28, 32]
    for name, factor in (("ours.txt", 1), ("real.txt", 1), ("long.txt", 100)):
        (tmp_path / name).write_text("\n".join("x" * (factor * length) for length in lengths))
    asked = EvaluationRequest(PROTOCOLS["default"], mauve="off")
    for name, tokens in (("real.txt", lengths), ("long.txt", [max(lengths)] * len(lengths))):
        [source] = file_sources([tmp_path / "ours.txt"], tmp_path / name)
        [entry] = Evaluation(scorer, asked, Parts(None), Console(quiet=True)).entries(source)
        assert entry.frame.cut == max(lengths)
        assert entry.figures["real"].tokens == sum(min(n, entry.frame.cut) for n in tokens) - len(lengths)


def test_a_result_says_everything_needed_to_repeat_it(micro, scorer, reference):
    result = plain(run(micro, scorer, reference))
    assert json.loads(json.dumps(result)) == result
    assert {"version", "protocol", "scorer", "scorer_hash", "scorer_precision", "scorer_context"} <= set(result)
    [entry] = result["entries"]
    assert entry["seeds"] == [0, 1] and len(entry["identity"]["checkpoint_sha256"]) == 64 and entry["config"]["method"]
    assert entry["identity"]["dtype"] == "float32" and {"steps", "solver", "grid", "w"} <= set(entry["sampler"])
    ppl = entry["measures"]["gen_ppl"]
    assert ppl["mean"] == pytest.approx(sum(ppl["values"]) / 2)
    assert ppl["sd"] == pytest.approx(abs(ppl["values"][0] - ppl["values"][1]) / math.sqrt(2))
    real, shuffled = entry["figures"]["real"], entry["figures"]["shuffled"]
    want = math.log(shuffled["gen_ppl"] / ppl["mean"]) / math.log(shuffled["gen_ppl"] / real["gen_ppl"])
    assert entry["way_from_shuffled_to_real"] == pytest.approx(want)
    assert entry["entropy_gap"] == pytest.approx(entry["measures"]["entropy"]["mean"] - real["entropy"])
    assert entry["reconstruction"] is None  # there is no held-out text
    assert any("at least 100" in note for note in entry["notes"])
    assert entry["runs"][0]["throughput"]["texts_per_second"] > 0 and entry["runs"][0]["identity"]["seed"] == 0
    # Real text of the same length: cut to the median of the generated ones.
    assert real["tokens"] <= real["texts"] * (entry["frame"]["cut"] - 1)


def test_the_table_never_shows_a_perplexity_alone(micro, scorer, reference, tmp_path):
    result = run(micro, scorer, reference, seeds=(0,), steps=(1, 2), solvers=("euler", "heun"))
    text = markdown(evaluation_tables(result))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [r.split(" | ")[1] for r in rows[2:6]] == ["1 euler steps", "2 euler steps", "1 heun steps", "2 heun steps"]
    assert rows[6].startswith("| real") and rows[7].startswith("| shuffled") and len(rows) == 8
    assert "Gen-PPL by byte-gpt2, protocol default" in text and "entropy" in rows[0]
    for path in (
        draw_sweep(result.entries, "byte-gpt2", tmp_path / "sweep.png"),
        draw_lengths(result.entries[0].runs[0].lengths, "micro", tmp_path / "lengths.png"),
    ):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_warnings_of_degenerate_text():
    nothing = dict.fromkeys((field.name for field in fields(TextFigures)), 0)
    real = TextFigures(**nothing | {"entropy": 4.0, "repetition_4": 0.02, "degenerate_share": 0.0})
    fine = {"entropy": spread([3.8]), "repetition_4": spread([0.05]), "degenerate_share": spread([0.01])}
    assert warnings(fine, real) == []
    bad = {"entropy": spread([2.0]), "repetition_4": spread([0.6]), "degenerate_share": spread([0.5])}
    assert len(warnings(bad, real)) == 3 and "2.00 nats" in warnings(bad, real)[0]


def test_way_and_spread():
    assert way(100, 1000, 10) == pytest.approx(0.5) and way(5, 7, 7) is None
    assert spread([1.0, 3.0]) == {"mean": 2.0, "sd": pytest.approx(math.sqrt(2)), "values": [1.0, 3.0]}
    assert spread([1.0])["sd"] is None


def test_the_released_protocol_draws_a_random_grid_for_every_32_texts(micro, scorer, reference, monkeypatch):
    drawn, inner = [], latent_sampler.grid_of
    monkeypatch.setattr(latent_sampler, "grid_of", lambda *a: (drawn.append(inner(*a)), drawn[-1])[1])
    options = {"n": 66, "seeds": (0,), "sampler": {"protocol": "released", "grid": "random", "steps": 3}}
    run(micro, scorer, reference, **options)
    assert len(drawn) == 3 and len({tuple(grid.tolist()) for grid in drawn}) == 3


# ---------------------------------------------------------------- the paper


def test_the_papers_tables_are_complete():
    tables = paper_tables()
    assert len(tables["main"]["lm1b"]) == len(tables["main"]["owt1024"]) == 8
    assert [len(tables[k]["rows"]) for k in ("ablation", "regularizers", "lm1b_steps", "cosmos_layers")] == [8, 4, 6, 3]
    assert tables["main"]["owt1024"][5] == {
        "method": "LangFlow", "params_M": 130, "gen_ppl": 36.48, "entropy": 5.244, "mauve": 0.922, "speed": 0.28,
    }  # fmt: skip
    assert tables["lm1b_steps"]["rows"][-1] == {"steps": 256, "gen_ppl": 64.07, "entropy": 4.230, "mauve": 0.933}
    base = tables["regularizers"]["rows"][3]
    assert (
        (base["gen_ppl"], base["mauve"])
        == (48.00, 0.912)
        == tuple(tables["ablation"]["rows"][0][k] for k in ("gen_ppl", "mauve"))
    )


def test_the_rows_that_float32_random_numbers_explain_say_so(fake, tmp_path):
    rows = comparable_rows("owt1024", "gpt2-large", "owt1024")
    noted = {row["name"]: row["note"] for row in rows if "note" in row}
    assert noted == dict.fromkeys(("MDLM", "SEDD-Absorb"), "float32 sampling (--sampler.race-dtype float32)")
    assert not any("note" in row for row in comparable_rows("lm1b", "gpt2-large", "lm1b"))
    (tmp_path / "s.txt").write_text("w1 w2 w3\n")
    fake.name = "gpt2-large"
    evaluation = Evaluation(fake, EvaluationRequest(PROTOCOLS["owt1024"]), Parts(), Console(quiet=True))
    result = evaluation.result([evaluation.entry(file_sources([tmp_path / "s.txt"], tmp_path / "s.txt")[0], {})])
    cells = {row[0]: row[-1] for row in texts_table(result).rows}
    assert cells["MDLM"] == "paper; float32 sampling (--sampler.race-dtype float32)" and cells["Duo"] == "paper"
    described = format_description(describe(for_method(preset("owt1024"), "mdlm")))
    assert "Gen-PPL, float32 sampling (--sampler.race-dtype float32)" in described


def test_the_paper_stands_beside_ours_only_where_they_compare():
    assert {row["name"] for row in comparable_rows("lm1b", "openai-community/gpt2-large", "lm1b")} >= {"AR", "JPEG-DLM"}
    assert len(comparable_rows("owt128", "gpt2-large", "owt128")) == 8
    assert comparable_rows("lm1b", "gpt2-large")  # texts of another program
    assert [row["name"] for row in comparable_rows("lm1b-lower", "gpt2-large", "lm1b", "ELF")] == ["ELF"]
    assert comparable_rows("lm1b-lower", "gpt2-large", "lm1b", "JPEG-DLM") == []
    for protocol, scorer, trained in (
        ("lm1b", "SmolLM2-135M-Instruct-Q4_1", "lm1b"),
        ("lm1b", "gpt2-large", "tiny"),
        ("owt1024", "gpt2-large", "lm1b"),
        ("mdlm", "gpt2-large", "lm1b"),
    ):
        assert comparable_rows(protocol, scorer, trained) == []


def test_a_systems_own_row_of_the_paper_comes_first():
    names = [row["name"] for row in comparable_rows("lm1b", "gpt2-large", "lm1b", "MDLM")]
    assert names[:2] == ["MDLM", "AR"] and len(names) == 8  # the sweep over steps is JPEG-DLM's own
    names = [row["name"] for row in comparable_rows("lm1b", "gpt2-large", "lm1b", "JPEG-DLM")]
    assert names[0] == "JPEG-DLM" and "JPEG-DLM, 8 steps" in names
    cosmos = comparable_rows("owt128", "gpt2-large", "owt128", "COSMOS")
    assert cosmos[0]["name"].startswith("COSMOS") and cosmos[0]["mauve"] == 0.1167 and len(cosmos) == 11


def test_the_papers_figures_by_system():
    assert paper_figures("lm1b") == paper_figures("lm1b", "JPEG-DLM")
    ar = {"total": "130M", "gen_ppl": 41.06, "entropy": 5.583, "mauve": 0.93, "speed": 1.0, "speed_kv_cache": 7.14}
    assert paper_figures("owt1024", "AR") == ar
    assert paper_figures("owt1024", "SEDD-Absorb")["speed"] == 0.25 and paper_figures("tiny", "AR") == {}


def test_several_systems_in_one_table(micro, micro_folders, scorer, reference):
    mdlm, ar = (load(micro_folders(name), "cpu") for name in ("mdlm", "ar"))
    asked = EvaluationRequest(PROTOCOLS["default"], n=3, steps=(1, 2), solvers=("euler",))
    sources = [ModelSource(model, model.config.method, 4, None, reference) for model in (mdlm, ar, micro)]
    evaluation = Evaluation(scorer, asked, Parts(None), Console(quiet=True))
    entries = [entry for source in sources for entry in evaluation.entries(source)]
    # A sampler without steps is evaluated once, one without solvers for each number of steps.
    assert [entry.model.method for entry in entries] == ["mdlm", "mdlm", "ar", "jpeg-dlm", "jpeg-dlm"]
    entries = [replace(entry, model=replace(entry.model, preset="lm1b")) for entry in entries]
    result = EvaluationResult({"scorer": "gpt2-large", "protocol": {"name": "lm1b"}}, entries, {})
    rows = [line.split(" | ")[0] for line in markdown(evaluation_tables(result)).splitlines() if line.startswith("| ")][2:]
    ours = [row for row in rows if "1 x 3" in row]
    assert ours == ["| mdlm (MDLM, 1 x 3)"] * 2 + ["| ar (AR, 1 x 3)"] + ["| jpeg-dlm (JPEG-DLM, 1 x 3)"] * 2
    papers = rows[rows.index("| MDLM") :]  # those of the systems above first
    assert papers[:3] == ["| MDLM", "| AR", "| JPEG-DLM"] and "| Duo" in papers[3:]
    assert "reconstructed" not in markdown(evaluation_tables(result))
