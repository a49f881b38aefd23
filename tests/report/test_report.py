"""Reports: what they hold, that any text stays text, and that damage becomes a sentence."""

import html
import json
from html.parser import HTMLParser

import pytest
from report_folders import HOSTILE, PICTURE, make_results, make_run, make_workshop

from jpeg_dlm.cli.main import main
from jpeg_dlm.report.collect import collect
from jpeg_dlm.report.render import PLAYER, policy, render, single_file, write_report
from jpeg_dlm.report.run_summary import format_summary, run_summary
from jpeg_dlm.util.errors import CheckpointError, UsageError


class Page(HTMLParser):
    """Tags with their attributes, and the text outside of scripts and styles."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags, self.text, self.open = [], "", []
        self.feed(source)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.text += data


def test_a_run(tmp_path):
    (section,) = collect([make_run(tmp_path / "run")]).sections
    facts = dict(section.facts)
    assert facts["steps"] == "20 of 20, finished" and facts["saved"] == "step-00000020" and "torch" in facts
    assert len(facts["ema.safetensors SHA-256"]) == 64
    assert [s["step"] for s in section.snapshots] == [10, 20] and section.snapshots[-1]["texts"][1] == "two\nlines [7] here"
    assert facts["held out"] == "ce 4.5, accuracy 0.125 (step 20)"
    assert section.commands == ["jpeg-dlm train --out 'my run'"]
    assert section.options["train.seed"] == 7
    assert section.figures == [("metrics", PICTURE)]


def test_results_come_before_runs(tmp_path):
    report = collect([make_run(tmp_path / "single"), make_workshop(tmp_path / "shop")])
    titles = [section.title for section in report.sections]
    assert titles[:3] == ["Comparison: a title", "Study rates: a title", "Evaluation: a title"]
    assert titles[3:] == ["Runs and models", "Run single", "Run ar-2", "Run jpeg-dlm-1"]
    comparison = report.sections[0]
    assert comparison.commands == ["jpeg-dlm evaluate one --length 9"]  # word for word, as it was typed
    assert comparison.samples == {"one, 8 euler steps": ["one", "second"]} and len(comparison.figures) == 1
    assert Page(render(report)).text.count("12.5 ± 0.1") == 3


def test_results_of_any_size_are_read(tmp_path):
    folder = make_results(tmp_path / "large")
    result = json.loads((folder / "results.json").read_text())
    result["entries"][0]["runs"][0]["samples"] = ["long " * 200_000, "second"]  # above one MiB, the limit of option files
    (folder / "results.json").write_text(json.dumps(result))
    (section,) = collect([folder]).sections
    assert not section.problems and len(section.tables) == 1


def test_hostile_text_stays_text(tmp_path):
    run = make_run(tmp_path / "run", text=HOSTILE)
    source = render(collect([run, make_results(tmp_path / "results", text=HOSTILE)], title=HOSTILE))
    page = Page(source)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not any(tag == "img" and "onerror" in a for tag, a in page.tags)
    assert HOSTILE.replace("\u202e", "[U+202E]") in page.text and "\u202e" not in source
    (element,) = [a for _, a in page.tags if "data-moments" in a]
    assert json.loads(element["data-moments"])[-1]["texts"][0] == HOSTILE.replace("\u202e", "[U+202E]")
    allowed = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert allowed == policy(PLAYER) and f"<script>{PLAYER}</script>" in source


def test_the_page_is_complete_by_itself(tmp_path):
    source = render(collect([make_workshop(tmp_path / "shop")]))
    page = Page(source)
    links = [a[name] for _, a in page.tags for name in ("src", "href") if name in a]
    assert links and all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    targets = {a["id"] for _, a in page.tags if "id" in a}
    assert {link[1:] for link in links if link.startswith("#")} <= targets
    assert all(a.get("alt") for tag, a in page.tags if tag == "img")


def test_a_player_alone():
    snapshots = [{"step": i, "steps": 2, "t": i / 2, "texts": [text]} for i, text in enumerate(["_", "a </div>", "a dog"])]
    page = Page(single_file(snapshots, "JPEG-DLM <1>", "jpeg-dlm generate --html 'x'"))
    assert "a dog" in page.text and "a </div>" not in page.text  # without its script the last texts are there
    assert "JPEG-DLM <1>" in page.text and "jpeg-dlm generate --html 'x'" in page.text
    assert [json.loads(a["data-moments"]) for _, a in page.tags if "data-moments" in a] == [snapshots]


@pytest.mark.parametrize("method", ["jpeg-dlm", "mdlm"])
def test_generate_writes_the_player(method, micro_folders, tmp_path):
    words = ["generate", str(micro_folders(method)), "-n", "2", "--html", str(tmp_path / "forming.html"), "--device", "cpu"]
    assert main(words) == 0
    page = Page((tmp_path / "forming.html").read_text("utf-8"))
    (moments,) = [json.loads(a["data-moments"]) for _, a in page.tags if "data-moments" in a]
    assert moments[-1]["step"] == moments[-1]["steps"] and len(moments[-1]["texts"]) == 2


def test_damage_is_a_sentence(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    results = make_results(tmp_path / "results")
    (results / "results.json").write_text("{")
    sections = collect([run, results]).sections
    assert "results.json cannot be shown" in sections[0].problems[0]
    assert [sentence.split(" cannot")[0] for sentence in sections[1].problems] == ["The training"]
    assert "cannot be shown" in format_summary(run_summary(run))


def test_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for path in ("empty", "file", "missing"):
        with pytest.raises(UsageError):
            collect([tmp_path / path])
    with pytest.raises(CheckpointError):
        run_summary(tmp_path / "empty")
    with pytest.raises(UsageError):
        write_report(collect([make_results(tmp_path / "results")]), tmp_path / "file")


def test_a_model_and_a_run_that_stopped_in_its_encoder(micro_folders, tmp_path):
    model = run_summary(micro_folders.model())
    assert model["kind"] == "model" and model["method"] == "jpeg-dlm" and model["next"]
    assert "prompts" in model["takes"] and "long text" not in model["takes"]  # it has no blocks of context
    run = tmp_path / "stopped"
    make_run(run / "encoder-training")
    (run / "config.json").write_text((run / "encoder-training" / "config.json").read_text())
    summary = run_summary(run)
    assert summary["stages"] == {"encoder-training": 20} and "--resume" in summary["next"][0]


def test_the_command_line(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["report", str(make_workshop(tmp_path / "shop")), "--out", str(out), "--title", "Mine & yours"]) == 0
    assert str(out / "index.html") in capsys.readouterr().out
    assert html.escape("Mine & yours") in (out / "index.html").read_text("utf-8")
