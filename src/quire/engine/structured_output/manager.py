"""Grammars of requests: when they are compiled, and which tokens they allow in a step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np

from quire.engine.request import Request
from quire.engine.structured_output.backend import GrammarBackend
from quire.engine.structured_output.request import StructuredOutputRequest
from quire.errors import GenerationError
from quire.logger import init_logger
from quire.wire.execution import GrammarOutput, SchedulerOutput

logger = init_logger(__name__)

END_S = 5.0
"""How long `clear_backend` waits for the compiler's thread."""


class StructuredOutputManager:
    """Owns the backend and a thread that compiles, both made when the first request with a grammar comes.

    `grammar_init` may be called from any thread (the core's input thread); all else belongs to the scheduler's. What a
    request's grammar knows is kept at the request, so there is nothing to forget when it ends.
    """

    def __init__(self, make_backend: Callable[[Request], GrammarBackend]) -> None:
        self._make_backend = make_backend
        self._backend: GrammarBackend | None = None
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    # -- compiling ---------------------------------------------------------------------------------------------

    def grammar_init(self, request: Request) -> None:
        """Begin to compile the request's grammar, if it asks for one. Does not wait."""
        structured = request.structured_output
        if structured is None:
            return
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._compile_all, name="GrammarCompiler", daemon=True)
                self._thread.start()
        self._requests.put(request)

    def _compile_all(self) -> None:
        while (request := self._requests.get()) is not None:
            structured = request.structured_output
            assert structured is not None  # grammar_init has looked
            if not structured.compiling.set_running_or_notify_cancel():
                continue
            try:
                if self._is_closed:
                    raise GenerationError("the engine is shutting down")
                if self._backend is None:
                    self._backend = self._make_backend(request)
                grammar = self._backend.compile(structured.params).copy_with(list(request.output_token_ids))
            except Exception as e:
                structured.compiling.set_exception(e)
            else:
                structured.compiling.set_result(grammar)

    # -- scheduling --------------------------------------------------------------------------------------------

    def is_ready(self, request: Request) -> bool:
        """Whether the request need not wait for its grammar: it has none, or it is compiled, or it cannot be."""
        structured = request.structured_output
        return structured is None or structured.is_compiled

    def grammar_bitmask(self, requests: Sequence[Request], scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Token masks for those of `requests` that have a grammar and sample in this step; None if there are none.

        A request with drafts has a row for each of them and one more, in order. A draft that its grammar refuses is
        followed by rows that allow everything: the draft is rejected anyway.
        """
        drafts = scheduler_output.scheduled_spec_decode_tokens
        sampling = [
            (request, request.structured_output, drafts.get(request.request_id, []))
            for request in requests
            if request.structured_output is not None and request.num_computed_tokens >= request.num_tokens
        ]
        if not sampling:
            return None
        assert self._backend is not None  # it has compiled their grammars
        num_words = -(-self._backend.vocab_size // 32)
        bitmask = np.full((sum(1 + len(d) for _, _, d in sampling), num_words), -1, dtype=np.int32)
        row = 0
        for _, structured, draft_ids in sampling:
            _fill_rows(structured, bitmask[row : row + 1 + len(draft_ids)], draft_ids)
            row += 1 + len(draft_ids)
        return GrammarOutput([request.request_id for request, _, _ in sampling], bitmask)

    # -- the end -----------------------------------------------------------------------------------------------

    def clear_backend(self) -> None:
        """End the compiler. May be called twice."""
        with self._lock:
            self._is_closed = True
        self._requests.put(None)
        if self._backend is not None:
            self._backend.close()
        if self._thread is not None:
            self._thread.join(END_S)


def _fill_rows(structured: StructuredOutputRequest, rows: np.ndarray, draft_ids: list[int]) -> None:
    """rows: [1 + len(draft_ids), words]."""
    grammar = structured.grammar
    grammar.fill_bitmask(rows[0])
    if not draft_ids:
        return
    num_valid = grammar.count_valid(draft_ids)
    for i in range(num_valid):
        grammar = grammar.copy_with(draft_ids[i : i + 1])
        grammar.fill_bitmask(rows[i + 1])
