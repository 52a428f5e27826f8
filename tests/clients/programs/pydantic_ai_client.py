"""pydantic-ai: typed outputs, tools that are called, streams, over chat completions and over responses."""

from __future__ import annotations

import asyncio
import os
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{os.environ['QUIRE_URL']}/v1", api_key=os.environ["QUIRE_API_KEY"])
SETTINGS = {"temperature": 0, "max_tokens": 300}
QUESTION = "What is the weather in Oslo?"


class Report(BaseModel):
    city: Literal["Oslo", "Rome"]
    degrees: int = Field(ge=-50, le=50)


async def try_model(model: OpenAIChatModel | OpenAIResponsesModel) -> None:
    plain = Agent(model, model_settings=SETTINGS)
    answer = await plain.run("What is prefix caching?")
    assert "KV blocks" in answer.output, answer.output
    assert answer.usage.output_tokens > 5

    async with plain.run_stream("What is prefix caching?") as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == answer.output
    endless = {**SETTINGS, "extra_body": {"ignore_eos": True}}  # a short answer may be there before it is asked for
    async with plain.run_stream("What is prefix caching?", model_settings=endless) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    assert len(pieces) > 1

    follow = await plain.run("Why does that matter?", message_history=answer.all_messages())
    assert follow.output

    for output_type in (ToolOutput(Report), NativeOutput(Report)):
        typed = Agent(model, output_type=output_type, model_settings=SETTINGS)
        result = await typed.run(QUESTION)
        assert isinstance(result.output, Report), result
        async with typed.run_stream(QUESTION) as stream:
            last = [report async for report in stream.stream_output(debounce_by=None)][-1]
        assert isinstance(last, Report)

    asked: list[str] = []
    caller = Agent(model, model_settings=SETTINGS)

    @caller.tool_plain
    def get_weather(city: str) -> str:
        """Current weather of a city."""
        asked.append(city)
        return "sunny, 21 degrees"

    called = await caller.run(QUESTION)
    assert asked == ["Oslo"], asked
    assert called.output
    asked.clear()
    async with caller.run_stream(QUESTION) as stream:
        text = await stream.get_output()
    assert (asked, text) == (["Oslo"], called.output)

    try:
        await Agent(model, model_settings={"temperature": 9}).run("x")
    except ModelHTTPError as e:
        assert e.status_code == 400, e
    else:
        raise AssertionError("a temperature of 9 was taken")


async def main() -> None:
    await try_model(OpenAIChatModel("demo", provider=provider))
    await try_model(OpenAIResponsesModel("demo", provider=provider))


asyncio.run(main())
print("text, stream, history, tool and native output, function tools, error: chat and responses")
