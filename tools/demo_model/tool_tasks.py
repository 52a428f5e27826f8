"""Tool conversations: a question that one of the offered tools answers, the call, its result and the reply.

Owns the catalogue of tools. The tools themselves are not held out; cities, numbers and names in the evaluation are.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.demo_model.documents import Message, Tool, call_text, tool_call
from tools.demo_model.extraction import pick
from tools.demo_model.small_tasks import draw_operands


@dataclass(frozen=True)
class ToolUse:
    """One use of a tool: the request, the arguments to call it with, its result, and the reply to the user."""

    question: str
    arguments: dict[str, Any]
    result: str
    reply: str


@dataclass(frozen=True)
class ToolEntry:
    """A tool of the catalogue: its schema and a generator of uses."""

    name: str
    description: str
    parameters: dict[str, str]
    draw: Callable[[random.Random, bool], ToolUse]

    def schema(self) -> Tool:
        """The tool as an OpenAI client sends it."""
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolTalk:
    """A conversation that needs one call: what is offered, what is asked, which call is right and the reply."""

    tools: list[Tool]
    entry: ToolEntry
    use: ToolUse

    def messages(self) -> list[Message]:
        """The whole conversation: question, call, result, reply."""
        return [
            {"role": "user", "content": self.use.question},
            tool_call(self.entry.name, self.use.arguments),
            {"role": "tool", "content": self.use.result},
            {"role": "assistant", "content": self.use.reply},
        ]

    def call(self) -> str:
        """The text of the right call."""
        return call_text(self.entry.name, self.use.arguments)


def ask(rng: random.Random, *wordings: str, **values: object) -> str:
    """One of the wordings with the values filled in."""
    return rng.choice(wordings).format(**values)


def _weather(rng: random.Random, held: bool) -> ToolUse:
    city, degrees, condition = pick(rng, "cities", held), rng.randint(0, 38), pick(rng, "conditions")
    question = ask(
        rng,
        "What is the weather in {c}?",
        "How is the weather in {c}?",
        "weather in {c}",
        "Is it warm in {c}?",
        "What's the weather like in {c} today?",
        "Tell me the weather in {c}.",
        "Do I need an umbrella in {c}?",
        c=city,
    )
    result = json.dumps({"temperature": degrees, "condition": condition})
    return ToolUse(question, {"city": city}, result, f"It is {condition} and {degrees} degrees in {city}.")


def _metric(rng: random.Random, held: bool) -> ToolUse:
    name, value = pick(rng, "metrics"), rng.randint(0, 999)
    question = ask(
        rng,
        "What is the value of {m}?",
        "Read the metric {m}.",
        "How high is {m}?",
        "Get {m}.",
        "What is {m} right now?",
        "Look up the metric {m}.",
        "Show me {m}.",
        m=name,
    )
    return ToolUse(question, {"name": name}, json.dumps({"value": value}), f"The metric {name} is {value}.")


def _add(rng: random.Random, held: bool) -> ToolUse:
    a, sign, b = draw_operands(rng, held)
    while sign != "+":
        a, sign, b = draw_operands(rng, held)
    question = ask(rng, "What is {a} + {b}?", "Add {a} and {b}.", "What is {a} plus {b}?", "Sum {a} and {b}.", a=a, b=b)
    return ToolUse(question, {"a": a, "b": b}, json.dumps({"result": a + b}), f"The result is {a + b}.")


def _multiply(rng: random.Random, held: bool) -> ToolUse:
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    question = ask(
        rng, "What is {a} * {b}?", "Multiply {a} and {b}.", "What is {a} times {b}?", "Multiply {a} by {b}.", a=a, b=b
    )
    return ToolUse(question, {"a": a, "b": b}, json.dumps({"result": a * b}), f"The result is {a * b}.")


def _search(rng: random.Random, held: bool) -> ToolUse:
    query, finding = pick(rng, "queries"), pick(rng, "findings")
    question = ask(
        rng,
        "Search the docs for {q}.",
        "Look up {q} in the docs.",
        "Find {q} in the documentation.",
        "What do the docs say about {q}?",
        "Search for {q}.",
        q=query,
    )
    return ToolUse(question, {"query": query}, finding, f"The docs say: {finding}")


def _time(rng: random.Random, held: bool) -> ToolUse:
    city, hour, minute = pick(rng, "cities", held), rng.randint(0, 23), rng.randint(0, 59)
    question = ask(
        rng, "What time is it in {c}?", "time in {c}", "Tell me the time in {c}.", "How late is it in {c}?", c=city
    )
    clock = f"{hour:02d}:{minute:02d}"
    return ToolUse(question, {"city": city}, json.dumps({"time": clock}), f"It is {clock} in {city}.")


def _timer(rng: random.Random, held: bool) -> ToolUse:
    minutes = rng.randint(2, 90)
    question = ask(
        rng,
        "Set a timer for {m} minutes.",
        "Start a timer of {m} minutes.",
        "Remind me in {m} minutes.",
        "timer {m} minutes",
        m=minutes,
    )
    return ToolUse(question, {"minutes": minutes}, json.dumps({"ok": True}), f"The timer is set for {minutes} minutes.")


def _message(rng: random.Random, held: bool) -> ToolUse:
    name, text = pick(rng, "names", held), pick(rng, "phrases")
    question = ask(
        rng,
        "Send {n} the message: {t}",
        "Write to {n}: {t}",
        "Tell {n}: {t}",
        "Send a message to {n}: {t}",
        n=name,
        t=text,
    )
    return ToolUse(question, {"to": name, "text": text}, json.dumps({"ok": True}), f"I sent the message to {name}.")


def _translate(rng: random.Random, held: bool) -> ToolUse:
    text, language = pick(rng, "phrases"), pick(rng, "languages")
    question = ask(
        rng,
        "Translate into {l}: {t}",
        "Translate to {l}: {t}",
        "How do you say in {l}: {t}",
        "Put this into {l}: {t}",
        l=language,
        t=text,
    )
    result = " ".join(rng.sample(["la", "mon", "tor", "ves", "ki", "dal", "un", "pel", "sar", "ro"], 3))
    return ToolUse(question, {"text": text, "language": language}, result, f"In {language} it is: {result}")


def _user(rng: random.Random, held: bool) -> ToolUse:
    name, age, city = pick(rng, "names", held), rng.randint(18, 90), pick(rng, "cities", held)
    question = ask(
        rng, "Who is {n}?", "Look up the user {n}.", "Find the user {n}.", "What do we know about {n}?", n=name
    )
    return ToolUse(
        question, {"name": name}, json.dumps({"age": age, "city": city}), f"{name} is {age} and lives in {city}."
    )


def _price(rng: random.Random, held: bool) -> ToolUse:
    item, price = pick(rng, "items", held), rng.randint(1, 99)
    question = ask(
        rng,
        "What does the {i} cost?",
        "How much is the {i}?",
        "Price of the {i}?",
        "What is the price of a {i}?",
        i=item,
    )
    return ToolUse(question, {"item": item}, json.dumps({"price": price}), f"The {item} costs {price} euros.")


CATALOGUE = (
    ToolEntry("get_weather", "Current weather of a city.", {"city": "string"}, _weather),
    ToolEntry("get_metric", "Value of an engine metric.", {"name": "string"}, _metric),
    ToolEntry("add", "Add two numbers.", {"a": "integer", "b": "integer"}, _add),
    ToolEntry("multiply", "Multiply two numbers.", {"a": "integer", "b": "integer"}, _multiply),
    ToolEntry("search_docs", "Search the documentation.", {"query": "string"}, _search),
    ToolEntry("get_time", "Current time in a city.", {"city": "string"}, _time),
    ToolEntry("set_timer", "Start a timer.", {"minutes": "integer"}, _timer),
    ToolEntry("send_message", "Send a message.", {"to": "string", "text": "string"}, _message),
    ToolEntry("translate", "Translate a text.", {"text": "string", "language": "string"}, _translate),
    ToolEntry("lookup_user", "Find a user by name.", {"name": "string"}, _user),
    ToolEntry("get_price", "Price of an item.", {"item": "string"}, _price),
)


def draw_offer(rng: random.Random) -> list[ToolEntry]:
    """One to three tools of the catalogue."""
    return rng.sample(CATALOGUE, rng.choice((1, 2, 2, 3)))


def draw_tool_talk(rng: random.Random, held: bool = False) -> ToolTalk:
    """A conversation with one call. In a quarter the descriptions are left out, as some clients do."""
    offered = draw_offer(rng)
    entry = rng.choice(offered)
    tools = [item.schema() for item in offered]
    if rng.random() < 0.25:
        for tool in tools:
            del tool["function"]["description"]
    return ToolTalk(tools, entry, entry.draw(rng, held))
