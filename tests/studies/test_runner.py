"""Studies that train, from text to picture: nothing trained twice, failures, deviations, budgets, several processes."""

import contextlib
import json
import math
import shutil
import statistics
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from micro import micro_config

from jpeg_dlm.api import load
from jpeg_dlm.checkpoints.checkpoint import latest_checkpoint
from jpeg_dlm.evaluation.evaluate import EvaluationRequest
from jpeg_dlm.evaluation.protocols import PROTOCOLS
from jpeg_dlm.evaluation.scorer import build_scorer
from jpeg_dlm.evaluation.table import markdown
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.options import override, to_dict
from jpeg_dlm.presets import preset
from jpeg_dlm.studies import plan, runner, training_cache
from jpeg_dlm.studies.catalog import STUDIES, Study, Variant, better_text, comparison
from jpeg_dlm.studies.plan import parse_budget, parse_tokens
from jpeg_dlm.studies.plots import draw_curves, draw_study
from jpeg_dlm.studies.tables import at_time, main_table, study_tables
from jpeg_dlm.studies.training_cache import StudyStopped, TrainingCache, training_seconds
from jpeg_dlm.training.metrics import MetricsLog, log_invocation
from jpeg_dlm.training.run import Outcome, train_run
from jpeg_dlm.util.console import Console
from jpeg_dlm.util.distributed import Ranks
from jpeg_dlm.util.errors import UsageError

pytest_plugins = ["tiny_evaluation"]  # fixtures

PAIR = Study(
    "",
    "two variants",
    (Variant("as it is"), Variant("other", {"objective.sigma": 0.1})),
    better_text("It is best as it is", ("as it is", "other")),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One for all studies, as a person would use it."""
    return tmp_path_factory.mktemp("studies")


@pytest.fixture
def trainings(monkeypatch):
    """The configs that are trained, in order; without pictures and samples on the way, which take longer than the training."""
    configs = []
    for name in ("plot_metrics", "write_samples"):
        monkeypatch.setattr(f"jpeg_dlm.training.run.{name}", lambda *a: None)

    def train(config, *args, **options):
        configs.append(config)
        return train_run(config, *args, **options)

    monkeypatch.setattr(training_cache, "train_run", train)
    return configs


def new_cache(folder):
    return TrainingCache(folder, Ranks(), Console(quiet=True))


def request_of(corpus_file, study=PAIR, name="pair", budgets="2steps", **options):
    own = {key: options.pop(key) for key in ("train_seeds", "only") if key in options}
    base = micro_config(data__source=str(corpus_file), **options)
    parsed = parse_tokens(budgets) if "," in budgets else (parse_budget(budgets),) if budgets else ()
    return plan.StudyRequest(name, study, base, {}, parsed, **own)


def compare_of(corpus_file, methods, budgets="6steps", **options):
    return request_of(corpus_file, comparison(plan.titles(methods.split(","))), "compare", budgets, **options)


def run(request, folder, byte_gpt2, seeds=1, n=2, frontier=False):
    cache = new_cache(folder)
    planned = plan.plan(request, cache)
    runner.train(planned, cache)
    evaluation = EvaluationRequest(PROTOCOLS["default"], tuple(range(seeds)), n, mauve="off", frontier=frontier)
    return runner.evaluate(planned, cache, lambda: build_scorer(f"hf:{byte_gpt2}"), evaluation, batch=2, repeats=1)


def test_a_study_runs_and_runs_again_without_training(corpus_file, byte_gpt2, folder, trainings, tmp_path):
    request = request_of(corpus_file, STUDIES["rates"], "rates", only="r = 0.")
    result = run(request, folder, byte_gpt2, seeds=2)
    assert result["errors"] == {} and [r["label"] for r in result["records"]] == list(result["paper"])
    for record in result["records"]:
        assert len(record["by_seed"]["gen_ppl"]) == 2 and record["gen_ppl"] == statistics.fmean(record["by_seed"]["gen_ppl"])
        assert record["parameters"] > 1000 and record["seconds"] > 0 and record["label"] in markdown(study_tables(result))
    assert [b["label"] for b in result["baselines"]] == ["tokens by frequency", "words shuffled", "real text"]
    assert result["scorer_precision"] == "fp32"
    # Neither this study nor one before it in the same folder trained the same configuration.
    keys = [json.dumps(new_cache(folder).options(config), sort_keys=True) for config in trainings]
    assert len(set(keys)) == len(keys)
    assert draw_study(result, "rate", tmp_path / "x.png").stat().st_size > 10_000
    trainings.clear()
    assert run(request, folder, byte_gpt2, seeds=2) == result and not trainings


@pytest.mark.slow
def test_several_trainings_share_encoder_and_steps_and_give_the_deviation(corpus_file, byte_gpt2, tmp_path, trainings):
    request = request_of(
        corpus_file, train_seeds=2, encoder__kind="small", train__encoder_steps=1, train__seed=7, objective__sigma=0.8
    )
    result = run(request, tmp_path, byte_gpt2, seeds=2)
    assert [(c.train.seed, c.objective.sigma) for c in trainings[1:]] == [(7, 0.8), (7, 0.1), (8, 0.8), (8, 0.1)]
    assert [c.method for c in trainings] == ["encoder"] + ["jpeg-dlm"] * 4 and len({c.encoder.name for c in trainings[1:]}) == 1
    table = main_table(result)
    mean, sd = (f([r["gen_ppl"] for r in result["records"][:2]]) for f in (statistics.fmean, statistics.stdev))
    headings = [column.name for column in table.columns]
    assert table.rows[0][headings.index("Gen-PPL")] == {"mean": mean, "sd": sd}
    assert result["records"][0]["encoder_seconds"] > 0 and "encoder's training (min)" in headings  # the budget is not all
    assert [v["trainings"] for v in result["verdicts"]] == [[2, 2]]

    # The comparison of all systems in the same folder finds them.
    cache = new_cache(tmp_path)
    same = plan.plan(replace(request, study=comparison({"jpeg-dlm": "JPEG-DLM"})), cache)
    runner.train(same, cache)
    assert len(trainings) == 5


@pytest.mark.slow
def test_floors_and_ceiling_are_scored_once_for_each_held_out_text(corpus_file, byte_gpt2, tmp_path, trainings):
    texts = Study("", "two texts", tuple(Variant(f"{n} tokens", {"data.token_len": n}) for n in (8, 12)))
    result = run(request_of(corpus_file, texts, "texts", train_seeds=2), tmp_path, byte_gpt2)
    heldout = [baseline["heldout"] for baseline in result["baselines"]]
    assert len(result["records"]) == 4 and len(heldout) == 6 and len(set(heldout)) == 2


def test_a_failing_variant_does_not_cost_the_others(corpus_file, byte_gpt2, tmp_path, trainings, monkeypatch):
    losses = JpegDlm.losses

    def fail(self, batch, noise):
        if self.config.objective.sigma == 0.1 and self.config.train.seed == 43:
            raise RuntimeError("no luck")
        return losses(self, batch, noise)

    monkeypatch.setattr(JpegDlm, "losses", fail)
    result = run(request_of(corpus_file, train_seeds=2), tmp_path, byte_gpt2)
    seeds = [(r["label"], r["seed"]) for r in result["records"]]
    assert seeds == [("as it is", 42), ("as it is", 43), ("other", 42)]  # what worked is kept
    assert result["errors"] == {"other": "RuntimeError: no luck"} and "no luck" in (tmp_path / "error-other.txt").read_text()

    monkeypatch.setattr(JpegDlm, "losses", lambda *a: 1 / 0)
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        run(request_of(corpus_file), tmp_path / "new", byte_gpt2)


def test_a_stop_is_no_failure(corpus_file, tmp_path, monkeypatch):
    monkeypatch.setattr(training_cache, "train_run", lambda *a, **k: Outcome(1, "SIGINT"))
    cache = new_cache(tmp_path)
    with pytest.raises(StudyStopped) as stopped:
        runner.train(plan.plan(request_of(corpus_file), cache), cache)
    assert stopped.value.exit_code == 130


# ---------------------------------------------------------------- all systems


def test_two_systems(corpus_file, byte_gpt2, folder, tmp_path):
    result = run(compare_of(corpus_file, "jpeg-dlm,ar", "2steps"), folder, byte_gpt2)
    ar, ours = result["records"]  # in the paper's order
    assert (ar["label"], ours["label"]) == ("AR", "JPEG-DLM") and ar["tokens"] == ours["tokens"] == 2 * 8 * 12
    assert [row["name"] for row in result["speed"]["rows"]] == ["AR", "AR, KV cache", "JPEG-DLM"]
    table = main_table(result)
    names = [str(row[0]).split(" (degenerate")[0] for row in table.rows]
    assert names == ["AR", "AR, KV cache", "JPEG-DLM", "tokens by frequency", "words shuffled", "real text"]
    headings = [column.name for column in table.columns]
    assert [row[headings.index("paper: Gen-PPL")] for row in table.rows[:3]] == [151.36, None, 96.76]
    assert [row[headings.index("paper: speed")] for row in table.rows[:3]] == [1.0, 1.62, 9.13]
    assert draw_curves(result, tmp_path / "x.png") is None  # one budget
    assert draw_study(result, "speed", tmp_path / "compare.png").stat().st_size > 10_000
    json.dumps(result, allow_nan=False)


@pytest.mark.slow
def test_systems_at_matched_entropy(corpus_file, byte_gpt2, folder):
    request = compare_of(corpus_file, "jpeg-dlm,ar", "2steps")
    plain, result = (run(request, folder, byte_gpt2, frontier=frontier) for frontier in (False, True))
    assert not any("frontier" in record for record in plain["records"]) and "at the entropy of real" not in str(
        main_table(plain)
    )
    for record in result["records"]:
        curve = record["frontier"]
        assert [len(curve["points"]), record["gen_ppl"], record["entropy"]] == [7, curve["gen_ppl"][0], curve["entropy"]]
        assert not curve["reached"] or curve["entropy"] == pytest.approx(curve["real_entropy"])
    assert "at the entropy of real text" in main_table(result).title
    [verdict] = result["verdicts"]
    assert verdict["with"] == result["records"][1]["gen_ppl"] and verdict["measure"] == "gen_ppl"
    json.dumps(result, allow_nan=False)


@pytest.mark.slow
def test_curves_of_several_seeds_are_trained_once_and_scored_on_the_way(corpus_file, byte_gpt2, tmp_path, trainings):
    curves = compare_of(corpus_file, "ar,cosmos", "192,384", train_seeds=2)  # 2 and 4 steps of 8 rows of 12 tokens
    result = run(curves, tmp_path, byte_gpt2)
    assert [(c.method, c.train.seed, c.train.steps) for c in trainings] == [
        (method, seed, steps) for seed in (42, 43) for method, steps in (("ar", 4), ("ar", 4), ("cosmos", 1), ("cosmos", 2))
    ]
    assert {c.train.schedule for c in trainings} == {"constant"}
    curves_of = [(record["label"], record["tokens"], record["seed"]) for record in result["records"]]
    assert sorted(curves_of) == [(label, n, seed) for label in ("AR", "COSMOS") for n in (192, 384) for seed in (42, 43)]
    # The model on the way is that of a training that ends there: the same rows, rates and noise.
    short = new_cache(tmp_path / "short")
    config = replace(trainings[0], train=replace(trainings[0].train, steps=2))
    short.train(config)
    [on_the_way] = tmp_path.glob(f"runs/{result['records'][0]['run']}/models/step-00000002")
    alone = load(short.run_of(config)).method.parameters()
    assert all(torch.equal(a, b) for a, b in zip(alone, load(on_the_way).method.parameters(), strict=True))

    trainings.clear()
    assert run(curves, tmp_path, byte_gpt2) == result and not trainings
    main, curve, equal_time = study_tables(result)
    assert [row[0] for row in curve.rows[:4]] == ["AR", "AR", "COSMOS", "COSMOS"]
    assert "AR" in [row[0] for row in equal_time.rows]
    assert draw_curves(result, tmp_path / "curves.png").stat().st_size > 10_000


def test_systems_with_phases_are_trained_for_each_budget(corpus_file, folder):
    planned = plan.plan(compare_of(corpus_file, "mdlm,duo,langflow", "192,384"), new_cache(folder))
    steps = [(point.config.method, point.config.train.steps, point.step) for point in planned.points]
    anew = [(method, step, step) for method in ("duo", "langflow") for step in (2, 4)]
    assert steps == [("mdlm", 4, 2), ("mdlm", 4, 4), *anew]


def test_a_model_on_the_way_that_is_gone_is_not_replaced_by_a_later_one(corpus_file, tmp_path, trainings):
    cache = new_cache(tmp_path)
    point = plan.plan(compare_of(corpus_file, "ar", "4steps"), cache).points[0]
    cache.train(point.config, steps=[2, 4])
    shutil.rmtree(cache.model_of(point.config, 2))
    with pytest.raises(UsageError, match="step 2"):
        cache.train(point.config, steps=[2, 4])


def test_equal_time_lies_between_the_budgets():
    values = ((1e6, 10.0, 100.0), (4e6, 40.0, 50.0), (16e6, 160.0, 40.0))
    points = [dict(zip(("tokens", "seconds", "gen_ppl"), each, strict=True)) for each in values]
    assert at_time(points, 20.0) == pytest.approx({"gen_ppl": 75.0, "tokens": 2e6})
    assert at_time(points, 160.0)["gen_ppl"] == pytest.approx(40.0) and at_time(points, 5.0) is None


# ---------------------------------------------------------------- before the training


def test_the_plan_is_announced_and_a_budget_inside_the_warm_up_is_warned_of(corpus_file, tmp_path, trainings):
    cache, lines, warned = new_cache(tmp_path), [], []
    cache.console.say, cache.console.warn = lines.append, warned.append
    request = request_of(corpus_file, encoder__kind="small", train__encoder_steps=2, train__warmup=5, budgets="3steps")
    planned = plan.plan(request, cache)
    assert [w for w in warned if "--train.warmup" in w and "as it is" in w]
    runner.announce(planned, cache, EvaluationRequest(PROTOCOLS["default"], (0, 1), 16))
    announced = lines[-1]  # two models and two floors of two seeds, and real text
    assert announced.startswith("Plan: 2 trainings, about ") and "9 sets of 16 texts" in announced
    runner.train(planned, cache)
    runner.announce(planned, cache, EvaluationRequest(PROTOCOLS["default"], (0, 1), 16))
    assert lines[-1].startswith("Plan: 0 trainings")


def test_equal_time_is_measured_once(corpus_file, folder):
    cache = new_cache(folder)
    first = plan.plan(compare_of(corpus_file, "ar", "2s"), cache).points[0].config
    assert first.train.steps >= 1 and first == plan.plan(compare_of(corpus_file, "ar", "2s"), cache).points[0].config


def test_conditions(corpus_file, tmp_path):
    cache, base = new_cache(tmp_path), request_of(corpus_file).base
    epochs = cache.conditions(replace(base, train=replace(base.train, steps=0, epochs=2.0)))
    rows = len(cache.blocks(cache.prepared(base), "train"))
    assert epochs.train.steps == -(-2 * rows // 8)
    # A folder that is reached by another path is still the same.
    (tmp_path / "link").symlink_to(tmp_path)
    other = new_cache(tmp_path / "link")
    assert cache.run_of(cache.conditions(base)).name == other.run_of(other.conditions(base)).name


def test_one_process_makes_the_steps_of_a_preset_for_several(corpus_file, tmp_path, trainings):
    """A preset of 4 devices with 8 rows each: 32 rows a step, and the steps of a quarter of an epoch in such steps."""
    request = request_of(corpus_file, only="as it is", budgets="", train__devices=4, train__steps=0, train__epochs=0.25)
    cache = new_cache(tmp_path)
    planned = plan.plan(request, cache)
    runner.train(planned, cache)
    config = planned.points[0].config
    rows = len(cache.blocks(cache.prepared(config), "train"))
    assert [(c.train.batch, c.train.accumulation, c.train.devices) for c in trainings] == [(8, 4, 1)]
    checkpoint = latest_checkpoint(cache.run_of(config), print)
    assert checkpoint.state["rows_per_step"] == 32 and checkpoint.step == config.train.steps == math.ceil(rows / 4 / 32)
    fewer = replace(config, train=replace(config.train, devices=1))
    assert not cache.finished(cache.run_of(config), fewer)  # a step of other rows is another training


@pytest.mark.parametrize("processes", [1, 2])
def test_training_time_counts_the_rows_of_all_processes(processes, tmp_path):
    config = override(preset("smoke"), {"train.batch": 8, "train.accumulation": 3})
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))
    log_invocation(tmp_path, "jpeg-dlm", 0, processes)
    with MetricsLog(tmp_path / "metrics.jsonl", None) as log:
        for step, rows_per_s in ((10, 100.0), (20, 50.0)):
            log.log(step, {"loss": 1.0, "rows_per_s": rows_per_s})
    assert training_seconds(tmp_path) == pytest.approx(10 * 8 * 3 * processes * (1 / 100 + 1 / 50))
    assert training_seconds(tmp_path, 10) == pytest.approx(10 * 8 * 3 * processes / 100)


# ---------------------------------------------------------------- among other processes

HOLD = """
import sys
from pathlib import Path
from jpeg_dlm.training.lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    input()
"""


@contextlib.contextmanager
def held(lock):
    """A process that holds a lock until it is killed."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdin=-1, stdout=-1, text=True) as child:
        try:
            assert child.stdout.readline() == "held\n"
            yield child
        finally:
            child.kill()


def test_what_another_process_holds_comes_last_and_is_taken_over_when_it_dies(corpus_file, tmp_path, trainings, monkeypatch):
    monkeypatch.setattr(training_cache, "POLL_S", 0.05)
    cache = new_cache(tmp_path)
    planned = plan.plan(request_of(corpus_file, objective__sigma=0.8), cache)
    name = cache.run_of(planned.points[0].config).name
    with held(tmp_path / "locks" / name) as child:
        runner.train(planned, cache, wait=False)
        assert [c.objective.sigma for c in trainings] == [0.1]
        lines = []
        cache.console.say = lambda text: lines.append(text) or ("Waiting" in text and child.kill())
        runner.train(planned, cache)
    waits = [text for text in lines if "Waiting" in text]
    assert len(waits) == 1 and f"Waiting for {name} (process {child.pid} on " in waits[0]
    assert [c.objective.sigma for c in trainings] == [0.1, 0.8]


def test_an_encoder_counts_as_trained_only_when_others_can_read_it(corpus_file, tmp_path, trainings):
    cache = new_cache(tmp_path)
    config = request_of(corpus_file, encoder__kind="small", train__encoder_steps=1).base
    encoder = tmp_path / cache.conditions(config).encoder.name
    (encoder / "encoder.json").unlink()  # as if killed between the last checkpoint and this
    cache.conditions(config)
    assert (encoder / "encoder.json").is_file() and [c.method for c in trainings] == ["encoder", "encoder"]
