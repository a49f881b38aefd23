"""Damage to any file of a run is found by `verify` and on loading."""

import shutil
from pathlib import Path

import pytest
from conftest import micro_flags

from jpeg_dlm import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.errors import CheckpointError, JpegDlmError
from jpeg_dlm.files import sha256_file
from jpeg_dlm.folders.model_folder import read_model, write_model
from jpeg_dlm.training import record
from jpeg_dlm.training.integrity import run_parts
from jpeg_dlm.training.record import append_row, read_rows, recorded, write_recorded


@pytest.fixture(scope="module")
def trained(corpus_file, tmp_path_factory):
    """A run with a trained encoder, prepared text and cached features: every kind of file there is."""
    out = tmp_path_factory.mktemp("integrity") / "run"
    command = ["train", "--preset", "smoke", "--data", str(corpus_file), "--out", str(out), "--quiet", "--device", "cpu"]
    assert main([*command, *micro_flags(data__cache_features="true", train__steps=6)]) == 0
    return out


@pytest.fixture
def run(trained, tmp_path):
    """A copy to damage."""
    return shutil.copytree(trained, tmp_path / "run")


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def older(run: Path) -> Path:
    """The run as an earlier version left it: manifests are in its checkpoints only."""
    for path in [*run.rglob("*.jsonl"), *run.glob("*/manifest.json")]:
        if path.name in (record.FILES, record.INVOCATIONS, "manifest.json"):
            path.unlink()
    return run


def damaged(run: Path) -> list[str]:
    return [part.said for part in run_parts(run) if part.state == "damaged"]


def test_a_flipped_bit_of_any_file_is_found_and_named(run):
    assert damaged(run) == [] and {part.state for part in run_parts(run)} == {"whole"}
    grows = ("lock", "metrics.jsonl")  # logs have to be readable, which a flipped digit is
    files = [path for path in run.rglob("*") if path.is_file() and path.name not in grows]
    folders = {str(path.relative_to(run).parent) for path in files}
    assert {".", "encoder", "data", "features", "samples", "encoder-training", "checkpoints/step-00000006"} < folders
    for path in files:
        whole = path.read_bytes()
        flip(path)
        said = damaged(run)
        assert said, path
        if path.name not in (record.FILES, "manifest.json", "index.json"):  # with these, what they speak for is named
            assert len(said) == 1 and str(path) in said[0]
        path.write_bytes(whole)


def test_missing_and_foreign_files_and_torn_logs(run):
    (run / "samples" / "step-00000006.txt").unlink()
    (run / "notes.txt").write_text("mine")
    with open(run / "metrics.jsonl", "r+b") as log:
        log.write(b"?")
    assert len(damaged(run)) == 2 and "step-00000006.txt' is missing" in " ".join(damaged(run))
    (unproved,) = (part for part in run_parts(run) if part.state == "unproved")
    assert unproved.name == "notes.txt" and "not recorded" in unproved.said


@pytest.mark.parametrize("as_before", [False, True])
def test_a_damaged_encoder_is_refused_by_whoever_uses_it(run, as_before, tmp_path, capsys):
    if as_before:
        older(run)
    flip(run / "encoder" / "encoder.safetensors")
    assert main(["verify", str(run)]) == 1 and "encoder" in capsys.readouterr().out
    assert main(["reconstruct", "--checkpoint", str(run), "--device", "cpu", "The farmer plants corn."]) == 1
    assert main(["export", str(run), "--out", str(tmp_path / "model")]) == 1
    seen = capsys.readouterr()
    lines = seen.err.splitlines()
    assert len(lines) == 2 and all(str(run / "encoder") in line for line in lines)
    assert seen.out == "" and not (tmp_path / "model").exists()


@pytest.mark.parametrize("as_before", [False, True])
def test_a_changed_tokenizer_is_refused_by_whoever_uses_it(run, as_before, tmp_path):
    if as_before:
        older(run)
    path = run / "tokenizer.json"
    path.write_text(path.read_text("utf-8").replace('"<line>"', '"<lime>"'), "utf-8")
    (said,) = damaged(run)
    assert str(path) in said
    with pytest.raises(CheckpointError, match="tokenizer"):
        load(run, "cpu").generate(1)
    with pytest.raises(CheckpointError, match="tokenizer"):
        write_model(read_model(run), tmp_path / "model")


def test_a_run_of_an_earlier_version_still_loads_and_what_is_unproved_is_said(run, corpus_file, capsys):
    older(run)
    assert main(["verify", str(run)]) == 0
    lines = {line.split(" MB  ")[0].rsplit(None, 1)[0]: line.split(" MB  ")[1] for line in capsys.readouterr().out.splitlines()}
    assert lines["encoder"] == lines["tokenizer.json"] == "whole"  # by the fingerprints in the checkpoint
    assert all("not recorded" in lines[name] for name in ("data", "features"))
    assert any(name.startswith("config.json, metrics.png") and "not recorded" in said for name, said in lines.items())
    assert load(run, "cpu").reconstruct(["The farmer plants corn."])
    assert main(["train", "--out", str(run), "--resume", "--quiet", "--device", "cpu"]) == 0


def test_resuming_checks_what_it_goes_on_from(run, capsys):
    for name in ("config.json", "features/features.bin", "data/heldout.jsonl", "encoder/encoder.json"):
        whole = (run / name).read_bytes()
        flip(run / name)
        assert main(["train", "--out", str(run), "--resume", "--quiet", "--device", "cpu"]) != 0
        assert name in capsys.readouterr().err
        (run / name).write_bytes(whole)


def test_a_prepared_folder_is_checked_before_it_is_trained_on(run, tmp_path, capsys):
    flip(run / "data" / "train-00000.bin")
    words = ["train", "--data", str(run / "data"), "--out", str(tmp_path / "new"), "--quiet", "--device", "cpu"]
    assert main([*words, *micro_flags(), "--data.vocab-size", "300"]) == 1
    assert "train-00000.bin" in capsys.readouterr().err


# ---------------------------------------------------------------- the record


def test_a_kill_between_a_file_and_its_record_is_not_damage(tmp_path, monkeypatch):
    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as kill, pytest.raises(KeyboardInterrupt):
        kill.setattr(record, "append_row", killed)
        write_recorded(tmp_path, "a", "first")
    assert recorded(tmp_path) == {}
    write_recorded(tmp_path, "a", "first")
    with monkeypatch.context() as kill, pytest.raises(KeyboardInterrupt):
        kill.setattr(record, "write_atomic", killed)
        write_recorded(tmp_path, "a", "second")
    assert (tmp_path / "a").read_text() == "first" and damaged(tmp_path) == []
    write_recorded(tmp_path, "a", "third")
    write_recorded(tmp_path, "a", "third")
    assert len(recorded(tmp_path)["a"]) == 3 and recorded(tmp_path)["a"][-1]["sha256"] == sha256_file(tmp_path / "a")
    assert damaged(tmp_path) == []


def test_a_line_that_a_power_cut_tore_is_dropped(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_row(path, {"a": 1})
    path.write_bytes(path.read_bytes() + b'{"b"')
    assert read_rows(path) == [{"a": 1}]
    append_row(path, {"c": 3})
    assert read_rows(path) == [{"a": 1}, {"c": 3}]
    path.write_bytes(b'{"a\n' + path.read_bytes())
    with pytest.raises(JpegDlmError, match="Line 1"):
        read_rows(path)
