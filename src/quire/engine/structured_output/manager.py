"""Grammars of requests: when they are compiled, and which tokens they allow in a step."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np

from quire.engine.request import Request
from quire.engine.structured_output.after_reasoning import place_form
from quire.engine.structured_output.backend import GrammarBackend
from quire.engine.structured_output.jump import may_jump
from quire.engine.structured_output.request import StructuredOutputRequest
from quire.errors import GenerationError
from quire.logger import init_logger
from quire.wire.execution import GrammarOutput, SchedulerOutput

logger = init_logger(__name__)

END_S = 5.0
"""How long `clear_backend` waits for the compiler's thread."""


class _Preload:
    """In the compiler's queue: make the backend."""


_PRELOAD = _Preload()


class StructuredOutputManager:
    """Owns the backend and a thread that compiles, both made when the first request with a grammar comes.

    `grammar_init` may be called from any thread (the core's input thread); all else belongs to the scheduler's. What a
    request's grammar knows is kept at the request, so there is nothing to forget when it ends.
    """

    def __init__(
        self, make_backend: Callable[[Request | None], GrammarBackend], *, jumps: bool = False, preloads: bool = False
    ) -> None:
        """`make_backend` is given the request that needs it; None if none does yet (`preload`)."""
        self._make_backend = make_backend
        self._jumps = jumps
        self._preloads = preloads
        self._backend: GrammarBackend | None = None
        self._requests: queue.SimpleQueue[Request | _Preload | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    # -- compiling ---------------------------------------------------------------------------------------------

    def grammar_init(self, request: Request) -> None:
        """Begin to compile the request's grammar, if it asks for one. Does not wait."""
        structured = request.structured_output
        if structured is None:
            return
        structured.jumps = self._jumps and may_jump(request)
        self._start_thread()
        self._requests.put(request)

    def preload(self) -> None:
        """Make the backend before a request needs it, where that takes so long that others would feel it. Does not
        wait."""
        if self._preloads:
            self._start_thread()
            self._requests.put(_PRELOAD)

    def _start_thread(self) -> None:
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._compile_all, name="GrammarCompiler", daemon=True)
                self._thread.start()

    def _compile_all(self) -> None:
        while (request := self._requests.get()) is not None:
            if isinstance(request, _Preload):
                with contextlib.suppress(Exception):  # the first request is told
                    self._backend = self._make_backend(None)
                continue
            structured = request.structured_output
            assert structured is not None  # grammar_init has looked
            if not structured.compiling.set_running_or_notify_cancel():
                continue
            try:
                if self._is_closed:
                    raise GenerationError("the engine is shutting down")
                backend, params = self._backend_for(request), structured.params
                form = backend.compile(params)
                grammar = place_form(form, params.reasoning, backend.eos_token_ids, backend.vocab_size)
                grammar = grammar.copy_with(list(request.output_token_ids))
            except Exception as e:
                structured.compiling.set_exception(e)
            else:
                structured.compiling.set_result(grammar)

    def _backend_for(self, request: Request) -> GrammarBackend:
        backend, params = self._backend, request.sampling_params
        eos = None if params is None else params.eos_token_id
        if backend is None or (eos is not None and eos not in backend.eos_token_ids):
            made = self._make_backend(request)
            if backend is not None:
                backend.close()
            self._backend = backend = made
        return backend

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
