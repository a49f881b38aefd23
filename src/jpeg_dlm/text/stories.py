"""Generate children's stories with stories15M, in cached parts; a killed writer resumes with the part it was writing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jpeg_dlm.errors import UsageError
from jpeg_dlm.fetch.assets import fetch
from jpeg_dlm.files import write_atomic
from jpeg_dlm.machine.cache import cache_dir
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.text.stories15m import BOS, SPECIALS, load_stories15m

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

    from jpeg_dlm.machine.console import Console

STORIES = 20_000  # for the source `stories`: about 4 M tokens of stories15M, an hour on one core
MOST = 1_000_000
PART = 64  # stories generated at once; their keys and values take 225 MB
NUCLEUS = 0.95  # measured: without it about one story of three is garbled
TOP = 512  # pieces that are sorted first; all are sorted when a nucleus is larger (assumed to be rare)
DROPPED = 0.75  # finished rows are dropped when this share is still being written; each drop copies the cache
VERSION = 1  # of the generator below: different stories need another folder
_LAST_END = re.compile(r"^.*[.!?][\"']?(?=\s|$)", re.DOTALL)


def stories_of(source: str) -> int | None:
    """Return how many stories a source such as 'stories' or 'stories:5000' names; None for another source."""
    name, colon, count = source.partition(":")
    if name != "stories":
        return None
    if not colon:
        return STORIES
    if not re.fullmatch(r"[0-9]{1,9}", count) or not 2 <= int(count) <= MOST:
        raise UsageError(f"'{source}' needs a number of stories from 2 to {MOST:,}: write for example stories:20000.")
    return int(count)


def written(count: int, console: Console | None = None) -> list[Path]:
    """Return the files of the first parts that hold at least `count` stories; write those that are missing."""
    from jpeg_dlm.machine.console import Console

    console = console or Console()
    folder = cache_dir() / f"stories-{VERSION}"
    paths = [folder / f"part-{i:05d}.jsonl" for i in range(-(-count // PART))]
    missing = [i for i, path in enumerate(paths) if not path.is_file()]
    if missing:
        model, tokenizer, context = load_stories15m(fetch("stories15m", console=console))
        folder.mkdir(parents=True, exist_ok=True)
        writer = StoryWriter(model, tokenizer, context, folder, PART)
        with console.progress(f"Writing {PART * len(missing):,} stories", "stories") as progress:
            for done, number in enumerate(missing, 1):
                write_atomic(paths[number], "".join(json.dumps({"text": text}) + "\n" for text in writer.part(number)))
                progress(PART * done, PART * len(missing))
    return paths


class StoryWriter:
    """Generates the parts; later parts draw only from the pieces that occurred in a nucleus of part 0 (`pieces.json`)."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: Tokenizer, context: int, folder: Path, size: int) -> None:
        self.model, self.tokenizer, self.context, self.size = model, tokenizer, context, size
        self.pieces = folder / "pieces.json"

    def part(self, number: int) -> list[str]:
        """Return the stories of one part."""
        if number and not self.pieces.is_file():
            self.part(0)
        # The head takes 60% of all multiplications, and most of its pieces never occur in stories.
        pieces = torch.tensor(json.loads(self.pieces.read_text("utf-8"))) if number else None
        rows, seen = self._draw(number, pieces)
        if pieces is None:
            write_atomic(self.pieces, json.dumps(seen.nonzero().flatten().tolist()))
        return [self._text(row) for row in rows]

    @torch.no_grad()
    def _draw(self, number: int, pieces: Tensor | None) -> tuple[list[list[int]], Tensor]:
        """Return the ids of each story, including its end token if it was drawn, and a mask of the pieces in any nucleus."""
        rows = range(number * self.size, (number + 1) * self.size)
        u_BL = RowNoise(0, rows).uniform("story", self.context)
        whole_VH = self.model.lm_head.weight
        head_VH = whole_VH if pieces is None else whole_VH[pieces]
        seen = torch.zeros(len(whole_VH), dtype=torch.bool)
        stories: list[list[int]] = [[] for _ in rows]
        cache = None
        alive, last = torch.arange(len(rows)), torch.full((len(rows),), BOS)
        writing = torch.ones(len(rows), dtype=torch.bool)
        for place in range(self.context):
            read = self.model.model(input_ids=last[:, None], past_key_values=cache, use_cache=True)
            cache = read.past_key_values
            chosen, kept = nucleus_draw((read.last_hidden_state[:, 0] @ head_VH.T).softmax(-1), u_BL[alive, place])
            last = chosen if pieces is None else pieces[chosen]
            seen[kept] = True  # only meaningful for the whole head, without `pieces`
            for row, token in zip(alive[writing].tolist(), last[writing].tolist(), strict=True):
                stories[row].append(token)
            writing &= last >= len(SPECIALS)
            if not writing.any():
                break
            if writing.float().mean() <= DROPPED:
                cache.batch_select_indices(writing)
                alive, last, writing = alive[writing], last[writing], writing[writing]
        return stories, seen

    def _text(self, ids: list[int]) -> str:
        """Return the text of a story; cut one that filled the context after its last full sentence."""
        whole = ids[-1] < len(SPECIALS)
        text = self.tokenizer.decode(ids[:-1] if whole else ids, skip_special_tokens=False).strip()
        ended = None if whole else _LAST_END.match(text)
        return ended[0] if ended else text


def nucleus_draw(p_BV: Tensor, u_B: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a piece per row by nucleus sampling with mass `NUCLEUS`; return the pieces and all pieces in the nuclei."""
    top, places = p_BV.topk(min(TOP, p_BV.shape[1]))
    if top.shape[1] < p_BV.shape[1] and (top.sum(1) < NUCLEUS).any():
        top, places = p_BV.sort(descending=True)
    sums = top.double().cumsum(1)
    inside = sums - top < NUCLEUS  # keep the piece that crosses the threshold
    mass = torch.where(inside, sums, 0.0).amax(1)
    drawn = torch.searchsorted(sums, (u_B.double() * mass)[:, None], right=True).clamp(max=top.shape[1] - 1)
    return places.gather(1, drawn)[:, 0], places[inside]
