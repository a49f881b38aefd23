"""Sample files of other programs: what is read, what is counted, and errors that name the line."""

import json

import pytest

from jpeg_dlm.evaluation.texts import REAL, file_sources, read_samples
from jpeg_dlm.util.errors import DataError


def written(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_text_file_has_one_text_per_line(tmp_path):
    found = read_samples(written(tmp_path, "a.txt", "\ufeffone\r\n\n  \ntwo\u2028still two\n"))
    assert found.texts == ["one", "", "  ", "two\u2028still two"]
    assert len(found.sha256) == 64 and found.token_ids is None and found.references is None


def test_json_lines_by_field(tmp_path):
    rows = [{"index": 0, "prediction": "p0", "reference": "r0", "token_ids": [1, 2]}, {"text": "t1", "reference": "r1"}]
    found = read_samples(written(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)) + "\n"))
    assert found.texts == ["p0", "t1"] and found.references == ["r0", "r1"] and found.token_ids is None
    assert read_samples(tmp_path / "a.jsonl", REAL).texts == ["r0", "r1"]
    other = read_samples(written(tmp_path, "b.jsonl", '{"n": 1, "story": "s"}\n"bare"\n{"prediction": "", "x": "no"}\n'))
    assert other.texts == ["s", "bare", ""]
    assert read_samples(written(tmp_path, "d.jsonl", '\ufeff"a \\ud800 b"')).texts == ["a ? b"]  # half a character, no line end
    ids = read_samples(written(tmp_path, "c.jsonl", '{"text": "a", "token_ids": [3]}\n{"text": "b", "token_ids": []}\n'))
    assert ids.token_ids == [[3], []]


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.txt", b"good\nbad \xff\xfe\n", "Line 2 .*UTF-8"),
        ("a.jsonl", b'"good"\n"caf\xe9"\n"x"\n', "Line 2 .*UTF-8"),
        ("a.jsonl", b'"a"\n{"text": "cu\n"c"\n', "Line 2 .*JSON"),
        ("a.jsonl", b'"a"\n{"n": 3}\n', "Line 2 .*no text"),
        ("a.jsonl", b"[1]\n", "Line 1 .*no text"),
        ("a.txt", b"\n \n", "blank"),
        ("a.jsonl", b"", "blank"),
        ("a.csv", b"a,b\n", "txt"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(tmp_path, name, content, match):
    with pytest.raises(DataError, match=match) as caught:
        read_samples(written(tmp_path, name, content))
    assert "\n" not in str(caught.value)


def test_seeds_of_one_system_are_one_source(tmp_path):
    names = ["pred_seed0.jsonl", "pred_seed1.jsonl", "other.jsonl"]
    paths = [written(tmp_path, name, f'{{"text": "{i} text", "reference": "real {i}"}}\n') for i, name in enumerate(names)]
    sources = file_sources(paths, None)
    assert [(s.name, s.runs([7])) for s in sources] == [("pred", [0, 1]), ("other", [0])]
    assert sources[0].real(9).texts.texts == ["real 0"]
    [lonely] = file_sources([written(tmp_path, "l.txt", "text\n")], None)
    with pytest.raises(DataError, match="--reference"):
        lonely.real(1)
