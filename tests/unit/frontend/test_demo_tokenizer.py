"""The tokenizer and chat template that ship with the package, against transformers'."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from quire.config.model import ASSETS_DIR, DEMO_MODEL, DRAFT_MODEL
from quire.frontend.text.tokenizer import Tokenizer

TEXTS = ["What is prefix caching?", '{"name": "add", "arguments": {"a": 12}}', "naïve 数据 🙂", "a<|im_end|>b", ""]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is prefix caching?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "What is 12 + 30?"},
    ],
]


@pytest.mark.parametrize("model", [DEMO_MODEL, DRAFT_MODEL])
def test_equal_to_transformers(model: str) -> None:
    ours, theirs = Tokenizer.from_dir(ASSETS_DIR / model), AutoTokenizer.from_pretrained(ASSETS_DIR / model)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.special_tokens_map == theirs.special_tokens_map
    for conversation in CONVERSATIONS:
        for tools in (None, [TOOL]):
            for generation in (True, False):
                options: dict[str, Any] = {"tools": tools, "add_generation_prompt": generation}
                expected = theirs.apply_chat_template(conversation, tokenize=False, **options)
                assert ours.apply_chat_template(conversation, tokenize=False, **options) == expected
                ids = theirs.apply_chat_template(conversation, return_dict=False, **options)
                assert ours.apply_chat_template(conversation, **options) == ids
