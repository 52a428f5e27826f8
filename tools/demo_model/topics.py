"""The topics of ``content/*.toml`` as question-and-answer pairs.

Owns the reading of the content files and which phrasings of a topic are for training and which for evaluation.
"""

from __future__ import annotations

import random
import tomllib
from dataclasses import dataclass, field
from functools import cache

from tools.demo_model import phrasing
from tools.demo_model.phrasing import CONTENT

TOPIC_FILES = ("quire", "caching", "scheduling", "sampling", "serving", "models", "chat")
INTENTS = ("what", "why", "example", "set")
_INTENT_WEIGHTS = {"what": 60, "why": 14, "example": 14, "set": 16}


@dataclass(frozen=True)
class Topic:
    """One subject: its aliases, one answer per intent, and hand-written phrasings of the question "what".

    ``ask`` is for training, ``held`` and ``blind`` for the evaluation: ``held`` was at hand while the training
    phrasings grew, ``blind`` was written after they were final.
    """

    key: str
    group: str
    names: tuple[str, ...]
    answers: dict[str, str]
    ask: tuple[str, ...]
    held: tuple[str, ...]
    blind: tuple[str, ...]
    about: bool = False

    @property
    def intents(self) -> list[str]:
        return [intent for intent in INTENTS if intent in self.answers]


@dataclass(frozen=True)
class Exchange:
    """One question and its answer. ``kind`` names the sort of task; ``topic`` and ``intent`` where known."""

    kind: str
    question: str
    answer: str
    topic: Topic | None = field(default=None, compare=False)
    intent: str = ""


@cache
def load_topics() -> tuple[Topic, ...]:
    """All topics in the order of the files."""
    return tuple(topic for name in TOPIC_FILES for topic in _load_file(name))


def _load_file(name: str) -> list[Topic]:
    tables = tomllib.loads((CONTENT / f"{name}.toml").read_text(encoding="utf-8"))
    extra, blind = _load_phrasings("more_phrasings"), _load_phrasings("blind")
    return [
        Topic(
            key=key,
            group=name,
            names=tuple(table.get("names", ())),
            answers={intent: table[intent] for intent in INTENTS if intent in table},
            ask=tuple(table["ask"]) + extra.get(key, ()),
            held=tuple(table["held"]),
            blind=blind.get(key, ()),
            about=table.get("kind") == "about",
        )
        for key, table in tables.items()
    ]


@cache
def _load_phrasings(name: str) -> dict[str, tuple[str, ...]]:
    tables = tomllib.loads((CONTENT / f"{name}.toml").read_text(encoding="utf-8"))
    return {key: tuple(values) for key, values in tables.items()}


@cache
def held_phrasings() -> frozenset[str]:
    """Every phrasing kept for the evaluation, normalised; training questions that match one are drawn again."""
    questions = [question for topic in load_topics() for question in topic.held + topic.blind]
    for topic in load_topics():
        for intent in topic.intents:
            for template in phrasing.TEMPLATES_HELD[intent]:
                questions += [template.format(n=name) for name in topic.names]
    questions += [text for follow_ups in phrasing.FOLLOW_UPS_HELD.values() for text in follow_ups]
    return frozenset(phrasing.normalise(question) for question in questions)


def draw_topic(rng: random.Random) -> Topic:
    """A random topic; small talk is easy and is drawn half as often, except for the many faces of the unknown."""
    topics = load_topics()
    if rng.random() < 0.03:
        return next(topic for topic in topics if topic.key == "unknown")
    while True:
        topic = rng.choice(topics)
        if topic.key == "unknown" or topic.group != "chat" or rng.random() < 0.5:
            return topic


def draw_exchange(rng: random.Random, topic: Topic | None = None, intent: str | None = None) -> Exchange:
    """A training exchange about a topic, never in a phrasing of the evaluation."""
    topic = topic or draw_topic(rng)
    if intent is None:
        intent = rng.choices(topic.intents, [_INTENT_WEIGHTS[name] for name in topic.intents])[0]
    while True:
        question = phrasing.vary(_draw_question(rng, topic, intent), rng)
        if phrasing.normalise(question) not in held_phrasings():
            return Exchange("topic", question, topic.answers[intent], topic, intent)


def _draw_question(rng: random.Random, topic: Topic, intent: str) -> str:
    if topic.key == "unknown" and rng.random() < 0.7:
        return phrasing.draw_unknown(rng)
    if intent == "what" and not topic.about and rng.random() < 0.15:
        return _draw_clue(rng, topic)
    if topic.about or (intent == "what" and rng.random() < 0.55):
        question = rng.choice(topic.ask)
        return phrasing.reword(question, rng) if rng.random() < 0.7 else question
    return rng.choice(phrasing.TEMPLATES[intent]).format(n=rng.choice(topic.names))


def _draw_clue(rng: random.Random, topic: Topic) -> str:
    """A few words from the topic's answers, as if half remembered: it ties their vocabulary to the topic."""
    words = topic.answers[rng.choice([intent for intent in topic.intents if intent in ("what", "why")])].split(" ")
    length = rng.randint(4, 8)
    start = rng.randint(min(2, len(words) - length), len(words) - length) if len(words) > length else 0
    span = " ".join(words[start : start + length]).rstrip(".,:;").lower()
    return f"{rng.choice(phrasing.CLUE_LEADS)} {span}".strip()


def draw_follow_up(rng: random.Random, topic: Topic, answer: str) -> Exchange:
    """A follow-up whose meaning depends on the turn before it: why, an example, how to set it, or "say it again"."""
    intents = [intent for intent in topic.intents if intent != "what"] + ["again"]
    if topic.about:
        intents = ["again"]
    intent = rng.choices(intents, [1 if name == "again" else 4 for name in intents])[0]
    reply = answer if intent == "again" else topic.answers[intent]
    while True:
        question = phrasing.vary(rng.choice(phrasing.FOLLOW_UPS[intent]), rng, typos=0.05)
        if phrasing.normalise(question) not in held_phrasings():
            return Exchange("follow-up", question, reply, topic, intent)


def held_written() -> list[Exchange]:
    """Evaluation: every hand-written held-out paraphrase, typed carefully."""
    return [
        Exchange("written", phrasing.tidy(question), topic.answers["what"], topic, "what")
        for topic in load_topics()
        for question in topic.held
    ]


def held_blind() -> list[Exchange]:
    """Evaluation: the questions that nobody looked at while the training phrasings were written."""
    return [
        Exchange("blind", question, topic.answers["what"], topic, "what")
        for topic in load_topics()
        for question in topic.blind
    ]


def held_templates(rng: random.Random, per_intent: int = 2) -> list[Exchange]:
    """Evaluation: held-out templates over random aliases, ``per_intent`` for each topic and intent."""
    found = []
    for topic in load_topics():
        for intent in topic.intents if topic.names else ():
            for template in rng.sample(phrasing.TEMPLATES_HELD[intent], per_intent):
                question = phrasing.tidy(template.format(n=rng.choice(topic.names)))
                found.append(Exchange(f"template {intent}", question, topic.answers[intent], topic, intent))
    return found


def held_follow_ups(rng: random.Random) -> list[tuple[Exchange, Exchange]]:
    """Evaluation: a plain first question and a held-out follow-up, for every topic and further answer."""
    found = []
    for topic in load_topics():
        for intent in topic.intents if topic.names else ():
            if intent != "what":
                first = Exchange("topic", f"What is {topic.names[0]}?", topic.answers["what"], topic, "what")
                question = phrasing.tidy(rng.choice(phrasing.FOLLOW_UPS_HELD[intent]))
                found.append((first, Exchange("follow-up", question, topic.answers[intent], topic, intent)))
    return found


def noisy(exchanges: list[Exchange], rng: random.Random) -> list[Exchange]:
    """The same questions in lower case without a question mark and with a typo in each."""
    return [
        Exchange(
            "typo", phrasing.add_typo(item.question.rstrip("?").lower(), rng), item.answer, item.topic, item.intent
        )
        for item in exchanges
    ]
