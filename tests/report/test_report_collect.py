"""What is found in folders, what is said of damage, and what is written."""

import json
import shlex

import pytest
from report_folders import HOSTILE, make_results, make_run, make_workshop, tiny_png

from jpeg_dlm.cli.evaluate_verb import _asked, add_arguments
from jpeg_dlm.cli.main import Parser, main
from jpeg_dlm.cli.options import parse_overrides, split_overrides
from jpeg_dlm.config_io import read_json_file
from jpeg_dlm.errors import UsageError
from jpeg_dlm.files import sha256_file
from jpeg_dlm.report import markdown, page
from jpeg_dlm.report.collect import collect
from jpeg_dlm.report.page_blocks import Course, Details, Facts, Figure, Note, Paragraph, Samples, Verbatim, figures
from jpeg_dlm.report.results import evaluate_command
from jpeg_dlm.report.run_folder import split_samples
from jpeg_dlm.results.resumable import key_of
from jpeg_dlm.results.table import Table
from jpeg_dlm.training.alarms import ADVICE

pytest_plugins = ["stand_in"]  # fixtures


@pytest.fixture
def workshop(tmp_path):
    return make_workshop(tmp_path / "shop")


def parts(section):
    return {part.title: part.blocks for part in section.parts}


def only(kind, blocks):
    return [block for block in blocks if isinstance(block, kind)]


def values(facts):
    return {name: str(value) for name, value in facts.pairs}


def cells(table):
    return [[str(cell) for cell in row] for row in table.rows]


def test_a_run(tmp_path):
    run = make_run(tmp_path / "mine")
    (section,) = collect([run]).sections
    assert section.title == "Run mine" and not only(Note, section.blocks)
    summary = values(only(Facts, section.blocks)[0])
    # 20 steps of 64 rows at 64 rows a second
    assert summary["Optimizer steps"] == "20" and summary["Time of training"] == "0.3 min" and summary["Method"] == "jpeg-dlm"
    assert cells(only(Table, section.blocks)[0]) == [["loss", "4.25", ""], ["accuracy", "", "0.125"], ["ce", "3", "4.5"]]
    assert only(Figure, section.blocks)[0].size == (1200, 400)
    found = parts(section)
    (course,) = only(Course, found["Samples"])
    assert course.steps == (10, 20) and course.texts == (("early",), ("The farmer plants corn.", "two\nlines [7] here", ""))
    (earlier,) = only(Details, found["Samples"])
    assert earlier.summary == "At step 10" and earlier.blocks == (Samples(("early",)),)
    changed = dict(cells(only(Table, found["Configuration"])[0]))
    assert changed == {"train.steps": "20", "data.source": "stories.txt", "train.seed": "7"}
    recorded = values(only(Facts, found["Provenance"])[0])
    checkpoint = run / "checkpoints" / "step-00000020"
    assert recorded["ema.safetensors SHA-256"] == sha256_file(checkpoint / "ema.safetensors")
    assert recorded["Configuration SHA-256"] == key_of(read_json_file(run / "config.json"))
    assert (recorded["Seed"], recorded["Step"], recorded["Data fingerprint"]) == ("7", "20", "d" * 64)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert (recorded["torch"], recorded["Threads"]) == (manifest["versions"]["torch"], str(manifest["threads"]))
    (command,) = only(Verbatim, found["Provenance"])
    assert shlex.split(command.text)[:4] == ["jpeg-dlm", "train", "--config", str(run / "config.json")]


def test_a_workshop(workshop):
    titles = [section.title for section in collect([workshop]).sections]
    assert titles == ["Comparison shop", "A title", "A title", "Evaluation scored", "Runs in shop"]
    *_, runs = collect([workshop]).sections
    (table,) = only(Table, runs.blocks)
    row = ["jpeg-dlm-1", "jpeg-dlm", "20", "4.25", "ce 4.5, accuracy 0.125", "0.3 min"]
    assert cells(table) == [["ar-2", *row[1:]], row]
    assert [block.summary.partition(":")[0] for block in only(Details, runs.blocks)] == ["ar-2", "jpeg-dlm-1"]
    compare = collect([workshop]).sections[0]
    assert cells(only(Table, compare.blocks)[0]) == [["real text", "12.5 ± 0.1"]]
    assert [block.text for block in only(Paragraph, compare.blocks)] == ["By one.", "A note on one."]
    assert only(Figure, compare.blocks)[0].size == (900, 300) and not only(Note, compare.blocks)
    samples = only(Details, parts(compare)["Samples"])[0]
    assert samples.summary == "one, 8 euler steps" and samples.blocks == (Samples(("one", "second")),)
    assert "c" * 64 in cells(only(Table, parts(compare)["Provenance"])[0])[0]


def test_results_of_earlier_versions_show_their_markdown(tmp_path):
    folder = make_results(tmp_path / "old", text=HOSTILE, earlier=True)
    (section,) = collect([folder]).sections
    (text,) = only(Verbatim, section.blocks)
    assert text.text == (folder / "results.md").read_text("utf-8") and "| *real text* | 12.5 ± 0.1 |" in text.text
    assert not only(Table, section.blocks)
    (said,) = only(Paragraph, section.blocks)
    assert "results.md" in said.text and "earlier versions" in said.text
    assert set(parts(section)) == {"Samples", "Configuration", "Provenance"}  # these come from the JSON, as before
    (folder / "results.json").unlink()
    (section,) = collect([folder]).sections
    assert only(Verbatim, section.blocks) == [text]


@pytest.mark.parametrize("tables", [5, [3], [{}], [{"title": "", "columns": ["a"], "rows": [["1", "2"]], "notes": []}]])
def test_tables_of_another_shape_are_a_sentence(tables, tmp_path):
    folder = make_results(tmp_path / "eval")
    result = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps(result | {"tables": tables}))
    report = collect([folder])
    assert "tables cannot be shown" in only(Note, report.sections[0].blocks)[-1].text and page.render(report)


def test_several_runs_are_held_against_each_other(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", steps=40)
    report = collect([a, b, a])
    assert [section.title for section in report.sections] == ["Runs", "Run a", "Run b"] and report.title == "Report on a, b"
    assert [row[2] for row in cells(only(Table, report.sections[0].blocks)[0])] == ["20", "20 of 40"]


def test_alarms_are_told(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "alarms.jsonl").write_text('{"step": 15, "kind": "loss spike", "text": "the loss is 9"}\n')
    blocks = collect([run]).sections[0].blocks
    assert only(Note, blocks)[0].text.startswith("1 alarm was raised")
    assert cells(only(Table, blocks)[0]) == [["15", "loss spike", "the loss is 9", ADVICE["loss spike"]]]


def test_a_model_and_a_stage(micro_folders, tmp_path):
    folder = micro_folders("ar")
    (section,) = collect([folder]).sections
    assert section.title == "Model ar" and values(only(Facts, section.blocks)[0]) == {"Method": "ar", "Preset": "smoke"}
    recorded = values(only(Facts, parts(section)["Provenance"])[0])
    assert recorded["model.safetensors SHA-256"] == sha256_file(folder / "model.safetensors")
    stage = make_run(make_run(tmp_path / "run") / "encoder-training")
    (stage / "config.json").unlink()  # it is in the checkpoint
    (section,) = collect([tmp_path / "run"]).sections
    assert [row[:3] for row in cells(only(Table, parts(section)["Stages before"])[0])] == [
        ["encoder-training", "jpeg-dlm", "20"]
    ]
    assert not only(Note, parts(section)["Stages before"])


def damages(folder):
    """Every file of a folder, missing, cut, filled with other bytes, and with JSON of another shape."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors"):
        before = path.read_bytes()
        for after in (
            None,
            b"",
            before[: len(before) // 2],
            b"\xff\x00\xfe",
            b"[1]\n",
            b'{"train": 3, "rows": 5, "step": "x"}\n',
        ):
            path.unlink() if after is None else path.write_bytes(after)
            yield path, after
            path.write_bytes(before)


def test_damage_is_a_sentence(tmp_path):
    folder = make_results(make_run(tmp_path / "run"), "study-rates", "rows")
    make_results(folder, earlier=True)
    (folder / "request.json").write_text("{}")
    (folder / "lengths.png").write_bytes(tiny_png())
    told = set()
    for path, _ in damages(folder):
        report = collect([folder])
        assert page.render(report) and markdown.render(report, dict.fromkeys(figures(report), "x.png"))
        if any(only(Note, section.blocks) for section in report.sections):
            told.add(path.name)
    known = {"config.json", "metrics.jsonl", "metrics.png", "manifest.json", "state.json", "study-rates.json"}
    assert told >= known | {"results.json", "results.md", "lengths.png"}
    (folder / "metrics.png").write_bytes(b"<svg>")
    assert "metrics.png cannot be shown: it is not a PNG." in [
        n.text for n in only(Note, collect([folder]).sections[-1].blocks)
    ]


def test_refused(tmp_path):
    with pytest.raises(UsageError, match="does not exist: name a run"):
        collect([tmp_path / "nothing"])
    with pytest.raises(UsageError, match="holds nothing to report: name a run, a model, or what evaluate"):
        collect([tmp_path])
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        collect([tmp_path / "file"])


def test_sample_files():
    assert split_samples("[0] a [1] b\n[2] c\n[1] d\n") == ("a [1] b\n[2] c", "d")
    assert split_samples("no numbers\nat all") == ("no numbers\nat all",) and split_samples("") == ()


@pytest.mark.parametrize(
    "words",
    [
        "",
        "a 'b c.txt' --protocol lm1b -n 12 --seeds 2 --seed 3 --steps 4,8 --solver euler,heun --scorer hf:x --reference r.txt",
        "m --likelihood --likelihood-draws 4 --data t.txt",
        "m --sampler.grid-mean -1.5 --sampler.grid uniform",
        "m --task infill -n 8",
        "m --task continue --context-scale 2.5",
    ],
)
def test_the_command_asks_for_the_same(words):
    def asked(line):
        own, rest = split_overrides(shlex.split(line))
        parser = Parser(allow_abbrev=False)
        add_arguments(parser)
        return _asked(parser.parse_args(own), parse_overrides(rest))

    request = asked(words)
    again = evaluate_command(request).removeprefix("jpeg-dlm evaluate ")
    assert asked(again) == request


def test_the_command_line(workshop, tmp_path, capsys):
    out = tmp_path / "deep" / "report"
    assert main(["report", str(workshop), str(workshop / "runs" / "ar-2"), "--out", str(out), "--title", HOSTILE]) == 0
    assert "index.html" in capsys.readouterr().out
    names = sorted(path.name for path in (out / "figures").iterdir())
    assert names == [f"figure-0{i + 1}.png" for i in range(len(figures(collect([workshop, workshop / "runs" / "ar-2"]))))]
    text = (out / "report.md").read_text("utf-8")
    assert all(f"](figures/{name})" in text for name in names) and "<script>" not in text.replace("\\<", "")

    # Replaced by a smaller one: nothing of the first is left, and files of others stay.
    (out / "mine.txt").write_text("x")
    assert main(["report", str(make_results(tmp_path / "eval")), "--out", str(out)]) == 0
    assert sorted(path.name for path in out.rglob("*")) == ["figures", "index.html", "mine.txt", "report.md"]
    assert "Evaluation eval" in (out / "index.html").read_text("utf-8")
    assert main(["report", str(tmp_path / "nothing"), "--out", str(out)]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "eval"), "--out", str(out / "mine.txt")]) == 2
    assert "is a file" in capsys.readouterr().err


def test_the_style_ships():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "report/*.css" in project["tool"]["setuptools"]["package-data"]["jpeg_dlm"]
