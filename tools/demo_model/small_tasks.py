"""Arithmetic, word lists and sentence completions.

Owns the deterministic split of sums and word lists: an instance belongs to the evaluation when a checksum of its
content says so, whatever its wording.
"""

from __future__ import annotations

import json
import random
import tomllib
import zlib
from functools import cache
from typing import Any

from tools.demo_model.extraction import invented_word, word_lists
from tools.demo_model.phrasing import CONTENT
from tools.demo_model.topics import Exchange

SUM_FORMS = ("What is {s}?", "{s}", "{s} =", "Calculate {s}.", "How much is {s}?", "what is {s}", "Compute {s}")
SUM_WORDS = {
    "+": ("What is {a} plus {b}?", "Add {a} and {b}.", "{a} plus {b}"),
    "-": ("What is {a} minus {b}?", "Subtract {b} from {a}.", "{a} minus {b}"),
    "*": ("What is {a} times {b}?", "Multiply {a} and {b}.", "{a} times {b}", "What is {a} x {b}?"),
}
REPEAT = ("Repeat: {words}", "Repeat these words: {words}", "Say: {words}", "Copy: {words}", "Write: {words}",
          "Repeat after me: {words}", "Please repeat: {words}", "Echo: {words}")  # fmt: skip
REVERSE = ("Reverse: {words}", "Reverse the words: {words}", "Write these words backwards: {words}",
           "Say in reverse order: {words}", "Reverse the order of: {words}")  # fmt: skip
CAPITAL_QUESTIONS = (
    "What is the capital of {c}?",
    "capital of {c}",
    "Which city is the capital of {c}?",
    "{c}'s capital?",
)
HELD_SHARE = 8
_ECHOED = ("words", "names", "cities", "items", "jobs", "colors", "fruits", "animals", "conditions", "metrics")


def is_held(content: str) -> bool:
    """Whether an instance is kept for the evaluation: one in ``HELD_SHARE``, by checksum."""
    return zlib.crc32(content.encode()) % HELD_SHARE == 0


def calculate(a: int, sign: str, b: int) -> int:
    """The result of one small sum."""
    return a + b if sign == "+" else a - b if sign == "-" else a * b


def draw_operands(rng: random.Random, held: bool = False) -> tuple[int, str, int]:
    """Operands of a sum. Products up to 12 x 12 are facts to be learned by heart, so they have no held-out part."""
    while True:
        sign = rng.choice("++++---*" if not held else "+-")
        if sign == "*":
            return rng.randint(0, 12), sign, rng.randint(0, 12)
        top = 9 if rng.random() < 0.15 else 99
        a, b = rng.randint(0, top), rng.randint(0, top)
        if sign == "-" and b > a:
            a, b = b, a
        if is_held(f"{a}{sign}{b}") == held:
            return a, sign, b


def draw_sum(rng: random.Random, held: bool = False) -> Exchange:
    """A sum in words or signs; the answer states the equation."""
    a, sign, b = draw_operands(rng, held)
    written = f"{a} {sign} {b}" if rng.random() < 0.7 else f"{a}{sign}{b}"
    question = rng.choice(SUM_FORMS + SUM_WORDS[sign]).format(s=written, a=a, b=b)
    return Exchange(f"sum {sign}", question, f"{a} {sign} {b} = {calculate(a, sign, b)}.")


def draw_words(rng: random.Random, held: bool = False) -> Exchange:
    """Words to repeat or to reverse."""
    while True:
        words = rng.sample(word_lists()["words"], rng.randint(2, 5))
        text = " ".join(words)
        if is_held(text) == held:
            break
    if rng.random() < 0.5:
        return Exchange("repeat", rng.choice(REPEAT).format(words=text), text)
    return Exchange("reverse", rng.choice(REVERSE).format(words=text), " ".join(reversed(words)))


def draw_echo(rng: random.Random) -> tuple[str, str]:
    """Many words from all lists, and the same words again: as they are, one per line, or as a JSON list."""
    lists = word_lists()
    source = [word for name in _ECHOED for word in lists[name]]
    words = [_echoed_word(rng, source) for _ in range(rng.randint(4, 16))]
    form = rng.choice(("repeat", "lines", "json", "reverse"))
    if form == "lines":
        return "One per line: " + ", ".join(words), "\n" + "\n".join(words)
    if form == "json":
        return "JSON list: " + ", ".join(words), "\n" + json.dumps(words)
    if form == "reverse":
        return "Reverse: " + " ".join(words[:8]), "\n" + " ".join(reversed(words[:8]))
    return rng.choice(REPEAT).format(words=" ".join(words)), "\n" + " ".join(words)


def _echoed_word(rng: random.Random, source: list[str]) -> str:
    draw = rng.random()
    if draw < 0.7:
        return rng.choice(source)
    if draw < 0.8:
        return str(rng.randint(0, 999))
    return invented_word(rng) if draw < 0.9 else invented_word(rng).capitalize()


def draw_sum_lines(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Lines of equations, each as (what is given, what follows)."""
    sums = [draw_operands(rng) for _ in range(count)]
    return [(f"{a} {sign} {b} =", f" {calculate(a, sign, b)}\n") for a, sign, b in sums]


@cache
def _completions() -> dict[str, Any]:
    return tomllib.loads((CONTENT / "completions.toml").read_text(encoding="utf-8"))


def draw_completion(rng: random.Random) -> tuple[str, str]:
    """A sentence that people like to try and its continuation, which begins with a space."""
    if rng.random() < 0.6:
        country, capital = rng.choice(list(_completions()["capitals"].items()))
        return f"The capital of {country} is", f" {capital}."
    entry = rng.choice(_completions()["completion"])
    return rng.choice(entry["prompts"]), " " + entry["rest"]


def draw_capital(rng: random.Random) -> Exchange:
    """The capital of a country, as a question."""
    country, capital = rng.choice(list(_completions()["capitals"].items()))
    question = rng.choice(CAPITAL_QUESTIONS).format(c=country)
    return Exchange("capital", question, f"The capital of {country} is {capital}.")
