"""OpenAI's agents: text, typed output, tools, handoffs, streams; over responses (its default) and chat completions."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Literal

import openai
from agents import (
    Agent,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel

set_tracing_disabled(True)
client = openai.AsyncOpenAI(
    base_url=f"{os.environ['QUIRE_URL']}/v1", api_key=os.environ["QUIRE_API_KEY"], max_retries=0, timeout=60
)
SETTINGS = ModelSettings(temperature=0, max_tokens=300)
QUESTION = "What is the weather in Oslo?"


class Report(BaseModel):
    city: Literal["Oslo", "Rome"]
    sunny: bool


async def try_model(model: OpenAIResponsesModel | OpenAIChatCompletionsModel) -> None:
    plain = Agent(name="plain", model=model, model_settings=SETTINGS)
    answer = await Runner.run(plain, "What is prefix caching?")
    assert "KV blocks" in answer.final_output, answer.final_output
    follow = await Runner.run(plain, [*answer.to_input_list(), {"role": "user", "content": "Why does that matter?"}])
    assert follow.final_output

    endless = ModelSettings(temperature=0, max_tokens=300, extra_body={"ignore_eos": True})
    for settings in (SETTINGS, endless):
        streamed = Runner.run_streamed(plain.clone(model_settings=settings), "What is prefix caching?")
        events: list[Any] = []
        try:
            async for event in streamed.stream_events():
                events.append(event)  # noqa: PERF401 - those before an error count, too
        except ModelBehaviorError:  # what a response that ends at max_tokens is to it
            assert settings is endless
        deltas = [
            event.data.delta
            for event in events
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        if settings is endless:  # a short answer may be there whole before it is read
            assert len(deltas) > 1
        else:
            assert "".join(deltas) == streamed.final_output == answer.final_output
        numbers = [event.data.sequence_number for event in events if event.type == "raw_response_event"]
        assert numbers == sorted(numbers)

    typed = Agent(name="typed", model=model, model_settings=SETTINGS, output_type=Report)
    report = await Runner.run(typed, QUESTION)
    assert isinstance(report.final_output, Report), report.final_output

    asked: list[str] = []

    @function_tool
    def get_weather(city: str) -> str:
        """Current weather of a city."""
        asked.append(city)
        return "sunny, 21 degrees"

    caller = Agent(name="caller", model=model, model_settings=SETTINGS, tools=[get_weather])
    called = await Runner.run(caller, QUESTION)
    assert asked == ["Oslo"], asked
    assert called.final_output
    asked.clear()
    streamed = Runner.run_streamed(caller, QUESTION)
    async for _ in streamed.stream_events():
        pass
    assert (asked, streamed.final_output) == (["Oslo"], called.final_output)

    asked.clear()
    must = ModelSettings(temperature=0, max_tokens=300, tool_choice="required")
    forced = Agent(name="forced", model=model, model_settings=must, tools=[get_weather])
    assert (await Runner.run(forced, "Hello.")).final_output is not None
    assert len(asked) >= 1

    specialist = Agent(name="weather desk", model=model, model_settings=SETTINGS)
    desk = Agent(
        name="front desk",
        model=model,
        model_settings=ModelSettings(temperature=0, max_tokens=300, tool_choice="transfer_to_weather_desk"),
        handoffs=[specialist],
    )
    handed = await Runner.run(desk, QUESTION)
    assert handed.last_agent.name == "weather desk", handed

    try:
        await Runner.run(Agent(name="hot", model=model, model_settings=ModelSettings(temperature=9)), "x")
    except openai.BadRequestError as e:
        assert e.param == "temperature", e
    else:
        raise AssertionError("a temperature of 9 was taken")


async def main() -> None:
    await try_model(OpenAIChatCompletionsModel("demo", client))
    await try_model(OpenAIResponsesModel("demo", client))


asyncio.run(main())
print("text, history, stream, typed output, tools, forced tools, handoff, error: chat and responses")
