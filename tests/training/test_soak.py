"""Memory and open files do not grow over a run of many steps."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from interrupted_runs import SERVER, train_words

from jpeg_dlm.cli.main import main
from jpeg_dlm.training.trainer import Launched, Trainer

FLAT_MB = 10.0  # growth over half of the run that counts as none; ten figures or copies of the state take more
FLAT_HANDLES = 5  # likewise: ten checkpoints would leave ten handles


def open_files() -> int:
    """Count this process's open files without fonts: matplotlib keeps each open from its first use."""
    return sum(not os.path.realpath(f"/proc/self/fd/{name}").endswith(".ttf") for name in os.listdir("/proc/self/fd"))


def run_measuring(words: list[str], out) -> None:
    """Run a training that measures its memory and open files and sends them; runs in its own process."""
    real, rows, page_mb = Trainer.launch_step, [], os.sysconf("SC_PAGE_SIZE") / 1e6

    def step(self: Trainer, *args: bool) -> Launched:
        if self.step % 25 == 0:
            self.background.wait()  # what is being written and drawn takes memory and open files
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            rows.append((pages * page_mb, open_files()))
        return real(self, *args)

    Trainer.launch_step = step
    assert main(words) == 0
    out.send(rows)


@pytest.mark.slow
def test_memory_and_files_stay_flat(blocks, tmp_path: Path):
    """The fastest method with checkpoints, evaluations, samples and plots."""
    changes = {"train__steps": 1000, "train__save_every": 50, "train__eval_every": 100, "train__log_every": 10}
    words = train_words("ar", blocks.folder, tmp_path / "run", **changes)
    inlet, outlet = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=run_measuring, args=(words, outlet), daemon=True)
    process.start()
    outlet.close()
    quarters = np.array_split(np.array(inlet.recv(), float), 4)
    process.join()
    (early_mb, early_handles), (late_mb, late_handles) = (np.median(quarters[i], axis=0) for i in (1, 3))
    assert late_mb - early_mb < FLAT_MB and late_handles - early_handles < FLAT_HANDLES
