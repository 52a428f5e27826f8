"""OpenAI's own client: what it parses, streams and raises."""

from __future__ import annotations

import json
import os

import openai
from pydantic import BaseModel

URL, KEY = os.environ["QUIRE_URL"], os.environ["QUIRE_API_KEY"]
QUESTION = [{"role": "user", "content": "What is prefix caching?"}]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60)

(model,) = client.models.list().data
assert model.id == client.models.retrieve(model.id).id == "demo"

answer = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0, seed=1)
(choice,) = answer.choices
assert choice.finish_reason == "stop"
assert "KV blocks" in choice.message.content, choice
assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

chunks = list(
    client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
)
assert chunks[0].choices[0].delta.role == "assistant"
assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == choice.message.content
assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["stop"]
assert chunks[-1].choices == []
assert chunks[-1].usage.total_tokens == answer.usage.total_tokens

logged = client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=5, logprobs=True, top_logprobs=3)
content = logged.choices[0].logprobs.content
assert len(content) == 5
assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in content)
assert all(bytes(token.bytes).decode(errors="replace") == token.token for token in content)

several = client.chat.completions.create(model="demo", messages=QUESTION, n=3, temperature=1, max_tokens=8, seed=3)
assert [c.index for c in several.choices] == [0, 1, 2]

completion = client.completions.create(
    model="demo", prompt=["Prefix caching is", "A KV block"], max_tokens=4, logprobs=2, echo=True, temperature=0
)
assert [c.index for c in completion.choices] == [0, 1]
assert completion.choices[0].text.startswith("Prefix caching is")
shown = completion.choices[0].logprobs
assert shown.token_logprobs[0] is None
assert len(shown.tokens) == len(shown.token_logprobs) == len(shown.text_offset) == len(shown.top_logprobs)
assert "".join(shown.tokens) == completion.choices[0].text

stream = client.completions.create(model="demo", prompt="Prefix caching is", max_tokens=6, stream=True, temperature=0)
parts = [c.text for chunk in stream for c in chunk.choices]
extra = {"top_k": 1, "min_tokens": 6, "repetition_penalty": 1.0, "ignore_eos": True, "return_token_ids": True}
same = client.completions.create(model="demo", prompt="Prefix caching is", max_tokens=6, extra_body=extra)
assert "".join(parts) == same.choices[0].text
assert len(same.choices[0].token_ids) == 6
endless = client.completions.create(  # long enough not to be there whole before it is read
    model="demo",
    prompt="Prefix caching is",
    max_tokens=300,
    stream=True,
    temperature=0,
    extra_body={"ignore_eos": True},
)
assert len([c.text for chunk in endless for c in chunk.choices]) > 1


class Verdict(BaseModel):
    good: bool


parsed = client.chat.completions.parse(model="demo", messages=QUESTION, response_format=Verdict)
assert isinstance(parsed.choices[0].message.parsed, Verdict)

response = client.responses.create(model="demo", input="What is prefix caching?", temperature=0)
assert (response.status, response.output_text) == ("completed", choice.message.content), response
assert response.usage.total_tokens == answer.usage.total_tokens
assert client.responses.retrieve(response.id).output_text == response.output_text
follow = client.responses.create(
    model="demo", input="And why?", previous_response_id=response.id, max_output_tokens=16, instructions="Be short."
)
assert (follow.status, follow.incomplete_details.reason) == ("incomplete", "max_output_tokens")
assert follow.usage.input_tokens > response.usage.total_tokens

events = list(client.responses.create(model="demo", input="What is prefix caching?", temperature=0, stream=True))
assert [event.sequence_number for event in events] == list(range(len(events)))
assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == response.output_text
assert events[-1].response.output_text == response.output_text
with client.responses.stream(model="demo", input="What is prefix caching?", temperature=0) as stream:
    done = [event.text for event in stream if event.type == "response.output_text.done"]
    assert done == [stream.get_final_response().output_text] == [response.output_text]

judged = client.responses.parse(model="demo", input="What is prefix caching?", text_format=Verdict)
assert isinstance(judged.output_parsed, Verdict)
function = {
    "type": "function",
    "name": "get_weather",
    "description": "Current weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
asked = [{"role": "user", "content": "What is the weather in Oslo?"}]
called = client.responses.create(model="demo", input=asked, tools=[function], store=False)
(call,) = called.output
assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Oslo"})
output = {"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": 7, "sky": "cloudy"}'}
told = client.responses.create(model="demo", input=[*asked, *called.output, output], tools=[function])
assert "7" in told.output_text, told

later = client.responses.create(model="demo", input="What is prefix caching?", background=True, temperature=0)
while later.status in ("queued", "in_progress"):
    later = client.responses.retrieve(later.id)
assert later.output_text == response.output_text
assert client.responses.cancel(later.id).status == "completed"
client.responses.delete(later.id)
try:
    client.responses.retrieve(later.id)
except openai.NotFoundError:
    pass
else:
    raise AssertionError("a deleted response was found")
try:
    client.responses.create(model="demo", input="x", tools=[{"type": "web_search"}])
except openai.BadRequestError as e:
    assert e.param == "tools"
else:
    raise AssertionError("a tool of OpenAI's was taken")

with client.chat.completions.create(model="demo", messages=QUESTION, stream=True) as left:
    next(iter(left))  # and gone

for error, kind, param in (
    ({"temperature": 9}, openai.BadRequestError, "temperature"),
    ({"model": "other"}, openai.NotFoundError, "model"),
    ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),
    ({"messages": []}, openai.BadRequestError, "messages"),
    ({"messages": [{"role": "user", "content": "x " * 5000}]}, openai.BadRequestError, None),
):
    try:
        client.chat.completions.create(**{"model": "demo", "messages": QUESTION, **error})
    except kind as e:
        assert param is None or e.param == param, (error, e.param)
        assert e.request_id
    else:
        raise AssertionError(f"{error} was taken")
try:
    client.with_options(api_key="wrong").models.list()
except openai.AuthenticationError:
    pass
else:
    raise AssertionError("a wrong key was taken")
print("models, chat, completions, responses, streams, parse, logprobs, n, extra fields, errors")
