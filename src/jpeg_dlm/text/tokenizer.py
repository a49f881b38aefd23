"""Convert text to token ids and back: one wrapper around `tokenizers.Tokenizer` for files and hub tokenizers.

Special tokens are found by name. Their names in a text are encoded as plain characters, or dropped if that is impossible.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from threading import Event

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from jpeg_dlm.text.download import fetch
from jpeg_dlm.util.background import Background
from jpeg_dlm.util.errors import DataError, JpegDlmError, UsageError, reason_of
from jpeg_dlm.util.files import write_atomic

SPECIALS = ("<pad>", "</s>", "<unk>", "<mask>", "<s>", "<line>")  # ids 0 to 5 of a tokenizer trained here
SMALLEST_BPE = 256 + len(SPECIALS)  # every byte has an id, so no text is unknown
# BPE training splits words into chunks of this many bytes, as its time grows without bound with the length of words.
# Words of languages with spaces are shorter; in a language without, this is 32 characters, and one in 32 adjacent pairs
# is split.
LONGEST_WORD = 96
MOST_LISTED = 5  # unknown words that a message names

# Names of each role, in order of preference. T5 has no begin, line or mask token: the released code uses its first two
# sentinels for begin and line, and we use the third for the mask. BERT's [CLS] also separates lines (MDLM, Duo). GPT-2's
# end token is its begin token too.
_PAD = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")
_EOS = ("</s>", "<|endoftext|>", "<eos>", "<|end_of_text|>", "[SEP]", "<|im_end|>")
_UNK = ("<unk>", "[UNK]")
_BOS = ("<s>", "<bos>", "<|begin_of_text|>", "[CLS]", "<extra_id_0>", "<|endoftext|>")
_BOUNDARY = ("<line>", "<extra_id_1>", "[CLS]")
_MASK = ("<mask>", "[MASK]", "<extra_id_2>")
# Spaces that transformers removes after T5's decoding, in its order (its `clean_up_tokenization_spaces`; released).
_CLEANED_UP = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


def collapse(text: str) -> str:
    """Collapse runs of white space to one space, strip the ends, and replace lone surrogates."""
    return _valid(" ".join(text.split()))


def _valid(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def clean_up(text: str) -> str:
    """Remove spaces before marks and English contractions, also where they belong: " ' " and " 're" of " 'real"."""
    for spaced in _CLEANED_UP:
        text = text.replace(spaced, spaced.strip())
    return text


class TextTokenizer:
    """A tokenizer that adds no tokens by itself and knows its special ids."""

    def __init__(self, backend: Tokenizer) -> None:
        backend.no_truncation()  # hub files may set both, which would silently cut documents
        backend.no_padding()
        backend.encode_special_tokens = True  # "</s>" in a text is five characters, not the end of a document
        self._backend = backend
        # The largest id plus one, not the number of ids: a file may skip ids, and a model needs an embedding for each.
        ids = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(ids.values(), default=-1)
        eos, pad, self.unk_id, self.bos_id, self.boundary_id, self.mask_id = (
            next((ids[name] for name in names if name in ids), None) for names in (_EOS, _PAD, _UNK, _BOS, _BOUNDARY, _MASK)
        )
        if eos is None:
            raise DataError(f"The tokenizer has no end token (one of {', '.join(_EOS)}): use 'bpe', 't5' or one that has it.")
        self.eos_id: int = eos
        self.pad_id: int = eos if pad is None else pad
        # Names of special tokens that plain text still encodes to special ids, as in T5's model.
        names = [t.content for t in backend.get_added_tokens_decoder().values() if t.special]
        encoded = set(backend.encode(" ".join(names), add_special_tokens=False).ids) - {self.unk_id}
        leaking = [re.escape(name) for name in names if ids[name] in encoded]
        self._literals = re.compile("|".join(leaking)) if leaking else None
        # GPT-2's gives back every text exactly and keeps its white space. T5's and BERT's lose white space, and those trained
        # here, which begin every text with a space, are trained on text with white space collapsed.
        probe = "a\n\n b  "
        self.keeps_white_space = backend.decode(backend.encode(probe, add_special_tokens=False).ids) == probe
        self._is_t5 = backend.token_to_id("<extra_id_0>") is not None

    def _plain(self, text: str) -> str:
        text = self._literals.sub(" ", text) if self._literals else text
        return _valid(text) if self.keeps_white_space else collapse(text)

    @classmethod
    def from_file(cls, path: Path) -> TextTokenizer:
        """Load a tokenizer.json."""
        try:
            return cls(Tokenizer.from_str(path.read_text("utf-8")))
        except (JpegDlmError, KeyboardInterrupt):
            raise
        except BaseException as error:  # the library raises bare Exception or panics when it cannot parse
            raise DataError(
                f"'{path}' cannot be read as a tokenizer.json ({reason_of(error)}): prepare the data again or name another."
            ) from error

    def save(self, path: Path) -> None:
        """Write tokenizer.json."""
        write_atomic(path, self._backend.to_str(pretty=False))

    def save_pretrained(self, folder: Path, most_tokens: int) -> None:
        """Write the files of `transformers.AutoTokenizer`, which then encodes and decodes as this tokenizer."""
        backend = Tokenizer.from_str(self._backend.to_str())
        backend.post_processor = None  # it adds no special tokens
        if isinstance(backend.decoder, decoders.ByteLevel) and not self.keeps_white_space:  # `collapse` is left to it
            spaces = (Regex(r"[\s\x1c-\x1f]+"), " "), (Regex(r"\A | \z"), "")
            backend.normalizer = normalizers.Sequence([normalizers.Replace(*pair) for pair in spaces])
            backend.decoder = decoders.Sequence([decoders.ByteLevel(), *(decoders.Replace(*pair) for pair in spaces)])
        ids = {"eos": self.eos_id, "pad": self.pad_id, "unk": self.unk_id, "bos": self.bos_id, "mask": self.mask_id}
        specials = {f"{role}_token": backend.id_to_token(i) for role, i in ids.items() if i is not None}
        options = {"clean_up_tokenization_spaces": self._is_t5, "split_special_tokens": True, "padding_side": "right"}
        if isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):  # transformers 4 would set it to its own default
            options["add_prefix_space"] = backend.pre_tokenizer.add_prefix_space
        options |= {"model_input_names": ["input_ids", "attention_mask"], "model_max_length": most_tokens}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **specials, **options}
        write_atomic(folder / "tokenizer.json", backend.to_str(pretty=False))
        write_atomic(folder / "tokenizer_config.json", json.dumps(config, indent=1) + "\n")

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the canonical tokenizer.json: equal exactly when all ids have the same meaning."""
        canonical = json.dumps(json.loads(self._backend.to_str()), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def trained_here(self) -> bool:
        """True for the tokenizers of `TRAINED`."""
        form = json.loads(self._backend.to_str())
        words, names = form["pre_tokenizer"] or {}, tuple(token["content"] for token in form["added_tokens"])
        plain = form["normalizer"] is None and form["model"]["type"] in ("BPE", "WordLevel")
        return plain and words.get("type") == "ByteLevel" and words["add_prefix_space"] and names == SPECIALS

    @cached_property
    def starts_with_space(self) -> bool:
        """True if texts that are encoded separately decode as separate words when their ids are concatenated."""
        return self.decode(self.encode("a") + self.encode("b")) == "a b"

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text` with no special tokens added; white space counts only where it is kept."""
        return self._backend.encode(self._plain(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str], following: bool = False) -> list[list[int]]:
        """Return the ids of each text; with `following`, each decodes as a new word after any preceding ids."""
        lead = " " if following and not self.starts_with_space else ""
        encoded = self._backend.encode_batch_fast([lead + self._plain(t) for t in texts], add_special_tokens=False)
        return [e.ids for e in encoded]

    def known_ids(self, text: str, name: str = "text") -> list[int]:
        """Return the ids of a text that a model is given; raise `DataError` if it is empty or has unknown words."""
        ids = self.encode(text)
        if not ids or text.isspace():
            raise DataError(f"The {name} is empty: give at least one word.")
        self.refuse_unknown(text)
        return ids

    def refuse_unknown(self, text: str) -> None:
        """Raise `DataError` that names the words of a text without a token, if there are any."""
        if self.unk_id is not None and self.unk_id in self.encode(text):
            words = [f"'{word}'" for word in dict.fromkeys(self._plain(text).split()) if self.unk_id in self.encode(word)]
            listed = ", ".join(words[:MOST_LISTED]) + (" ..." if len(words) > MOST_LISTED else "")
            raise DataError(f"The model's tokenizer does not know {listed}: use other words.")

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; drop special tokens, and turn line boundaries into spaces."""
        groups = itertools.groupby(map(int, ids), key=lambda i: i == self.boundary_id)
        segments = [list(group) for is_boundary, group in groups if not is_boundary]
        texts = (self._backend.decode(s, skip_special_tokens=True) for s in segments)
        if not self.keeps_white_space:
            texts = (collapse(clean_up(text) if self._is_t5 else text) for text in texts)
        return " ".join(filter(None, texts))

    def decode_with_specials(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` with special tokens by name."""
        return self._backend.decode(list(ids), skip_special_tokens=False)


def train_bpe(texts: Iterable[str], vocab_size: int, check: Callable[[], None] = lambda: None) -> TextTokenizer:
    """Train a byte-level BPE tokenizer deterministically; `check` is called ten times a second and may raise to stop."""
    if vocab_size < SMALLEST_BPE:
        raise UsageError(f"data.vocab_size {vocab_size} is too small for 'bpe', which needs at least {SMALLEST_BPE}.")
    backend = Tokenizer(models.BPE())
    # The added space gives the first word of a text the same token as elsewhere, so cutting documents changes no ids.
    words = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bounded = pre_tokenizers.Split(Regex(f".{{{LONGEST_WORD}}}"), "isolated")  # words are bytes by now
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence([words, bounded]), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    _train(backend, trainer, texts, check)
    backend.pre_tokenizer = words
    return TextTokenizer(backend)


def train_words(texts: Iterable[str], vocab_size: int, check: Callable[[], None] = lambda: None) -> TextTokenizer:
    """Train a tokenizer whose tokens are the most frequent words and marks; every other word is the unknown token.

    Words are split as in `train_bpe`, so that texts decode with the same spaces; `check` is as there.
    """
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    trainer = trainers.WordLevelTrainer(vocab_size=vocab_size, special_tokens=list(SPECIALS), show_progress=False)
    _train(backend, trainer, texts, check)
    return TextTokenizer(backend)


TRAINED = {"bpe": train_bpe, "words": train_words}  # tokenizers that are trained on the text, by name


def _train(backend: Tokenizer, trainer: trainers.Trainer, texts: Iterable[str], check: Callable[[], None]) -> None:
    """Train in a thread, because the library blocks Python's signal handlers for minutes."""
    background, stopped = Background(), Event()

    def feed() -> Iterator[str]:
        for text in texts:
            if stopped.is_set():
                raise InterruptedError
            yield collapse(text)

    end = background.start(lambda: backend.train_from_iterator(feed(), trainer=trainer))
    try:
        while not end.wait(0.1):
            check()
    finally:
        stopped.set()
        end.wait(1)  # ends at once if it is still reading
    background.wait()


def load_tokenizer(spec: str) -> TextTokenizer:
    """Load a tokenizer from 't5', a tokenizer.json, a folder that holds a tokenizer, or a hub name."""
    path = Path(os.path.expanduser(spec))  # Path.expanduser fails for an unknown user
    if spec == "t5":
        return _from_hub("t5-small") or TextTokenizer.from_file(fetch("t5-tokenizer"))  # released
    for file in (path, path / "tokenizer.json"):
        if file.is_file():
            return TextTokenizer.from_file(file)
    tokenizer = _converted(str(path), local=True) if path.is_dir() else _from_hub(spec)
    if tokenizer is None:
        raise DataError(
            f"No tokenizer '{spec}': it is no file, no folder with a tokenizer.json or with files that transformers can turn "
            "into one (SentencePiece models need the package protobuf), and neither the hub nor its local cache has it."
        )
    return tokenizer


def _from_hub(name: str) -> TextTokenizer | None:
    """Load a hub tokenizer, from the local cache if possible; return None when neither has it."""
    from huggingface_hub import constants, get_session, hf_hub_download

    only_local = [True]
    with contextlib.suppress(Exception):  # offline by choice or not; its type depends on the client's version
        get_session().head(constants.ENDPOINT, timeout=3)  # because a download is tried for most of a minute
        only_local.append(False)
    for local in only_local:
        try:
            return TextTokenizer.from_file(Path(hf_hub_download(name, "tokenizer.json", local_files_only=local)))
        except (OSError, ValueError):  # not found, no network or invalid name: all hub errors are one of these
            if (tokenizer := _converted(name, local)) is not None:
                return tokenizer
    return None


def _converted(name: str, local: bool) -> TextTokenizer | None:
    """Let transformers convert a tokenizer in an older format, such as a bare SentencePiece model."""
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(name, local_files_only=local, trust_remote_code=False)
    except (OSError, ValueError, ImportError):
        return None
    backend = getattr(slow, "backend_tokenizer", None)
    return TextTokenizer(Tokenizer.from_str(backend.to_str())) if backend is not None else None
