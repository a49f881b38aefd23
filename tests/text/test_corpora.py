"""Documents are read whole and in order; files that are not text are rejected by name."""

import bz2
import gzip
import io
import json
import lzma
import zipfile

import pytest

from jpeg_dlm.errors import DataError, MissingPackageError, UsageError
from jpeg_dlm.fetch.assets import ASSETS
from jpeg_dlm.text import corpora
from jpeg_dlm.text.captions import sentence
from jpeg_dlm.text.corpora import open_corpus
from jpeg_dlm.text.lm1b import detokenize_lm1b
from jpeg_dlm.text.text_files import text_lines
from jpeg_dlm.text.wikipedia import clean_wikitext, wikipedia_articles


def documents(source, detokenize="none", skip=0):
    return open_corpus(source, detokenize).stream(skip)


def zipped():
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.txt", "hello")
    return out.getvalue()


def write(path, text):
    path.write_text(text, "utf-8")
    return str(path)


def test_file_with_blank_lines_is_paragraphs(tmp_path):
    source = write(tmp_path / "a.txt", "\ufeffOne line,\nwrapped  here.\n\n\n  Two.\t\n\nThree")
    assert list(documents(source)) == ["One line, wrapped here.", "Two.", "Three"]


def test_file_without_blank_lines_is_lines(tmp_path):
    assert list(documents(write(tmp_path / "a.txt", "One.\nTwo.\r\nThree.\n"))) == ["One.", "Two.", "Three."]


def test_markers_win_over_blank_lines(tmp_path):
    source = write(tmp_path / "a.txt", "One.\n\nStill one.\n<|endoftext|>\nTwo.\n")
    assert list(documents(source)) == ["One.\nStill one.", "Two."]


def test_folder_is_one_document_per_file_in_order(tmp_path):
    write(tmp_path / "b.txt", "B one.\n\nB two.")
    write(tmp_path / "a.md", "A.")
    (tmp_path / "c").mkdir()
    write(tmp_path / "c" / "d.jsonl", '{"text": "D."}\n\n{"title": "E."}\n')
    write(tmp_path / "ignored.csv", "x,y")
    (tmp_path / "c" / ".hidden").mkdir()
    (tmp_path / "c" / "._d.jsonl").write_bytes(b"\0\5\x16\7")  # as macOS leaves beside files on other disks
    write(tmp_path / "c" / ".hidden" / "e.txt", "E.")
    assert list(documents(str(tmp_path))) == ["A.", "B one.\nB two.", "D.", "E."]
    assert list(documents(str(tmp_path), skip=2)) == ["D.", "E."]


def test_packed_file_reads_like_the_plain_one(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"id": 3, "body": "Hello  there."}\n'))
    assert list(documents(str(tmp_path / "a.jsonl.gz"))) == ["Hello there."]


def test_fingerprint_follows_content(tmp_path):
    source = write(tmp_path / "a.txt", "One.")
    before = open_corpus(source)
    assert before.total_bytes == 4 and before.fingerprint == open_corpus(source).fingerprint
    write(tmp_path / "a.txt", "Two.")
    assert open_corpus(source).fingerprint != before.fingerprint


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("empty.txt", b"", "empty"),
        ("blank.txt", b" \n\n", "empty"),
        ("nul.txt", b"abc\0def", "binary"),
        ("latin.txt", "caf\u00e9".encode("latin-1"), "UTF-8"),
        ("texts.zip", zipped(), "is a zip archive, not text: unpack it first"),
        ("texts.xz", lzma.compress(b"hello"), "packed with xz, not text: unpack it first"),
        ("texts.txt", bz2.compress(b"hello"), "packed with bzip2"),
        ("cut.txt.gz", gzip.compress(b"hello " * 1000, mtime=0)[:-20], "damaged"),
        ("bad.jsonl", b'{"text": "a"}\nnot json\n', "Line 2"),
        ("list.jsonl", b"[1, 2]\n", "Line 1"),
        ("none.jsonl", b'{"n": 1}\n', "no text"),
    ],
)
def test_unusable_files_are_refused_by_name(tmp_path, name, content, word):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=word) as caught:
        list(documents(str(tmp_path / name)))
    assert name in str(caught.value)


def test_missing_sources_are_refused(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        documents(str(tmp_path / "nowhere.txt"))
    with pytest.raises(DataError, match="holds no .txt"):
        documents(str(tmp_path))
    with pytest.raises(UsageError, match="data.source"):
        documents("")
    write(tmp_path / "index.json", "{}")
    with pytest.raises(DataError, match="already prepared"):
        documents(str(tmp_path))


def test_hub_sets_stream_or_name_the_extra(monkeypatch):
    class Stream(list):
        def skip(self, n):
            return self[n:]

    class Fake:
        @staticmethod
        def load_dataset(path, split, streaming):
            assert streaming and (path, split) == ("some/set", "test")
            return Stream([{"text": "a  b"}, {"text": ""}, {"text": "c"}])

    monkeypatch.setitem(__import__("sys").modules, "datasets", Fake)
    assert list(documents("hf:some/set:test")) == ["a b", "", "c"]
    assert list(documents("hf:some/set:test", skip=2)) == ["c"]
    monkeypatch.setattr(Fake, "load_dataset", lambda path, split, streaming: Stream([{"input_ids": [3, 1]}]))
    assert list(documents("hf:some/set:test")) == [(3, 1)]
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(MissingPackageError, match=r"jpeg-dlm\[data\]"):
        list(documents("lm1b"))


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("He didn 't know what 's wrong , but they 'll see .", "He didn't know what's wrong, but they'll see."),
        ("I do n't , we 've and I 'm .", "I don't, we've and I'm."),
        ('The " cat " and the " dog " .', 'The "cat" and the "dog".'),
        ('She said : " Go . " He left .', 'She said: "Go." He left.'),
        ("`` Yes , '' he said .", '"Yes," he said.'),
        ("It cost $ 3.5 million ( about £ 2 million ) , up 5 % .", "It cost $3.5 million (about £2 million), up 5%."),
        ("The players ' union met at 10 : 30 a.m. , not before !", "The players' union met at 10:30 a.m., not before!"),
        ("A state-run agency - in 2009 , 30 of them .", "A state-run agency - in 2009, 30 of them."),
        ("Plain text stays.", "Plain text stays."),
    ],
)
def test_lm1b_spacing_is_undone(raw, expected):
    assert detokenize_lm1b(raw) == expected


ARTICLE = """{{Infobox Country|name={{nowrap|X}}|note=
a}}
[[Image:Map.png|thumb|200px|A map of [[Europe]], see [[Asia|there]].]]
'''Iceland''' is a [[Nordic countries|Nordic]] island country in the [[Atlantic Ocean]]<ref name="a">A book.</ref>, with \
CO<sub>2</sub> &amp;ndash; and ''much'' more (; ) to see at [http://x.org its site].<!-- hidden
note -->

== History ==
{| class="wikitable"
|-
| cell || {| nested |} || other
|}
* a list item that is long enough to be taken for a paragraph of prose, were it not a list item.
It was settled in the year 874 by [[Ingólfr Arnarson]], and later by many others who came from [[Norway]].
Too short.
[[Category:Islands]]
[[de:Island]]
"""


def test_markup_becomes_prose():
    import html

    assert clean_wikitext(html.unescape(ARTICLE)).split("\n") == [
        "Iceland is a Nordic island country in the Atlantic Ocean, with CO2 – and much more to see at its site.",
        "It was settled in the year 874 by Ingólfr Arnarson, and later by many others who came from Norway.",
    ]


def test_dump_gives_articles_only(tmp_path):
    import html

    def page(title, text, end="</page>"):
        return f'<page>\n<title>{title}</title>\n<text xml:space="preserve">{html.escape(text)}</text>\n{end}\n'

    prose = "This is a sentence of an article that is long enough to be kept by the cleaner. " * 4
    dump = page("A", prose) + page("B", "#REDIRECT [[A]]") + page("Talk:A", prose) + page("C", prose + "{{disambig}}")
    path = tmp_path / "dump.gz"
    path.write_bytes(gzip.compress((dump + page("D", "Stub.") + page("E", prose, end="")).encode()))
    assert list(wikipedia_articles(text_lines(path))) == [prose.strip()]


def test_named_corpora_come_from_the_cache(tmp_path, monkeypatch):
    folder = tmp_path / "speeches"
    folder.mkdir()
    write(folder / "1790.txt", "Fellow citizens:\n\nWe meet.")
    monkeypatch.setattr(corpora, "fetch", lambda name: folder)
    assert list(documents("sotu")) == ["Fellow citizens:\nWe meet."]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("two dogs are  running outside", "Two dogs are running outside."),
        ("It is winter here .", "It is winter here."),
        ("Two dogs want a toy.,", "Two dogs want a toy."),
        ("The soldiers are silent/", "The soldiers are silent."),
        ('The sign says "Golden"', 'The sign says "Golden".'),
        ('She is reading "War and Peace."', 'She is reading "War and Peace."'),
        ("Look, he is falling!", "Look, he is falling!"),
        ("2 cats are sleeping", "2 cats are sleeping."),
        ("Nobody is here", ""),
        ("A " + "very " * 12 + "old man", ""),
        ("TWO LADIES ARE BOWLING", ""),
        ("A café is on the corner", ""),
        ("He ate salt & pepper", ""),
        ("1 2 3 4 5", ""),
        ("", ""),
    ],
)
def test_captions_are_plain_sentences_or_nothing(raw, expected):
    assert sentence(raw) == expected


def test_captions_come_once_each_and_in_order(tmp_path, monkeypatch):
    def record(first, second):
        return json.dumps({"captionID": "1.jpg#0", "sentence1": first, "sentence2": second}) + "\n"

    write(tmp_path / "b.jsonl", record("A man is outside.", "Two dogs, running in snow."))
    write(tmp_path / "a.jsonl", record("A boy is asleep.", "a man is OUTSIDE") + record("A boy is asleep.", "Too short."))
    monkeypatch.setattr(corpora, "fetch", lambda name: tmp_path)
    corpus = open_corpus("captions")
    expected = ["A boy is asleep.", "A man is OUTSIDE.", "Two dogs, running in snow."]
    assert [list(corpus.stream(skip)) for skip in (0, 1)] == [expected, expected[1:]], "streams start afresh"
    assert ASSETS["captions"].archive_sha256 in corpus.fingerprint and "CC BY-SA" in ASSETS["captions"].license


def test_tatoeba_is_the_english_of_both_files_each_once(tmp_path, monkeypatch):
    by = "CC-BY 2.0 (France) Attribution: tatoeba.org #1 (CK) & #2 (x)"
    with zipfile.ZipFile(tmp_path / "fra-eng.zip", "w") as bundle:
        bundle.writestr("_about.txt", "about")
        bundle.writestr("fra.txt", f"Go.\tVa !\t{by}\nGo.\tMarche.\t{by}\nTom  is\u00a0here.\tTom est ici.\t{by}\n")
    write(tmp_path / "spa.txt", f"Go.\tVe.\t{by}\nI'm late.\tLlego tarde.\t{by}\n")
    monkeypatch.setattr(corpora, "fetch", lambda name: tmp_path)
    corpus = open_corpus("tatoeba")
    assert list(corpus.stream(0)) == ["Go.", "Tom is here.", "I'm late."] and list(corpus.stream(2)) == ["I'm late."]
    assert ASSETS["tatoeba"].archive_sha256 in corpus.fingerprint and "CC BY 2.0 FR" in ASSETS["tatoeba"].license
    (tmp_path / "fra-eng.zip").write_bytes(b"no archive")
    with pytest.raises(DataError, match="fetch them again"):
        list(corpus.stream(0))


def test_records_keep_their_paragraphs(tmp_path):
    source = write(tmp_path / "a.jsonl", json.dumps({"text": "One\nline.\n\nTwo."}))
    assert list(documents(source, detokenize="lm1b")) == ["One line.\nTwo."]
