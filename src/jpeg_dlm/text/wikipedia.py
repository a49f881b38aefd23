"""Extract prose from a Wikipedia dump: a streaming cleaner of MediaWiki markup."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Iterator

from jpeg_dlm.text.tokenizer import collapse

_NAMESPACE = re.compile(r"(?:Wikipedia|Talk|User|Image|File|Template|Category|Portal|Help|MediaWiki|Special)(?: talk)?:", re.I)
_REDIRECT = re.compile(r"\s*#\s*redirect", re.I)
_DISAMBIGUATION = re.compile(
    r"\{\{\s*(?:disambig|dab|geodis|hndis|2CC|3CC|TLAdisambig)[^{}]*\}\}|may (?:also )?(?:refer to|mean)[^.]{0,40}:\s*\n", re.I
)
_DROPPED = re.compile(
    r"<!--.*?-->|<(ref|math|gallery|table|timeline|pre|code|imagemap|hiero|score|div)\b[^<>]*(?<!/)>.*?</\1\s*>|<ref\b[^<>]*/>",
    re.S | re.I,
)
_BREAK = re.compile(r"</?(?:br|p|li|tr|td|blockquote)\b[^<>]*>", re.I)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
_TABLE = re.compile(r"\{\|(?:(?!\{\||\|\}).)*\|\}", re.S)
_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_DROPPED_LINK = re.compile(r"\s*(?:Image|File|Category|[a-z]{2,3}(?:-[a-z]+)*|simple)\s*:", re.I)
_EXTERNAL = re.compile(r"\[(?:https?|ftp|news|mailto)[^\s\]]*\s*([^\]]*)\]")
_URL = re.compile(r"(?:https?|ftp)://\S+")
_EMPTY_BRACKETS = re.compile(r"\(\s*[;,.:\s]*\)|\[\s*\]")
_OPEN_BRACKET = re.compile(r"\([;,:\s]+")
_COMMAS = re.compile(r",(?:\s*,)+")
_SPACE_BEFORE = re.compile(r"\s+([,.;:!?)])")
_DEBRIS = re.compile(r"&\w+;|\{\{|\}\}|\[\[|\]\]|\{\||\|\}|\|\||[<>]|__[A-Z]+__")
_PROSE_END = re.compile(r"[.!?][\"')\]]*$")
SHORTEST_PARAGRAPH = 60  # characters; shorter lines are captions and fragments
SHORTEST_ARTICLE = 200


def wikipedia_articles(lines: Iterable[str]) -> Iterator[str]:
    """Yield the articles of a MediaWiki dump as prose, without redirects, lists, tables, templates, references or markup."""
    for page in _pages(lines):
        title, text = _between(page, "<title>", "</title>"), _between(page, "<text", "</text>")
        if not text or _NAMESPACE.match(title):
            continue
        article = clean_wikitext(html.unescape(text.partition(">")[2]))
        if len(article) >= SHORTEST_ARTICLE:
            yield article


def _pages(lines: Iterable[str]) -> Iterator[str]:
    """Yield the text between <page> and </page>; drop a truncated last page (as in enwik8)."""
    page: list[str] | None = None
    for line in lines:
        if "<page>" in line:
            page = []
        elif "</page>" in line and page is not None:
            yield "".join(page)
            page = None
        elif page is not None:
            page.append(line)


def _between(text: str, left: str, right: str) -> str:
    return text.partition(left)[2].rpartition(right)[0]


def clean_wikitext(text: str) -> str:
    """Return the prose of one article, one paragraph per line, or "" for redirects and disambiguation pages."""
    if _REDIRECT.match(text) or _DISAMBIGUATION.search(text):
        return ""
    text = _DROPPED.sub(" ", text)
    text = _innermost_first(_TEMPLATE, "", text)
    text = _innermost_first(_TABLE, "\n", text)
    text = _TAG.sub("", _BREAK.sub(" ", text))  # other tags leave no space: H<sub>2</sub>O is one word
    text = _innermost_first(_LINK, _link_text, text)  # image captions contain links themselves
    text = _URL.sub("", _EXTERNAL.sub(r"\1", text))
    lines = (_clean_line(line) for line in html.unescape(text).split("\n") if line[:1] not in "*#:;|!={}" or not line)
    return "\n".join(line for line in lines if _is_prose(line))


def _innermost_first(pattern: re.Pattern[str], replacement: str | Callable[[re.Match[str]], str], text: str) -> str:
    for _ in range(8):  # prose is not nested deeper; lines with leftovers are dropped
        text, count = pattern.subn(replacement, text)
        if not count:
            break
    return text


def _link_text(match: re.Match[str]) -> str:
    target, _, label = match[1].partition("|")
    if _DROPPED_LINK.match(target):
        return ""
    return label.rpartition("|")[2] or target.lstrip(":")


def _clean_line(line: str) -> str:
    line = re.sub(r"'{2,}", "", line)
    line = _COMMAS.sub(",", _OPEN_BRACKET.sub("(", _EMPTY_BRACKETS.sub("", line)))
    return _SPACE_BEFORE.sub(r"\1", collapse(line))


def _is_prose(line: str) -> bool:
    return len(line) >= SHORTEST_PARAGRAPH and bool(_PROSE_END.search(line)) and not _DEBRIS.search(line)
