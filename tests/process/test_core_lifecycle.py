"""Pause, sleep and new weights of an engine core in a process of its own, over the wire."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .peer import ABORTED, LENGTH, Peer


@pytest.fixture
def peer() -> Iterator[Peer]:
    with tempfile.TemporaryDirectory(prefix="quire-test-") as path, Peer(Path(path)) as made:
        yield made


def test_pauses_sleeps_and_weights(peer: Peer) -> None:
    peer.start()
    client = peer.client

    def begin(request_id: str, max_tokens: int = 4000) -> None:
        client.add(request_id, max_tokens=max_tokens)
        client.wait_for(lambda: len(client.tokens(request_id)) > 3)

    begin("waited for", max_tokens=50)
    assert client.call("pause_scheduler", "wait")[1:3] == [None, None]
    assert client.finish_reason("waited for") == LENGTH, "the answer comes after the last token"
    client.add("late", max_tokens=8)
    assert client.call("is_scheduler_paused")[2] is True
    assert client.tokens("late") == []
    client.call("resume_scheduler")
    client.wait_finished("late")
    assert client.tokens("late") == client.tokens("waited for")[:8]

    begin("ended")
    client.call("sleep", 2, "abort")
    assert client.finish_reason("ended") == ABORTED
    client.add("asleep", max_tokens=8)
    assert client.call("is_sleeping")[2] is True
    assert "asleep" in client.call("resume_scheduler")[1]
    assert client.call("wake_up", ["weights"])[2] is False
    assert client.call("wake_up")[2] is True
    client.wait_finished("asleep")
    assert client.tokens("asleep") == client.tokens("late"), "what the cache held before is not read again"

    begin("kept", max_tokens=300)
    client.call("pause_scheduler", "keep")
    num_tokens = len(client.tokens("kept"))
    assert client.call("update_weights", "/other")[2] == "1"
    assert len(client.tokens("kept")) == num_tokens
    client.call("resume_scheduler")
    client.add("new", max_tokens=8)
    client.wait_finished("kept", "new")
    assert len(client.tokens("kept")) == 300
    assert client.tokens("new") != client.tokens("late"), "another model"
    assert client.call("update_weights", "")[1].startswith("Call to update_weights method failed: an empty path")
    assert client.call("get_weight_version")[2] == "1"
