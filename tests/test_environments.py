"""Real processes in poor environments: no network, no home, ASCII only, closed or full streams, odd names."""

import os
import subprocess
import sys

import pytest
from conftest import made_up_text, micro_flags

KEPT = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
POOR = KEPT | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HOME": "/dev/null/x"}
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TMPDIR": "/no/such/folder"}
# Whatever reaches for the network, the resolver included, ends the process at once.
NO_NETWORK = """
import os, sys
def hook(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "urllib.Request") and not isinstance(args[-1], (str, bytes)):
        os.write(2, f"NETWORK {event} {args}\\n".encode()); os._exit(77)
sys.addaudithook(hook)
from jpeg_dlm.cli.main import main
raise SystemExit(main())
"""


def run(*words, env=None, redirect="", code=("-m", "jpeg_dlm")):
    command = [sys.executable, *code, *map(str, words)]
    command = ["sh", "-c", f'"$@" {redirect}', "sh", *command] if redirect else command
    return subprocess.run(command, env=POOR | (env or {}), capture_output=True, timeout=300)


@pytest.mark.parametrize("redirect, code", [(">&-", 0), ("2>&-", 0), ("> /dev/full", 1), ("| head -n 0", 0)])
def test_closed_and_full_streams_give_no_traceback(redirect, code):
    done = run("info", "--preset", "smoke", "--options", redirect=redirect)
    assert done.returncode == code and b"Traceback" not in done.stderr and b"ignored" not in done.stderr
    assert (b"No space left" in done.stderr) == bool(code)


@pytest.mark.parametrize("env", [ASCII, {"PYTHONIOENCODING": "latin-1:strict"}], ids=str)
def test_names_beyond_the_encoding_of_the_terminal(env, tmp_path):
    done = run("info", "--config", tmp_path / "Füße-日本\n\x1b[2J.json", env=env)
    assert done.returncode == 2 and done.stderr.startswith(b"error: ") and done.stderr.count(b"\n") == 1
    (tmp_path / "Füße-日本.json").write_text('{"data": {"source": "日本 İ"}}', "utf-8")
    done = run("info", "--options", "--preset", "smoke", "--config", tmp_path / "Füße-日本.json", env=env)
    assert done.returncode == 0 and not done.stderr and b"--data.source" in done.stdout


@pytest.mark.slow
def test_train_and_generate_without_network_or_home(tmp_path):
    place = tmp_path / "a b\nc ü 日本"
    place.mkdir()
    (place / "täxt.txt").write_text(made_up_text(20).replace("corn", "Köln 日本"), "utf-8")
    flags = micro_flags(train__steps=4, train__encoder_steps=2, train__save_every=2, train__eval_every=2)
    words = ["train", "--preset", "smoke", "--data", place / "täxt.txt", "--out", place / "run", "--device", "cpu", *flags]
    done = run(*words, env=ASCII, code=("-c", NO_NETWORK))
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    done = run("generate", place / "run", "-n", 8, "--device", "cpu", env=ASCII, code=("-c", NO_NETWORK))
    assert done.returncode == 0 and done.stdout.count(b"\n") == 8, done.stderr


@pytest.mark.slow
def test_what_has_to_be_fetched_says_so_in_one_sentence(tmp_path):
    done = run("prepare", "captions", "--out", tmp_path / "out", "--quiet")
    assert done.returncode == 1 and done.stderr.count(b"\n") == 1 and not (tmp_path / "out" / "index.json").exists()
