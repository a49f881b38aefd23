"""Text to token ids and back: one wrapper around `tokenizers.Tokenizer`, whatever file or hub it came from.

Special tokens are found by name, so a saved tokenizer.json is all that a prepared folder or a checkpoint has to keep.
Only this package places special ids: text that happens to contain the name of a special token is encoded as plain
characters, or without the name where a tokenizer cannot do that.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from jpeg_dlm.assets import fetch
from jpeg_dlm.errors import DataError, JpegDlmError, UsageError, reason_of
from jpeg_dlm.files import write_atomic

SPECIALS = ("<pad>", "</s>", "<unk>", "<mask>", "<s>", "<line>")  # ids 0 to 5 of a tokenizer trained here
SMALLEST_BPE = 256 + len(SPECIALS)  # every byte has an id, so nothing is ever unknown
# Bytes of a word that training looks at in one: longer than the words of any language with spaces, and 32 characters of
# one without, of whose neighbors it parts one pair in 32. Training takes the longer the longer words are, without end.
LONGEST_WORD = 96
LARGEST_FILE = 1 << 27  # bytes of a tokenizer.json; those with a quarter of a million ids have 35 MB
T5_HUB_NAME = "t5-small"  # released
OLDER_FILES = ("spiece.model", "tokenizer.model", "vocab.json", "vocab.txt")  # what came before tokenizer.json

# Names by which each role is known, best first. T5 has no begin, line or mask token: the released code takes its
# first two sentinels for the first two, and we take the third one for the mask. BERT's [CLS] also parts lines (MDLM, Duo).
_PAD = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")
_EOS = ("</s>", "<|endoftext|>", "<eos>", "<|end_of_text|>", "[SEP]", "<|im_end|>")
_UNK = ("<unk>", "[UNK]")
_BOS = ("<s>", "<bos>", "<|begin_of_text|>", "[CLS]", "<extra_id_0>")
_BOUNDARY = ("<line>", "<extra_id_1>", "[CLS]")
_MASK = ("<mask>", "[MASK]", "<extra_id_2>")


def collapse(text: str) -> str:
    """`text` with every run of white space as one space, none at the ends, and lone surrogates replaced."""
    text = " ".join(text.split())
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


class TextTokenizer:
    """A tokenizer that adds nothing by itself and knows which ids are special."""

    def __init__(self, backend: Tokenizer) -> None:
        backend.no_truncation()  # files from the hub may carry both, and would silently cut documents
        backend.no_padding()
        backend.encode_special_tokens = True  # "</s>" in a text is five characters, not the end of a document
        self._backend = backend
        # One more than the largest id, not how many there are: a file may leave ids out, and a model needs a row for each.
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        eos = self._find(_EOS)
        if eos is None:
            raise DataError(f"The tokenizer has no end token (one of {', '.join(_EOS)}): use 'bpe', 't5' or one that has it.")
        pad = self._find(_PAD)
        self.eos_id: int = eos
        self.pad_id: int = eos if pad is None else pad
        self.unk_id: int | None = self._find(_UNK)
        self.bos_id: int | None = self._find(_BOS)
        self.boundary_id: int | None = self._find(_BOUNDARY)
        self.mask_id: int | None = self._find(_MASK)
        self._literals = self._leaking()

    def _find(self, names: Sequence[str]) -> int | None:
        ids = (self._backend.token_to_id(name) for name in names)
        return next((i for i in ids if i is not None), None)

    def _leaking(self) -> re.Pattern[str] | None:
        """Names of special tokens that plain text would still turn into their ids: T5's are pieces of its model."""
        names = [t.content for t in self._backend.get_added_tokens_decoder().values() if t.special]
        ids = set(self._backend.encode(" ".join(names), add_special_tokens=False).ids)
        leaking = [n for n in names if self._backend.token_to_id(n) in ids - {self.unk_id}]
        return re.compile("|".join(map(re.escape, leaking))) if leaking else None

    def _plain(self, text: str) -> str:
        return collapse(self._literals.sub(" ", text) if self._literals else text)

    @classmethod
    def from_file(cls, path: Path) -> TextTokenizer:
        """The tokenizer of a tokenizer.json."""
        try:
            with open(path, "rb") as file:
                raw = file.read(LARGEST_FILE + 1)
            if len(raw) > LARGEST_FILE:
                raise DataError(f"'{path}' is larger than {LARGEST_FILE} bytes, which no tokenizer is: name another.")
            return cls(Tokenizer.from_str(raw.decode("utf-8")))
        except OSError as error:
            raise DataError(f"Cannot read the tokenizer '{path}': {error.strerror or error}.") from error
        except (JpegDlmError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # for what it cannot parse the library raises bare Exception, or panics
            raise DataError(
                f"'{path}' is not a tokenizer.json ({reason_of(error)}): prepare the data again or name another."
            ) from error

    def save(self, path: Path) -> None:
        """Write tokenizer.json, whole or not at all."""
        write_atomic(path, self.to_json())

    def to_json(self) -> str:
        """The content of its tokenizer.json."""
        return self._backend.to_str(pretty=False)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the tokenizer.json in canonical form: equal exactly when all ids mean the same."""
        canonical = json.dumps(json.loads(self._backend.to_str()), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @cached_property
    def starts_with_space(self) -> bool:
        """Whether pieces that are encoded apart read as separate words when their ids are joined."""
        return self.decode(self.encode("a") + self.encode("b")) == "a b"

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, white space collapsed, nothing added."""
        return self._backend.encode(self._plain(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str], following: bool = False) -> list[list[int]]:
        """Ids of each text; `following` makes each read as a new word after whatever ids come before it."""
        lead = " " if following and not self.starts_with_space else ""
        encoded = self._backend.encode_batch_fast([lead + self._plain(t) for t in texts], add_special_tokens=False)
        return [e.ids for e in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`: special tokens vanish, a line boundary separates, white space is collapsed."""
        segments: list[list[int]] = [[]]
        for i in map(int, ids):
            if i == self.boundary_id:
                segments.append([])
            else:
                segments[-1].append(i)
        texts = (collapse(self._backend.decode(s, skip_special_tokens=True)) for s in segments)
        return " ".join(t for t in texts if t)


def train_bpe(texts: Iterable[str], vocab_size: int, check: Callable[[], None] = lambda: None) -> TextTokenizer:
    """A byte-level BPE tokenizer; the same texts give the same tokenizer, and every text survives a round trip.

    `check` is called ten times a second meanwhile, and may raise to give up.
    """
    if vocab_size < SMALLEST_BPE:
        raise UsageError(f"data.vocab_size {vocab_size} is too small for 'bpe', which needs at least {SMALLEST_BPE}.")
    backend = Tokenizer(models.BPE())
    # The added space makes the first word of a text the same token as inside it, so cutting documents changes no ids.
    words = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bounded = pre_tokenizers.Split(Regex(f".{{{LONGEST_WORD}}}"), "isolated")  # of words already turned into bytes
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, bounded])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    _interruptibly(lambda feed: backend.train_from_iterator(feed, trainer=trainer), map(collapse, texts), check)
    backend.pre_tokenizer = words
    return TextTokenizer(backend)


def _interruptibly(train: Callable[[Iterator[str]], None], texts: Iterator[str], check: Callable[[], None]) -> None:
    """Run `train(texts)` in a thread: the library computes for minutes without letting a signal through to Python."""
    given_up, future = threading.Event(), Future[None]()

    def feed() -> Iterator[str]:
        for text in texts:
            if given_up.is_set():
                raise InterruptedError
            yield text

    def work() -> None:
        try:
            future.set_result(train(feed()))
        except BaseException as error:  # whatever it is, it belongs to the caller
            future.set_exception(error)

    thread = threading.Thread(target=work, daemon=True)  # a daemon, which no exit waits for
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.1)
            check()
    finally:
        given_up.set()
        thread.join(1)  # while it still reads it ends at once
    future.result()


def load_tokenizer(spec: str) -> TextTokenizer:
    """'t5', a tokenizer.json, a folder that holds a tokenizer, or a hub name."""
    path = Path(os.path.expanduser(spec))  # Path's own refuses a user that does not exist
    if spec == "t5":
        return _from_hub(T5_HUB_NAME) or TextTokenizer.from_file(fetch("t5-tokenizer"))
    if path.is_file():
        return TextTokenizer.from_file(path)
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            return TextTokenizer.from_file(path / "tokenizer.json")
        older = any((path / name).is_file() for name in OLDER_FILES)
        found = _through_transformers(str(path), local=True) if older else None
        if found is None:
            raise DataError(
                f"The folder '{path}' holds no tokenizer.json and nothing that transformers can turn into one: name another "
                "folder, or for a SentencePiece model install the package protobuf."
            )
        return found
    found = None if spec == "bpe" or path.is_absolute() else _from_hub(spec)
    if found is None:
        raise DataError(f"No tokenizer '{spec}': it is no file or folder, and neither the hub nor its local cache has it.")
    return found


def _from_hub(name: str) -> TextTokenizer | None:
    """A hub tokenizer, from the local cache when it is there; None when neither has it."""
    for local in (True, False) if _hub_reachable() else (True,):
        file = _hub_file(name, "tokenizer.json", local)
        if file:
            return TextTokenizer.from_file(file)
        if any(_hub_file(name, older, local) for older in OLDER_FILES):
            return _through_transformers(name, local)
    return None


def _hub_file(name: str, file: str, local: bool) -> Path | None:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, file, local_files_only=local))
    except (OSError, ValueError):  # not found, no network, or not a valid name: all of the hub's errors are one of these
        return None


def _through_transformers(name: str, local: bool) -> TextTokenizer | None:
    """For tokenizers kept in an older form, such as a SentencePiece model alone: transformers converts them."""
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(name, local_files_only=local, trust_remote_code=False)
    except (OSError, ValueError, ImportError):
        return None
    backend = getattr(slow, "backend_tokenizer", None)
    return TextTokenizer(Tokenizer.from_str(backend.to_str())) if backend is not None else None


def _hub_reachable() -> bool:
    """A quick look, because the hub's own client retries for most of a minute on a machine without network."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return False
    if urllib.request.getproxies():
        return True  # the proxy resolves names, so looking from here would say nothing
    endpoint = urllib.parse.urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        with socket.create_connection((endpoint.hostname or "", endpoint.port or 443), timeout=3):
            return True
    except OSError:
        return False
