"""The parts of a load: lengths, synthetic prompts, files, traces."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.bench.datasets import (
    TRACE_BLOCK,
    FileDataset,
    Material,
    RandomDataset,
    TraceDataset,
    TraceRow,
    read_custom,
    read_sharegpt,
    read_trace,
)
from quire.cli.bench.load import LoadRequest
from quire.cli.bench.workloads import Lengths
from quire.errors import ConfigError

MATERIAL = Material(tuple(range(300, 400)), tokens_per_word=2.0)


@pytest.mark.parametrize(
    ("text", "mean", "longest"),
    [
        ("256", 256, 256),
        ("100-500", 300, 500),
        ("normal:200:20", 200, None),
        ("lognormal:200:0.5", 200, None),
        ("exponential:200", 200, None),
    ],
)
def test_lengths_are_drawn_from_what_the_text_describes(text: str, mean: float, longest: int | None) -> None:
    lengths, rng = Lengths.parse(text), random.Random(1)
    drawn = [lengths.draw(rng) for _ in range(4000)]
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.1)
    assert min(drawn) >= 1
    assert lengths.longest == longest
    assert longest is None or max(drawn) == longest
    assert all(lengths.draw(rng, 50) <= 50 for _ in range(100))
    assert str(lengths) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "-5", "5-", "9-3", "0-3", "1.5", "x", "99999999999"),
        *("normal", "normal:5", "normal:0:1", "normal:1:2:3", "lognormal:nan:1", "exponential:inf", "zipf:3"),
    ],
)
def test_what_is_no_length(text: str) -> None:
    with pytest.raises(ConfigError, match="not a number of tokens"):
        Lengths.parse(text)


def dataset(**options: Any) -> RandomDataset:
    lengths = {"input_len": Lengths.parse("20-60"), "output_len": Lengths.parse("lognormal:30:1")}
    return RandomDataset(**{"material": MATERIAL, "as_text": False, **lengths, **options})


@given(st.integers(0, 9), st.integers(0, 40), st.integers(1, 4))
def test_random_requests_are_the_same_for_the_same_seed(seed: int, prefix_len: int, num_prefixes: int) -> None:
    data = dataset(seed=seed, prefix_len=prefix_len, num_prefixes=num_prefixes, max_model_len=128)
    first, again, other = data.requests(40, 0), data.requests(40, 0), data.requests(40, 1)
    assert first == again
    assert [len(r.prompt) for r in first] == [len(r.prompt) for r in other]  # lengths stay,
    assert all(a.prompt != b.prompt for a, b in zip(first, other, strict=True))  # tokens do not
    for request in first:
        assert isinstance(request.prompt, list)
        assert 20 + prefix_len <= len(request.prompt) <= 60 + prefix_len
        assert set(request.prompt) <= set(MATERIAL.token_ids)
        assert request.output_len >= 1
        assert len(request.prompt) + request.output_len <= 128
    if prefix_len > 4:
        assert len({tuple(r.prompt[:prefix_len]) for r in first}) <= num_prefixes
        assert len({tuple(r.prompt[prefix_len:]) for r in first}) == 40


def test_random_texts_are_about_as_long() -> None:
    (request,) = dataset(as_text=True, input_len=Lengths.parse("100"), prefix_len=10).requests(1, 0)
    assert isinstance(request.prompt, str)
    assert len(request.prompt.split()) == 5 + 50  # two tokens a word


def test_sharegpt_conversations_become_requests(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    talk = [{"from": "human", "value": "question?"}, {"from": "gpt", "value": "a" * 40}]
    path.write_text(
        json.dumps([{"conversations": talk}, {"conversations": talk[:1]}, {}, 5, {"conversations": 3 * talk}])
    )
    data = read_sharegpt(path, None, 0)
    assert data.rows == [LoadRequest("question?", 10)] * 2
    assert read_sharegpt(path, Lengths.parse("7"), 0).rows[0].output_len == 7
    assert [r.prompt for r in data.requests(5, 3)] == ["question?"] * 5
    path.write_text("[]")
    with pytest.raises(ConfigError, match="no conversation"):
        read_sharegpt(path, None, 0)
    path.write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_sharegpt(path, None, 0)
    with pytest.raises(ConfigError, match="No such file"):
        read_sharegpt(tmp_path / "none", None, 0)


def custom(tmp_path: Path, *rows: Any) -> FileDataset:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return read_custom(path, Lengths.parse("9"), 0)


def test_rows_of_a_custom_file_become_requests(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    data = custom(tmp_path, {"prompt": "a"}, "", {"prompt": [1, 2], "output_len": 3}, {"prompt": "b", "max_tokens": 4})
    assert list(data.rows) == [LoadRequest("a", 9), LoadRequest([1, 2], 3), LoadRequest("b", 4)]
    data.check_endpoint(is_chat=False)
    with pytest.raises(ConfigError, match="holds token ids, which --endpoint chat does not take"):
        data.check_endpoint(is_chat=True)
    talk = custom(tmp_path, {"messages": messages})
    assert talk.rows[0].prompt == messages
    talk.check_endpoint(is_chat=True)
    with pytest.raises(ConfigError, match="use --endpoint chat"):
        talk.check_endpoint(is_chat=False)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "line 1: "),
        ([1], "not a JSON object"),
        ({}, "neither"),
        ({"prompt": ""}, "neither"),
        ({"prompt": [1, "a"]}, "neither"),
        ({"messages": "hi"}, "neither"),
        ({"messages": [1]}, "neither"),
        ({"prompt": "a", "output_len": 0}, "output_len 0 is not"),
        ({"prompt": "a", "output_len": True}, "output_len True is not"),
        ("", "is empty"),
    ],
)
def test_custom_rows_that_are_none(tmp_path: Path, row: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        custom(tmp_path, row)


def test_a_trace_becomes_requests_with_shared_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 3000, "input_length": 2 * TRACE_BLOCK + 5, "output_length": 4, "hash_ids": [7, 8, 9]},
        {"timestamp": 1000, "input_length": TRACE_BLOCK + 9, "output_length": 2, "hash_ids": [7]},
        {"arrival_s": 1.5, "input_length": 3, "output_length": 1},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    read = read_trace(path)
    assert [row.arrival_s for row in read] == [0.0, 0.5, 2.0]
    data = TraceDataset(read, MATERIAL, as_text=False, speed=2.0)
    requests = data.requests(3, 0)
    assert [(r.arrival_s, len(r.prompt), r.output_len) for r in requests] == [
        (0.0, TRACE_BLOCK + 9, 2),
        (0.25, 3, 1),
        (1.0, 2 * TRACE_BLOCK + 5, 4),
    ]
    assert requests[0].prompt[:TRACE_BLOCK] == requests[2].prompt[:TRACE_BLOCK]  # the same hash id
    assert requests[0].prompt[:TRACE_BLOCK] != data.requests(1, 1)[0].prompt[:TRACE_BLOCK]
    assert data.size == 3
    text = TraceDataset([TraceRow(0.0, 8, 1)], MATERIAL, as_text=True).requests(1, 0)[0].prompt
    assert isinstance(text, str)
    assert len(text.split()) == 4


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"timestamp": 0, "input_length": 5}, "no 'output_length'"),
        ({"input_length": 5, "output_length": 5}, "no 'timestamp'"),
        ({"timestamp": -1, "input_length": 5, "output_length": 5}, "its time"),
        ({"timestamp": "x", "input_length": 5, "output_length": 5}, "line 1"),
        ({"timestamp": 0, "input_length": 0, "output_length": 5}, "input_length 0"),
        ({"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": ["a"]}, "hash_ids"),
    ],
)
def test_traces_that_are_none(tmp_path: Path, row: Any, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=words):
        read_trace(path)
