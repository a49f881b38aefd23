"""A folder that writes text in a browser: exported networks, ONNX Runtime Web, and a page of plain JavaScript.

Any server of plain files can serve it. `page/sampler.js` is the sampler, `page/noise.js` the noise of `util.rng`, and
`page/tokenizer.js` reads the tokenizers that are trained here.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from jpeg_dlm.checkpoints.model_folder import ModelParts
from jpeg_dlm.export.onnx_model import Precision, exportable, write_exported
from jpeg_dlm.flow.path import make_grid
from jpeg_dlm.util.errors import AssetError, UsageError, either
from jpeg_dlm.util.rng import generator

VERSION = "1.30.0"  # of onnxruntime-web
INSIDE = "package/dist"  # the folder of the package with what a page loads
RUNTIME = {  # a file in a web folder: that of the package, and its sha256
    "ort.js": ("ort.wasm.bundle.min.mjs", "11e64bd8ffe11bd1a2a2f0d6275fdfbbba7262f0b76b99b53d228a8a22ef3d90"),
    "ort.wasm": ("ort-wasm-simd-threaded.wasm", "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2"),
}
PACKAGE = Path(__file__).parent.parent
SHARED = ("report/style.css", "report/player.css", "report/player.js", "serve/page/page.css")
STEPS = (4, 8, 16, 32, 64, 128)  # that the page offers, besides the model's own


def write_web(parts: ModelParts, out: Path, precision: Precision = "fp32", runtime: Path | None = None) -> Path:
    """Write a folder for a server of files; it is an exported folder too. `runtime` holds the files of ONNX Runtime Web."""
    exportable(parts)
    sampler = parts.config.sampler
    if parts.tokenizer is None or not parts.read_tokenizer().trained_here:
        raise UsageError("In a browser only the tokenizers 'words' and 'bpe' run: train a model with one of them.")
    if sampler.grid == "random":
        raise UsageError("In a browser no random grid can be drawn: choose another with --sampler.grid quantile.")
    grids = {
        steps: make_grid(sampler.grid, steps, sampler.grid_mean, sampler.grid_std, generator(0, "grid")).tolist()
        for steps in sorted({*STEPS, sampler.steps})
    }
    pages = [*sorted((PACKAGE / "export" / "page").iterdir()), *(PACKAGE / name for name in SHARED)]
    files = {"grids.json": json.dumps(grids).encode()} | {page.name: page.read_bytes() for page in pages}
    return write_exported(parts, out, precision, files | runtime_files(runtime))


def runtime_files(folder: Path | None) -> dict[str, bytes]:
    """Return the files of ONNX Runtime Web from a folder, or from the package that npm downloads."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = folder or download(Path(scratch))
        try:
            files = {name: (folder / member).read_bytes() for name, (member, _) in RUNTIME.items()}
        except OSError as error:
            names = either([member for member, _ in RUNTIME.values()])
            raise AssetError(f"'{folder}' has no file {names}: name the folder 'dist' of onnxruntime-web {VERSION}.") from error
    for name, content in files.items():
        member, digest = RUNTIME[name]
        if hashlib.sha256(content).hexdigest() != digest:
            raise AssetError(f"'{folder / member}' is not the file of onnxruntime-web {VERSION}: fetch that version again.")
    return files


def download(scratch: Path) -> Path:
    """Let npm download the package to a folder, by its own settings and from its own cache; return the extracted files."""
    elsewhere = f"name the folder 'dist' of onnxruntime-web {VERSION} with --runtime"
    npm = shutil.which("npm")
    if npm is None:
        raise AssetError(f"The program npm is missing, which downloads ONNX Runtime Web: install it, or {elsewhere}.")
    words = [npm, "pack", f"onnxruntime-web@{VERSION}", "--prefer-offline", "--loglevel=error", f"--pack-destination={scratch}"]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=scratch)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[0]
        raise AssetError(f"npm cannot download onnxruntime-web {VERSION} ({reason}): check the network, or {elsewhere}.")
    wanted = {f"{INSIDE}/{member}" for member, _ in RUNTIME.values()}
    (scratch / INSIDE).mkdir(parents=True)
    with tarfile.open(scratch / f"onnxruntime-web-{VERSION}.tgz") as archive:
        for member in archive:  # in one pass, as going back means to unpack again
            content = archive.extractfile(member) if member.name in wanted else None
            if content:
                (scratch / member.name).write_bytes(content.read())
    return scratch / INSIDE
