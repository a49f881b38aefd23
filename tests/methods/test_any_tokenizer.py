"""The systems on token ids with tokenizers of the field: BERT's framed rows, and GPT-2's single special token."""

import pytest
from conftest import made_up_text
from micro import PIECES, as_flags
from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer

from jpeg_dlm.api import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.text.blocks import Blocks


def bert(path):
    """Word pieces with BERT's special tokens."""
    tokenizer = BertWordPieceTokenizer(lowercase=True)
    tokenizer.train_from_iterator([made_up_text()], vocab_size=120, show_progress=False)
    tokenizer.save(str(path))


def gpt2(path):
    """Byte pairs with GPT-2's only special token."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([made_up_text()], vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.save(str(path))


SMALL = ["--model.hidden", "16", "--model.depth", "1", "--model.heads", "2", "--train.batch", "4", "--train.eval-every", "0"]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "method"), [(bert, "ar"), (bert, "mdlm"), (bert, "duo"), (gpt2, "ar"), (gpt2, "sedd")])
def test_train_and_write(make, method, corpus_file, tmp_path):
    make(tmp_path / "tokenizer.json")
    framed = make is bert
    words = ["train", "--preset", "smoke", "--method", method, "--data", str(corpus_file), "--out", str(tmp_path / "run")]
    words += [*as_flags(PIECES), *SMALL, "--quiet", "--train.steps", "2", "--data.tokenizer", str(tmp_path / "tokenizer.json")]
    special = []
    if framed:
        words += ["--data.frame", "true"]
        special = ["--model.start-id", "2"] if method == "ar" else []
        special += ["--model.mask-id", "4"] if method != "duo" else []  # its own mask, no extra row
    assert main([*words, *special]) == 0
    blocks = Blocks(tmp_path / "run" / "data", "train")
    rows = blocks.rows(list(range(len(blocks))))
    if framed:  # rows end with [CLS], and lines are parted by it, as in the data of MDLM and Duo
        assert (rows[:, 0] == 2).all() and (rows[:, -1] == 2).all() and (rows[:, 1:-1] == 2).any() and not (rows == 3).any()
    model = load(tmp_path / "run", "cpu")
    own_mask = framed and method != "duo"
    assert model.method.backbone.vocab_embed.embedding.shape[0] == blocks.vocab_size + (method != "duo" and not own_mask)
    tokens = model.sample(3)
    assert tokens.shape == (3, 16) and int(tokens.max()) < blocks.vocab_size
    assert not own_mask or 4 not in tokens
    prompted = model.generate(2, prompt="The farmer")
    assert all(text.lower().startswith("the farmer") for text in prompted)
