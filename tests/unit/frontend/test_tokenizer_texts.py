"""Texts and pairs of texts as encoders read them: ids, segments and cuts are those of transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import transformers

from quire.errors import ValidationError
from quire.frontend.text.tokenizer import Tokenizer
from quire.testing.tiny_models import make_tiny_checkpoint

WORDS = [
    "the",
    "keys",
    "and",
    "values",
    "of every",
    "token",
    "are kept",
    "in blocks,",
    "begin with",
    "ÄÖ",
    "東京",
    "🙂",
    "xyzzy",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tokenizer"), "bert")


def some_text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))


@pytest.mark.parametrize("side", ["left", "right"])
def test_whatever_is_cut(directory: Path, side: str) -> None:
    ours, theirs = Tokenizer.from_dir(directory), transformers.AutoTokenizer.from_pretrained(directory)
    theirs.truncation_side = side
    rng = random.Random(side)
    for _ in range(300):
        texts = [some_text(rng) for _ in range(rng.choice((1, 2)))]
        max_len = rng.choice((None, 3, 4, 5, 8, 17, 60))
        cut: dict[str, Any] = {} if max_len is None else {"truncation": True, "max_length": max_len}
        expected = theirs(*texts, **cut, return_token_type_ids=True)
        ids, segment_start = ours.encode_texts(*texts, max_len=max_len, side=side)
        assert ids == expected["input_ids"], (texts, max_len)
        types = expected["token_type_ids"]
        assert segment_start == (types.index(1) if 1 in types else None)


def test_without_special_tokens(directory: Path) -> None:
    tokenizer = Tokenizer.from_dir(directory)
    plain, _ = tokenizer.encode_texts("the keys", add_special_tokens=False)
    assert plain == tokenizer.encode("the keys", add_special_tokens=False)
    assert tokenizer.encode_texts("the keys and values", add_special_tokens=False, max_len=2)[0] == plain[:2]
    assert len(tokenizer.encode_texts("the keys", max_len=1)[0]) == 2  # the special ones, whatever was asked for


def test_what_is_no_text(directory: Path) -> None:
    with pytest.raises(ValidationError, match="lone surrogate"):
        Tokenizer.from_dir(directory).encode_texts("a", "\ud800")
