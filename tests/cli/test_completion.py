"""Completion scripts in the shells that they are for."""

import os
import pty
import select
import shutil
import subprocess
import time

import pytest

from jpeg_dlm.cli.main import VERBS, main

BASH = shutil.which("bash") or "bash"  # as everywhere where there is make
ASK = 'ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _jpeg_dlm; echo "${COMPREPLY[@]}"; }\n'


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The script for bash, in a file."""
    path = tmp_path_factory.mktemp("completion") / "jpeg-dlm.bash"
    with pytest.MonkeyPatch.context() as patch, open(path, "w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["completion", "bash"]) == 0
    return path


@pytest.mark.parametrize("words, offered", [
    ([""], " ".join(VERBS)), (["ge"], "generate"), (["generate", "--so"], "--solver"),
    (["generate", "--dtype", ""], "exact auto fp32 bf16 int8"), (["generate", "--dtype", "=", "b"], "bf16"),
    (["generate", "--dtype", "="], "exact auto fp32 bf16 int8"), (["study", "ab"], "ablations"),
    (["study", "ablations", "--mauve", "o"], "on off"), (["train", "--model.latent-"], "--model.latent-len --model.latent-dim"),
    (["prepare", "--data.packing", ""], "continuous sentences padded"), (["prepare", "--model."], ""),
    (["train", "--preset", "sm"], "smoke"), (["generate", "train", "--resu"], ""), (["completion", ""], "bash zsh fish"),
    (["generate", "runs/"], ""), (["generate", "--out", "te"], ""),
])  # fmt: skip
def test_bash_offers_verbs_options_and_choices(script, words, offered):
    asked = " ".join(f"'{word}'" for word in ["jpeg-dlm", *words])
    done = subprocess.run([BASH, "-c", f"source '{script}'\n{ASK}ask {asked}"], capture_output=True, text=True, check=True)
    found = done.stdout.split()
    assert set(offered.split()) <= set(found) and (words == [""] or found == offered.split()) and done.stderr == ""


def test_bash_completes_names_of_files_as_typed(script, tmp_path):
    (tmp_path / "my run").mkdir()
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        os.execve(BASH, ["bash", "--norc", "--noprofile", "-i"], {"PATH": os.environ["PATH"], "TERM": "dumb", "PS1": "> "})
    try:
        os.write(terminal, f"source '{script}'; echo READY$((1 + 1))\n".encode())
        until(terminal, "READY2")
        os.write(terminal, b"jpeg-dlm gene\tmy\t")
        until(terminal, "jpeg-dlm generate my\\ run/")
    finally:
        os.kill(process, 9)
        os.waitpid(process, 0)
        os.close(terminal)


def until(terminal, wanted, seconds=60):
    """Wait for words in the terminal; the deadline only ends a test that fails."""
    seen, end = "", time.monotonic() + seconds
    while wanted not in seen:
        assert time.monotonic() < end, seen
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 4096).decode(errors="replace")


def test_scripts_of_the_other_shells_hold_every_verb(capsys):
    assert main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out
    assert main(["completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(f"-f -a {verb} -d '" in line for line in lines) for verb in VERBS)
    assert any("from generate' -l dtype -x -a 'exact auto fp32 bf16 int8' -d 'of jpeg-dlm" in line for line in lines)
