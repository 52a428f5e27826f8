"""JSON tasks: a sentence with facts, the keys that are asked for, and the object to write.

Owns the sentence templates; values come from ``content/lists.toml``. Held-out instances use unseen names, cities
and items, and unseen wordings of the instruction.
"""

from __future__ import annotations

import json
import random
import tomllib
from functools import cache
from typing import Any

from tools.demo_model.phrasing import CONTENT
from tools.demo_model.topics import Exchange

_INVENTED = ("names", "cities", "items")
_STARTS = (*"bcdfghjklmnprstvwz", "", "br", "tr", "st", "gl", "ch", "sh", "th")
_VOWELS = (*"aeiouaeiou", "ai", "ea", "ee", "oo", "io")
_ENDS = (*"nrsltmk", "nd", "rt", "ss", "tt", "ng", "er", "le")

INSTRUCTIONS = (
    "Answer as JSON with keys {keys}: {text}",
    "Answer as JSON with the keys {keys}: {text}",
    "Give me JSON with {keys}: {text}",
    "Extract {keys} as JSON: {text}",
    "Extract {keys} as JSON from this text: {text}",
    "Return a JSON object with {keys}. {text}",
    "{text} Write this as JSON with the keys {keys}.",
    "{text} Give {keys} as JSON.",
    "Turn this into JSON with keys {keys}: {text}",
    "Write JSON with keys {keys} for: {text}",
)
INSTRUCTIONS_HELD = (
    "Please extract the keys {keys} as JSON: {text}",
    "{text} Return JSON with the keys {keys}.",
    "As JSON with keys {keys}: {text}",
)
LIST_INSTRUCTIONS = (
    "Write the {kind} as a JSON list: {text}",
    "Give me a JSON array of these {kind}: {text}",
    "Turn these {kind} into a JSON list: {text}",
    "List the {kind} as JSON: {text}",
)
LIST_INSTRUCTIONS_HELD = ("Make a JSON array of the {kind}: {text}", "As a JSON list, the {kind}: {text}")


@cache
def word_lists() -> dict[str, list[str]]:
    """The lists of ``content/lists.toml``."""
    return tomllib.loads((CONTENT / "lists.toml").read_text(encoding="utf-8"))


def pick(rng: random.Random, name: str, held: bool = False) -> str:
    """One entry of a list, from its held-out part where it has one and ``held`` asks for it.

    In training one name, city or item in three is an invented word: a model that only ever copies words it knows
    puts a known word in the place of a new one.
    """
    lists = word_lists()
    if not held and f"{name}_held" in lists and name in _INVENTED and rng.random() < 0.35:
        word = invented_word(rng)
        return word if name == "items" else word.capitalize()
    return rng.choice(lists[f"{name}_held"] if held and f"{name}_held" in lists else lists[name])


def invented_word(rng: random.Random) -> str:
    """A pronounceable word that is in no list, such as "takiru" or "blons"."""
    word = "".join(rng.choice(_STARTS) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 3)))
    return word + (rng.choice(_ENDS) if rng.random() < 0.5 or len(word) < 3 else "")


def _person(rng: random.Random, held: bool) -> tuple[str, dict[str, Any]]:
    name, age, city, job = pick(rng, "names", held), rng.randint(2, 98), pick(rng, "cities", held), pick(rng, "jobs")
    clauses = {
        "age": rng.choice((f"is {age}", f"is {age} years old")),
        "city": rng.choice((f"lives in {city}", f"comes from {city}")),
        "job": rng.choice((f"is a {job}", f"works as a {job}")),
    }
    chosen = rng.sample(list(clauses), rng.randint(1, 3))
    values = {"age": age, "city": city, "job": job}
    spoken = [clauses[key] for key in chosen]
    text = f"{name} {_join(spoken)}."
    return text, {"name": name, **{key: values[key] for key in chosen}}


def _product(rng: random.Random, held: bool) -> tuple[str, dict[str, Any]]:
    item, price, quantity = pick(rng, "items", held), rng.randint(1, 99), rng.randint(2, 60)
    if rng.random() < 0.5:
        return f"The {item} costs {price} euros.", {"item": item, "price": price}
    text = rng.choice(
        (
            f"The {item} costs {price} euros and there are {quantity} of them.",
            f"There are {quantity} of the {item}, and one costs {price} euros.",
        )
    )
    return text, {"item": item, "price": price, "quantity": quantity}


def _weather(rng: random.Random, held: bool) -> tuple[str, dict[str, Any]]:
    city, degrees, condition = pick(rng, "cities", held), rng.randint(0, 38), pick(rng, "conditions")
    text = rng.choice(
        (
            f"It is {condition} and {degrees} degrees in {city}.",
            f"In {city} it is {degrees} degrees and {condition}.",
        )
    )
    return text, {"city": city, "temperature": degrees, "condition": condition}


def _meeting(rng: random.Random, held: bool) -> tuple[str, dict[str, Any]]:
    day, hour, room, name = pick(rng, "days"), rng.randint(8, 18), pick(rng, "rooms"), pick(rng, "names", held)
    text = rng.choice(
        (
            f"The meeting with {name} is on {day} at {hour} in room {room}.",
            f"{name} meets us on {day} at {hour} in room {room}.",
        )
    )
    return text, {"name": name, "day": day, "hour": hour, "room": room}


def _reading(rng: random.Random, held: bool) -> tuple[str, dict[str, Any]]:
    metric, value = pick(rng, "metrics"), rng.randint(0, 999)
    text = rng.choice((f"The metric {metric} is {value}.", f"{metric} = {value}", f"The value of {metric} is {value}."))
    return text, {"metric": metric, "value": value}


_FAMILIES = (_person, _person, _product, _weather, _meeting, _reading)


def draw_extraction(rng: random.Random, held: bool = False) -> Exchange:
    """One JSON task; the keys are a random part of the facts, in random order."""
    if rng.random() < 0.15:
        return _list_task(rng, held)
    text, facts = rng.choice(_FAMILIES)(rng, held)
    keys = rng.sample(list(facts), rng.randint(1 if len(facts) < 3 else 2, len(facts)))
    if rng.random() < 0.5:
        keys = [key for key in facts if key in keys]
    instruction = rng.choice(INSTRUCTIONS_HELD if held else INSTRUCTIONS)
    question = instruction.format(keys=_join(keys), text=text)
    return Exchange("json", question, json.dumps({key: facts[key] for key in keys}, ensure_ascii=False))


def _list_task(rng: random.Random, held: bool) -> Exchange:
    kind = rng.choice(("colors", "fruits", "animals", "names", "cities", "items"))
    lists = word_lists()
    source = lists[f"{kind}_held"] if held and f"{kind}_held" in lists else lists[kind]
    chosen = rng.sample(source, rng.randint(2, 4))
    if not held and kind in _INVENTED:
        chosen = [pick(rng, kind) for _ in chosen]
    instruction = rng.choice(LIST_INSTRUCTIONS_HELD if held else LIST_INSTRUCTIONS)
    question = instruction.format(kind=kind, text=_join(chosen))
    return Exchange("json list", question, json.dumps(chosen, ensure_ascii=False))


def _join(parts: list[str]) -> str:
    """Parts as English lists them: "a, b and c"."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
