"""llama-index's models for servers with OpenAI's API."""

from __future__ import annotations

import asyncio
import os

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

PLACE = {"api_base": f"{os.environ['QUIRE_URL']}/v1", "api_key": os.environ["QUIRE_API_KEY"]}
OPTIONS = {"model": "demo", "temperature": 0, "context_window": 2048, **PLACE}
chat = OpenAILike(is_chat_model=True, is_function_calling_model=True, max_tokens=60, **OPTIONS)
answer = chat.chat([ChatMessage(role="user", content="What is prefix caching?")])
assert "KV blocks" in answer.message.content, answer
pieces = [chunk.delta for chunk in chat.stream_chat([ChatMessage(role="user", content="What is prefix caching?")])]
assert "".join(p or "" for p in pieces) == answer.message.content
text = OpenAILike(is_chat_model=False, max_tokens=8, **OPTIONS)
assert text.complete("Prefix caching is").text
assert asyncio.run(chat.acomplete("What is a KV block?")).text


def get_weather(city: str) -> str:
    """Get the current weather in a city"""
    return f"fine in {city}"


called = chat.predict_and_call([FunctionTool.from_defaults(get_weather)], "What is the weather in Paris?")
assert "Paris" in str(called), called
print("chat, stream, completion, async, tools")
