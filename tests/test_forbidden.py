"""What the package must never do, read from its syntax trees, and what importing it must not do, seen by an audit hook."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jpeg_dlm

PACKAGE = Path(jpeg_dlm.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "yaml",
    "pty",
    "code",
}
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.execv", "os.execvp", "os.spawnv", "torch.load",
    "subprocess.getoutput", "subprocess.getstatusoutput", "tempfile.mktemp", "pickle.load", "pickle.loads", "yaml.load",
    "torch.hub.load", "np.fromregex", "logging.config.listen",
}  # fmt: skip
# Keyword arguments and the only value they may have, where they may be given at all.
ONLY = {"shell": False, "trust_remote_code": False, "allow_pickle": False, "weights_only": True}

# A module whose name is computed is one of this package: by its prefix, or out of the table of methods.
OWN_MODULE = re.compile(r"import_module\((f'jpeg_dlm\.|module\))")


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name or attribute, else empty."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def aliases(tree: ast.AST) -> dict[str, str]:
    """What imported names stand for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(a.asname or a.name.split(".")[0]): (a.name if a.asname else a.name.split(".")[0]) for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {(a.asname or a.name): f"{node.module}.{a.name}" for a in node.names}
    return found


def offences(source: str) -> list[str]:
    """Every forbidden thing in a source text."""
    tree = ast.parse(source)
    known, found = aliases(tree), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        else:
            modules = []
        found += [f"imports {m}" for m in modules if m.split(".")[0] in FORBIDDEN_MODULES]
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        head, _, tail = name.partition(".")
        full = known.get(head, head) + (f".{tail}" if tail else "")
        if {name, full} & FORBIDDEN_CALLS:
            found.append(f"calls {full}")
        if full.endswith("import_module") and not OWN_MODULE.search(ast.unparse(node)):
            found.append(f"imports {ast.unparse(node.args[0])}")
        for keyword in node.keywords:
            right = isinstance(keyword.value, ast.Constant) and keyword.value.value is ONLY.get(keyword.arg or "")
            if keyword.arg in ONLY and not right:
                found.append(f"gives {keyword.arg}")
        if full in ("np.load", "numpy.load") and "allow_pickle" not in {k.arg for k in node.keywords}:
            found.append("numpy.load without allow_pickle=False")
    for node in ast.walk(tree):  # as in {"trust_remote_code": True}
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value in ONLY:
                    if not (isinstance(value, ast.Constant) and value.value is ONLY[key.value]):
                        found.append(f"gives {key.value}")
    return found


BAD = {
    "import pickle": "imports pickle",
    "from pickle import loads": "imports pickle",
    "import joblib as j": "imports joblib",
    "import torch\ntorch.load('x', weights_only=True)": "calls torch.load",
    "from torch import load as read\nread('x')": "calls torch.load",
    "import torch as t\nt.load('x')": "calls torch.load",
    "f(weights_only=False)": "gives weights_only",
    "import numpy as np\nnp.load('x', allow_pickle=True)": "gives allow_pickle",
    "import numpy as np\nnp.load('x')": "numpy.load without",
    "eval('1')": "calls eval",
    "exec('1')": "calls exec",
    "compile('1', '', 'eval')": "calls compile",
    "import os\nos.system('ls')": "calls os.system",
    "from os import popen\npopen('ls')": "calls os.popen",
    "import subprocess\nsubprocess.run('ls', shell=True)": "gives shell",
    "import subprocess\nsubprocess.run('ls', shell=flag)": "gives shell",
    "model(trust_remote_code=True)": "gives trust_remote_code",
    "model(**{'trust_remote_code': True})": "gives trust_remote_code",
    "import yaml\nyaml.load(x)": "yaml",
    "import tempfile\ntempfile.mktemp()": "calls tempfile.mktemp",
    "import importlib\nimportlib.import_module(config.method)": "imports config.method",
}


@pytest.mark.parametrize("snippet", BAD)
def test_the_search_finds(snippet):
    assert any(BAD[snippet] in found for found in offences(snippet)), offences(snippet)


def test_the_search_lets_pass_what_is_allowed():
    good = (
        "import re\nre.compile('x')\nmodel.eval()\nrun(['ls'], shell=False)\nnp.load(f, allow_pickle=False)\ntorch.save(1, f)"
    )
    assert offences("import numpy as np\nimport torch\n" + good) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_file_runs_what_it_reads(path):
    assert offences(path.read_text("utf-8")) == []


# ---------------------------------------------------------------- importing

# Third-party packages are imported first: what they do is theirs. The hook then watches our own modules alone.
WATCH = """
import importlib, os, pkgutil, sys, threading
for name in ("torch", "numpy", "transformers", "huggingface_hub", "tokenizers", "safetensors", "safetensors.torch",
             "rich.console", "rich.progress", "rich.live", "rich.panel", "matplotlib.figure", "torch.distributed",
             "torch.nn.parallel", "torch.utils.checkpoint", "starlette.applications", "starlette.middleware.cors",
             "prometheus_client"):
    importlib.import_module(name)
seen = []
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

def hook(event, args):
    if event == "open" and isinstance(args[2], int) and args[2] & WRITING and "__pycache__" not in str(args[0]):
        seen.append(f"writes {{args[0]}}")
    elif event.split(".")[0] in ("socket", "subprocess") or event in (
        "os.fork", "os.system", "os.exec", "os.posix_spawn", "os.mkdir", "os.remove", "os.rename",
        "urllib.Request", "shutil.rmtree", "tempfile.mkdtemp", "tempfile.mkstemp",
    ):
        if event != "socket.gethostname" and "__pycache__" not in str(args):
            seen.append(f"{{event}} {{args[0]}}" if args else event)

sys.addaudithook(hook)
start, environment = threading.Thread.start, dict(os.environ)
threading.Thread.start = lambda thread: (seen.append("a thread"), start(thread))  # Python 3.11 audits no threads
{act}
print(*seen, os.environ == environment, sep="\\n")
"""
EVERY_MODULE = """
import jpeg_dlm
names = [m.name for m in pkgutil.walk_packages(jpeg_dlm.__path__, "jpeg_dlm.")]
assert len(names) > 60
for name in names:
    importlib.import_module(name)
"""
OFFENDER = """
import socket, tempfile
open(os.devnull, "w"); tempfile.mkdtemp(); socket.socket(); threading.Thread(target=print).start(); os.environ["A"] = "b"
"""


def watched(act: str, tmp_path: Path) -> list[str]:
    script = WATCH.format(act=act)
    env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line]


@pytest.mark.slow
def test_importing_every_module_has_no_side_effect(tmp_path):
    assert watched(EVERY_MODULE, tmp_path) == ["True"]
    assert list(tmp_path.iterdir()) == []


def test_the_hook_sees_side_effects(tmp_path):
    # Without the heavy imports, which are no part of what is shown here.
    light = WATCH[: WATCH.index("for name in")] + WATCH[WATCH.index("seen = []") :]
    done = subprocess.run(
        [sys.executable, "-c", light.format(act=OFFENDER)],
        capture_output=True, text=True, env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    for event in ("writes /dev/null", "tempfile.mkdtemp", "os.mkdir", "socket.__new__", "a thread", "False"):
        assert event in done.stdout, done.stdout


@pytest.mark.parametrize(
    "module", ["jpeg_dlm", "jpeg_dlm.config", "jpeg_dlm.config_io", "jpeg_dlm.presets", "jpeg_dlm.errors", "jpeg_dlm.cli.main"]
)
def test_the_front_door_opens_without_heavy_packages(module):
    script = f"import sys, {module}; print({{'torch', 'numpy', 'transformers', 'rich', 'matplotlib'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "set()"
