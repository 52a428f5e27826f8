"""Anthropic's own client: messages, streams, tools, structured output, counts and errors."""

from __future__ import annotations

import json
import os

import anthropic
from pydantic import BaseModel

URL, KEY = os.environ["QUIRE_URL"], os.environ["QUIRE_API_KEY"]
QUESTION = [{"role": "user", "content": "What is prefix caching?"}]
WEATHER = {
    "name": "get_weather",
    "description": "Current weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ASK = {
    "model": "demo",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
    "tools": [WEATHER],
}
GREEDY = {"temperature": 0}
client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=60)

answer = client.messages.create(
    model="demo", max_tokens=100, system=[{"type": "text", "text": "Be short."}], messages=QUESTION, extra_body=GREEDY
)
(block,) = answer.content
assert (block.type, answer.stop_reason, answer.role) == ("text", "end_turn", "assistant"), answer
assert answer.usage.input_tokens > 0 < answer.usage.output_tokens
counted = client.messages.count_tokens(model="demo", system="Be short.", messages=QUESTION)
assert counted.input_tokens == answer.usage.input_tokens

with client.messages.stream(
    model="demo", max_tokens=100, system="Be short.", messages=QUESTION, extra_body=GREEDY
) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == block.text
assert (final.stop_reason, final.usage.output_tokens) == (answer.stop_reason, answer.usage.output_tokens)

used = client.messages.create(**ASK)
(use,) = used.content
assert (used.stop_reason, use.type, use.name, use.input) == ("tool_use", "tool_use", "get_weather", {"city": "Oslo"})
with client.messages.stream(**ASK) as stream:
    pieces = [event.partial_json for event in stream if event.type == "input_json"]
    streamed = stream.get_final_message()
assert json.loads("".join(pieces)) == streamed.content[0].input == use.input
result = {"type": "tool_result", "tool_use_id": use.id, "content": '{"temperature": 7, "sky": "cloudy"}'}
turns = [{"role": "assistant", "content": used.content}, {"role": "user", "content": [result]}]
told = client.messages.create(**{**ASK, "messages": [*ASK["messages"], *turns]})
assert "7" in told.content[0].text, told
forced = client.messages.create(**{**ASK, "messages": QUESTION, "tool_choice": {"type": "any"}})
assert {b.type for b in forced.content} == {"tool_use"}

stopped = client.messages.create(
    model="demo", max_tokens=100, messages=QUESTION, extra_body=GREEDY, stop_sequences=["the"]
)
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "the")


class Verdict(BaseModel):
    good: bool


parsed = client.messages.parse(model="demo", max_tokens=100, messages=QUESTION, output_format=Verdict)
assert isinstance(parsed.parsed_output, Verdict)

with client.messages.stream(model="demo", max_tokens=100, messages=QUESTION) as left:
    next(iter(left))  # and gone

image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
for error, kind, word in (
    ({"extra_body": {"temperature": 9}}, anthropic.BadRequestError, "temperature"),
    ({"model": "other"}, anthropic.NotFoundError, "other"),
    ({"messages": []}, anthropic.BadRequestError, "messages"),
    ({"messages": [{"role": "user", "content": [image]}]}, anthropic.BadRequestError, "image"),
):
    try:
        client.messages.create(**{"model": "demo", "max_tokens": 5, "messages": QUESTION, **error})
    except kind as e:
        assert word in e.body["error"]["message"], e.body
    else:
        raise AssertionError(f"{error} was taken")
for options in ({"api_key": "wrong"}, {"api_key": None, "auth_token": "wrong"}):
    try:
        client.with_options(**options).messages.create(model="demo", max_tokens=5, messages=QUESTION)
    except anthropic.AuthenticationError:
        pass
    else:
        raise AssertionError("a wrong key was taken")
bearer = anthropic.Anthropic(base_url=URL, auth_token=KEY, api_key=None, max_retries=0, timeout=60)
assert bearer.messages.count_tokens(model="demo", messages=QUESTION).input_tokens > 0
print("messages, streams, tools, stop sequences, parse, count_tokens, errors, both kinds of key")
