"""Grammars of requests: which backend compiles them, when, and which tokens they allow in a step."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from quire.config.engine import EngineConfig
from quire.config.model import ModelConfig
from quire.config.tokenizer_json import find_vocabulary
from quire.engine.request import Request
from quire.engine.sched.interface import AdmissionGate
from quire.engine.structured_output.backend import GrammarBackend, place_form
from quire.engine.structured_output.compiler import CompilerSetup
from quire.engine.structured_output.request import StructuredOutputRequest
from quire.errors import GenerationError
from quire.logger import init_logger
from quire.resolve import resolve
from quire.wire.execution import GrammarOutput, SchedulerOutput

logger = init_logger(__name__)

END_S = 5.0
"""Seconds that `clear_backend` waits for the compiler's thread."""


class StructuredOutputManager(AdmissionGate):
    """Owns the backend and a thread that compiles, both made when the first request with a grammar comes.

    `grammar_init` may be called from any thread (the core's input thread); everything else belongs to the scheduler's.
    The state of a request's grammar is kept at the request, so there is nothing to clean up when it ends.
    """

    def __init__(
        self,
        make_backend: Callable[[Request | None], GrammarBackend],
        *,
        jumps: bool = False,
        preloads: bool = False,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`make_backend` gets the first request with a grammar, or None from `preload`. `wake` is called on the
        compiler's thread when a compilation has ended."""
        self._wake = wake
        self._make_backend = make_backend
        self._jumps = jumps
        self._preloads = preloads
        self._backend: GrammarBackend | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Calls for the compiler's thread; None ends it."""
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    # -- compiling ---------------------------------------------------------------------------------------------

    def grammar_init(self, request: Request) -> None:
        """Begins to compile the request's grammar, if it has one. Does not wait."""
        structured = request.structured_output
        if structured is None:
            return
        structured.jumps = self._jumps and may_jump(request)
        self._start_thread()
        self._jobs.put(partial(self._compile, request, structured))

    def preload(self) -> None:
        """Makes the backend before a request needs it, where that would delay other requests. Does not wait."""
        if self._preloads:
            self._start_thread()
            self._jobs.put(self._make_first_backend)

    def _start_thread(self) -> None:
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run_jobs, name="GrammarCompiler", daemon=True)
                self._thread.start()

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _make_first_backend(self) -> None:
        with contextlib.suppress(Exception):  # the first request gets the error
            self._backend = self._make_backend(None)

    def _compile(self, request: Request, structured: StructuredOutputRequest) -> None:
        if not structured.compiling.set_running_or_notify_cancel():
            return
        try:
            if self._is_closed:
                raise GenerationError("the engine is shutting down")
            backend, params = self._backend_for(request), structured.params
            form = backend.compile(params)
            grammar = place_form(form, params.reasoning, backend.eos_token_ids, backend.vocab_size)
            grammar = grammar.copy_with(request.output_token_ids)
        except Exception as e:
            structured.compiling.set_exception(e)
        else:
            structured.compiling.set_result(grammar)
        self._wake()

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
        """Returns whether the request need not wait for its grammar: it has none, or it is compiled, or it cannot
        be."""
        structured = request.structured_output
        return structured is None or structured.compiling.done()

    def grammar_bitmask(self, requests: Sequence[Request], scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Returns token masks for those of `requests` that have a grammar and sample in this step; None if there are
        none.

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
        """Ends the compiler. May be called twice."""
        with self._lock:
            self._is_closed = True
        self._jobs.put(None)
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


BACKENDS: Mapping[str, str] = {
    "guidance": "quire.engine.structured_output.llguidance_backend:LLGuidanceBackend",
    "xgrammar": "quire.engine.structured_output.xgrammar_backend:XGrammarBackend",
}
"""Backends by the value of --grammar-backend; auto is the first."""
PRELOAD_VOCAB_SIZE = 50_000
"""Least size of a vocabulary that is read while the weights are: reading it holds the interpreter's lock for 0.3 s or
more. The library is loaded there, too."""


def make_structured_output_manager(
    config: EngineConfig, wake: Callable[[], None] = lambda: None
) -> StructuredOutputManager:
    """Returns a manager that costs nothing until a request has a grammar, except after `preload`."""
    model = config.model_config
    return StructuredOutputManager(
        partial(_make_backend, config),
        jumps=config.structured_outputs_config.grammar_jump_forward,
        preloads=_is_slow_to_load(config) and model.pooling is None and _has_vocabulary(model),
        wake=wake,
    )


def _is_slow_to_load(config: EngineConfig) -> bool:
    vocab_size = config.model_config.hf_config.get("vocab_size") or 0
    return vocab_size >= PRELOAD_VOCAB_SIZE or config.structured_outputs_config.grammar_backend == "xgrammar"


def _tokenizer_file(model: ModelConfig) -> Path:
    return (model.tokenizer_dir / "tokenizer.json").absolute()


def _has_vocabulary(model: ModelConfig) -> bool:
    return _tokenizer_file(model).is_file() or find_vocabulary(model.tokenizer_dir) is not None


def _make_backend(config: EngineConfig, request: Request | None) -> GrammarBackend:
    """Returns the backend. Raises ConfigError if the model's tokenizer cannot be used."""
    limits, model = config.structured_outputs_config, config.model_config
    library = "guidance" if limits.grammar_backend == "auto" else limits.grammar_backend
    setup = CompilerSetup(
        tokenizer_file=str(_tokenizer_file(model)),
        vocab_size=model.hf_config.vocab_size,
        eos_token_ids=_eos_token_ids(model, request),
        cpu_s=limits.grammar_compile_cpu_s,
        memory_bytes=limits.grammar_compile_memory_bytes,
        library=library,
    )
    backend: GrammarBackend = resolve(BACKENDS[library])(setup)
    return backend


def _eos_token_ids(model: ModelConfig, request: Request | None) -> list[int]:
    """Returns all tokens that end a text of this model: the frontend's, and those that its configurations list."""
    listed = model.generation_defaults.get("eos_token_id")
    more = listed if isinstance(listed, list) else [listed]
    params = None if request is None else request.sampling_params
    ids = [None if params is None else params.eos_token_id, *more, *model.hf_config.eos_token_ids]
    return list(dict.fromkeys(int(i) for i in ids if i is not None and i < model.hf_config.vocab_size))


def may_jump(request: Request) -> bool:
    """Returns whether the request takes a token with a mask of its own for certain, and needs no probability of it."""
    params = request.sampling_params
    if params is None:
        return False
    form = params.structured_outputs
    closes_reasoning = params.thinking_token_budget is not None and (form is None or form.reasoning is None)
    return not (
        closes_reasoning  # in the middle of the form, which fails there
        or params.num_logprobs is not None
        or params.logprob_token_ids
        or params.allowed_token_ids
        or params.bad_words_token_ids
        or params.bad_words
    )
