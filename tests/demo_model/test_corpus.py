"""The corpus: deterministic, split cleanly from the evaluation, and encoded without surprises."""

from __future__ import annotations

import json
import random
import re
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tools.demo_model import phrasing, topics
from tools.demo_model.corpus import copies, documents, long_documents
from tools.demo_model.documents import Piece, chat_document, render
from tools.demo_model.extraction import INSTRUCTIONS, INSTRUCTIONS_HELD, draw_extraction, word_lists
from tools.demo_model.small_tasks import calculate, draw_echo, draw_operands, draw_sum, draw_words, is_held
from tools.demo_model.tokenizer import cut_words, encode_document
from tools.demo_model.tool_tasks import CATALOGUE, draw_tool_talk

from quire.config.model import ASSETS_DIR

TOPICS = topics.load_topics()
SAMPLE = 1500


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS_DIR / "demo" / "tokenizer.json"))


def text_of(document: list[Piece]) -> str:
    return "".join(piece.text for piece in document)


def test_same_seed_same_documents() -> None:
    first, second = (list(islice(documents(11), 200)) for _ in range(2))
    assert first == second
    assert first != list(islice(documents(12), 200))


def test_there_are_enough_topics_with_distinct_answers() -> None:
    answers = [answer for topic in TOPICS for answer in topic.answers.values()]
    assert len(TOPICS) >= 120
    assert len(set(answers)) == len(answers)


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.key)
def test_topic_is_complete(topic: topics.Topic) -> None:
    assert topic.answers["what"]
    assert len(topic.held) >= 2
    assert len(topic.ask) >= 6
    assert topic.about or topic.names


def test_held_out_phrasings_are_no_training_phrasings() -> None:
    held = topics.held_phrasings()
    written = {phrasing.normalise(question) for topic in TOPICS for question in topic.ask}
    assert not held & written
    for intent in topics.INTENTS:
        assert not set(phrasing.TEMPLATES[intent]) & set(phrasing.TEMPLATES_HELD[intent])


def test_drawn_questions_are_never_held_out() -> None:
    rng = random.Random(5)
    held = topics.held_phrasings()
    for _ in range(SAMPLE):
        exchange = topics.draw_exchange(rng)
        assert exchange.topic is not None
        follow_up = topics.draw_follow_up(rng, exchange.topic, exchange.answer)
        assert phrasing.normalise(exchange.question) not in held
        assert phrasing.normalise(follow_up.question) not in held


def test_evaluation_asks_only_held_out_phrasings() -> None:
    rng = random.Random(5)
    held = topics.held_phrasings()
    asked = topics.held_written() + topics.held_blind() + topics.held_templates(rng)
    asked += [follow_up for _, follow_up in topics.held_follow_ups(rng)]
    assert all(phrasing.normalise(item.question) in held for item in asked)


def test_tasks_split_by_content() -> None:
    rng = random.Random(5)
    for held in (False, True):
        for _ in range(300):
            a, sign, b = draw_operands(rng, held)
            assert sign == "*" or is_held(f"{a}{sign}{b}") == held
            words = draw_words(rng, held)
            listed = words.answer if words.kind == "repeat" else " ".join(reversed(words.answer.split(" ")))
            assert is_held(listed) == held
    assert not set(INSTRUCTIONS) & set(INSTRUCTIONS_HELD)
    lists = word_lists()
    for name in ("names", "cities", "items", "systems"):
        assert not set(lists[name]) & set(lists[f"{name}_held"])


def test_sums_are_right() -> None:
    rng = random.Random(5)
    for _ in range(300):
        left, result = draw_sum(rng).answer.rstrip(".").split(" = ")
        a, sign, b = left.split(" ")
        assert calculate(int(a), sign, int(b)) == int(result)


def test_extractions_hold_what_the_text_says() -> None:
    rng = random.Random(5)
    for _ in range(300):
        item = draw_extraction(rng)
        answer = json.loads(item.answer)
        assert all(str(value) in item.question for value in (answer.values() if isinstance(answer, dict) else answer))


def test_an_echo_copies_words_it_was_given() -> None:
    rng = random.Random(5)
    for _ in range(200):
        given, copy = draw_echo(rng)
        words = json.loads(copy) if copy.startswith("\n[") else copy.split()
        assert all(word in given for word in words)


def test_tool_calls_fit_their_schema() -> None:
    rng = random.Random(5)
    kinds = {"string": str, "integer": int}
    for _ in range(300):
        talk = draw_tool_talk(rng)
        offered = {tool["function"]["name"] for tool in talk.tools}
        assert talk.entry.name in offered
        assert set(talk.use.arguments) == set(talk.entry.parameters)
        for name, value in talk.use.arguments.items():
            assert isinstance(value, kinds[talk.entry.parameters[name]])
    assert len(CATALOGUE) == len({entry.name for entry in CATALOGUE})


def test_chat_document_is_what_the_template_renders() -> None:
    messages = draw_tool_talk(random.Random(5)).messages()
    document = chat_document(messages)
    assert text_of(document) + "\n" == render(messages)
    assert [piece.learned for piece in document] == [False, True, False, True]


def test_pieces_tokenize_as_the_whole_text(tokenizer: Tokenizer) -> None:
    """The model learns piece by piece the same tokens that it meets in a prompt."""
    for document in islice(documents(3), 400):
        pieces = [number for piece in document for number in tokenizer.encode(piece.text).ids]
        assert pieces == tokenizer.encode(text_of(document)).ids


def test_documents_fit_their_rows(tokenizer: Tokenizer) -> None:
    lengths = [len(tokenizer.encode(text_of(document)).ids) for document in islice(documents(3), 400)]
    assert sum(length > 256 for length in lengths) < 8
    longest = [len(tokenizer.encode(text_of(document)).ids) for document in islice(long_documents(3), 20)]
    assert max(longest) > 400


def test_copies_are_all_there_is_at_first() -> None:
    for document in islice(copies(5), 50):
        given, learned = (
            " ".join(piece.text for piece in document if piece.learned is is_learned) for is_learned in (False, True)
        )
        words = re.findall(r"[a-z]{4,}", learned.partition("<|")[0])
        assert words
        assert all(word in given for word in words)


@given(st.text(st.characters(max_codepoint=0x2FF), max_size=200), st.integers(0, 99))
def test_cut_words_are_the_same_text(text: str, seed: int) -> None:
    parts = cut_words(text, random.Random(seed))
    assert "".join(parts) == text
    for before, after in pairwise(parts):
        assert before[-1].isalpha()
        assert after[0].isalpha()


def test_cuts_change_the_tokens_of_the_context_alone(tokenizer: Tokenizer) -> None:
    changed = 0
    for document in islice(documents(21), 100):
        usual, cut = (encode_document(tokenizer, document, cuts) for cuts in (None, random.Random(3)))
        for learned in (False, True):
            same, other = ([t for t, of in zip(*encoded, strict=True) if of is learned] for encoded in (usual, cut))
            assert tokenizer.decode(same) == tokenizer.decode(other)
            assert same == other or not learned
        changed += usual != cut
    assert changed > 20


def test_marks_and_roles_are_never_cut() -> None:
    prompt = render([{"role": "user", "content": ""}, {"role": "assistant", "content": ""}], prompt=True)
    assert all(cut_words(prompt, random.Random(seed)) == [prompt] for seed in range(200))
