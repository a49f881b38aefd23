"""Documents are read whole and in order; files that are not text are rejected by name."""

import bz2
import gzip
import io
import json
import lzma
import zipfile

import pytest
from hub_stand_in import HubStandIn

from jpeg_dlm.errors import DataError, MissingPackageError, UsageError
from jpeg_dlm.fetch.assets import ASSETS
from jpeg_dlm.text import corpora
from jpeg_dlm.text.captions import sentence
from jpeg_dlm.text.corpora import open_corpus
from jpeg_dlm.text.lm1b import detokenize_lm1b
from jpeg_dlm.text.records import size_of
from jpeg_dlm.text.text_files import text_lines
from jpeg_dlm.text.tokenizer import clean_up
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


@pytest.fixture
def hub(monkeypatch):
    def install(sets):
        stand_in = HubStandIn(sets)
        monkeypatch.setitem(__import__("sys").modules, "datasets", stand_in)
        return stand_in

    return install


def test_hub_sets_stream_or_name_the_extra(hub, monkeypatch):
    hub({"default": {"test": [{"text": "a  b"}, {"text": ""}, {"text": "c"}], "train": [{"input_ids": [3, 1]}]}})
    assert list(documents("hf:some/set:test")) == ["a b", "", "c"]
    assert list(documents("hf:some/set:test", skip=2)) == ["c"]
    assert list(documents("hf:some/set")) == [(3, 1)]
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
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
        ("hf:{tmp}/set/en:test", ("{tmp}/set", "en", "test", None)),  # its README.md defines configurations
        ("hf:{tmp}/set", ("{tmp}/set", None, "train", None)),
        ("hf:{tmp}/files/of/mine", ("{tmp}/files/of/mine", None, "train", None)),
    ],
)
def test_name_configuration_revision_and_split_of_a_hub_set(tmp_path, hub, source, call):
    write(tmp_path / "README.md", "of the folder around the sets")
    (tmp_path / "set" / "en").mkdir(parents=True)
    write(tmp_path / "set" / "README.md", "---\nconfigs:\n- config_name: en\n---\n")
    (tmp_path / "files" / "of" / "mine").mkdir(parents=True)
    stand_in = hub({name: dict.fromkeys(("train", "validation", "test"), [{"text": "a"}]) for name in [call[1]]})
    assert list(documents(source.format(tmp=tmp_path))) == ["a"]
    assert stand_in.calls == [tuple(part and part.format(tmp=tmp_path) for part in call)]


def test_configurations_and_scripts_are_named_in_the_error(hub):
    stand_in = hub({"en": {}, "de": {}})
    with pytest.raises(DataError, match="Config name is missing.*name one of en, de, as in hf:own/set/en"):
        list(documents("hf:own/set"))

    def refuse(*args, **options):
        raise RuntimeError("Dataset scripts are no longer supported, but found set.py")

    stand_in.load_dataset = refuse
    with pytest.raises(DataError, match="hf:own/set@refs/convert/parquet"):
        list(documents("hf:own/set"))
    with pytest.raises(UsageError, match=r"'train\[5\]' is not a split"):
        documents("hf:own/set:train[5]")


def test_a_hub_set_can_name_its_held_out_split_and_ranges(hub):
    texts = [f"text {i}" for i in range(10)]
    hub({"default": {"train": [{"text": text} for text in texts], "test": [{"text": "held out ."}]}})
    corpus = open_corpus("hf:own/set:train[2:7],train[7:]")
    assert [list(corpus.stream(skip)) for skip in (0, 3, 6)] == [texts[2:7], texts[5:7], []]
    assert corpus.heldout and list(corpus.heldout(0)) == texts[7:]
    lm1b = open_corpus("lm1b", "lm1b")
    assert list(lm1b.stream(8)) == texts[8:] and lm1b.heldout and list(lm1b.heldout(0)) == ["held out."]
    assert open_corpus("hf:own/set").heldout is None


def test_openwebtext_is_a_pinned_revision_without_the_last_hundred_thousand_documents(hub):
    stand_in = hub({"default": {"train": [{"text": "a"}]}})
    corpus = open_corpus("openwebtext")
    assert list(corpus.stream(0)) == ["a"] and corpus.heldout and list(corpus.heldout(0)) == []
    [path, name, split, revision] = stand_in.calls[0]
    assert (path, name, split, len(revision)) == ("Skylion007/openwebtext", None, "train", 40)
    assert corpus.fingerprint.endswith(f":train[:{8_013_769 - 100_000}],train[{8_013_769 - 100_000}:]")


# ---------------------------------------------------------------- fields of records


def jsonl(path, records):
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


CONTENT = [{"id": str(i), "content": f"The dog number {i} runs."} for i in range(20)]


@pytest.mark.parametrize(
    ("records", "first", "other"),
    [
        (CONTENT, "id", "content"),
        ([{"url": f"http://x.org/{i}/a/long/address", "body": f"Dog {i}."} for i in range(20)], "url", "body"),
        ([{"title": "A dog", "meta": {"text": "It runs and runs and runs. " * 3}}] * 20, "title", "meta.text"),
        ([{"id": str(i), "content": "word " * 20} for i in range(5000)], "id", "content"),
    ],
)
def test_a_field_that_is_hardly_the_text_is_refused(tmp_path, hub, records, first, other):
    hub({"default": {"train": records}})
    for source in (jsonl(tmp_path / "a.jsonl", records), "hf:own/set"):
        with pytest.raises(DataError, match=f"'{first}', holds .* where '{other}' holds .* --data.field {other}"):
            list(documents(source))
        found = list(open_corpus(source, field=other).stream(0))
        assert len(found) == len(records) and found[0].startswith(("The dog", "Dog", "It runs", "word"))


def test_a_named_field_is_read_and_a_wrong_name_is_refused(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [{"text": "no", "a": {"b": {"c": "yes"}}, "a.d": "dotted", "rows": [3, 1]}])
    for field, document in {"": "no", "a.b.c": "yes", "a.d": "dotted", "rows": (3, 1)}.items():
        assert list(open_corpus(source, field=field).stream(0)) == [document]
    for wrong in ("a.b", "a.b.c.d", "nothing"):
        with pytest.raises(DataError, match=f"no text in '{wrong}' among the fields text, a"):
            list(open_corpus(source, field=wrong).stream(0))
    with pytest.raises(UsageError, match="data.field names a field of records"):
        open_corpus(write(tmp_path / "a.txt", "Text."), field="text")


def test_texts_of_equal_size_are_read_by_the_first_and_the_others_are_named(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [{"src": "A dog runs.", "trg": "Ein Hund rennt."}] * 3)
    corpus = open_corpus(source)
    assert list(corpus.stream(0)) == ["A dog runs."] * 3
    assert corpus.reader.summary(1394, 355_120) == "Field 'src' of 1,394 records, 355 KB; not read: 'trg'."


@pytest.mark.parametrize(("size", "shown"), [(7, "7 bytes"), (999, "999 bytes"), (1234, "1.23 KB"), (56_789_000, "56.8 MB"),
                                             (4_000_000_000, "4 GB"), (10**13, "1e+04 GB")])  # fmt: skip
def test_sizes_have_three_digits(size, shown):
    assert size_of(size) == shown


def test_white_space_of_records_and_files_is_kept_where_the_tokenizer_keeps_it(tmp_path):
    text = "  Title\n\n\tOne  two\n three. \n"
    jsonl(tmp_path / "a.jsonl", [{"text": text}])
    write(tmp_path / "b.txt", text)
    assert list(documents(str(tmp_path))) == ["Title\nOne two three."] * 2
    assert list(open_corpus(str(tmp_path), verbatim=True).stream(0)) == [text] * 2


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
    ("raw", "released"),
    [
        ("Many of the victims ' families came .", "victims'families"),
        ("He won in 12 : 28 .", "12: 28."),
        ('He said : " The fire is out .', '" The fire'),
        ("The ( so called ( old ) CVDT ) on March 3 .", "CVDT ) on March"),
        ("They live on ' real assets ' .", "on'real assets'."),
    ],
)
def test_rules_and_clean_up_give_the_fragments_of_the_released_references(raw, released):
    assert released in clean_up(detokenize_lm1b(raw))


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
