"""Real processes in poor environments: no network, no home, ASCII only, closed or full streams, odd names.

Commands that need no torch stand in for all others wherever the surroundings meet the command line alone; the slow tests
train, generate and evaluate.
"""

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from conftest import made_up_text, micro_flags
from tiny_evaluation import byte_gpt2, micro_folder  # noqa: F401 - fixtures

BARE = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
# Whatever reaches for the network, the resolver included, ends the process at once.
NO_NETWORK = """
import os, sys
def hook(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request", "socket.sendto"):
        if event != "socket.connect" or not isinstance(args[1], (str, bytes)):  # a path is no network
            os.write(2, f"NETWORK {event} {args}\\n".encode()); os._exit(77)
sys.addaudithook(hook)
from jpeg_dlm.cli.main import main
raise SystemExit(main())
"""


def run(*words: object, env: dict | None = None, shell: str = "", **options) -> subprocess.CompletedProcess:
    """A command in a bare environment; `shell` are redirections that only a shell can make."""
    command = [sys.executable, "-m", "jpeg_dlm.cli.main", *map(str, words)]
    if shell:
        command = ["sh", "-c", f'"$@" {shell}', "sh", *command]
    options = {"capture_output": True} | options
    return subprocess.run(command, env=BARE | {"HOME": "/dev/null/x"} | (env or {}), timeout=300, **options)


def sentence(done: subprocess.CompletedProcess) -> str:
    """The only line on standard error."""
    lines = done.stderr.decode(errors="replace").splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    return lines[0]


# ---------------------------------------------------------------- standard streams


@pytest.mark.parametrize("words, code", [(["info", "--preset", "smoke"], 0), (["info", "--preset", "none"], 2)])
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed(words, code, closed):
    done = run(*words, shell=closed)
    lost = ">&-" in closed.split() and not code  # a result that nobody can read is no success
    assert done.returncode == (1 if lost else code) and b"Traceback" not in done.stderr and b"Exception" not in done.stderr
    if (code or lost) and "2>" not in closed:
        assert not lost or "Standard output is closed" in sentence(done)
        sentence(done)


def test_only_a_result_that_is_printed_needs_standard_output(micro_folder, tmp_path):  # noqa: F811
    words = ["generate", micro_folder, "-n", "1", "--device", "cpu"]
    assert run(*words, shell=">&-").returncode == 1
    assert run(*words, "--out", tmp_path / "texts.jsonl", shell=">&-").returncode == 0
    assert (tmp_path / "texts.jsonl").read_text().count("\n") == 1


def test_files_do_not_take_the_numbers_of_closed_streams(tmp_path):
    script = "import os; from jpeg_dlm.cli.main import ready_streams; ready_streams(); "
    script += "print(os.open('x', os.O_CREAT), file=open('n', 'w'))"
    done = subprocess.run(["sh", "-c", f'"{sys.executable}" -c "$1" <&- >&- 2>&-', "sh", script], cwd=tmp_path, env=BARE)
    assert done.returncode == 0 and int((tmp_path / "n").read_text()) > 2


def test_a_full_disk_behind_standard_output():
    with open("/dev/full", "wb") as full:
        done = run("info", "--preset", "smoke", stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert done.returncode == 1 and "No space left" in sentence(done)
    with open("/dev/full", "wb") as full:
        done = run("info", "--preset", "smoke", stdout=subprocess.PIPE, stderr=full, capture_output=False)
    assert done.returncode == 0 and b"parameters" in done.stdout


# ---------------------------------------------------------------- encodings and locales


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
LOCALES = [
    ASCII,
    {"LC_ALL": "POSIX"},
    {"LC_ALL": "tr_TR.UTF-8"},
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "latin-1:strict"},
]


@pytest.mark.parametrize("env", LOCALES, ids=str)
def test_names_beyond_the_encoding_of_the_terminal(env, tmp_path):
    done = run("info", "--config", tmp_path / "Füße-日本-İ.json", env=env)
    assert done.returncode == 2 and "Cannot read" in sentence(done)
    (tmp_path / "Füße-日本.json").write_text(json.dumps({"data": {"source": "日本 İ", "cache_features": "TRUE"}}), "utf-8")
    done = run("info", "--options", "--preset", "smoke", "--config", tmp_path / "Füße-日本.json", env=env)
    assert done.returncode == 0 and not done.stderr and b"--data.source" in done.stdout


def test_names_that_are_no_text(tmp_path):
    done = run("info", "--config", os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9\n\x1b[2J.json"))
    assert done.returncode == 2 and "\\n\\x1b[2J" in sentence(done)


# ---------------------------------------------------------------- terminals


def on_a_terminal(words: list[object], columns: int, env: dict) -> tuple[int, str]:
    """Exit code and everything that a terminal of so many columns receives."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-m", "jpeg_dlm.cli.main", *map(str, words)]
    process = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, env=BARE | {"HOME": "/dev/null/x"} | env, close_fds=True
    )
    os.close(follower)
    seen = b""
    try:
        while select.select([leader], [], [], 120)[0] and (part := os.read(leader, 65536)):
            seen += part
    except OSError:
        pass  # the terminal's other end is closed
    os.close(leader)
    try:
        return process.wait(timeout=60), seen.decode()
    finally:
        process.kill()


PLAIN = [{"TERM": "dumb"}, {"TERM": "xterm-256color", "NO_COLOR": "1"}, {"TERM": "xterm", "COLUMNS": "20"}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("env", PLAIN, ids=str)
def test_a_narrow_and_simple_terminal(env, tmp_path):
    (tmp_path / "a.txt").write_text(made_up_text(6))
    words = ["prepare", tmp_path / "a.txt", "--out", tmp_path / "out", "--preset", "smoke", "--data.vocab-size", 300]
    code, seen = on_a_terminal(words, 20, env)
    assert code == 0 and "blocks of 16 tokens" in seen and "Traceback" not in seen
    if env.get("TERM") == "dumb":
        assert "\x1b" not in seen
    if "NO_COLOR" in env:
        assert "\x1b[3" not in seen and "\x1b[9" not in seen


class FullDisk:
    encoding = "utf-8"

    def write(self, text):
        raise OSError(28, "No space left on device")

    flush = isatty = lambda self: False


@pytest.mark.parametrize("stream", [FullDisk(), None], ids=["full", "none"])
def test_messages_that_cannot_be_shown_end_no_work(stream, monkeypatch):
    from jpeg_dlm.machine.console import Console

    monkeypatch.setattr(sys, "stderr", stream)
    console = Console()
    console.say("hello")
    console.warn("hello")
    with console.progress("Work", "steps") as report:
        report(1, 2)


# ---------------------------------------------------------------- places


@pytest.mark.slow
def test_no_home_no_temporary_folder_and_another_time_zone(tmp_path):
    (tmp_path / "a.txt").write_text(made_up_text(6))
    surroundings = [{}, {"TMPDIR": "/no/such/folder", "TZ": "Asia/Kathmandu"}]
    for number, env in enumerate(surroundings):
        words = ["prepare", tmp_path / "a.txt", "--out", tmp_path / f"{number}", "--preset", "smoke", "--data.vocab-size", 300]
        done = run(*words, "--quiet", env=env)
        assert done.returncode == 0 and not done.stderr, done.stderr
    names = sorted(path.name for path in (tmp_path / "0").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "1").iterdir())
    for name in set(names) - {"lock"}:  # which names the process that prepared
        assert (tmp_path / "0" / name).read_bytes() == (tmp_path / "1" / name).read_bytes()


@pytest.mark.slow
def test_what_has_to_be_fetched_says_so_without_a_home(tmp_path):
    done = run("prepare", "sotu", "--out", tmp_path / "out", "--quiet")
    assert done.returncode == 1 and "JPEG_DLM_CACHE" in sentence(done) and not (tmp_path / "out").exists()


# ---------------------------------------------------------------- the whole way


@pytest.mark.slow
@pytest.mark.parametrize(
    "env", [{}, ASCII | {"TERM": "dumb", "TMPDIR": "/no/such"}, {"LC_ALL": "tr_TR.UTF-8", "TZ": "UTC-5"}], ids=str
)
def test_train_generate_and_evaluate_without_network_or_home(env, byte_gpt2, tmp_path):  # noqa: F811
    place = tmp_path / "a b\nc ü 日本"
    place.mkdir()
    (place / "täxt.txt").write_text(made_up_text(20).replace("corn", "Köln 日本"), "utf-8")

    def offline(*words: object) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", NO_NETWORK, *map(str, words)]
        whole = {name: value for name, value in BARE.items() if name != "HF_HUB_OFFLINE"} | {"HOME": "/dev/null/x"} | env
        return subprocess.run(command, env=whole, capture_output=True, timeout=400)

    flags = micro_flags(train__steps=4, train__encoder_steps=2, train__save_every=2, train__eval_every=2)
    words = ["train", "--preset", "smoke", "--data", place / "täxt.txt", "--out", place / "run", "--device", "cpu", *flags]
    done = offline(*words)
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    done = offline("generate", place / "run", "-n", 8, "--device", "cpu")
    assert done.returncode == 0 and done.stdout.count(b"\n") == 8, done.stderr
    options = ["-n", 4, "--mauve", "off", "--data", place / "run" / "data", "--out", place / "results", "--quiet"]
    done = offline("evaluate", place / "run", "--scorer", f"hf:{byte_gpt2}", *options)
    assert done.returncode == 0 and (place / "results" / "results.json").is_file(), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("redirect", [">&-", "<&-", "2>&-", "> /dev/full"])
def test_generating_with_the_bundled_model_into_nothing(redirect):
    done = run("generate", "-n", 1, "--steps", 2, shell=redirect)
    assert (
        done.returncode == (redirect in (">&-", "> /dev/full"))
        and b"Traceback" not in done.stderr
        and b"ignored" not in done.stderr
    )


@pytest.mark.slow
def test_watching_on_a_narrow_terminal(micro_folder):  # noqa: F811
    code, seen = on_a_terminal(["generate", micro_folder, "-n", 1, "--watch", "--device", "cpu"], 20, {"TERM": "xterm"})
    assert code == 0 and "step" in seen and "Traceback" not in seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "--scorer", "smollm2", "-n", "2"],
        ["generate", "nobody/no-such-model"],
        ["train", "--preset", "smoke", "--data", "sotu", "--out", "OUT"],
        ["import", "nobody/no-such-model", "--out", "OUT"],
    ],
)
def test_what_needs_a_fetch_says_in_one_sentence_what_to_do(words, tmp_path):
    words = [str(tmp_path / "out") if word == "OUT" else word for word in words]
    env = {"JPEG_DLM_CACHE": str(tmp_path / "cache"), "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
    done = run(*words, env=env)
    assert done.returncode == 1 and b"Traceback" not in done.stderr
    assert done.stderr.decode().splitlines()[-1].startswith("error: ")
    assert not Path(tmp_path / "out" / "checkpoints").exists()
