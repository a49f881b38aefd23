"""Studies that train: each from text to picture, nothing trained twice, failures, deviations, several processes."""

import contextlib
import json
import statistics
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from conftest import MICRO

from jpeg_dlm.config_io import override
from jpeg_dlm.errors import UsageError
from jpeg_dlm.evaluation.entry import EvaluationEntry, ModelFacts
from jpeg_dlm.evaluation.evaluate import EvaluationRequest
from jpeg_dlm.evaluation.protocols import protocol
from jpeg_dlm.folders.checkpoint import latest_checkpoint
from jpeg_dlm.machine.console import Console
from jpeg_dlm.machine.dist import Ranks
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.presets import preset
from jpeg_dlm.results.table import markdown
from jpeg_dlm.scorers.language_models import build_scorer
from jpeg_dlm.studies import compare, trained
from jpeg_dlm.studies import workshop as workshop_module
from jpeg_dlm.studies.budget import parse_budget
from jpeg_dlm.studies.compare import Comparison
from jpeg_dlm.studies.scored import over_trainings
from jpeg_dlm.studies.study import TrainingStudy, Variant, Variants
from jpeg_dlm.studies.trained import ask
from jpeg_dlm.studies.variant_pictures import draw_rows
from jpeg_dlm.studies.variants import TRAINING
from jpeg_dlm.studies.workshop import StudyStopped, Workshop, training_seconds
from jpeg_dlm.training.metrics import MetricsLog
from jpeg_dlm.training.record import Invocation
from jpeg_dlm.training.run import Outcome, train_run

pytest_plugins = ["tiny_evaluation"]  # fixtures

COUNTS = {
    "ablations": 8, "regularizers": 4, "rates": 4, "widths": 4, "joint-vs-two-stage": 9, "encoder-layers": 2, "recipes": 12,
    "objectives": 15, "remedies": 9, "codecs": 9, "decoders": 9,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One for all studies, as a person would use it."""
    return tmp_path_factory.mktemp("workshop")


@pytest.fixture
def trainings(monkeypatch):
    """The configs that are trained, in order; without pictures and samples on the way, which take longer than the training."""
    found = []
    for name in ("plot_metrics", "write_samples"):
        monkeypatch.setattr(f"jpeg_dlm.training.run.{name}", lambda *a: None)
    monkeypatch.setattr(
        workshop_module, "train_run", lambda config, *a, **k: found.append(config) or train_run(config, *a, **k)
    )
    return found


def shop(folder):
    return Workshop(folder, Ranks(), Console(quiet=True))


def question(study, corpus_file, train_seeds=1, only="", **options):
    values = MICRO | {"encoder.kind": "random"} | options
    values = {name: value for name, value in values.items() if name not in TRAINING[study].sets}
    return ask(study, "smoke", str(corpus_file), values, parse_budget("2steps"), train_seeds, only)


def run(asked, folder, byte_gpt2, seeds=1):
    workshop = shop(folder)
    planned = trained.plan(asked, workshop)
    trained.train(planned, workshop)
    request = EvaluationRequest(protocol("default"), tuple(range(seeds)), 2, mauve="off")
    return trained.evaluate(planned, workshop, lambda: build_scorer(f"hf:{byte_gpt2}"), request)


@pytest.mark.parametrize("study", COUNTS)
def test_every_study_runs_and_runs_again_without_training(study, corpus_file, byte_gpt2, folder, trainings, tmp_path):
    outcome = run(question(study, corpus_file), folder, byte_gpt2, seeds=2)
    rows = outcome.result["rows"]
    assert len(rows) == COUNTS[study] and not [row for row in rows if "error" in row]
    for row in rows:
        assert set(row) == {
            "label", "paper", "facts", "runs", "measures", "reconstruction", "training_seconds", "parameters", "degenerate"
        }  # fmt: skip
        assert len(row["measures"]["gen_ppl"]["values"]) == 2 and row["parameters"] > 1000 and row["runs"][0]["steps"] == 2
        assert row["label"] in markdown(outcome.tables)
    assert outcome.result["real"]["texts"] == 2
    # Neither this study nor one before it in the same folder trained the same configuration.
    keys = [json.dumps(shop(folder).options(config), sort_keys=True) for config in trainings]
    assert len(set(keys)) == len(keys) and len([config for config in trainings if config.method != "encoder"]) <= len(rows)
    paths = outcome.write(tmp_path, study)
    assert [p.name for p in paths] == [f"study-{study}{end}" for end in (".json", ".md", ".png")]
    assert paths[2].stat().st_size > 10_000 and outcome.result.items() <= json.loads(paths[0].read_text()).items()
    trainings.clear()
    again = run(question(study, corpus_file), folder, byte_gpt2, seeds=2)
    assert again.result == outcome.result and not trainings


@pytest.fixture
def pair(monkeypatch):
    """A study of two variants: the preset as it is, and with another sigma."""

    def variants(base):
        return Variants(
            [Variant("as it is", base), Variant("other", replace(base, objective=replace(base.objective, sigma=0.1)))]
        )

    monkeypatch.setitem(TRAINING, "pair", TrainingStudy("two variants", variants, draw_rows))


def test_several_trainings_share_encoder_and_steps_and_give_the_deviation(pair, corpus_file, byte_gpt2, tmp_path, trainings):
    asked = question("pair", corpus_file, 2, **{"encoder.kind": "small", "train.encoder_steps": 1, "train.seed": 7})
    outcome = run(asked, tmp_path, byte_gpt2, seeds=2)
    assert [(c.method, c.train.seed, c.objective.sigma) for c in trainings] == [
        ("encoder", 7, 0.8), ("jpeg-dlm", 7, 0.8), ("jpeg-dlm", 7, 0.1), ("jpeg-dlm", 8, 0.8), ("jpeg-dlm", 8, 0.1),
    ]  # fmt: skip
    assert len({c.encoder.name for c in trainings[1:]}) == 1
    row = outcome.result["rows"][0]
    means = [statistics.fmean(r["measures"]["gen_ppl"]["values"]) for r in row["runs"]]
    assert [len(r["measures"]["gen_ppl"]["values"]) for r in row["runs"]] == [2, 2] and means[0] != means[1]
    found = row["measures"]["gen_ppl"]
    assert found["values"] == pytest.approx(means) and found["mean"] == pytest.approx(sum(means) / 2)
    assert found["sd"] == pytest.approx(abs(means[0] - means[1]) / 2**0.5)
    assert "deviation over 2 trainings, each the mean over 2 x 2 texts" in markdown(outcome.tables)

    # The comparison of all systems in the same folder finds them.
    workshop = shop(tmp_path)
    rows = compare.plan(Comparison(asked.base, ("jpeg-dlm",), (asked.budget,), asked.shared, train_seeds=2), workshop)
    compare.train(rows, workshop)
    found = [path.parent.parent.name for path in rows["jpeg-dlm"].models.values()]
    assert found == [run["run"] for run in row["runs"]] and len(trainings) == 5


def test_what_is_trained_so_far_is_scored_without_training_more(pair, corpus_file, byte_gpt2, tmp_path, trainings):
    asked, workshop = question("pair", corpus_file, 2), shop(tmp_path)
    planned = trained.plan(asked, workshop)
    with pytest.raises(UsageError, match="No training of 'pair' has ended yet: leave --so-far out"):
        trained.so_far(planned, workshop)
    own = question("pair", corpus_file, **{"encoder.kind": "small", "train.encoder_steps": 1})
    still = Workshop(tmp_path, Ranks(), Console(quiet=True), trains=False)
    with pytest.raises(UsageError, match="has ended yet"):  # nor is an encoder trained
        trained.so_far(trained.plan(own, still), still)
    assert not trainings
    workshop.train(planned.rows[0].configs[0])
    count = len(trainings)
    part = trained.so_far(trained.plan(asked, workshop), workshop)
    request = EvaluationRequest(protocol("default"), (0,), 2, mauve="off")
    outcome = trained.evaluate(part, workshop, lambda: build_scorer(f"hf:{byte_gpt2}"), request)
    (row,) = outcome.result["rows"]
    assert row["label"] == "as it is" and [run["seed"] for run in row["runs"]] == [42] and len(trainings) == count
    assert outcome.result["left_out"] == ["as it is: 1 of 2 trainings so far.", "other: 0 of 2 trainings so far."]

    # Likewise for the comparison of all systems: a model at one of two budgets.
    budgets = tuple(parse_budget(text) for text in ("2steps", "4steps"))
    rows = compare.plan(Comparison(asked.base, ("jpeg-dlm", "ar"), budgets, asked.shared), workshop)
    with pytest.raises(UsageError, match="No system has been trained yet"):
        compare.so_far(rows, workshop)
    config = rows["ar"].points[42][0].config
    path = workshop.model_of(config, 2)
    path.mkdir(parents=True)  # as `Workshop.models` leaves it
    found = compare.so_far(compare.plan(Comparison(asked.base, ("jpeg-dlm", "ar"), budgets, asked.shared), workshop), workshop)
    assert list(found) == ["ar"] and found["ar"].models == {(42, 0): path}


def test_a_failing_variant_does_not_cost_the_others(pair, corpus_file, byte_gpt2, tmp_path, trainings, monkeypatch):
    losses = JpegDlm.losses

    def fail(self, batch, noise):
        if self.config.objective.sigma == 0.1 and self.config.train.seed == 43:
            raise RuntimeError("no luck")
        return losses(self, batch, noise)

    monkeypatch.setattr(JpegDlm, "losses", fail)
    outcome = run(question("pair", corpus_file, 2), tmp_path, byte_gpt2)
    first, second = outcome.result["rows"]
    assert "error" not in first and len(first["runs"]) == 2
    assert second["error"] == "RuntimeError: no luck" and [r["seed"] for r in second["runs"]] == [42]  # what worked is kept
    assert "other failed: RuntimeError: no luck" in markdown(outcome.tables)
    assert "no luck" in (tmp_path / "error-pair-other.txt").read_text()

    monkeypatch.setattr(JpegDlm, "losses", lambda *a: 1 / 0)
    with pytest.raises(UsageError, match="No variant could be trained: ZeroDivisionError"):
        run(question("pair", corpus_file), tmp_path / "new", byte_gpt2)


def test_a_stop_is_no_failure(pair, corpus_file, tmp_path, monkeypatch):
    monkeypatch.setattr(workshop_module, "train_run", lambda *a, **k: Outcome(1, "SIGINT"))
    workshop = shop(tmp_path)
    with pytest.raises(StudyStopped) as stopped:
        trained.train(trained.plan(question("pair", corpus_file), workshop), workshop)
    assert stopped.value.exit_code == 130


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


def test_what_another_process_holds_comes_last_and_is_taken_over_when_it_dies(
    pair, corpus_file, tmp_path, trainings, monkeypatch
):
    monkeypatch.setattr(workshop_module, "POLL_S", 0.05)
    workshop = shop(tmp_path)
    planned = trained.plan(question("pair", corpus_file), workshop)
    run_name = workshop.run_of(planned.rows[0].configs[0]).name
    with held(tmp_path / "locks" / run_name) as child:
        trained.train(planned, workshop, wait=False)
        assert [c.objective.sigma for c in trainings] == [0.1] and not planned.rows[0].runs
        told = []
        workshop.console.say = lambda text: told.append(text) or ("Waiting" in text and child.kill())
        trained.train(planned, workshop)
    waits = [text for text in told if "Waiting" in text]
    assert len(waits) == 1 and f"Waiting for {run_name} (process {child.pid} on " in waits[0]
    assert [c.objective.sigma for c in trainings] == [0.1, 0.8] and planned.rows[0].runs[42].name == run_name


def test_text_is_prepared_by_one_process_at_a_time(corpus_file, tmp_path, monkeypatch):
    monkeypatch.setattr(workshop_module, "POLL_S", 0.05)
    workshop = shop(tmp_path)
    config = question("rates", corpus_file).base
    prepared = workshop.prepared(config)
    prepared.rename(tmp_path / "away")
    with held(tmp_path / "locks" / prepared.name) as child:
        seen = []
        workshop.console.say = lambda text: "Waiting" in text and (seen.append(prepared.exists()), child.kill())
        assert workshop.prepared(config) == prepared
    assert seen == [False] and (prepared / "index.json").is_file()


def test_an_encoder_counts_as_trained_only_when_others_can_read_it(corpus_file, tmp_path, trainings):
    workshop = shop(tmp_path)
    config = replace(question("rates", corpus_file).base, method="jpeg-dlm")
    config = replace(config, encoder=replace(config.encoder, kind="small"), train=replace(config.train, encoder_steps=1))
    folder = tmp_path / workshop.conditions(config).encoder.name
    (folder / "encoder.json").unlink()  # as if killed between the last checkpoint and this
    workshop.conditions(config)
    assert (folder / "encoder.json").is_file() and [c.method for c in trainings] == ["encoder", "encoder"]


def test_conditions(corpus_file, tmp_path):
    workshop = shop(tmp_path)
    base = question("rates", corpus_file).base
    epochs = workshop.conditions(replace(base, train=replace(base.train, steps=0, epochs=2.0)))
    rows = len(workshop.blocks(workshop.prepared(base), "train"))
    assert epochs.train.steps == -(-2 * rows // 8)
    # A workshop that is reached by another path is still the same.
    (tmp_path / "link").symlink_to(tmp_path)
    other = shop(tmp_path / "link")
    assert workshop.run_of(workshop.conditions(base)).name == other.run_of(other.conditions(base)).name


def test_one_process_makes_the_steps_of_a_preset_for_several(corpus_file, tmp_path, trainings):
    """A preset of 4 devices with 8 rows each: 32 rows a step, and the steps of two epochs in such steps."""
    asked = question("widths", corpus_file, only="d = 16", **{"train.devices": 4, "train.steps": 0, "train.epochs": 2.0})
    workshop = shop(tmp_path)
    planned = trained.plan(replace(asked, budget=None), workshop)
    trained.train(planned, workshop)
    [config], [run] = planned.rows[0].configs, planned.rows[0].runs.values()
    rows = len(workshop.blocks(workshop.prepared(config), "train"))
    assert [(c.train.batch, c.train.accumulation, c.train.devices) for c in trainings] == [(8, 4, 1)]
    checkpoint = latest_checkpoint(run, print)
    assert checkpoint.state["rows_per_step"] == 32 and checkpoint.step == config.train.steps == -(-2 * rows // 32)
    assert workshop.finished(run, config)
    fewer = replace(config, train=replace(config.train, devices=1))
    assert not workshop.finished(run, fewer)  # a step of other rows is another training


@pytest.mark.parametrize("processes", [1, 2])
def test_training_time_counts_the_rows_of_all_processes(processes, tmp_path):
    config = override(preset("smoke"), {"train.batch": 8, "train.accumulation": 3})
    Invocation(tmp_path, config, processes).begin("jpeg-dlm", 0)
    with MetricsLog(tmp_path / "metrics.jsonl", None) as log:
        for step, rows_per_s in ((10, 100.0), (20, 50.0)):
            log.log(step, {"loss": 1.0, "rows_per_s": rows_per_s})
    assert training_seconds(tmp_path) == pytest.approx(10 * 8 * 3 * processes * (1 / 100 + 1 / 50))
    assert training_seconds(tmp_path, 10) == pytest.approx(10 * 8 * 3 * processes / 100)


def test_what_a_study_sets_itself_cannot_be_given():
    with pytest.raises(UsageError, match="'encoder-layers' sets encoder.layer itself: leave --encoder.layer out"):
        ask("encoder-layers", "tiny", None, {"encoder.layer": "-2"})
    with pytest.raises(UsageError, match="'rates' sets model.latent-len itself"):
        ask("rates", "tiny", None, {"model.latent-len": "4"})


def test_one_training_is_spread_by_its_sampling_seeds():
    nothing = dict.fromkeys((field.name for field in fields(ModelFacts)), 0)

    def made(gen_ppl, kept=None, degenerate=()):
        base = dict.fromkeys((field.name for field in fields(EvaluationEntry)), ())
        measures = {"gen_ppl": {"mean": gen_ppl, "sd": 2.0, "values": [gen_ppl - 2, gen_ppl + 2]}}
        model = ModelFacts(**nothing | {"reconstruction": kept})
        return EvaluationEntry(**base | {"measures": measures, "model": model, "degenerate": degenerate})

    one = over_trainings([made(10.0)], [10])
    assert one.measures["gen_ppl"]["sd"] == 2.0 and one.reconstruction is None
    three = over_trainings([made(10.0, 0.5), made(14.0, degenerate=["x"]), made(12.0)], [10, 20, 10])
    assert (three.measures["gen_ppl"]["mean"], three.measures["gen_ppl"]["sd"]) == (12.0, 2.0)
    assert three.training_seconds == pytest.approx(40 / 3) and three.degenerate == ["x"]
    assert three.reconstruction["values"] == [0.5]
