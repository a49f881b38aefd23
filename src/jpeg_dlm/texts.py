"""Display of texts in a notebook."""

from __future__ import annotations

import html

STYLE = "max-width: 46rem; white-space: pre-wrap"  # a readable line length


class Texts(list[str]):
    """A list of strings that a notebook displays as a numbered list with line breaks preserved."""

    def _repr_html_(self) -> str:
        items = "".join(f'<li dir="auto" style="{STYLE}">{html.escape(text)}</li>' for text in self)
        return f'<ol start="0">{items}</ol>'
