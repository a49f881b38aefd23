"""Run the commands of docs/tutorial.md and put what they print below each: `python tools/tutorial.py`.

Commands are the lines of ```console blocks that begin with "$ "; all other lines of a block are output, which is replaced. They
run in one folder with a text, mine.txt. The line that begins with "Run on" gets CPU, time, date and version.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

from jpeg_dlm import __version__
from jpeg_dlm.config import DataConfig
from jpeg_dlm.text.sources import open_corpus
from jpeg_dlm.util.distributed import cpu_name

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tutorial.md"
SENTENCES = 40_000
PROGRESS = re.compile(r"\d+/\d+ +\d+%|\d%\|")


def output(command: str, folder: Path) -> str:
    """Run a command and return what it prints, without the states of progress bars, which a terminal overwrites."""
    words = shlex.split(command)
    words = [sys.executable, "-m", "jpeg_dlm", *words[1:]] if words[0] == "jpeg-dlm" else words
    print("$", command, flush=True)
    run = subprocess.run(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode:
        raise SystemExit(f"{command} ended with code {run.returncode}:\n{run.stdout}")
    return "\n".join(line.rstrip() for line in run.stdout.strip().split("\n") if not PROGRESS.search(line))


def ran(block: re.Match[str], folder: Path) -> str:
    """Return a block with the output of its commands."""
    commands = [line[2:] for line in block[1].splitlines() if line.startswith("$ ")]
    return "```console\n" + "\n\n".join(f"$ {command}\n{output(command, folder)}" for command in commands) + "\n```"


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sentences = islice(open_corpus(DataConfig(source="captions")).stream(0), SENTENCES)
        (folder / "mine.txt").write_text("\n".join(map(str, sentences)) + "\n", "utf-8")
        text = re.sub(r"```console\n(.*?)```", lambda block: ran(block, folder), PAGE.read_text("utf-8"), flags=re.DOTALL)
    minutes = round(getrusage(RUSAGE_CHILDREN).ru_utime / 60)
    run = f"Run on one core of {cpu_name()} in {minutes} minutes of its time"
    stamp = f"{run}, {datetime.now(UTC):%Y-%m-%d}, jpeg-dlm {__version__}."
    PAGE.write_text(re.sub(r"^Run on .*$", lambda _: stamp, text, flags=re.MULTILINE), "utf-8")


if __name__ == "__main__":
    main()
