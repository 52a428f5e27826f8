"""Blocks: however an answer is cut, its events add up to the answer, in both APIs."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config.server import ServerConfig
from quire.frontend.openai.chat.blocks import BlockReader
from quire.frontend.openai.chat.format import ChatFormat
from quire.frontend.openai.chat.output import ChatParser, make_message
from quire.frontend.openai.protocol.chat import ChatBody, FunctionDefinition, Tool
from tests.seeds import examples

FORMAT = ChatFormat(ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3"), None)
PLAN = FORMAT.plan(ChatBody(messages=[], tools=[Tool(FunctionDefinition("f"))]))
PIECES = [
    "<think>", "</think>", "Hm", "\n", " ", "Hello", "é", "𐀀", "<tool_call>", "</tool_call>", "<tool", "{", "}",
    '{"name": "f", "arguments": {"a": "<think>"}}', '{"name": "f", "arguments": {', '"b": [1, 2]', '{"name": 3}',
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "<think>No</think>",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join)
CUTS = st.lists(st.integers(0, 200), max_size=20)


def cut(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    return [text[a:b] for a, b in pairwise(places)] or [text]


def parser() -> ChatParser:
    return PLAN.make_parser("")


@settings(max_examples=examples(100))
@given(text=TEXTS, cuts=CUTS)
def test_events_add_up_to_what_the_chat_route_says(text: str, cuts: list[int]) -> None:
    reader, seen = BlockReader(parser()), dict[int, str]()
    is_open: int | None = None
    for piece in [*cut(text, cuts), None]:
        for event in reader.finish() if piece is None else reader.feed(piece, ()):
            index = event.block.index
            if event.step == "open":
                assert (is_open, index, event.block.text) == (None, len(seen), "")
                is_open, seen[index] = index, ""
            elif event.step == "grow":
                assert is_open == index
                seen[index] += event.text
                assert event.block.text == seen[index]
            else:
                assert is_open == index
                is_open = None
    assert is_open is None
    assert [seen[i] for i in range(len(seen))] == [block.text for block in reader.blocks]
    whole = parser()
    message = make_message("assistant", [*whole.feed(text, ()), *whole.finish()])
    made = reader.message()
    assert made["content"] == (message["content"] or "")
    assert made.get("reasoning") == message["reasoning"]
    assert [c["function"] for c in made.get("tool_calls", [])] == [c["function"] for c in message.get("tool_calls", [])]


def test_an_answer_that_says_nothing_is_an_empty_text() -> None:
    reader = BlockReader(parser())
    steps = [(event.step, event.block.kind, event.is_last) for event in reader.finish()]
    assert steps == [("open", "text", False), ("close", "text", True)]
    assert reader.message() == {"role": "assistant", "content": ""}
