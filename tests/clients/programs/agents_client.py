"""OpenAI's agents: responses with functions that run here, in one piece and streamed."""

from __future__ import annotations

import asyncio
import os

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

URL, KEY = os.environ["QUIRE_URL"], os.environ["QUIRE_API_KEY"]
asked = []


@function_tool
def get_weather(city: str) -> str:
    """Current weather of a city.

    Args:
        city: Its name.
    """
    asked.append(city)
    return '{"temperature": 7, "sky": "cloudy"}'


async def main() -> None:
    """Ask once in each way."""
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60)
    model = OpenAIResponsesModel(model="demo", openai_client=client)
    agent = Agent(name="Weather", instructions="Answer questions about the weather.", model=model, tools=[get_weather])
    question = "What is the weather in Oslo?"
    result = await Runner.run(agent, question, max_turns=4)
    assert asked == ["Oslo"], asked
    assert "7" in result.final_output, result
    streamed = Runner.run_streamed(agent, question, max_turns=4)
    kinds = {event.type async for event in streamed.stream_events()}
    assert asked == ["Oslo", "Oslo"], asked
    assert "7" in streamed.final_output, streamed
    assert {"raw_response_event", "run_item_stream_event"} <= kinds, kinds
    again = await Runner.run(agent, [*result.to_input_list(), {"role": "user", "content": "Thank you!"}], max_turns=4)
    assert again.final_output


asyncio.run(main())
print("an agent that calls a function, whole and streamed, and goes on")
