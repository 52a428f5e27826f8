"""Ollama's own client: conversations, prompts, streams, tools, formats, lists and errors."""

from __future__ import annotations

import json
import os

import ollama

URL, KEY = os.environ["QUIRE_URL"], os.environ["QUIRE_API_KEY"]
QUESTION = [{"role": "user", "content": "What is prefix caching?"}]
GREEDY = {"temperature": 0, "num_predict": 60}
client = ollama.Client(host=URL, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)

assert [model.model for model in client.list().models] == ["demo"]
assert "completion" in client.show("demo").capabilities
assert client.ps().models[0].context_length > 0

answer = client.chat("demo", QUESTION, options=GREEDY)
assert answer.done
assert answer.message.content
assert answer.eval_count > 0 < answer.prompt_eval_count, answer
parts = list(client.chat("demo:latest", QUESTION, stream=True, options=GREEDY))
assert len(parts) > 1  # the end, and the text before it: a reader that is late gets several tokens in a part
assert "".join(part.message.content for part in parts) == answer.message.content
assert (parts[-1].done, parts[-1].done_reason) == (True, answer.done_reason)

prompt = QUESTION[0]["content"]
assert client.generate("demo", prompt, options=GREEDY).response == answer.message.content
assert "".join(part.response for part in client.generate("demo", prompt, stream=True, options=GREEDY)) == (
    answer.message.content
)
assert client.generate("demo").done_reason == "load"


def get_weather(city: str) -> str:
    """Current weather of a city.

    Args:
        city: The city.
    """
    return f"It rains in {city}."


ask = [{"role": "user", "content": "What is the weather in Oslo?"}]
asked = client.chat("demo", ask, tools=[get_weather], options={"temperature": 0})
(call,) = asked.message.tool_calls
assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Oslo"}), asked
ask += [asked.message, {"role": "tool", "tool_name": "get_weather", "content": get_weather("Oslo")}]
assert client.chat("demo", ask, tools=[get_weather], options={"temperature": 0}).message.content

schema = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
form = client.chat(
    "demo", [{"role": "user", "content": "Is a quire paper?"}], format=schema, options={"num_predict": 60}
)
assert json.loads(form.message.content)["answer"] in ("yes", "no")

for wrong, status in ((lambda: client.chat("other", QUESTION), 404), (lambda: client.pull("other"), 501)):
    try:
        wrong()
    except ollama.ResponseError as e:
        assert (e.status_code, bool(e.error)) == (status, True), e
    else:
        raise AssertionError("no error")
print("ollama's answers are right")
