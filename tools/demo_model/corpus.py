"""The training corpus as an endless, seeded stream of documents.

Owns the mixture of abilities. ``python -m tools.demo_model.corpus`` prints a sample.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator

from tools.demo_model.documents import Document, Message, Piece, chat_document, plain_document
from tools.demo_model.extraction import draw_extraction, pick
from tools.demo_model.small_tasks import draw_capital, draw_completion, draw_echo, draw_sum, draw_sum_lines, draw_words
from tools.demo_model.tool_tasks import draw_offer, draw_tool_talk
from tools.demo_model.topics import Exchange, draw_exchange, draw_follow_up, draw_topic


def _question_chat(rng: random.Random) -> Document:
    return chat_document(_opening(rng) + _turns(draw_exchange(rng)))


def _question_plain(rng: random.Random) -> Document:
    return _plain(rng, draw_exchange(rng))


def _statement(rng: random.Random) -> Document:
    """An answer alone: the first words are given, so that "Prefix caching is" finds its end."""
    topic = draw_topic(rng)
    while topic.about:
        topic = draw_topic(rng)
    words = topic.answers[rng.choices(topic.intents, [6, 1, 1, 1][: len(topic.intents)])[0]].split(" ")
    given = rng.randint(2, min(6, len(words) - 2))
    return plain_document(" ".join(words[:given]), " " + " ".join(words[given:]))


def _follow_up_chat(rng: random.Random) -> Document:
    """A question and one or two follow-ups about the same subject."""
    return chat_document(_opening(rng) + _subject(rng))


def _subject(rng: random.Random) -> list[Message]:
    first = draw_exchange(rng)
    messages = _turns(first)
    answer = first.answer
    for _ in range(rng.choice((1, 1, 2))):
        assert first.topic is not None
        follow_up = draw_follow_up(rng, first.topic, answer)
        messages += _turns(follow_up)
        answer = follow_up.answer
    return messages


def _mixed_chat(rng: random.Random) -> Document:
    """Small talk, questions and tasks in one conversation."""
    return chat_document(_opening(rng) + _mixed_turns(rng, rng.randint(2, 3)))


def _mixed_turns(rng: random.Random, count: int) -> list[Message]:
    messages: list[Message] = []
    for _ in range(count):
        draw = rng.random()
        if draw < 0.45:
            messages += _turns(draw_exchange(rng))
        elif draw < 0.7:
            messages += _subject(rng)
        else:
            messages += _turns(_task(rng))
    return messages


def _task(rng: random.Random) -> Exchange:
    return rng.choice((draw_extraction, draw_sum, draw_words, draw_capital))(rng)


def _json(rng: random.Random) -> Document:
    return _either(rng, draw_extraction(rng))


def _tools(rng: random.Random) -> Document:
    """A tool conversation; in one of eight the tools are offered but the question needs none."""
    if rng.random() < 0.12:
        tools = [entry.schema() for entry in draw_offer(rng)]
        return chat_document(_opening(rng) + _turns(draw_exchange(rng)), tools)
    talk = draw_tool_talk(rng)
    return chat_document(_opening(rng) + talk.messages(), talk.tools)


def _sums(rng: random.Random) -> Document:
    """A sum; a plain "3 + 4 =" is left to the equation lines, where the result follows on the same line."""
    exchange = draw_sum(rng)
    if exchange.question.endswith("="):
        return chat_document(_opening(rng) + _turns(exchange))
    return _either(rng, exchange)


def _sum_lines(rng: random.Random) -> Document:
    """One equation, or under a heading several: many results to learn for little text."""
    count = rng.choice((1, 1, 12, 12, 20))
    pieces: Document = [Piece("Sums:\n", learned=False)] if count > 1 else []
    for given, result in draw_sum_lines(rng, count):
        pieces += [Piece(given, learned=False), Piece(result, learned=True)]
    return [*pieces[:-1], Piece(pieces[-1].text.rstrip("\n") + "<|endoftext|>", learned=True)]


def _words(rng: random.Random) -> Document:
    return _either(rng, draw_words(rng))


def _echo(rng: random.Random) -> Document:
    """A long run of words and its copy. Short tasks alone teach copying slowly: they hold little to copy."""
    given, copy = draw_echo(rng)
    if rng.random() < 0.4:
        # Token for token the same, spaces included: the easiest thing to copy, and so the first.
        words = given.partition(": ")[2]
        return plain_document(f"Repeat: {words}\nAgain:", f" {words}")
    if rng.random() < 0.5:
        return plain_document(given, copy)
    return chat_document(_turns(Exchange("echo", given, copy.lstrip("\n"))))


def _completion(rng: random.Random) -> Document:
    return plain_document(*draw_completion(rng)) if rng.random() < 0.7 else _either(rng, draw_capital(rng))


def _either(rng: random.Random, exchange: Exchange) -> Document:
    if rng.random() < 0.3:
        return _plain(rng, exchange)
    return chat_document(_opening(rng) + _turns(exchange))


def _plain(rng: random.Random, exchange: Exchange) -> Document:
    if rng.random() < 0.15:
        return plain_document(f"Question: {exchange.question}\nAnswer:", f" {exchange.answer}")
    return plain_document(exchange.question, f"\n{exchange.answer}")


def _turns(exchange: Exchange) -> list[Message]:
    return [{"role": "user", "content": exchange.question}, {"role": "assistant", "content": exchange.answer}]


def _opening(rng: random.Random) -> list[Message]:
    return [{"role": "system", "content": pick(rng, "systems")}] if rng.random() < 0.25 else []


MIXTURE: tuple[tuple[Callable[[random.Random], Document], int], ...] = (
    (_question_chat, 36),
    (_question_plain, 16),
    (_statement, 5),
    (_follow_up_chat, 11),
    (_mixed_chat, 4),
    (_json, 15),
    (_tools, 11),
    (_sums, 7),
    (_sum_lines, 11),
    (_words, 7),
    (_echo, 5),
    (_completion, 4),
)


def documents(seed: int, echo: int = 0) -> Iterator[Document]:
    """The corpus: the same seed gives the same documents, on every machine.

    ``echo`` is the weight of additional documents to copy, beside a mixture that weighs about 130 in all.
    """
    rng = random.Random(seed)
    makers, weights = zip(*MIXTURE, (_echo, echo), strict=True)
    while True:
        yield rng.choices(makers, weights)[0](rng)


def with_copies(seed: int) -> Iterator[Document]:
    """The corpus with a sixth more of documents to copy."""
    return documents(seed, echo=25)


def copies(seed: int) -> Iterator[Document]:
    """Nothing but documents to copy."""
    rng = random.Random(seed)
    while True:
        yield _echo(rng)


def long_documents(seed: int) -> Iterator[Document]:
    """Conversations of many turns, so that the model also works far from the start of its context."""
    rng = random.Random(seed)
    while True:
        yield chat_document(_opening(rng) + _mixed_turns(rng, rng.randint(6, 14)))


def main() -> None:
    """Print some documents, the learned parts in brackets."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    args = parser.parse_args()
    for _, document in zip(range(args.count), documents(args.seed), strict=False):
        print("".join(f"[{piece.text}]" if piece.learned else piece.text for piece in document))
        print("-" * 40)


if __name__ == "__main__":
    main()
