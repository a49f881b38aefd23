"""Help of every verb, as golden files: `pytest tests/cli/test_help.py --update-golden` writes them anew."""

import difflib
import subprocess
import sys
from pathlib import Path

import pytest

from jpeg_dlm.cli.main import VERBS, main
from jpeg_dlm.methods.registry import for_method
from jpeg_dlm.options import option_names
from jpeg_dlm.presets import preset

GOLDEN = Path(__file__).parent / "golden"


def help_text(capsys, monkeypatch, *words):
    monkeypatch.setenv("COLUMNS", "128")
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="later versions of argparse lay help out differently")
@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_is_as_recorded(verb, capsys, monkeypatch, request):
    text = help_text(capsys, monkeypatch, *([verb] if verb else []), "--help")
    path = GOLDEN / f"{verb or 'jpeg-dlm'}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(text, "utf-8")
    recorded = path.read_text("utf-8") if path.is_file() else ""
    assert text == recorded, "\n".join(difflib.unified_diff(recorded.splitlines(), text.splitlines(), lineterm=""))


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.iterdir()} == {"jpeg-dlm", *VERBS}


def test_help_of_every_verb_answers_without_torch():
    script = """
import sys
from jpeg_dlm.cli.main import VERBS, main
for words in [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS), ["train", "--help-all"]]:
    try:
        main(words)
    except SystemExit as stop:
        assert stop.code == 0, words
    assert not {"torch", "numpy", "transformers", "rich", "tokenizers", "matplotlib"} & set(sys.modules), words
"""
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)


@pytest.mark.parametrize(
    "verb, method, groups",
    [("prepare", "jpeg-dlm", ("data",)), ("train", "mdlm", None), ("generate", "jpeg-dlm", ("sampler",))],
)
def test_help_all_shows_the_options_of_the_method(verb, method, groups, capsys, monkeypatch):
    chosen = ["--preset", "smoke", "--method", method] if verb == "train" else []
    text = help_text(capsys, monkeypatch, verb, *chosen, "--help-all")
    config = for_method(preset("smoke"), method)
    known = [name for name in option_names(config) if "." in name and (groups is None or name.split(".")[0] in groups)]
    lines = [line.split()[0] for line in text.splitlines() if line.startswith("  --") and "." in line.split()[0]]
    assert lines == [f"--{name.replace('_', '-')}" for name in known]
    assert verb != "train" or f"default: {config.data.token_len})" in text
