"""Print how large the package is: lines, files, layers, options, and the functions that a step and a text pass through.

python tools/size.py [--lines]      # --lines: without the runs, which take a minute
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
TEXT = "The farmer plants corn in the valley. The captain steers ships near the river.\n\n" * 60


class Trace:
    """Collects the functions of the package that run in the last call of `start`."""

    def __init__(self, start: str, package: str, until: str = "") -> None:
        self.start, self.package, self.until = start, package, until
        self.functions: set[tuple[str, str]] = set()
        self.inside: FrameType | None = None
        self.frames = 0  # of the package from `start` to the first call of `until`

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self.package):
            if self.inside is None and code.co_qualname == self.start:
                self.inside, self.functions, self.frames = frame, set(), 0
            if self.inside is not None:
                self.functions.add((code.co_filename, code.co_qualname))
                if not self.frames and code.co_qualname == self.until:
                    self.frames = self._depth(frame)
        elif event == "return" and frame is self.inside:
            self.inside = None

    def _depth(self, frame: FrameType | None) -> int:
        depth = 0
        while frame is not None and frame is not self.inside:
            depth += frame.f_code.co_filename.startswith(self.package)
            frame = frame.f_back
        return depth

    def __str__(self) -> str:
        modules = {name for name, _ in self.functions}
        return f"{len(self.functions)} functions in {len(modules)} modules" + (f", {self.frames} frames" if self.frames else "")


def traced(trace: Trace, act: Any) -> Trace:
    sys.setprofile(trace)
    try:
        act()
    finally:
        sys.setprofile(None)
    return trace


def count(folder: str) -> tuple[int, int]:
    files = [path for path in (ROOT / folder).rglob("*.py")]
    return sum(len(path.read_text("utf-8").splitlines()) for path in files), len(files)


def main() -> None:
    for folder in ("src", "tests", "benchmarks", "examples", "research", "tools"):
        lines, files = count(folder)
        if files:
            print(f"{folder:<12} {lines:>7,} lines in {files} files")
    words = {path.name: len(path.read_text("utf-8").split()) for path in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]}
    print(f"{'docs':<12} {sum(words.values()):>7,} words, {words.get('results.md', 0):,} of them in results.md")
    sys.path.insert(0, str(ROOT / "src"))
    sys.path.insert(0, str(ROOT / "tests"))
    import test_order

    from jpeg_dlm.options import option_names

    print(f"{'layers':<12} {len(test_order.LAYERS):>7}")
    print(f"{'options':<12} {len(option_names()):>7} of JPEG-DLM")
    if "--lines" in sys.argv:
        return

    import jpeg_dlm
    from jpeg_dlm.cli.main import main as command

    package = os.path.dirname(inspect.getfile(jpeg_dlm))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text.txt").write_text(TEXT)
        words_ = ["train", "--preset", "smoke", "--data", f"{folder}/text.txt", "--out", f"{folder}/run", "--quiet"]
        sizes = ["--train.steps", "2", "--train.encoder-steps", "2", "--data.tokenizer", "bpe", "--data.vocab-size", "300"]
        plain = ["--data.known", "false", "--data.packing", "continuous", "--data.whole", "false"]
        print("train        ", traced(Trace("main", package), lambda: command([*words_, *sizes, *plain])))
        words_[-2] = f"{folder}/again"
        print("one step     ", traced(Trace("Trainer.launch_step", package), lambda: command([*words_, *sizes, *plain])))
    model = jpeg_dlm.load(device="cpu")
    step = Trace("Model.generate", package, "DiT.forward")
    print("generate     ", traced(step, lambda: model.generate(1, steps=2)), "to the network")


if __name__ == "__main__":
    main()
