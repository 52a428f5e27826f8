"""A terminal chat: the conversation, its sampling parameters, how an answer is made, and a model that runs here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quire.cli.generation import Engine, RequestTiming
from quire.cli.option_groups import make_sampling_params
from quire.errors import GenerationError, PromptTooLongError, ValidationError
from quire.lora_request import LoRARequest
from quire.sampling_params import RequestOutputKind, SamplingParams

Message = dict[str, str]


@dataclass(frozen=True)
class ChatPrompt:
    """Messages in the form that their model takes, and their length in tokens; None where it is unknown."""

    content: Any
    num_tokens: int | None


@dataclass(frozen=True)
class AnswerPiece:
    """A part of an answer. Text that is `shown_only` (a model's reasoning) does not belong to the message."""

    text: str
    finish_reason: str | None = None
    shown_only: bool = False


class ChatModel(Protocol):
    """The model of a chat: a local engine or a server. `max_model_len` is None where it is unknown."""

    name: str
    max_model_len: int | None

    def longest_answer(self, params: Mapping[str, Any]) -> int | None:
        """Returns the limit in tokens that `params` or the model set. Raises ValidationError for bad parameters."""

    def render(self, messages: Sequence[Message]) -> ChatPrompt:
        """Returns the prompt that `answer` takes. Raises ClientError."""

    def answer(
        self, prompt: ChatPrompt, params: Mapping[str, Any], timing: RequestTiming
    ) -> Generator[AnswerPiece, None, None]:
        """Yields the pieces as they arrive and stores their times in `timing`. Closing it early ends the request.

        Raises ClientError, GenerationError.
        """


@dataclass(frozen=True)
class Answer:
    """The answer to one message. `num_dropped` messages no longer fitted into the context and were left out."""

    text: str
    finish_reason: str | None
    was_stopped: bool
    num_dropped: int
    timing: RequestTiming


class ChatSession:
    """A conversation with one model.

    Every message is kept (and saved); `answer` leaves out the oldest ones where the context is too short for all.
    """

    def __init__(self, model: ChatModel, params: Mapping[str, Any], system: str | None = None) -> None:
        self._model = model
        self._first_kept = 0
        self.params = dict(params)
        self.system = system
        self.messages: list[Message] = []
        self.last_answer: Answer | None = None

    # -- the conversation -----------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Deletes every message; the system prompt stays."""
        self.messages.clear()
        self._first_kept = 0
        self.last_answer = None

    def undo(self) -> bool:
        """Deletes the last question and what followed it. Returns False if there is none."""
        questions = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        if not questions:
            return False
        del self.messages[questions[-1] :]
        self._first_kept = min(self._first_kept, len(self.messages))
        return True

    def to_json(self) -> dict[str, Any]:
        """Returns what /save writes."""
        return {"messages": [*self._system_messages(), *self.messages]}

    def load_json(self, content: Any) -> None:
        """Replaces the conversation by a result of `to_json` or a plain list of messages. Raises ValidationError."""
        messages = content.get("messages") if isinstance(content, dict) else content
        if not isinstance(messages, list) or not all(_is_message(m) for m in messages):
            raise ValidationError("the file holds no list of messages with a role and a text content")
        self.reset()
        first_is_system = bool(messages) and messages[0]["role"] == "system"
        self.system = messages[0]["content"] if first_is_system else None
        self.messages = [{"role": m["role"], "content": m["content"]} for m in messages[first_is_system:]]

    def check_params(self) -> None:
        """Raises ValidationError if the next answer could not be asked for with `params`."""
        self._model.longest_answer(self.params)

    def context_line(self) -> str:
        """Returns a line that says how full the context is."""
        used = self._render().num_tokens if self.messages else 0
        if used is None or self._model.max_model_len is None:
            return f"{len(self.messages)} messages"
        return f"{used} of {self._model.max_model_len} tokens of context used"

    # -- answering ------------------------------------------------------------------------------------------------

    def answer(self, question: str, write: Callable[[str], None]) -> Answer:
        """Asks, passes each piece of the answer to `write`, and stores both. Ctrl-C ends the answer, not the chat.

        Raises ClientError (and deletes the question) when the question cannot be asked.
        """
        first_kept = self._first_kept
        self.messages.append({"role": "user", "content": question})
        try:
            prompt, num_dropped = self._fit(self._model.longest_answer(self.params))
            answer = self._generate(prompt, num_dropped, write)
        except BaseException:
            self.messages.pop()
            self._first_kept = first_kept
            raise
        if answer.text or not answer.was_stopped:
            self.messages.append({"role": "assistant", "content": answer.text})
        else:
            self.messages.pop()
        self.last_answer = answer
        return answer

    def _fit(self, max_tokens: int | None) -> tuple[ChatPrompt, int]:
        """Returns the prompt, and how many of the oldest messages were dropped to leave room for an answer."""
        limit, before = self._model.max_model_len, self._first_kept
        prompt = self._render()
        if limit is None:
            return prompt, 0
        room = min(max_tokens or limit, limit // 4)
        while prompt.num_tokens is not None and prompt.num_tokens > limit - room:
            questions = [i for i, m in enumerate(self.messages) if m["role"] == "user" and i > self._first_kept]
            if not questions:
                if prompt.num_tokens < limit:
                    break  # a long question alone: its answer gets the room that is left
                raise PromptTooLongError(
                    f"the message (with the system prompt) takes {prompt.num_tokens} tokens; the context holds "
                    f"{limit}: shorten it, or raise --max-model-len if the model can take more",
                    param="messages",
                )
            self._first_kept = questions[0]
            prompt = self._render()
        return prompt, self._first_kept - before

    def _render(self) -> ChatPrompt:
        return self._model.render([*self._system_messages(), *self.messages[self._first_kept :]])

    def _system_messages(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def _generate(self, prompt: ChatPrompt, num_dropped: int, write: Callable[[str], None]) -> Answer:
        timing = RequestTiming(added_s=time.perf_counter())
        texts: list[str] = []
        reason = None
        try:
            with contextlib.closing(self._model.answer(prompt, self.params, timing)) as pieces:
                for piece in pieces:
                    if not piece.shown_only:
                        texts.append(piece.text)
                    reason = piece.finish_reason or reason
                    write(piece.text)
        except KeyboardInterrupt:
            reason = None
        return Answer("".join(texts), reason, reason is None, num_dropped, timing)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


class ChatTokenizer(Protocol):
    """The part of `Tokenizer` a chat needs."""

    def apply_chat_template(self, conversation: Any, *, add_generation_prompt: bool) -> Any:
        """Returns the prompt token ids of messages."""


class EngineChatModel:
    """Renders and counts with the model's own tokenizer. `model_defaults` are its sampling parameters."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: ChatTokenizer,
        max_model_len: int,
        model_defaults: Mapping[str, Any],
        name: str = "model",
        lora_request: LoRARequest | None = None,
    ) -> None:
        self.name = name
        self._options: dict[str, Any] = {} if lora_request is None else {"lora_request": lora_request}
        self.max_model_len: int | None = max_model_len
        self._engine = engine
        self._tokenizer = tokenizer
        self._model_defaults = model_defaults
        self._num_requests = 0

    def longest_answer(self, params: Mapping[str, Any]) -> int | None:
        return self._sampling_params(params).max_tokens

    def render(self, messages: Sequence[Message]) -> ChatPrompt:
        token_ids = list(self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True))
        return ChatPrompt(token_ids, len(token_ids))

    def answer(
        self, prompt: ChatPrompt, params: Mapping[str, Any], timing: RequestTiming
    ) -> Generator[AnswerPiece, None, None]:
        request_id = f"chat-{self._num_requests}"
        self._num_requests += 1
        self._engine.add_request(
            request_id, {"prompt_token_ids": prompt.content}, self._sampling_params(params), **self._options
        )
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
