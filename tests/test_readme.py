"""Every command, option and number in the documentation is right."""

from __future__ import annotations

import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from huggingface_hub import ModelCard
from micro import installed_package

from jpeg_dlm import load
from jpeg_dlm.cli.doctor import NEXT
from jpeg_dlm.cli.main import VERBS, build_parser, main
from jpeg_dlm.cli.new_system import TEMPLATE
from jpeg_dlm.evaluation.paper import paper_tables
from jpeg_dlm.flow.sampler import Capability
from jpeg_dlm.methods.base import Method, system_class
from jpeg_dlm.methods.registry import for_method, names
from jpeg_dlm.options import option_names
from jpeg_dlm.presets import preset

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FORMS = sorted((ROOT / ".github").rglob("*.yml"))
OPTIONS = {name for method in names("system") for name in option_names(for_method(preset("tiny"), method))}

KNOWN = {"--method": "ar", "--preset": "tiny"}  # in place of a placeholder


def commands(page: Path) -> list[list[str]]:
    """Every `jpeg-dlm ...` and `torchrun ... -m jpeg_dlm ...` in code, with placeholders as they stand."""
    text = re.sub(r"\\\n\s*", " ", page.read_text("utf-8"))  # a command may take several lines
    code = re.findall(r"`(jpeg-dlm [^`\n]+)`", text) + re.findall(r"^\s*(?:\$ )?(jpeg-dlm .+)$", text, re.MULTILINE)
    code += re.findall(r"torchrun [^`\n]*-(m jpeg_dlm [^`\n&]+)", text)
    code = [re.sub(r"(--method|--preset) NAME", lambda m: f"{m[1]} {KNOWN[m[1]]}", line) for line in code]
    lines = [re.split(r"\s{2,}#|\s+\[(?!MASK)", line)[0].replace("...", "x") for line in code if "--help" not in line]
    return [words[2:] if words[0] == "m" else words[1:] for words in map(shlex.split, lines)]


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[None]:
    """The system that docs/extending.md makes."""
    with installed_package(tmp_path, TEMPLATE, "chain = toy_system:Toy"):
        yield


@pytest.mark.usefixtures("chain")
@pytest.mark.parametrize("page", [*PAGES, *FORMS], ids=lambda p: p.name)
def test_every_command_is_understood(page: Path):
    for words in commands(page):
        assert build_parser(words[0]).parse_args(words).verb in VERBS, f"{page.name}: {words}"


def test_sentences_that_readme_and_demo_show_are_known_to_the_bundled_model(capsys: pytest.CaptureFixture[str]):
    shown = [*commands(ROOT / "README.md"), *map(shlex.split, NEXT)]
    texts = [words for words in shown if words[0] in ("reconstruct", "interpolate", "edit") or "--template" in words]
    assert len(texts) >= 5
    for words in texts:
        assert main(words) == 0, words
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    model, lines = load(), code[1].splitlines() if code else []
    for text in re.findall(r'"([A-Z][^"\[]*\.)"', "\n".join(lines)):
        assert model.tokenizer.known_ids(text, "text")


def test_every_verb_is_in_the_readme():
    text = (ROOT / "README.md").read_text("utf-8")
    assert not [verb for verb in VERBS if not re.search(rf"(`|jpeg-dlm |make ){verb}\b", text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_options_and_files_named_in_the_docs_exist(page: Path):
    text = page.read_text("utf-8")
    sections = "|".join({name.split(".")[0] for name in OPTIONS if "." in name})
    for name in re.findall(rf"--((?:{sections})\.[a-z0-9-]+)", text):
        assert name.replace("-", "_") in OPTIONS, name
    for link, _, anchor in re.findall(r"\]\(([^)#:]*)(#([^)]+))?\)", text):
        target = page.parent / link if link else page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings], (link, anchor)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_rows_of_a_table_have_equal_numbers_of_cells(page: Path):
    tables = re.findall(r"(?:^\|.*\n)+", page.read_text("utf-8"), re.MULTILINE)
    for rows in (table.splitlines() for table in tables):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1, rows[0]  # GFM splits cells even inside code


def test_forms_ask_for_the_doctor_and_workflows_run_the_checks_and_have_no_secrets():
    forms = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in FORMS}
    assert commands(ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml") == [["doctor"]]
    assert commands(ROOT / ".github" / "ISSUE_TEMPLATE" / "gpu.yml") == [["doctor", "--selftest"]]
    assert all(forms[name]["name"] and forms[name]["body"] for name in ("bug", "gpu", "question"))
    [checks] = forms["checks"]["jobs"].values()
    assert checks["runs-on"] == "ubuntu-latest" and ".ci/run" in [step.get("run") for step in checks["steps"]]
    publish = forms["release"]["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and "pypi-publish" in publish["steps"][-1]["uses"]
    assert not any("secrets." in path.read_text("utf-8") for path in FORMS)


def test_citation_says_what_the_package_says():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    said = {"title": "name", "version": "version", "license": "license", "abstract": "description"}
    assert {key: citation[key] for key in said} == {key: project[name] for key, name in said.items()}
    paper = citation["preferred-citation"]
    page = (ROOT / "README.md").read_text("utf-8")
    assert paper["title"] in " ".join(page.split())
    assert all(f"{author['given-names']} {author['family-names']}" in page for author in paper["authors"])


def test_the_values_of_table_1_are_the_papers():
    text = (ROOT / "docs" / "reproduce.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.count(" / ") == 6]
    for column, preset_name in ((2, "lm1b"), (3, "owt1024")):
        stated = {row[0]: [float(number) for number in re.findall(r"[\d.]+", row[column])] for row in rows}
        keys = ("gen_ppl", "entropy", "mauve", "speed", "speed_kv_cache")
        paper = {row["method"]: [row[key] for key in keys if key in row] for row in paper_tables()["main"][preset_name]}
        assert stated == paper


def test_the_model_card_has_metadata_of_the_hub_with_figures_of_its_tables():
    card = ModelCard.load(ROOT / "docs" / "model-card.md")
    data: Any = card.data
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert (data.license, data.library_name) == (project["license"].lower(), project["name"])
    assert data.language and data.eval_results
    ours = next(line for line in card.text.splitlines() if line.startswith("| generated"))  # the stored sampler
    figures = {float(cell) for cell in ours.split("|") if re.fullmatch(r"[\d.]+", cell.strip())}
    said = {result.metric_type: result.metric_value for result in data.eval_results}
    assert said.keys() == {"perplexity", "mauve"} and set(said.values()) <= figures


def test_the_table_of_systems_says_what_their_classes_do():
    text = (ROOT / "docs" / "methods.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")]
    said = {row[0].strip("`"): (row[4], row[5]) for row in rows[1:]}
    assert set(said) == set(names("system"))
    for name, told in said.items():
        cls = system_class(name)
        answers = cls.likelihood is not Method.likelihood
        likelihood = "exact" if cls.exact_likelihood else "bound" if answers else "no"
        assert told == (likelihood, ", ".join(a for a in get_args(Capability) if a in cls.supports)), name


@pytest.mark.parametrize("method", names("system"))
def test_the_page_of_a_system_names_its_options_beyond_the_paper(method: str):
    config, page = for_method(preset("tiny"), method), (ROOT / "docs" / "systems" / f"{method}.md").read_text("utf-8")
    page += (ROOT / "docs" / "systems" / "jpeg-dlm.md").read_text("utf-8") if method == "ldlm" else ""  # to which it refers
    own = [(group, f) for group in ("model", "objective", "sampler") for f in fields(getattr(config, group))]
    beyond = [f"`{group}.{f.name}`" for group, f in own if "not in the paper" in f.metadata.get("help", "")]
    assert not [name for name in beyond if name not in page]


def test_the_page_of_results_is_what_its_tool_writes():
    tool = runpy.run_path(str(ROOT / "tools" / "results_page.py"))
    page = tool["page"]()
    assert (ROOT / "docs" / "results.md").read_text("utf-8") == page, "run python tools/results_page.py"
    assert len(page.split()) <= 2500
    shown = {path.stem for path in (ROOT / "docs" / "results").glob("*.json")}
    assert shown == {*tool["read"]("page")["sections"], "page", "dropped"}
