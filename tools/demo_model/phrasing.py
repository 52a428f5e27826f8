"""How people ask: question templates per intent, follow-ups, and the noise that makes one question many.

Owns ``content/phrasings.toml``, and with it the split between phrasings used in training and those that only the
evaluation sees. Knows no topics.
"""

from __future__ import annotations

import random
import re
import tomllib
from pathlib import Path

CONTENT = Path(__file__).parent / "content"
_PHRASINGS = tomllib.loads((CONTENT / "phrasings.toml").read_text(encoding="utf-8"))


def _lists(table: str) -> dict[str, list[str]]:
    """The phrasings of a table by intent; bars and newlines separate them in the file."""
    blocks: dict[str, str] = _PHRASINGS[table]
    return {
        intent: [part for line in block.splitlines() for part in line.split("|") if part]
        for intent, block in blocks.items()
    }


TEMPLATES = _lists("templates")
TEMPLATES_HELD = _lists("templates_held")
FOLLOW_UPS = _lists("follow_ups")
FOLLOW_UPS_HELD = _lists("follow_ups_held")
_PREFIXES: list[str] = _PHRASINGS["noise"]["prefixes"]
_SUFFIXES: list[str] = _PHRASINGS["noise"]["suffixes"]
_OPENINGS: list[list[str]] = _PHRASINGS["noise"]["openings"]
_SYNONYMS: dict[str, list[str]] = _PHRASINGS["synonyms"]


CLUE_LEADS: list[str] = _PHRASINGS["noise"]["clue_leads"]
_QUESTION_STARTS = frozenset(_PHRASINGS["noise"]["question_starts"])
_UNKNOWN: dict[str, list[str]] = _PHRASINGS["unknown"]


def draw_unknown(rng: random.Random) -> str:
    """A question that has nothing to do with Quire."""
    return rng.choice(_UNKNOWN["templates"]).format(x=rng.choice(_UNKNOWN["things"]))


def normalise(question: str) -> str:
    """The form in which two questions count as the same phrasing: lower case, letters and digits only."""
    return " ".join(re.findall(r"[a-z0-9]+", question.lower()))


def reword(question: str, rng: random.Random) -> str:
    """A hand-written question with another opening, synonyms or a dropped word: a machine-made paraphrase."""
    question = _swap_opening(question, rng)
    words = []
    for word in question.split(" "):
        bare = word.rstrip("?,.")
        options = _SYNONYMS.get(bare.lower())
        if options and rng.random() < 0.3:
            word = rng.choice(options) + word[len(bare) :]
        if rng.random() < 0.06 and len(question) > 25:
            continue
        words.append(word)
    return re.sub(" +", " ", " ".join(words)).strip()


def _swap_opening(question: str, rng: random.Random) -> str:
    lowered = question.lower()
    for group in _OPENINGS:
        for opening in group:
            if lowered.startswith(opening + " "):
                return rng.choice(group) + question[len(opening) :] if rng.random() < 0.5 else question
    return question


def vary(question: str, rng: random.Random, typos: float = 0.18) -> str:
    """The question as different people would type it: politeness, punctuation, case and now and then a typo."""
    text = question.rstrip("?")
    if rng.random() < 0.15:
        text = rng.choice(_PREFIXES) + text
    if rng.random() < 0.1:
        text = text + rng.choice(_SUFFIXES)
    text = text + rng.choice(("?", "?", "?", "", "", ".", " ?", "!", "??")) if rng.random() < 0.6 else text + "?"
    if rng.random() < typos:
        text = add_typo(text, rng)
    return recase(text, rng)


def tidy(question: str) -> str:
    """The question as a careful person types it: a capital first, and a question mark or full stop last."""
    end = "?" if question.split(" ")[0].strip(",.") in _QUESTION_STARTS else "."
    text = question if question.endswith(("?", ".", "!")) else question + end
    return text[0].upper() + text[1:]


def recase(text: str, rng: random.Random) -> str:
    """Random letter case: mostly sentence case or as written, sometimes all lower, title or upper case."""
    draw = rng.random()
    if draw < 0.45:
        return text[0].upper() + text[1:]
    if draw < 0.75:
        return text.lower()
    if draw < 0.8:
        return text.upper()
    return text.title() if draw < 0.83 else text


def add_typo(text: str, rng: random.Random) -> str:
    """One character dropped, doubled, swapped with its neighbour or replaced."""
    if len(text) < 8:
        return text
    at = rng.randrange(1, len(text) - 2)
    before, here, after = text[:at], text[at], text[at + 1 :]
    kind = rng.randrange(4)
    if kind == 0:
        return before + after
    if kind == 1:
        return before + here + here + after
    if kind == 2:
        return before + after[0] + here + after[1:]
    return before + rng.choice("etaoinsrhl") + after
