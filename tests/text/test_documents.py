"""Rows before a row: of the same document only, oldest first, for any lengths of documents."""

import json
import random

import pytest
import torch

from jpeg_dlm.config import DataConfig
from jpeg_dlm.errors import DataError
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.prepare import prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Documents of 1 to 5 rows; the words of each are its own."""
    rng, path = random.Random(0), tmp_path_factory.mktemp("documents")
    texts = [" ".join(f"d{i}" for _ in range(rng.randint(1, 16))) for i in range(80)]
    (path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = DataConfig(source=str(path / "text.jsonl"), vocab_size=300, token_len=8, packing="padded", holdout=0.1)
    prepare(data, path / "blocks")
    return path / "blocks"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_rows_before_are_those_of_the_same_document(folder, count):
    blocks = Blocks(folder)
    everything = blocks.rows(range(len(blocks)))
    documents: list[list[int]] = [[]]  # by the text itself: a document is what was joined, up to its end token
    for i, row in enumerate(everything.tolist()):
        documents[-1].append(i)
        if blocks.index["eos_id"] in row:
            documents.append([])
    assert max(map(len, documents)) > 3 and [1 for d in documents if len(d) == 1]
    rows, present = blocks.before(range(len(blocks)), count)
    for document in documents:
        for place, i in enumerate(document):
            there = [place - count + k >= 0 for k in range(count)]
            assert present[i].tolist() == there
            for k in range(count):
                if there[k]:
                    assert torch.equal(rows[i, k], everything[document[place - count + k]])


def test_the_text_of_a_document_is_its_rows_one_after_another(folder):
    blocks = Blocks(folder)
    last = [i for i in range(len(blocks)) if blocks.index["eos_id"] in blocks.rows([i])[0]]
    tokenizer = blocks.tokenizer()
    for i in last[:20]:
        rows, present = blocks.before([i], 8)
        ids = [*rows[0][present[0]].flatten().tolist(), *blocks.rows([i])[0].tolist()]
        assert len(set(tokenizer.decode(ids).split())) == 1


def test_rows_without_documents_have_none_before_them(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    index = json.loads((folder / "index.json").read_text()) | {"given_rows": True}
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="prepare the text itself"):
        Blocks(tmp_path).before([1], 1)
