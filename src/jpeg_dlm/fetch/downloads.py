"""Download one archive from the package registry in the user's settings; the caller checks the hash.

pip knows the user's index, proxy, certificates and credentials; without any pip, the index in the settings of pip or uv is
used directly. npm packages are downloaded with npm, or from the registry in npm's settings.
"""

from __future__ import annotations

import configparser
import contextlib
import html.parser
import http.client
import importlib.util
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jpeg_dlm.errors import JpegDlmError, reason_of

SECONDS = 1800  # a stalled index must not block a run forever; the largest archive has 112 MB
SOCKET_SECONDS = 60
POLL_S = 0.2
CHUNK = 1 << 18
PAGE_BYTES = 1 << 26  # largest index page that is read; packages with thousands of files have a few MB
INDEX_VARIABLES = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")
BUILD_VARIABLES = ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")  # the former until pip 25.2, the latter since
REGISTRY_VARIABLES = ("npm_config_registry", "NPM_CONFIG_REGISTRY")
SYSTEM_FILES = ("/etc/pip.conf", os.path.join(sys.prefix, "pip.conf"))
SIMPLE = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"  # PEP 691

Report = Callable[[int], None]  # called with the number of bytes received


class DownloadError(JpegDlmError):
    """The reason why a download failed, as a clause for an error message."""


# ---------------------------------------------------------------- programs


def by_pip(requirement: str, options: list[str], folder: Path, report: Report, builds_with: str = "") -> bool:
    """Download `requirement` with pip, which builds its metadata with `builds_with`; return False if there is no pip."""
    command = next(pips(), None)
    if command is None:
        return False
    # With --require-hashes, pip checks the hash before it opens the archive. Otherwise it would run the build script of
    # an sdist to get its metadata before we could verify it.
    path = folder / "requirement.txt"
    path.write_text(requirement + "\n", "utf-8")
    command += ["download", "-q", "--disable-pip-version-check", "--no-deps", "--ignore-requires-python", "--require-hashes"]
    environment: dict[str, str] = {}
    if builds_with:
        command.append("--use-pep517")
        (folder / "build.txt").write_text(builds_with + "\n", "utf-8")
        environment = {name: str(folder / "build.txt") for name in BUILD_VARIABLES}
    stderr = _run([*command, *options, "-d", str(folder), "-r", str(path)], folder, report, environment)
    if stderr is not None:
        raise DownloadError(_pip_error(stderr))
    return True


def pips() -> Iterator[list[str]]:
    """Yield commands that run pip, in order of preference."""
    if importlib.util.find_spec("pip"):
        yield [sys.executable, "-m", "pip"]
    spec = importlib.util.find_spec("ensurepip")
    if spec and spec.origin:
        for wheel in sorted(Path(spec.origin).parent.glob("_bundled/pip-*.whl")):
            yield [sys.executable, str(wheel / "pip")]
    if found := shutil.which("pip3") or shutil.which("pip"):
        yield [found]
    if found := shutil.which("uv"):
        yield [found, "tool", "run", "--quiet", "pip"]


def _pip_error(stderr: str) -> str:
    if "DO NOT MATCH THE HASHES" in stderr:
        return "the file on the index does not have the pinned hash"
    lines = [line.removeprefix("ERROR: ").strip() for line in stderr.splitlines() if line.startswith("ERROR")]
    return lines[-1].rstrip(".") if lines else "pip failed"


def by_npm(package: str, version: str, folder: Path, report: Report) -> bool:
    """Download a package to `folder` with npm pack; return False if there is no npm."""
    npm = shutil.which("npm")
    if npm is None:
        return False
    command = [npm, "pack", f"{package}@{version}", "--silent", "--ignore-scripts", "--pack-destination", str(folder)]
    stderr = _run(command, folder, report)
    if stderr is not None:
        lines = [line.partition("npm error ")[2] for line in stderr.splitlines() if line.startswith("npm error ")]
        raise DownloadError((lines or ["npm failed"])[-1].rstrip("."))
    return True


def _run(command: list[str], folder: Path, report: Report, environment: Mapping[str, str] | None = None) -> str | None:
    """Run a program with its temporary files in `folder`; return its error messages if it failed, else None."""
    variables = os.environ | {"TMPDIR": str(folder)} | dict(environment or {})
    began, errors = time.monotonic(), folder / "messages.txt"
    with errors.open("wb") as sink:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=sink, env=variables)
        try:
            while process.poll() is None:
                if time.monotonic() - began > SECONDS:
                    raise DownloadError(f"no answer within {SECONDS} s")
                report(_largest(folder))
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return errors.read_text("utf-8", "replace") if process.returncode else None


def _largest(folder: Path) -> int:
    """Return the size of the largest file in `folder`, which is the archive during a download."""
    sizes = [0]
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(base, name)).st_size)
            except OSError:  # removed meanwhile
                continue
    return max(sizes)


# ---------------------------------------------------------------- an index itself


def by_index(package: str, archive: str, folder: Path, report: Report) -> bool:
    """Download the archive from the index in the settings of pip or uv; return False if they have none."""
    index = index_url(os.environ)
    if index is None:
        return False
    page = urllib.parse.urljoin(index.rstrip("/") + "/", re.sub(r"[-_.]+", "-", package).lower() + "/")
    raw, kind, final = _read(page, SIMPLE)
    link = _json_link(raw, archive) if "json" in kind else _html_link(raw, archive)
    if link is None:
        raise DownloadError(f"the index has no file '{archive}'")
    _save(urllib.parse.urljoin(final, link), folder / archive, report)
    return True


def by_registry(package: str, version: str, archive: str, folder: Path, report: Report) -> bool:
    """Download the archive from the registry in npm's settings; return False if they have none."""
    registry = registry_url(os.environ)
    if registry is None:
        return False
    raw, _, _ = _read(f"{registry.rstrip('/')}/{package}/{version}", "application/json")
    try:
        link = json.loads(raw)["dist"]["tarball"]
    except (ValueError, LookupError, TypeError) as error:
        raise DownloadError("the registry's answer cannot be read") from error
    _save(str(link), folder / archive, report)
    return True


def index_url(environment: Mapping[str, str]) -> str | None:
    """Return the index in the environment variables or configuration files of pip or uv, if any."""
    named = next((environment[name] for name in INDEX_VARIABLES if environment.get(name)), None)
    return named or _pip_setting(environment, "index-url")


def _pip_setting(environment: Mapping[str, str], name: str) -> str | None:
    files = [*SYSTEM_FILES, "~/.pip/pip.conf", "~/.config/pip/pip.conf", environment.get("PIP_CONFIG_FILE", os.devnull)]
    settings = configparser.ConfigParser(interpolation=None)
    try:
        settings.read(map(os.path.expanduser, files), encoding="utf-8")  # the last one wins
        return settings.get("global", name, fallback=None)
    except (configparser.Error, UnicodeDecodeError):
        return None


def registry_url(environment: Mapping[str, str]) -> str | None:
    """Return the registry in npm's environment variable or the user's .npmrc, if any."""
    named = next((environment[name] for name in REGISTRY_VARIABLES if environment.get(name)), None)
    if named:
        return named
    try:
        text = Path(os.path.expanduser("~/.npmrc")).read_text("utf-8", "replace")
    except OSError:
        return None
    found = re.search(r"^\s*registry\s*=\s*(\S+)", text, re.MULTILINE)
    return found[1] if found else None


def _open(url: str, accept: str) -> Any:
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise DownloadError(f"'{url}' is not an http address")
    certificates = os.environ.get("PIP_CERT") or _pip_setting(os.environ, "cert")
    with _told(url):
        context = ssl.create_default_context(cafile=certificates)
        request = urllib.request.Request(url, headers={"Accept": accept})
        return urllib.request.urlopen(request, timeout=SOCKET_SECONDS, context=context)


@contextlib.contextmanager
def _told(url: str) -> Iterator[None]:
    """Raise `DownloadError` for errors of the network, which are no errors of the disk to which an archive is saved."""
    try:
        yield
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise DownloadError(f"{urllib.parse.urlsplit(url).hostname}: {reason_of(error)}") from error


def _read(url: str, accept: str) -> tuple[bytes, str, str]:
    """Return the content, type and final address of a page."""
    with _open(url, accept) as answer, _told(url):
        return answer.read(PAGE_BYTES), answer.headers.get_content_type(), answer.url


def _save(url: str, path: Path, report: Report) -> None:
    def chunks() -> Iterator[bytes]:
        with _open(url, "*/*") as answer, _told(url):
            while chunk := answer.read(CHUNK):
                yield chunk

    with path.open("wb") as file:
        for chunk in chunks():
            file.write(chunk)
            report(file.tell())


def _json_link(raw: bytes, archive: str) -> str | None:
    try:
        files = json.loads(raw)["files"]
        return next((str(file["url"]) for file in files if file["filename"] == archive), None)
    except (ValueError, LookupError, TypeError) as error:
        raise DownloadError("the index's answer cannot be read") from error


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for name, value in attrs if name == "href" and value]


def _html_link(raw: bytes, archive: str) -> str | None:
    page = _Links()
    page.feed(raw.decode("utf-8", "replace"))
    links = ((urllib.parse.urlsplit(link).path.rpartition("/")[2], link) for link in page.found)
    return next((link for name, link in links if urllib.parse.unquote(name) == archive), None)
