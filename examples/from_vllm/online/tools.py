"""Tools: the model decides (auto), must call (required), calls a named one; also streamed."""

import argparse
import json

from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "F"]}},
                "required": ["city"],
            },
        },
    }
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def get_weather(city: str, unit: str = "C") -> str:
    return f"It is 21 degrees {unit} in {city}."


parser = argparse.ArgumentParser()
parser.add_argument("--base-url", default="http://localhost:8000/v1")
client = OpenAI(api_key="EMPTY", base_url=parser.parse_args().base_url)
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
common = {"model": model, "messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 100}

for choice in ("required", NAMED):
    message = client.chat.completions.create(**common, tool_choice=choice).choices[0].message
    name = choice if isinstance(choice, str) else "named"
    print(f"{name}:", message.tool_calls[0].function.name, json.loads(message.tool_calls[0].function.arguments))

pieces, called = [], None
for chunk in client.chat.completions.create(**common, tool_choice="auto", stream=True):
    for call in chunk.choices[0].delta.tool_calls or ():
        called = call.function.name or called
        pieces.append(call.function.arguments or "")
print("streamed:", called, json.loads("".join(pieces)))

answer = client.chat.completions.create(**common)
message = answer.choices[0].message
print("auto:", answer.choices[0].finish_reason)
messages.append(message.model_dump(exclude_none=True))
for call in message.tool_calls:
    result = {"get_weather": get_weather}[call.function.name](**json.loads(call.function.arguments))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print("answer:", client.chat.completions.create(**common).choices[0].message.content)
