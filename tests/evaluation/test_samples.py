"""Sample files of other programs: what is read, what is counted, and errors that name the line."""

import json

import pytest

from jpeg_dlm.errors import DataError
from jpeg_dlm.evaluation.samples import REAL, is_samples, read_samples
from jpeg_dlm.evaluation.sources import file_sources


def written(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_text_file_has_one_text_per_line(tmp_path):
    found = read_samples(written(tmp_path, "a.txt", "\ufeffone\r\n\n  \ntwo\u2028still two\n"))
    assert found.texts == ["one", "", "  ", "two\u2028still two"] and found.blank == 2 and found.cut_lines == 0
    assert len(found.sha256) == 64 and found.token_ids is None and found.references is None


def test_json_lines_by_field(tmp_path):
    rows = [{"index": 0, "prediction": "p0", "reference": "r0", "token_ids": [1, 2]}, {"text": "t1", "reference": "r1"}]
    found = read_samples(written(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)) + "\n"))
    assert found.texts == ["p0", "t1"] and found.references == ["r0", "r1"] and found.token_ids is None
    assert read_samples(tmp_path / "a.jsonl", REAL).texts == ["r0", "r1"]
    other = read_samples(written(tmp_path, "b.jsonl", '{"n": 1, "story": "s"}\n"bare"\n{"prediction": "", "x": "no"}\n'))
    assert other.texts == ["s", "bare", ""]
    ids = read_samples(written(tmp_path, "c.jsonl", '{"text": "a", "token_ids": [3]}\n{"text": "b", "token_ids": []}\n'))
    assert ids.token_ids == [[3], []]


def test_a_single_line_may_begin_with_a_mark_and_lack_its_end(tmp_path):
    found = read_samples(written(tmp_path, "a.jsonl", '\ufeff{"text": "one"}'))
    assert found.texts == ["one"] and found.cut_lines == 0


def test_half_a_character_is_replaced(tmp_path):
    assert read_samples(written(tmp_path, "a.jsonl", b'"a \\ud800 b"\n')).texts == ["a ? b"]


def test_a_file_cut_in_its_last_line_is_counted_elsewhere_refused(tmp_path):
    whole = '{"text": "one"}\n{"text": "two ü"}\n'.encode()
    assert read_samples(written(tmp_path, "a.jsonl", whole[:-1])).cut_lines == 0
    for cut in (2, 3, 4, 5, 8):  # 5 is inside of the ü
        found = read_samples(written(tmp_path, "a.jsonl", whole[:-cut]))
        assert found.texts == ["one"] and found.cut_lines == 1
    with pytest.raises(DataError, match="Line 2 .*JSON"):
        read_samples(written(tmp_path, "a.jsonl", b'"a"\n{"text": "cu\n"c"\n'))


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.txt", b"good\nbad \xff\xfe\n", "Line 2 .*UTF-8"),
        ("a.jsonl", b'"good"\n"caf\xe9"\n"x"\n', "Line 2 .*UTF-8"),
        ("a.jsonl", b'"a"\n{"n": 3}\n', "Line 2 .*no text"),
        ("a.jsonl", b"[1]\n", "Line 1 .*no text"),
        ("a.txt", b"", "blank"),
        ("a.txt", b"\n \n", "blank"),
        ("a.jsonl", b"", "blank"),
        ("a.csv", b"a,b\n", "txt"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(tmp_path, name, content, match):
    with pytest.raises(DataError, match=match) as caught:
        read_samples(written(tmp_path, name, content))
    assert "\n" not in str(caught.value)


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(DataError, match="Cannot read"):
        read_samples(tmp_path / "none.txt")
    (tmp_path / "folder.txt").mkdir()
    assert not is_samples(tmp_path / "folder.txt") and not is_samples(tmp_path)


def test_seeds_of_one_system_are_one_source(tmp_path):
    names = ["pred_seed0.jsonl", "pred_seed1.jsonl", "other.jsonl"]
    paths = [written(tmp_path, name, f'{{"text": "{i} text", "reference": "real {i}"}}\n') for i, name in enumerate(names)]
    sources = file_sources(paths, None)
    assert [(s.name, s.runs([7])) for s in sources] == [("pred", [0, 1]), ("other", [0])]
    assert sources[0].real(9).texts.texts == ["real 0"]
    [lonely] = file_sources([written(tmp_path, "l.txt", "text\n")], None)
    with pytest.raises(DataError, match="--reference"):
        lonely.real(1)
