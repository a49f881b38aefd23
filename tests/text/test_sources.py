"""Documents are read whole and in order; files that are not text are rejected by name."""

import gzip
import json
import sys

import pytest
from hub_stand_in import HubStandIn

from jpeg_dlm.config import DataConfig
from jpeg_dlm.text import sources
from jpeg_dlm.text.cleaning import detokenize_lm1b, sentence
from jpeg_dlm.text.download import ASSETS
from jpeg_dlm.text.sources import open_corpus
from jpeg_dlm.util.errors import DataError, MissingPackageError, UsageError


def corpus_of(source, **options):
    return open_corpus(DataConfig(source=source, **options))


def documents(source, skip=0, **options):
    return corpus_of(source, **options).stream(skip)


def write(path, text):
    path.write_text(text, "utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\ufeffOne line,\nwrapped  here.\n\n\n  Two.\t\n\nThree", ["One line, wrapped here.", "Two.", "Three"]),
        ("One.\nTwo.\r\nThree.\n", ["One.", "Two.", "Three."]),
        ("One.\n\nStill one.\n<|endoftext|>\nTwo.\n", ["One.\nStill one.", "Two."]),
    ],
    ids=["blank lines", "lines", "markers"],
)
def test_documents_of_a_file(tmp_path, text, expected):
    assert list(documents(write(tmp_path / "a.txt", text))) == expected


def test_folder_is_one_document_per_file_in_order(tmp_path):
    write(tmp_path / "b.txt", "B one.\n\nB two.")
    write(tmp_path / "a.md", "A.")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "d.jsonl.gz").write_bytes(gzip.compress(b'{"text": "D."}\n\n{"id": 3, "title": "E."}\n'))
    write(tmp_path / "ignored.csv", "x,y")
    (tmp_path / "c" / ".hidden").mkdir()
    (tmp_path / "c" / "._d.jsonl").write_bytes(b"\0\5\x16\7")  # as macOS leaves beside files on other disks
    write(tmp_path / "c" / ".hidden" / "e.txt", "E.")
    assert list(documents(str(tmp_path))) == ["A.", "B one.\nB two.", "D.", "E."]
    assert list(documents(str(tmp_path), skip=2)) == ["D.", "E."]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.txt", b""),
        ("nul.txt", b"abc\0def"),
        ("latin.txt", "caf\u00e9".encode("latin-1")),
        ("cut.txt.gz", gzip.compress(b"hello " * 1000, mtime=0)[:-20]),
        ("plain.txt.gz", b"not packed"),
        ("bad.jsonl", b'{"text": "a"}\nnot json\n'),
        ("deep.jsonl", b"[" * 100_000),
        ("none.jsonl", b'{"n": 1}\n'),
    ],
)
def test_unusable_files_are_refused_by_name(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        list(documents(str(tmp_path / name)))


def test_missing_sources_are_refused(tmp_path):
    with pytest.raises(UsageError, match="data.source"):
        documents("")
    for source, word in {tmp_path / "nowhere.txt": "no such file", tmp_path: "holds no .txt"}.items():
        with pytest.raises(DataError, match=word):
            documents(str(source))
    write(tmp_path / "index.json", "{}")
    with pytest.raises(DataError, match="already prepared"):
        documents(str(tmp_path))


@pytest.fixture
def hub(monkeypatch):
    """Installs a stand-in of the hub with some data sets, and returns it."""
    return lambda sets: monkeypatch.setitem(sys.modules, "datasets", HubStandIn(sets)) or sys.modules["datasets"]


def test_hub_sets_stream_or_name_the_extra(hub, monkeypatch):
    hub({"default": {"test": [{"text": "a  b"}, {"text": ""}, {"text": "c"}], "train": [{"input_ids": [3, 1]}]}})
    assert list(documents("hf:some/set:test")) == ["a b", "", "c"]
    assert list(documents("hf:some/set:test", skip=2)) == ["c"]
    assert list(documents("hf:some/set")) == [(3, 1)]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackageError, match=r"jpeg-dlm\[data\]"):
        list(documents("lm1b"))


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("hf:wikitext", ("wikitext", None, "train", None)),
        ("hf:owner/name", ("owner/name", None, "train", None)),
        ("hf:allenai/c4/en:validation", ("allenai/c4", "en", "validation", None)),
        ("hf:wikimedia/wikipedia/20231101.en", ("wikimedia/wikipedia", "20231101.en", "train", None)),
        ("hf:owner/name@refs/convert/parquet:test", ("owner/name", None, "test", "refs/convert/parquet")),
        ("hf:owner/name/en@v1.0", ("owner/name", "en", "train", "v1.0")),
        ("hf:{tmp}/files/of/mine", ("{tmp}/files/of/mine", None, "train", None)),
    ],
)
def test_name_configuration_revision_and_split_of_a_hub_set(tmp_path, hub, source, call):
    (tmp_path / "files" / "of" / "mine").mkdir(parents=True)
    stand_in = hub({name: dict.fromkeys(("train", "validation", "test"), [{"text": "a"}]) for name in [call[1]]})
    assert list(documents(source.format(tmp=tmp_path))) == ["a"]
    assert stand_in.calls == [tuple(part and part.format(tmp=tmp_path) for part in call)]


def test_a_missing_configuration_and_a_wrong_split_are_refused(hub):
    hub({"en": {}, "de": {}})
    with pytest.raises(DataError, match="Config name is missing"):
        list(documents("hf:own/set"))
    with pytest.raises(UsageError, match=r"'train\[5\]' is not a split"):
        documents("hf:own/set:train[5]")


def test_a_hub_set_can_name_its_held_out_split_and_ranges(hub):
    texts = [f"text {i}" for i in range(10)]
    hub({"default": {"train": [{"text": text} for text in texts], "test": [{"text": "held out ."}]}})
    corpus = corpus_of("hf:own/set:train[2:7],train[7:]")
    assert [list(corpus.stream(skip)) for skip in (0, 3, 6)] == [texts[2:7], texts[5:7], []]
    assert corpus.heldout and list(corpus.heldout(0)) == texts[7:]
    lm1b = corpus_of("lm1b", detokenize="lm1b")
    assert list(lm1b.stream(8)) == texts[8:] and lm1b.heldout and list(lm1b.heldout(0)) == ["held out."]
    assert corpus_of("hf:own/set").heldout is None


def test_openwebtext_is_a_pinned_revision_without_the_last_hundred_thousand_documents(hub):
    stand_in = hub({"default": {"train": [{"text": "a"}]}})
    corpus = corpus_of("openwebtext")
    assert list(corpus.stream(0)) == ["a"] and corpus.heldout and list(corpus.heldout(0)) == []
    [path, name, split, revision] = stand_in.calls[0]
    assert (path, name, split, len(revision)) == ("Skylion007/openwebtext", None, "train", 40)
    assert corpus.fingerprint.endswith(f":train[:{8_013_769 - 100_000}],train[{8_013_769 - 100_000}:]")


# ---------------------------------------------------------------- fields of records


def jsonl(path, records):
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


def test_several_texts_to_choose_from_are_refused(tmp_path, hub):
    records = [{"id": str(i), "page": {"content": f"The dog number {i} runs."}} for i in range(20)]
    hub({"default": {"train": records}})
    for source in (jsonl(tmp_path / "a.jsonl", records), "hf:own/set"):
        with pytest.raises(DataError, match="name one of id, page.content with --data.field"):
            list(documents(source))
        assert list(documents(source, field="page.content")) == [f"The dog number {i} runs." for i in range(20)]


def test_a_named_field_is_read_and_a_wrong_name_is_refused(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [{"text": "no", "a": {"b": {"c": "yes"}}, "a.d": "dotted", "rows": [3, 1]}])
    for field, document in {"": "no", "a.b.c": "yes", "a.d": "dotted", "rows": (3, 1)}.items():
        assert list(documents(source, field=field)) == [document]
    for wrong in ("a.b", "a.b.c.d", "nothing"):
        with pytest.raises(DataError, match=wrong):
            list(documents(source, field=wrong))
    with pytest.raises(UsageError, match="data.field names a field of records"):
        corpus_of(write(tmp_path / "a.txt", "Text."), field="text")


def test_white_space_of_records_and_files_is_kept_where_the_tokenizer_keeps_it(tmp_path):
    text = "  Title\n\n\tOne  two\n three. \n"
    jsonl(tmp_path / "a.jsonl", [{"text": text}])
    write(tmp_path / "b.txt", text)
    assert list(documents(str(tmp_path))) == ["Title\nOne two three."] * 2
    assert list(open_corpus(DataConfig(source=str(tmp_path)), verbatim=True).stream(0)) == [text] * 2


# ---------------------------------------------------------------- LM1B


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        # Values of Duo's `lm1b_detokenizer`.
        ('" I was a father figure , " he said .', '"I was a father figure," he said.'),
        ("It 's a test : yes ; no ? maybe ! ok / fine", "It's a test: yes; no? maybe! ok/fine"),
        ("He didn 't know what 's wrong , but they 'll see .", "He didn't know what's wrong, but they'll see."),
        ("It cost $ 3.5 million ( about £ 2 million ) , up 5 % .", "It cost $3.5 million (about £2 million), up 5 % ."),
        (
            "See https : / / x.org [ a ] and b . c . d . Is it ? Yes ! Is it ?",
            "See https://x.org [a] and b. c . d. Is it? Yes! Is it?",
        ),
        ("Plain text stays.", "Plain text stays."),
    ],
)
def test_lm1b_spacing_is_undone_by_the_rules_of_the_field(raw, expected):
    assert detokenize_lm1b(raw) == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("two dogs are  running outside", "Two dogs are running outside."),
        ("Two dogs want a toy.,", "Two dogs want a toy."),
        ('The sign says "Golden"', 'The sign says "Golden".'),
        ('She is reading "War and Peace."', 'She is reading "War and Peace."'),
        ("Nobody is here", ""),
        ("A " + "very " * 12 + "old man", ""),
        ("TWO LADIES ARE BOWLING", ""),
        ("He ate salt & pepper", ""),
    ],
)
def test_captions_are_plain_sentences_or_nothing(raw, expected):
    assert sentence(raw) == expected


def test_captions_come_once_each_and_in_order(tmp_path, monkeypatch):
    def record(first, second):
        return json.dumps({"captionID": "1.jpg#0", "sentence1": first, "sentence2": second}) + "\n"

    write(tmp_path / "b.jsonl", record("A man is outside.", "Two dogs, running in snow."))
    write(tmp_path / "a.jsonl", record("A boy is asleep.", "a man is OUTSIDE") + record("A boy is asleep.", "Too short."))
    monkeypatch.setattr(sources, "fetch", lambda name, console: tmp_path)
    corpus = corpus_of("captions")
    expected = ["A boy is asleep.", "A man is OUTSIDE.", "Two dogs, running in snow."]
    assert [list(corpus.stream(skip)) for skip in (0, 1)] == [expected, expected[1:]], "streams start afresh"
    assert ASSETS["captions"].archive_sha256 in corpus.fingerprint and "CC BY-SA" in ASSETS["captions"].license
