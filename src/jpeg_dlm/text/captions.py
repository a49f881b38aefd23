"""Short sentences about pictures, out of the Stanford Natural Language Inference corpus (SNLI).

A record pairs a caption of a picture (`sentence1`) with a sentence that somebody wrote about it (`sentence2`), and a
caption comes back in several records. Each sentence is given once, in the order of first appearance, so neighbors are
often about the same picture.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

from jpeg_dlm.text.tokenizer import collapse

WORDS = range(4, 14)  # such sentences fit rows of 16 to 24 tokens, and are 86% of all (measured)
# Characters of plain sentences, and at least one small letter: leaves out what was typed in capitals, and stray symbols.
_PLAIN = re.compile(r"(?=.*[a-z])[A-Za-z0-9 .,!?'\"-]+")
_BEFORE_MARK = re.compile(r" (?=[.,!?])")
_NOT_WORD = re.compile(r"[^a-z0-9 ]")


def captions(lines: Iterable[str]) -> Iterator[str]:
    """Yield the sentences of SNLI records, one record per line, each in the form that `sentence` gives it.

    Sentences that differ in capitals and punctuation alone count as one.
    """
    seen: set[str] = set()
    for line in lines:
        record = json.loads(line)
        for text in (record["sentence1"], record["sentence2"]):
            found = sentence(text)
            key = _NOT_WORD.sub("", found.lower())
            if found and key not in seen:
                seen.add(key)
                yield found


def sentence(text: str) -> str:
    """Return `text` with a capital and a final stop, or nothing when it is too short, too long or holds odd characters."""
    text = _BEFORE_MARK.sub("", collapse(text)).rstrip(" ,;:/\\`>-")
    if len(text.split()) not in WORDS or not _PLAIN.fullmatch(text):
        return ""
    end = "" if text.rstrip('"')[-1:] in ".!?" else "."
    return text[0].upper() + text[1:] + end
