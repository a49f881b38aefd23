"""What people install: the distributions of this tree in an environment that has nothing else of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from micro import micro_flags

ROOT = Path(__file__).parent.parent
PACKAGED = ("pyproject.toml", "README.md", "LICENSE")
PLACES = "import importlib.util as u; print(*(bool(s := u.find_spec(name)) and s.origin for name in ('jpeg_dlm', 'micro')))"


def run(*words: object, cwd: Path) -> str:
    """Run a command without what the tests of this tree have on their path; return what it prints."""
    env = {"PATH": os.environ["PATH"], "HOME": str(cwd), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, and the wheel that is built from it."""
    copy = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in PACKAGED:
        shutil.copy(ROOT / name, copy)
    run(sys.executable, "-m", "build", "--no-isolation", copy, cwd=copy)
    return copy / "dist"


@pytest.fixture(scope="module")
def environment(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel, which sees torch and the like of the running one."""
    home = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=home)
    pip = (sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", "--no-index", "--no-deps")
    run(*pip, *dist.glob("*.whl"), cwd=home)
    [site] = home.glob("lib/python*/site-packages")
    (site / "others.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    return home / "bin"


@pytest.mark.slow
def test_the_wheel_alone_runs_the_demo(dist: Path, environment: Path, tmp_path: Path):
    assert run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir(), cwd=tmp_path).count("PASSED") == 2
    [wheel] = dist.glob("*.whl")
    files = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "jpeg_dlm").rglob("*") if path.is_file()}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("jpeg_dlm/")}
    assert packed == {name for name in files if "__pycache__" not in name}

    assert "4. Halfway between" in run(environment / "jpeg-dlm", "demo", cwd=tmp_path)
    place, of_tests = run(environment / "python", "-c", PLACES, cwd=tmp_path).split()
    assert place.startswith(str(environment.parent)) and of_tests == "False"


def changed(code: str, page: str) -> str:
    """Apply the change that a page shows; `@@` begins each of its parts."""
    [diff] = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    for part in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
        lines = part.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
        assert code.count(before) == 1, before
        code = code.replace(before, after)
    return code


@pytest.mark.slow
def test_a_new_system_is_installed_changed_tested_trained_and_writes(environment: Path, corpus_file: Path, tmp_path: Path):
    """As docs/extending.md has it."""
    python, program = environment / "python", environment / "jpeg-dlm"
    run(program, "new-system", "chain", cwd=tmp_path)
    module = tmp_path / "chain" / "chain.py"
    module.write_text(changed(module.read_text("utf-8"), (ROOT / "docs" / "extending.md").read_text("utf-8")), "utf-8")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", "--no-build-isolation")
    run(*pip, "-e", "./chain", cwd=tmp_path)
    assert "4 passed" in run(python, "-m", "pytest", "chain", "-q", "-p", "no:cacheprovider", cwd=tmp_path)

    flags = micro_flags(train__steps=3)
    kept = [words for words in zip(flags[::2], flags[1::2], strict=True) if words[0].startswith(("--data.", "--train."))]
    train = [program, "train", "--preset", "smoke", "--method", "chain", "--data", corpus_file, "--out", "run", "--quiet"]
    run(*train, *(word for words in kept for word in words), "--model.reach", 2, cwd=tmp_path)
    [text] = run(program, "generate", "run", "-n", 1, "--prompt", "The farmer", cwd=tmp_path).splitlines()
    assert "The farmer" in text
