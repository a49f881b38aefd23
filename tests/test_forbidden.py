"""What ruff's rules (pyproject.toml) cannot say: the front door is light, and nothing read from outside is run."""

import re
import subprocess
import sys
from pathlib import Path

import jpeg_dlm


def test_the_front_door_opens_without_heavy_packages():
    modules = "jpeg_dlm, jpeg_dlm.options, jpeg_dlm.presets, jpeg_dlm.util.errors, jpeg_dlm.cli.main"
    script = f"import sys, {modules}; print({{'torch', 'numpy', 'transformers', 'rich', 'matplotlib'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "set()"


def test_no_file_asks_a_library_to_run_code_of_a_file():
    switch = re.compile(r"""(trust_remote_code|allow_pickle)["']?\s*[=:]\s*True|weights_only["']?\s*[=:]\s*False""")
    paths = Path(jpeg_dlm.__file__).parent.rglob("*.py")
    assert [path.name for path in paths if switch.search(path.read_text("utf-8"))] == []
