"""When grammars are compiled, and which masks a step gets."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from quire.engine.request import Request, RequestStatus
from quire.engine.structured_output.backend import Grammar, GrammarBackend
from quire.engine.structured_output.manager import StructuredOutputManager
from quire.errors import ClientError, GenerationError, ValidationError
from quire.structured_outputs import StructuredOutputsParams
from quire.wire.engine_core import FinishReason
from quire.wire.execution import DraftTokenIds

from ..harness import Engine, make_request, make_scheduler

VOCAB = 40


class CountingGrammar(Grammar):
    """Allows tokens in their natural order: 1, 2, … up to `last`."""

    def __init__(self, last: int, seen: int = 0) -> None:
        self.last, self.seen = last, seen

    def accept(self, token_id: int) -> ClientError | None:
        if token_id != self.seen + 1:
            return ValidationError(f"{token_id} after {self.seen}", param="structured_outputs")
        self.seen += 1
        return None

    def is_complete(self) -> bool:
        return self.seen == self.last

    def fill_bitmask(self, row: npt.NDArray[np.int32]) -> None:
        row[:] = 0
        row[(self.seen + 1) // 32] = np.uint32(1 << (self.seen + 1) % 32).astype(np.int32)

    def count_valid(self, token_ids: Sequence[int]) -> int:
        expected = range(self.seen + 1, self.last + 1)
        pairs = zip(token_ids, expected, strict=False)
        return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))

    def copy(self) -> CountingGrammar:
        return type(self)(self.last, self.seen)


class CountingBackend(GrammarBackend):
    """`regex` is the last number; compiling waits for `gate`."""

    vocab_size = VOCAB

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.compiled: list[str] = []
        self.is_closed = False

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        self.gate.wait(120)
        assert params.regex is not None
        self.compiled.append(params.regex)
        if not params.regex.isdigit():
            raise ValidationError("no number", param="structured_outputs.regex")
        return CountingGrammar(int(params.regex))

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def backend() -> CountingBackend:
    return CountingBackend()


@pytest.fixture
def manager(backend: CountingBackend) -> Iterator[StructuredOutputManager]:
    manager = StructuredOutputManager(lambda request: backend)
    yield manager
    backend.gate.set()
    manager.clear_backend()
    manager.clear_backend()


def structured(request_id: str, last: str, **fields: Any) -> Request:
    request = make_request(request_id, 4, **fields)
    assert request.sampling_params is not None
    params = request.sampling_params.clone()
    params.structured_outputs = StructuredOutputsParams(regex=last)
    request.origin.sampling_params = params
    return Request(request.origin)


def wait(*requests: Request) -> None:
    for request in requests:
        assert request.structured_output is not None
        request.structured_output.compiling.exception(timeout=120)


def counting(request_id: str, tokens: list[int]) -> int:
    return len(tokens) - 3  # the first output of a prompt of four is 1


def end_of(engine: Engine, request_id: str) -> Any:
    return engine.outputs[request_id][-1]


def test_a_backend_may_be_made_before_it_is_needed() -> None:
    made: list[Request | None] = []

    def make(request: Request | None) -> CountingBackend:
        made.append(request)
        backend = CountingBackend()
        backend.eos_token_ids = [7]
        return backend

    manager = StructuredOutputManager(make, preloads=True)
    manager.preload()
    first, second = structured("a", "3"), structured("b", "3")
    for request, eos in ((first, 7), (second, 8)):
        assert request.sampling_params is not None
        request.sampling_params.eos_token_id = eos
        manager.grammar_init(request)
    wait(first, second)
    assert made == [None, second]  # it did not know the end of sequence of the second
    manager.clear_backend()
    lazy = StructuredOutputManager(make)
    lazy.preload()
    assert lazy._thread is None


def test_a_backend_that_cannot_be_made_before_is_tried_again() -> None:
    def make(request: Request | None) -> CountingBackend:
        if request is None:
            raise ValueError("not yet")
        return CountingBackend()

    manager = StructuredOutputManager(make, preloads=True)
    manager.preload()
    request = structured("a", "3")
    manager.grammar_init(request)
    wait(request)
    assert manager.is_ready(request)
    assert request.structured_output is not None
    assert request.structured_output.compiling.exception(timeout=0) is None
    manager.clear_backend()


def test_a_complete_form_ends_the_output(manager: StructuredOutputManager) -> None:
    engine = Engine(make_scheduler(structured_output_manager=manager), counting)
    a, b = structured("a", "3", max_tokens=9), structured("b", "5", max_tokens=5, ignore_eos=True)
    for request in (a, b):
        manager.grammar_init(request)
    wait(a, b)
    engine.add(a, b, make_request("c", 4, max_tokens=2))
    engine.run()
    assert engine.tokens("a") == [1, 2, 3]
    assert engine.tokens("b") == [1, 2, 3, 4, 5]
    assert end_of(engine, "a").finish_reason is end_of(engine, "b").finish_reason is FinishReason.STOP
    assert end_of(engine, "c").finish_reason is FinishReason.LENGTH


def test_a_token_that_does_not_fit_ends_one_request_with_an_error(manager: StructuredOutputManager) -> None:
    engine = Engine(make_scheduler(structured_output_manager=manager), lambda request_id, tokens: len(tokens) - 3 or 7)
    a = structured("a", "9")
    manager.grammar_init(a)
    wait(a)
    engine.add(a, make_request("b", 5, max_tokens=3))
    engine.worker.choose = lambda request_id, tokens: 1 if len(tokens) == 4 else 30
    engine.run()
    end = end_of(engine, "a")
    assert (end.finish_reason, end.error_type, end.error_message) == (
        FinishReason.ERROR,
        "ValidationError",
        "30 after 1",
    )
    assert end_of(engine, "b").finish_reason is FinishReason.LENGTH


def test_a_request_waits_for_its_grammar_and_others_do_not(
    manager: StructuredOutputManager, backend: CountingBackend
) -> None:
    backend.gate.clear()
    engine = Engine(make_scheduler(structured_output_manager=manager), counting)
    a = structured("a", "2")
    manager.grammar_init(a)
    engine.add(a, make_request("b", 4, max_tokens=9))
    assert list(engine.step().num_scheduled_tokens) == ["b"]
    backend.gate.set()
    wait(a)
    assert list(engine.step().num_scheduled_tokens) == ["b", "a"]


def test_an_abort_while_compiling_costs_no_compilation(
    manager: StructuredOutputManager, backend: CountingBackend
) -> None:
    backend.gate.clear()
    engine = Engine(make_scheduler(structured_output_manager=manager), counting)
    a, b, c = (structured(name, str(i)) for i, name in enumerate("abc", start=4))
    for request in (a, b, c):
        manager.grammar_init(request)
    engine.add(a, b, c)
    engine.step()
    engine.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    backend.gate.set()
    wait(a, c)
    assert backend.compiled == ["4", "6"]
    engine.run()
    assert engine.tokens("c") == [1, 2, 3, 4, 5, 6]


def test_a_grammar_that_is_wrong_is_the_clients_error(manager: StructuredOutputManager) -> None:
    engine = Engine(make_scheduler(structured_output_manager=manager), counting)
    a = structured("a", "many")
    manager.grammar_init(a)
    wait(a)
    engine.add(a, make_request("b", 4, max_tokens=1))
    engine.run()
    end = end_of(engine, "a")
    assert (end.finish_reason, end.error_type, end.error_message) == (
        FinishReason.ERROR,
        "ValidationError",
        "no number",
    )


def test_a_resumed_request_goes_on_in_its_grammar(manager: StructuredOutputManager) -> None:
    engine = Engine(make_scheduler(structured_output_manager=manager), counting)
    a = structured("a", "5", output_token_ids=[1, 2, 3])
    done = structured("done", "2", output_token_ids=[1, 2])
    wrong = structured("wrong", "5", output_token_ids=[2])
    for request in (a, done, wrong):
        manager.grammar_init(request)
    wait(a, done, wrong)
    engine.add(a, done, wrong)
    engine.run()
    assert engine.tokens("a") == [4, 5]
    assert end_of(engine, "done").finish_reason is FinishReason.STOP, "its last output was lost with the core"
    assert end_of(engine, "done").new_token_ids == []
    assert end_of(engine, "wrong").finish_reason is FinishReason.ERROR


def test_preemption_changes_nothing(manager: StructuredOutputManager) -> None:
    engine = Engine(make_scheduler(num_blocks=7, structured_output_manager=manager), counting)
    requests = [structured(name, "12", max_tokens=20) for name in "ab"]
    for request in requests:
        manager.grammar_init(request)
    wait(*requests)
    engine.add(*requests)
    engine.run()
    assert requests[1].num_preemptions > 0
    assert engine.tokens("a") == engine.tokens("b") == list(range(1, 13))


def bits(row: npt.NDArray[np.int32]) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB]).tolist()


def test_masks_are_for_requests_that_sample(manager: StructuredOutputManager) -> None:
    scheduler = make_scheduler(structured_output_manager=manager, max_num_batched_tokens=16)
    a, long = structured("a", "3"), structured("long", "3")
    long = Request(
        type(long.origin)("long", list(range(40)), long.sampling_params, None, 0.0)  # its prompt takes several steps
    )
    for request in (a, long):
        manager.grammar_init(request)
    wait(a, long)
    engine = Engine(scheduler, counting)
    engine.add(a, long)
    output = scheduler.schedule()
    assert output.has_structured_output_requests
    mask = scheduler.get_grammar_bitmask(output)
    assert mask is not None
    assert mask.structured_output_request_ids == ["a"]
    assert mask.grammar_bitmask.shape == (1, 2)
    assert bits(mask.grammar_bitmask[0]) == [1]
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert scheduler.get_grammar_bitmask(output) is None


def test_drafts_have_a_row_each(manager: StructuredOutputManager) -> None:
    engine = Engine(make_scheduler(structured_output_manager=manager, num_spec_tokens=3), counting)
    a, b = structured("a", "30"), structured("b", "30")
    for request in (a, b):
        manager.grammar_init(request)
    wait(a, b)
    engine.add(a, b)
    engine.step()
    engine.scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[2, 3, 9]]))
    output = engine.schedule()
    mask = engine.scheduler.get_grammar_bitmask(output)
    assert mask is not None
    rows = [bits(row) for row in mask.grammar_bitmask]
    assert rows == [[2], [3], [4], [2]], "9 is not allowed, and not verified"
    stats = engine.update(output)[0].scheduler_stats
    assert stats is not None
    assert stats.spec_decoding_stats is not None
    assert stats.spec_decoding_stats.num_unused_tokens == {"grammar": 1}
    assert engine.tokens("a") == [1, 2, 3, 4], "what it verified its grammar has seen"


def test_a_manager_that_is_closed_compiles_nothing(manager: StructuredOutputManager, backend: CountingBackend) -> None:
    a, b = structured("a", "3"), structured("b", "3")
    manager.grammar_init(a)
    wait(a)
    manager.clear_backend()
    assert backend.is_closed
    manager.grammar_init(b)
    assert not manager.is_ready(b)


def test_a_backend_that_cannot_be_made_fails_the_request() -> None:
    def refuse(request: Request) -> GrammarBackend:
        raise GenerationError("no tokenizer")

    manager = StructuredOutputManager(refuse)
    a = structured("a", "3")
    manager.grammar_init(a)
    wait(a)
    engine = Engine(make_scheduler(structured_output_manager=manager), counting)
    engine.add(a)
    engine.run()
    assert end_of(engine, "a").error_message == "no tokenizer"
    manager.clear_backend()
