"""The self-test: what is right passes, what is wrong is reported as failed, and its file names nobody."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from toy_system import Toy  # noqa: E402

from jpeg_dlm.cli import doctor_verb, selftest  # noqa: E402
from jpeg_dlm.cli.main import main  # noqa: E402
from jpeg_dlm.cli.selftest import Verdict, anonymous, difference  # noqa: E402
from jpeg_dlm.machine.console import Console  # noqa: E402
from jpeg_dlm.methods import registry  # noqa: E402
from jpeg_dlm.methods.base import Batch  # noqa: E402
from jpeg_dlm.methods.registry import METHODS, Entry, methods  # noqa: E402
from jpeg_dlm.rng import RowNoise  # noqa: E402


class Idle(Toy):
    """Has a parameter that no loss reaches."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.idle = nn.Parameter(torch.zeros(2))


class Overflowing(Toy):
    """Has a loss whose gradient is infinite."""

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        return {"ce": super().losses(batch, noise)["ce"] + (0 * self.head.bias).sqrt().sum()}


class Lopsided(Toy):
    """Weighs the rows of the second process more."""

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        rank = torch_dist.get_rank() if torch_dist.is_initialized() else 0
        return {"ce": super().losses(batch, noise)["ce"] * (1 + rank)}


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A registry of AR and the classes above, in this process."""
    wrong = {cls.__name__.lower(): Entry("system", f"{__name__}:{cls.__name__}") for cls in (Idle, Overflowing)}
    monkeypatch.setattr(registry, "METHODS", wrong | {"ar": METHODS["ar"]})
    methods.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    methods.cache_clear()


@pytest.fixture
def installed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A class as the system `toy` of an installed package, also in child processes."""
    info = tmp_path / "site" / "toys-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[jpeg_dlm.systems]\ntoy = {__name__}:{request.param.__name__}\n")
    paths = [str(info.parent), str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.syspath_prepend(str(info.parent))
    methods.cache_clear()
    yield
    methods.cache_clear()


# ---------------------------------------------------------------- single checks


def test_every_name_is_a_check():
    assert tuple(selftest.CHECKS) == doctor_verb.CHECKS


def test_a_parameter_without_a_finite_gradient_is_named(only: pytest.MonkeyPatch, tmp_path: Path):
    result, detail = selftest.gradients(tmp_path)
    assert result == "failed"
    assert detail.startswith("idle: no gradient: idle; overflowing: NonFiniteError: ") and "grad_norm became NaN" in detail
    assert "ar:" not in detail


def test_good_gradients_pass(only: pytest.MonkeyPatch, tmp_path: Path):
    only.setattr(registry, "METHODS", {"ar": METHODS["ar"], "mdlm": METHODS["mdlm"]})
    methods.cache_clear()
    result, detail = selftest.gradients(tmp_path)
    assert (result, detail.split(",")[0]) == ("ok", "2 methods")


def test_the_difference_is_a_share_of_the_update():
    start, one = {"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 4.0])}
    assert difference(start, one, {"w": torch.tensor([3.0, 4.5])}) == pytest.approx(0.1)
    assert difference(start, one, one) == 0


# ---------------------------------------------------------------- child processes


def test_why_a_process_failed_is_one_line():
    assert selftest.run_process(["-c", "pass"]) == ""
    assert selftest.run_process(["-c", "raise ValueError('two\\nlines')"]) == "ended with code 1: lines"
    assert selftest.run_process(["-c", "import os; os.kill(os.getpid(), 9)"]) == "ended with code -9: "


def test_a_process_that_hangs_ends_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(selftest, "PATIENCE_S", 0.5)
    pid = tmp_path / "pid"
    child = "import subprocess, sys, time\np = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
    child += f"open({str(pid)!r}, 'w').write(str(p.pid))\ntime.sleep(100)"
    assert selftest.run_process(["-c", child]) == "did not end within 0.5 s"
    for _ in range(100):  # until init has collected it
        stat = Path(f"/proc/{pid.read_text()}/stat")
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the child still runs")


# ---------------------------------------------------------------- the report


def test_paths_and_names_are_left_out():
    user, host = getpass.getuser(), socket.gethostname()
    said = f"OSError: '/home/{user}/a b/model.pt' on {host}: see /var/log/x.log, C:\\Users\\{user}\\y and 12 texts/s (1/2)"
    assert anonymous(said) == "OSError: 'PATH' on HOST: see PATH, PATH and 12 texts/s (1/2)"


def test_a_failed_check_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    verdicts = [Verdict("parity", "ok", "512 of 512", 1.2), Verdict("compile", "not available", "no compiler", 3)]
    monkeypatch.setattr(selftest, "run_checks", lambda checks, console: verdicts)
    words = ["doctor", "--selftest", "--only", "parity,compile", "--out", str(tmp_path / "report.md")]
    assert main(words) == 0
    verdicts.append(Verdict("sharding", "failed", "jpeg-dlm: RuntimeError: no", 4))
    assert main(words) == 1
    text = (tmp_path / "report.md").read_text()
    assert "| sharding | failed | jpeg-dlm: RuntimeError: no | 4 |" in text and f"torch {torch.__version__}" in text
    assert text in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--only", "parity"], ["--out", "report.md"]])
def test_options_of_the_self_test_need_it(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", *words]) == 2
    assert "add --selftest" in capsys.readouterr().err


# ---------------------------------------------------------------- the whole


@pytest.mark.slow
def test_other_tokens_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert selftest.parity(tmp_path)[0] == "ok"
    models = [selftest.load(), selftest.load()]
    with torch.no_grad():
        for p in models[1].method.parameters():
            p.mul_(1.5)
    monkeypatch.setattr(selftest, "load", lambda device: models.pop())
    assert selftest.parity(tmp_path)[0] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "installed, reason",
    [(Lopsided, "toy: one process trains otherwise"), (Idle, "toy: RuntimeError: Expected to have finished reduction")],
    indirect=["installed"],
)
def test_two_processes_that_train_otherwise_fail(installed: None, reason: str, tmp_path: Path):
    assert selftest.run_checks(["processes"], Console(quiet=True))[0].detail.startswith(reason)


@pytest.mark.slow
def test_the_whole_command(tmp_path: Path):
    words = [sys.executable, "-m", "jpeg_dlm", "doctor", "--selftest", "--out", "report.md"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "report.md").read_text()
    rows = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in text.splitlines() if line.startswith("| ")}
    assert tuple(rows)[2:] == doctor_verb.CHECKS
    assert all(rows[check] == "ok" or (check, rows[check]) == ("compile", "not available") for check in doctor_verb.CHECKS)
    for private in (socket.gethostname(), str(Path.home()), str(tmp_path), sys.prefix):
        assert private not in text
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]
