"""The journal's entry of a live request, and the request that a core gets from it."""

from __future__ import annotations

import sys

import pytest

from quire.frontend.supervision.journal import Journal, JournalEntry, Standing, num_tokens_of
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import EngineCoreOutput, EngineCoreRequest
from quire.wire.lora import AdapterInfo


def make_request(request_id: str = "a", prompt: list[int] | None = None, **fields: object) -> EngineCoreRequest:
    ids = [1, 2] if prompt is None else prompt
    return EngineCoreRequest(request_id, ids, SamplingParams(), None, 0.0, **fields)  # type: ignore[arg-type]


def test_a_fresh_request_is_sent_as_it_is() -> None:
    entry = JournalEntry(make_request())
    assert entry.make_request() is entry.request
    assert (entry.standing, entry.has_output, num_tokens_of(entry.request)) == (Standing.HELD, False, 2)


def test_a_resumed_request_has_its_outputs_behind_those_it_came_with() -> None:
    entry = JournalEntry(make_request(output_token_ids=[5]))
    entry.output_token_ids.extend([6, 7])
    again = entry.make_request()
    assert again.output_token_ids == [5, 6, 7]
    assert entry.request.output_token_ids == [5], "what the user's side holds is not changed"
    assert (entry.has_output, num_tokens_of(again)) == (True, 5)


def test_a_resumed_request_names_the_revision_that_its_outputs_come_from() -> None:
    entry = JournalEntry(make_request())
    info = AdapterInfo(1, 2, "digest", 1000, 8)
    entry.take_in(EngineCoreOutput("a", [6], adapter=info))
    entry.take_in(EngineCoreOutput("a", [7]))
    again = entry.make_request()
    assert (again.output_token_ids, again.adapter) == ([6, 7], info)
    assert JournalEntry(again).adapter == info, "also after another restart"


def test_tokens_cost_four_bytes_each() -> None:
    entry = JournalEntry(make_request())
    for token in range(10_000):
        entry.output_token_ids.append(token)
    assert sys.getsizeof(entry.output_token_ids) < 10_000 * 4 * 1.2


def test_a_core_knows_a_request_by_one_name_per_time_it_was_sent() -> None:
    journal = Journal()
    entry = journal.add(make_request())
    names = []
    for _ in range(3):
        journal.note_sent(entry, first_time=False)
        names.append(entry.wire_id)
        assert journal.on_core == {entry.wire_id: entry}
        assert journal.note_withdrawn(entry) == entry.wire_id
        assert (journal.on_core, entry.standing) == ({}, Standing.HELD)
    assert names == ["a", "a~1", "a~2"]
    journal.note_new_core()
    journal.note_sent(entry, first_time=True)
    assert (entry.wire_id, entry.standing) == ("a", Standing.SENT)
    journal.remove(entry)
    assert (len(journal), journal.on_core, journal.get("a")) == (0, {}, None)


def test_entries_keep_the_order_of_their_coming_and_ids_are_unique() -> None:
    journal = Journal()
    for name in "cab":
        journal.add(make_request(name))
    assert [entry.request_id for entry in journal] == ["c", "a", "b"]
    with pytest.raises(ValueError, match="a is in use"):
        journal.add(make_request("a"))
