"""A chat's model that runs here: an engine, stepped by hand."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol

from quire.cli.chat_session import AnswerPiece, ChatPrompt, Message
from quire.cli.generation import Engine, RequestTiming
from quire.cli.sampling_options import make_sampling_params
from quire.errors import GenerationError
from quire.sampling_params import RequestOutputKind, SamplingParams


class ChatTokenizer(Protocol):
    """The part of `Tokenizer` a chat needs."""

    def apply_chat_template(self, conversation: Any, *, add_generation_prompt: bool) -> Any:
        """Messages to prompt token ids."""


class EngineChatModel:
    """Renders and counts with the model's own tokenizer. `model_defaults` are its sampling parameters."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: ChatTokenizer,
        max_model_len: int,
        model_defaults: Mapping[str, Any],
        name: str = "model",
    ) -> None:
        self.name = name
        self.max_model_len: int | None = max_model_len
        self._engine = engine
        self._tokenizer = tokenizer
        self._model_defaults = model_defaults
        self._num_requests = 0

    def longest_answer(self, params: Mapping[str, Any]) -> int | None:
        """Raises ValidationError."""
        return self._sampling_params(params).max_tokens

    def render(self, messages: Sequence[Message]) -> ChatPrompt:
        """Token ids."""
        token_ids = list(self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True))
        return ChatPrompt(token_ids, len(token_ids))

    def answer(
        self, prompt: ChatPrompt, params: Mapping[str, Any], timing: RequestTiming
    ) -> Generator[AnswerPiece, None, None]:
        """Raises GenerationError when the engine fails."""
        request_id = f"chat-{self._num_requests}"
        self._num_requests += 1
        self._engine.add_request(request_id, {"prompt_token_ids": prompt.content}, self._sampling_params(params))
        has_ended = False
        try:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    timing.record(output, time.perf_counter())
                    has_ended = has_ended or output.finished
                    for o in output.outputs:
                        if o.finish_reason == "error":
                            raise GenerationError(o.error_message or "the engine failed to answer; ask again")
                        yield AnswerPiece(o.text, o.finish_reason)
        finally:
            if not has_ended:
                self._engine.abort_request([request_id])

    def _sampling_params(self, params: Mapping[str, Any]) -> SamplingParams:
        return make_sampling_params({**params, "n": 1}, self._model_defaults, output_kind=RequestOutputKind.DELTA)
