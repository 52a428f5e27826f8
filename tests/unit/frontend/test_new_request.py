from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.errors import ValidationError
from quire.frontend.input_processor import as_prompt_list, parse_prompt
from quire.frontend.new_request import ParsedPrompt


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("hi", ParsedPrompt(text="hi")),
        ([1, 2], ParsedPrompt(token_ids=[1, 2])),
        ((1, 2), ParsedPrompt(token_ids=[1, 2])),
        (np.array([1, 2]), ParsedPrompt(token_ids=[1, 2])),
        ({"prompt": "hi"}, ParsedPrompt(text="hi")),
        ({"prompt": "hi", "cache_salt": "s"}, ParsedPrompt(text="hi", cache_salt="s")),
        ({"prompt": "hi", "cache_salt": ""}, ParsedPrompt(text="hi", cache_salt="")),
        ({"prompt_token_ids": [1], "prompt": "a"}, ParsedPrompt(text="a", token_ids=[1])),
        ({"type": "token", "prompt_token_ids": np.array([1]), "arrival_time": 2.0}, ParsedPrompt(None, [1], None, 2.0)),
        ({"prompt": "hi", "multi_modal_data": None}, ParsedPrompt(text="hi")),
    ],
)
def test_every_form_of_prompt_is_parsed(prompt: Any, parsed: ParsedPrompt) -> None:
    assert parse_prompt(prompt) == parsed


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (5, "got int"),
        (None, "got NoneType"),
        (["a"], "got list"),
        ([1.5], "got list"),
        ([True], "got list"),
        (b"ab", "got bytes"),
        ({}, "needs 'prompt', 'prompt_token_ids' or 'prompt_embeds'"),
        ({"prompt": 5}, "'prompt' must be text, got int"),
        ({"prompt_token_ids": "12"}, "must be a list of integers"),
        ({"prompt_token_ids": [[1]]}, "must be a list of integers"),
        ({"prompt": "hi", "multi_modal_data": {}}, "cannot have 'multi_modal_data'"),
        ({"prompt": "hi", "cache_salt": 5}, "'cache_salt' must be text"),
        ({"prompt": "hi", "cache_salt": "s" * 1025}, "at most 1024"),
    ],
)
def test_refusals_say_why(prompt: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        parse_prompt(prompt)


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("hi", 1),
        ({"prompt": "hi"}, 1),
        ([1, 2], 1),
        (np.array([1, 2]), 1),
        ([], 0),
        (["a", "b"], 2),
        ([[1], "b"], 2),
        (("a",), 1),
    ],
)
def test_one_prompt_or_many(prompts: Any, count: int) -> None:
    assert len(as_prompt_list(prompts)) == count


def test_no_prompt_at_all() -> None:
    with pytest.raises(ValidationError, match="got int"):
        as_prompt_list(7)
