"""Tokenizers are lossless, add no ids of their own, and are the same after saving and loading."""

import itertools
import os
import random
import signal
import string
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase

from jpeg_dlm.text import tokenizer as module
from jpeg_dlm.text.tokenizer import SPECIALS, TextTokenizer, clean_up, collapse, load_tokenizer, train_bpe, train_words
from jpeg_dlm.util.errors import DataError, UsageError

WORDS = ("great", "old", "new", "whole")
TEXTS = [f"The people of the {w} union have the {w} power, and they don't doubt it." for w in WORDS] * 5
BPE = train_bpe(TEXTS, 320)

NAMES = ["<pad>", "</s>", "<unk>", "<extra_id_2>", "<extra_id_1>", "<extra_id_0>"]


def t5_like(letters=""):
    """The content of a tokenizer.json like that of T5, which also has a truncation and a template."""
    pieces = ["\u2581a", "\u2581b", "\u2581", "a", "b", "c", "\u2581cab"]
    vocab = [(name, 0.0) for name in NAMES] + [(piece, -2.0) for piece in pieces] + [(letter, -3.0) for letter in letters]
    backend = Tokenizer(models.Unigram(vocab, unk_id=2))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    backend.add_special_tokens(NAMES)
    backend.enable_truncation(2)
    return backend.to_str()


T5 = TextTokenizer(Tokenizer.from_str(t5_like()))


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=60) | st.text(alphabet="a </s>pdmk\n\t\u00a0'\"é中🙂", max_size=60))
def test_round_trip_is_lossless(text):
    ids = BPE.encode(text)
    assert BPE.decode(ids) == collapse(text) == " ".join(text.split())
    assert all(i >= 6 for i in ids), "special ids come from the packer alone"


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=6))
def test_pieces_join_to_the_ids_of_the_whole(pieces):
    pieces = [collapse(p) for p in pieces if collapse(p)]
    joined = [i for ids in BPE.encode_batch(pieces, following=True) for i in ids]
    assert joined == BPE.encode(" ".join(pieces))


def test_ids_and_roles_of_a_trained_tokenizer():
    assert (BPE.pad_id, BPE.eos_id, BPE.unk_id, BPE.mask_id, BPE.bos_id, BPE.boundary_id) == (0, 1, 2, 3, 4, 5)
    assert BPE.encode("people")[0] == BPE.encode("the people")[-1], "a first word is the same token as inside a text"
    row = [4, *BPE.encode("One two."), 5, 5, *BPE.encode("Three"), 0, 3, 1]
    assert BPE.decode(row) == "One two. Three", "framed rows decode line by line"
    assert BPE.decode(BPE.encode("a\ud800b")) == "a?b", "lone surrogates do not crash"


def test_training_is_deterministic_across_processes():
    code = f"from jpeg_dlm.text.tokenizer import train_bpe\nprint(train_bpe({TEXTS[:4]!r} * 5, 320).fingerprint)"
    for threads in ("1", "2"):
        env = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        seen = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout.strip()
        assert seen == BPE.fingerprint


def test_save_and_load_keep_the_fingerprint(tmp_path):
    BPE.save(tmp_path / "tokenizer.json")
    for source in (tmp_path, tmp_path / "tokenizer.json"):
        again = load_tokenizer(str(source))
        assert again.fingerprint == BPE.fingerprint and again.encode(TEXTS[0]) == BPE.encode(TEXTS[0])
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]
    assert train_bpe(["other words"], 320).fingerprint != BPE.fingerprint


def test_sentinels_stand_in_and_stored_truncation_is_dropped():
    assert (T5.bos_id, T5.boundary_id, T5.mask_id) == (5, 4, 3)
    ids = T5.encode("cab a b a b")
    assert len(ids) == 5 and 1 not in ids
    assert T5.decode([5, *ids, 4, *T5.encode("a"), 1]) == "cab a b a b a"


def test_names_of_special_tokens_in_a_text_give_no_special_ids():
    ids = T5.encode("a</s> b <pad><extra_id_1> cab")
    assert not {0, 1, 3, 4, 5} & set(ids) and T5.decode(ids) == "a b cab"
    assert T5.encode_batch(["a</s> b"]) == [T5.encode("a b")]
    assert BPE.decode(BPE.encode("a </s> b")) == "a </s> b"


def test_t5_decoding_cleans_up_spaces_as_transformers_does():
    letters = set(string.ascii_letters + string.digits + ".,:;?!'\"()") - set("abc")
    t5 = TextTokenizer(Tokenizer.from_str(t5_like(sorted(letters))))
    for text, expected in {
        "the victims ' families": "the victims'families",
        "on 'real assets' .": "on'real assets'.",
        "at 12: 28 . We do n't , I 'm , he 's , we 've , they 're ?": "at 12: 28. We don't, I'm, he's, we've, they're?",
        "( the CVDT (x) ) on March": "( the CVDT (x) ) on March",
    }.items():
        assert t5.decode([5, *t5.encode(text), 4, *t5.encode("a ."), 1]) == f"{expected} a."
        assert clean_up(text) == PreTrainedTokenizerBase.clean_up_tokenization(None, text) == expected  # type: ignore[arg-type]
    assert BPE.decode(BPE.encode("on 'real assets' .")) == "on 'real assets' .", "other tokenizers keep their spaces"


def gpt2_like():
    return TextTokenizer(
        Tokenizer.from_str(BPE._backend.to_str().replace('"add_prefix_space":true', '"add_prefix_space":false'))
    )


@settings(deadline=None, max_examples=100)
@given(st.text(alphabet="ab .\n\t\u00a0\r\u2028é", max_size=30))
def test_gpt2_keeps_white_space_and_no_other_tokenizer_does(text):
    bare = gpt2_like()
    assert bare.keeps_white_space and not BPE.keeps_white_space
    assert bare.decode(bare.encode(text)) == text
    assert [bare.encode(text)] == bare.encode_batch([text])
    ids = [i for piece in bare.encode_batch(["the union", "have it"], following=True) for i in piece]
    assert bare.decode(ids) == " the union have it", "pieces get their space"


def test_wrong_tokenizers_are_refused_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    whole = t5_like()
    for content in (b"{}", b"\xff", whole[:-9].encode(), whole.replace("Unigram", "Nothing").encode(), b"[" * 100_000):
        (tmp_path / "x.json").write_bytes(content)
        with pytest.raises(DataError, match=r"x\.json"):
            load_tokenizer(str(tmp_path / "x.json"))
    for name in (str(tmp_path), "no/such-name"):
        with pytest.raises(DataError, match=name):
            load_tokenizer(name)
    with pytest.raises(DataError, match="no end token"):
        TextTokenizer(Tokenizer(models.BPE()))
    with pytest.raises(UsageError, match="at least 262"):
        train_bpe(TEXTS, 100)


def test_a_text_without_spaces_is_learned_in_words_of_bounded_length():
    plain = train_bpe(["\u6f22\u5b57\u4eee\u540d" * 2000], 400)
    assert max(len(token) for token in plain._backend.get_vocab() if token not in SPECIALS) <= module.LONGEST_WORD
    rng = random.Random(0)
    words = ["".join(rng.choices([chr(0x4E00 + i) for i in range(40)], k=2)) for _ in range(25)]
    unspaced = "".join(rng.choices(words, k=4000))
    chinese = train_bpe([unspaced], 420)  # 256 bytes, 40 characters at most and 25 words fit
    assert len(chinese.encode(unspaced)) < 1.1 * 4000 and chinese.decode(chinese.encode(unspaced)) == unspaced


def test_training_gives_up_when_it_is_told_to_and_passes_errors_on():
    class Enough(Exception):
        pass

    def check():
        raise Enough

    with pytest.raises(Enough):
        train_bpe(itertools.repeat("word"), 320, check)  # would never end

    def broken():
        yield "word"
        raise DataError("The file is damaged.")

    with pytest.raises(DataError, match="damaged"):
        train_bpe(broken(), 320)


CHILD = """
import random
from jpeg_dlm.text.tokenizer import train_bpe

def text():
    for _ in range(60):
        yield "".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=100_000))
    print("read", flush=True)

train_bpe(text(), 60_000)  # six megabytes without a space, for minutes
print("trained", flush=True)
"""


@pytest.mark.slow
def test_an_interrupt_ends_training_while_it_computes():
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 - a shell ignores it for what it starts with `&`
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = subprocess.Popen([sys.executable, "-c", CHILD], preexec_fn=heard, **pipes)
    assert child.stdout is not None and child.stdout.readline() == "read\n"
    time.sleep(2)
    assert child.poll() is None
    child.send_signal(signal.SIGINT)
    try:
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert "trained" not in out and "KeyboardInterrupt" in err


# ---------------------------------------------------------------- whole words


def test_the_most_frequent_words_are_tokens_and_the_others_unknown():
    texts = ["The dog runs.", "The dog sleeps.", "A dog's ball, the dog's.", "A cat runs."]
    words = train_words(texts, len(SPECIALS) + 5)
    tokens = {words.decode([i]) for i in range(len(SPECIALS), words.vocab_size)}
    assert len(tokens) == 5 and {"dog", "."} < tokens < {"dog", ".", "The", "A", "runs", "'s"}  # 4 times, 4 times and twice
    assert words.fingerprint == train_words(iter(texts), len(SPECIALS) + 5).fingerprint


def test_whole_words_decode_to_the_text_and_unknown_ones_are_named():
    words = train_words(TEXTS, 4000)
    for text in TEXTS:
        assert words.decode(words.encode(text)) == collapse(text) and words.known_ids(text)
    known = " ".join(collapse(TEXTS[0]).split()[:3])
    assert words.known_ids(known) == words.encode(known)
    with pytest.raises(DataError, match="'zebra', 'gnus'"):
        words.known_ids(f"{known} zebra {known} gnus zebra")
    for tokenizer in (words, gpt2_like()):
        with pytest.raises(DataError, match="prompt"):
            tokenizer.known_ids(" \n", "prompt")
