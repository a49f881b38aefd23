"""The table of all systems: equal budgets, one failure, continuing after a stop, and the files written."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from conftest import MICRO

from jpeg_dlm.api import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.config_io import override
from jpeg_dlm.errors import UsageError
from jpeg_dlm.evaluation.evaluate import EvaluationRequest
from jpeg_dlm.evaluation.protocols import protocol
from jpeg_dlm.machine import dist
from jpeg_dlm.machine.console import Console
from jpeg_dlm.machine.dist import Ranks
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.results.plain import plain
from jpeg_dlm.results.spread import spread
from jpeg_dlm.results.table import markdown
from jpeg_dlm.scorers import language_models
from jpeg_dlm.scorers.language_models import build_scorer
from jpeg_dlm.studies import compare as compare_module
from jpeg_dlm.studies import workshop as workshop_module
from jpeg_dlm.studies.budget import parse_budget, parse_tokens
from jpeg_dlm.studies.compare import Comparison, ScoredPoint, ScoredTraining, evaluate, method_names, plan, points_of, train
from jpeg_dlm.studies.compare_claims import claims_table
from jpeg_dlm.studies.compare_pictures import draw_comparison, draw_curves
from jpeg_dlm.studies.compare_report import at_time, compare_table, compare_tables
from jpeg_dlm.studies.compare_tasks import summarized, task_names
from jpeg_dlm.studies.scored import TrainedScores
from jpeg_dlm.studies.study import read_base
from jpeg_dlm.studies.workshop import StudyStopped, Workshop
from jpeg_dlm.training.run import Outcome, train_run

pytest_plugins = ["tiny_evaluation"]  # fixtures


def asked(corpus_file, methods, budget="6steps"):
    base = override(preset("smoke"), MICRO | {"data.source": str(corpus_file)})
    return Comparison(base, method_names(methods), (parse_budget(budget),), {}, batch=2, repeats=1)


def compare(asked, workshop, scorer, request):
    rows = plan(asked, workshop)
    train(rows, workshop)
    return evaluate(asked, rows, workshop, scorer, request)


def run(asked, folder, byte_gpt2):
    request = EvaluationRequest(protocol("default"), (0, 1), 4, mauve="off")
    return compare(asked, Workshop(folder, Ranks(), Console(quiet=True)), lambda: build_scorer(f"hf:{byte_gpt2}"), request)


def test_two_systems(corpus_file, byte_gpt2, tmp_path, monkeypatch):
    result = run(asked(corpus_file, "jpeg-dlm,ar"), tmp_path, byte_gpt2)
    ar, jpeg = result["rows"]  # in the paper's order
    assert (ar["title"], jpeg["title"]) == ("AR", "JPEG-DLM")
    config = for_method(asked(corpus_file, "ar").base, "ar")
    assert ar["parameters"] == sum(p.numel() for p in build_method(config).parameters()) and jpeg["parameters"] > 5_000
    [ar_point], [jpeg_point] = ar["points"], jpeg["points"]
    assert ar_point.tokens_seen == jpeg_point.tokens_seen == 6 * 8 * 12
    assert min(ar_point.scores.training_seconds, jpeg_point.scores.training_seconds) > 0
    assert jpeg["evaluations"] == jpeg["entry"].model.evaluations == 4 and 0 <= ar_point.scores.measures["words"]["mean"] <= 1
    assert ar["entry"].figures["real"] == jpeg["entry"].figures["real"]  # held against the very same text
    assert [row["name"] for row in result["speed"]["rows"]] == ["AR", "AR, KV cache", "JPEG-DLM"]
    assert result["speed"]["rows"][0]["ratio"] == 1 and result["budgets"][0]["text"] == "6steps"
    text = markdown([compare_table(result)])
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    names = [line.split(" | ")[0].removeprefix("| ").split(" (degenerate")[0] for line in lines[2:]]
    assert names == ["AR", "AR, KV cache", "JPEG-DLM", "*tokens by frequency*", "*words shuffled*", "*real text*"]
    assert result["anchors"]["real"]["words"]["mean"] > 0.9 and result["anchors"]["real"]["copied"]["sd"] is None
    assert len(result["anchors"]["unigram"]["gen_ppl"]["values"]) == 2 and draw_curves(result, tmp_path / "x.png") is None
    assert "151.36" in text and "96.76" in text and "± " in text
    assert draw_comparison(result, tmp_path / "compare.png").stat().st_size > 10_000
    [said] = json.loads(json.dumps(plain(result)))["rows"][1]["points"]
    assert set(said) == {
        "budget", "tokens_seen", "measures", "reconstruction", "training_seconds", "degenerate", "runs"
    }  # fmt: skip

    # The same again trains, writes and scores nothing.
    monkeypatch.setattr(workshop_module, "train_run", lambda *a, **k: pytest.fail("trained twice"))
    again = run(asked(corpus_file, "jpeg-dlm,ar"), tmp_path, byte_gpt2)
    assert again == result


def test_tasks_are_columns_and_what_a_system_does_not_do_is_a_footnote(corpus_file, byte_gpt2, tmp_path, monkeypatch):
    from jpeg_dlm.methods.mdlm import Mdlm

    monkeypatch.setattr(Mdlm, "supports", frozenset({"templates"}))
    both = replace(asked(corpus_file, "mdlm,jpeg-dlm", "2steps"), tasks=task_names("continue, infill"))
    result = run(both, tmp_path, byte_gpt2)
    mdlm, jpeg = result["rows"]
    assert result["tasks"] == ["infill", "continue"] and "error" not in mdlm
    assert mdlm["tasks"]["continue"]["reason"].startswith("MDLM does not take prompts: use ar, ")
    for row in (mdlm, jpeg):
        found = row["tasks"]["infill"]
        each = [r["scores"]["filled"]["perplexity"] for r in found["results"]]  # a seed each
        assert found["measures"]["perplexity"]["mean"] == pytest.approx(sum(each) / 2) and len(each) == 2
        assert found["measures"]["kept"] == {"mean": 1.0, "sd": 0.0, "values": [1.0, 1.0]}
    assert mdlm["tasks"]["infill"]["real"] == jpeg["tasks"]["infill"]["real"]  # held against the very same text
    table = compare_table(result)
    assert "MAUVE of continuations" not in table.columns  # not measured
    place = [table.columns.index(name) for name in ("perplexity of filled texts", "given another prompt")]
    cells = {str(row[0]).split(" (deg")[0]: [str(row[i]) for i in place] for row in table.rows}
    spread = jpeg["tasks"]["continue"]["measures"]["elsewhere"]
    assert cells["JPEG-DLM"][1] == f"{spread['mean']:.1f} ± {spread['sd']:.1f}"
    assert cells["MDLM"][0] and cells["MDLM"][1] == "" and cells["words shuffled"] == ["", ""]
    real = [
        jpeg["tasks"][task]["results"][0]["scores"][of] for task, of in (("infill", "real"), ("continue", "real_elsewhere"))
    ]
    assert cells["real text"] == [f"{score['perplexity']:.1f}" for score in real]
    filled, continued, refused = table.notes
    assert filled.startswith("Infilling: 4 held-out texts, ") and "filled from other texts" in filled
    assert "of 4 held-out texts" in continued and refused == mdlm["tasks"]["continue"]["reason"]
    json.dumps(plain(result))

    # Asked again with one task less, nothing is written or scored anew.
    monkeypatch.setattr("jpeg_dlm.api.Model.sample", lambda *a, **k: pytest.fail("sampled twice"))
    again = run(replace(both, tasks=("infill",)), tmp_path, byte_gpt2)
    assert again["rows"][1]["tasks"]["infill"] == jpeg["tasks"]["infill"] and "continue" not in again["rows"][1]["tasks"]
    with pytest.raises(UsageError, match="Unknown task 'fill': choose some of infill,continue"):
        task_names("infill,fill")


def test_deviations_in_tasks_are_over_trainings_if_there_are_several():
    def model(*recovered):
        scores = {name: {"perplexity": 2.0} for name in ("filled", "real", "other")}
        return {"infill": {"results": [{"kept": 1.0, "recovered": r, "scores": scores} for r in recovered]}}

    [one], two = [summarized([model(0.2, 0.4)])], summarized([model(0.2, 0.4), model(0.5, 0.7)])
    assert one["infill"]["measures"]["recovered"]["values"] == [0.2, 0.4]
    assert two["infill"]["measures"]["recovered"]["values"] == pytest.approx([0.3, 0.6])
    assert len(two["infill"]["results"]) == 4


@pytest.mark.slow
def test_curves_of_several_seeds_are_trained_once_and_scored_on_the_way(corpus_file, byte_gpt2, tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(
        workshop_module, "train_run", lambda c, run, *a, **k: trained.append((c, k["stop_at"])) or train_run(c, run, *a, **k)
    )
    base = override(preset("smoke"), MICRO | {"data.source": str(corpus_file), "encoder.kind": "random"})
    budgets = parse_tokens("192,384")  # 2 and 4 steps of 8 rows of 12 tokens
    curves = Comparison(base, ("ar", "cosmos"), budgets, {}, batch=2, repeats=1, train_seeds=2)
    result = run(curves, tmp_path, byte_gpt2)
    ar, cosmos = result["rows"]
    assert [(c.method, c.train.seed, c.train.steps, stop) for c, stop in trained] == [
        ("ar", 42, 4, 2), ("ar", 42, 4, None), ("cosmos", 42, 1, None), ("cosmos", 42, 2, None),
        ("ar", 43, 4, 2), ("ar", 43, 4, None), ("cosmos", 43, 1, None), ("cosmos", 43, 2, None),
    ]  # fmt: skip
    assert {c.train.schedule for c, _ in trained} == {"constant"}
    for row in (ar, cosmos):
        assert [point.tokens_seen for point in row["points"]] == [192, 384]
        assert [len(point.scores.measures["gen_ppl"]["values"]) for point in row["points"]] == [2, 2]
        first, last = row["points"]
        assert 0 < first.scores.training_seconds and [r.seed for r in last.runs] == [42, 43]
    # The model on the way is that of a training that ends there: the same rows, rates and noise.
    shop = Workshop(tmp_path / "short", Ranks(), Console(quiet=True))
    config = replace(trained[0][0], train=replace(trained[0][0].train, steps=2))
    [alone] = shop.models(config, [2])
    [on_the_way] = tmp_path.glob(f"runs/{ar['points'][0].runs[0].run}/models/step-00000002")
    same = zip(load(alone).method.parameters(), load(on_the_way).method.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)

    trained.clear()
    again = run(curves, tmp_path, byte_gpt2)
    assert again == result and not trained
    main_table, curve, equal_time, recipes = compare_tables(result)
    assert curve.column(0)[:4] == ["AR", "AR", "COSMOS", "COSMOS"] and curve.column(1)[:2] == ["0.00 M", "0.00 M"]
    assert "2 trainings, each the mean over 2 x 4 texts" in main_table.title and "AR" in equal_time.column(0)
    assert "lr 0.0003 -> 0.002" in recipes.rows[0][recipes.columns.index("optimization")]
    assert draw_curves(result, tmp_path / "curves.png").stat().st_size > 10_000


def test_systems_with_phases_are_trained_for_each_budget(corpus_file, tmp_path):
    shop = Workshop(tmp_path, Ranks(), Console(quiet=True))
    curves = replace(asked(corpus_file, "mdlm,duo,langflow"), budgets=parse_tokens("192,384"))
    steps = {name: [(p.config.train.steps, p.step) for p in points_of(curves, shop, name)] for name in curves.methods}
    assert steps == {"mdlm": [(4, 2), (4, 4)], "duo": [(2, 2), (4, 4)], "langflow": [(2, 2), (4, 4)]}


def test_a_model_on_the_way_that_is_gone_is_not_replaced_by_a_later_one(corpus_file, tmp_path):
    shop = Workshop(tmp_path, Ranks(), Console(quiet=True))
    config = shop.budgeted(shop.conditions(for_method(asked(corpus_file, "ar").base, "ar")), parse_budget("4steps"))
    first, _ = shop.models(config, [2, 4])
    shutil.rmtree(first)
    with pytest.raises(UsageError, match="lacks the model of step 2"):
        shop.models(config, [2, 4])


def test_verdicts_are_over_the_trainings_of_the_last_budget():
    def row(title, ppl, mauve):
        scores = TrainedScores({"gen_ppl": spread(ppl), "mauve": spread(mauve)}, None, 1.0, [])
        runs = [ScoredTraining(seed, "run", "model", 1.0) for seed in range(len(ppl))]
        return {"title": title, "points": [ScoredPoint("", 1, scores, runs)]}

    near = row("MDLM", [100.0, 101.0], [0.50, 0.52])
    far = row("AR", [200.0, 202.0], [0.80, 0.82])
    ours = row("JPEG-DLM", [100.0, 102.0], [0.50, 0.52])
    table = claims_table([near, far, ours])
    assert table is not None
    beside, measure, verdict, ends = map(table.columns.index, ("beside", "measure", "verdict", "95% interval"))
    verdicts = {(r[beside], r[measure]): r[verdict] for r in table.rows}
    assert verdicts == {
        ("MDLM", "Gen-PPL (ratio)"): "cannot be told", ("MDLM", "MAUVE"): "cannot be told",
        ("AR", "Gen-PPL (ratio)"): "holds", ("AR", "MAUVE"): "does not hold",
    }  # fmt: skip
    # One variance for all: each of three groups of two has squares 0.0002, so t(3) * sqrt(0.0002 * (1/2 + 1/2)).
    half = 3.182 * 0.0002**0.5
    interval = next(r[ends] for r in table.rows if r[beside] == "AR" and r[measure] == "MAUVE")
    assert interval == f"{-0.3 - half:.3f} to {-0.3 + half:.3f}"
    assert claims_table([near, far]) is None and claims_table([ours]) is None
    assert claims_table([row("AR", [2.0], [0.1]), row("JPEG-DLM", [1.0], [0.2])]) is None, "one training decides nothing"


def test_equal_time_lies_between_the_budgets():
    def point(tokens, seconds, gen_ppl):
        return ScoredPoint("", tokens, TrainedScores({"gen_ppl": spread([gen_ppl])}, None, seconds, []), [])

    points = [point(1e6, 10.0, 100.0), point(4e6, 40.0, 50.0), point(16e6, 160.0, 40.0)]
    assert at_time(points, 20.0) == pytest.approx({"gen_ppl": 75.0, "tokens": 2e6})
    assert at_time(points, 160.0)["gen_ppl"] == pytest.approx(40.0) and at_time(points, 5.0) is None


def test_tokens_must_increase():
    assert [budget.amount for budget in parse_tokens("1M, 2.5M,16M")] == [1e6, 2.5e6, 16e6]
    for text in ("2M,1M", "1M,1M", "1M,,2M", "1min"):
        with pytest.raises(UsageError):
            parse_tokens(text)


def test_a_failing_system_does_not_cost_the_others(corpus_file, byte_gpt2, tmp_path, monkeypatch):
    from jpeg_dlm.methods.ar import Ar

    monkeypatch.setattr(Ar, "losses", lambda *a: (_ for _ in ()).throw(RuntimeError("no luck")))
    result = run(asked(corpus_file, "ar,jpeg-dlm"), tmp_path, byte_gpt2)
    ar, jpeg = result["rows"]
    assert ar["error"] == "RuntimeError: no luck" and "entry" not in ar and "entry" in jpeg
    assert "no luck" in (tmp_path / "error-ar.txt").read_text()
    text = markdown([compare_table(result)])
    assert "| AR | failed |" in text and "AR failed: RuntimeError: no luck" in text


def test_a_stop_is_no_failure(corpus_file, byte_gpt2, tmp_path, monkeypatch):
    monkeypatch.setattr(workshop_module, "train_run", lambda *a, **k: Outcome(1, "SIGTERM"))
    with pytest.raises(StudyStopped) as stopped:
        run(asked(corpus_file, "ar,jpeg-dlm"), tmp_path, byte_gpt2)
    assert stopped.value.exit_code == 143


def test_equal_time_is_measured_once(corpus_file, tmp_path):
    shop = Workshop(tmp_path, Ranks(), Console(quiet=True))
    config = shop.conditions(for_method(asked(corpus_file, "ar").base, "ar"))
    first = shop.budgeted(config, parse_budget("2s"))
    assert first.train.steps >= 1 and first == shop.budgeted(config, parse_budget("2s"))  # measured anew it would differ


def test_one_cause_for_all_is_told_once_and_before_scoring(tmp_path):
    with pytest.raises(UsageError, match="No system could be trained: No text at"):
        compare(asked(tmp_path / "nothing", "ar,mdlm"), Workshop(tmp_path, Ranks(), Console(quiet=True)), pytest.fail, None)


def test_names():
    paper = ("ar", "mdlm", "sedd", "duo", "flm", "langflow", "elf", "cosmos", "jpeg-dlm")
    assert method_names("all") == paper
    assert method_names("jpeg-dlm, ar") == ("ar", "jpeg-dlm")


def test_the_command(corpus_file, byte_gpt2, tmp_path, capsys):
    words = [
        "compare",
        "--methods",
        "ar,mdlm",
        "--preset",
        "smoke",
        "--data",
        str(corpus_file),
        "--budget",
        "2steps",
        "-n",
        "4",
    ]
    words += ["--seeds", "1", "--scorer", f"hf:{byte_gpt2}", "--mauve", "off", "--batch", "2", "--repeats", "1", "--quiet"]
    assert main([*words, "--out", str(tmp_path / "out"), "--train.batch", "4"]) == 0
    shown = capsys.readouterr().out
    assert shown.strip() == (tmp_path / "out" / "compare.md").read_text().strip() and "| MDLM |" in shown
    assert (tmp_path / "out" / "compare.png").is_file()
    assert main([*words, "--out", str(tmp_path / "out"), "--train.batch", "4", "--tasks", "infill"]) == 0
    assert "perplexity of filled texts" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "out"), "--out", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "report.md").read_text()
    assert "perplexity of filled texts" in page and "--tasks infill" in page
    capsys.readouterr()
    assert main(["compare", "--methods", "arr", "--out", str(tmp_path)]) == 2
    assert "Unknown method 'arr'" in capsys.readouterr().err
    assert main(["compare", "--out", str(tmp_path), "--model.hiden", "8"]) == 2
    assert "Unknown option 'model.hiden'; did you mean 'model.hidden'?" in capsys.readouterr().err


def test_options_of_jpeg_dlm_shape_every_system_and_the_others_hold_for_all():
    options = {"model.depth": "3", "train.lr": "0.5", "data.token-len": "24"}
    base, shared = read_base("smoke", "some.txt", options)
    assert shared == {"train.lr": "0.5", "data.token-len": "24", "data.source": "some.txt"}
    ar, elf = (override(for_method(base, name), shared) for name in ("ar", "elf"))
    assert ar.model.depth == elf.model.depth == 3
    assert elf.train.lr == 0.5 != for_method(base, "elf").train.lr  # ELF's own recipe gives way to what was asked for
    assert (ar.data.token_len, ar.data.source) == (24, "some.txt")


def test_the_scorer_computes_where_the_models_do(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(dist, "read_ranks", lambda *_: Ranks(device=torch.device("meta")))
    monkeypatch.setattr(language_models, "build_scorer", lambda spec, device, *_: asked.append(device))
    for name in ("plan", "train"):
        monkeypatch.setattr(compare_module, name, lambda *_, **__: {})

    def stop(asked, rows, workshop, scorer, request):
        scorer()
        raise UsageError("enough")

    monkeypatch.setattr(compare_module, "evaluate", stop)
    assert main(["compare", "--out", str(tmp_path)]) == 2 and asked == ["meta"]
