"""The state of one terminal chat: the conversation, the sampling parameters, and how an answer is made."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from quire.cli.generation import Engine, RequestTiming
from quire.cli.sampling_options import make_sampling_params
from quire.errors import GenerationError, PromptTooLongError, ValidationError
from quire.sampling_params import RequestOutputKind, SamplingParams

Message = dict[str, str]


class ChatTokenizer(Protocol):
    """The part of `Tokenizer` a chat needs."""

    def apply_chat_template(self, conversation: Any, *, add_generation_prompt: bool) -> Any:
        """Messages to prompt token ids."""


@dataclass(frozen=True)
class Answer:
    """What came of one message. `num_dropped` messages no longer fitted the context and were left out."""

    text: str
    finish_reason: str | None
    was_stopped: bool
    num_dropped: int
    timing: RequestTiming


class ChatSession:
    """A conversation with one engine.

    Every message is kept (and saved); `answer` leaves out the oldest ones where the context is too short for all.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: ChatTokenizer,
        max_model_len: int,
        model_defaults: Mapping[str, Any],
        params: Mapping[str, Any],
        system: str | None = None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._model_defaults = model_defaults
        self._first_kept = 0
        self._num_requests = 0
        self.params = dict(params)
        self.system = system
        self.messages: list[Message] = []
        self.last_answer: Answer | None = None

    # -- the conversation -----------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every message; the system prompt stays."""
        self.messages.clear()
        self._first_kept = 0
        self.last_answer = None

    def undo(self) -> bool:
        """Take back the last question and what followed it. False if there is none."""
        questions = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        if not questions:
            return False
        del self.messages[questions[-1] :]
        self._first_kept = min(self._first_kept, len(self.messages))
        return True

    def to_json(self) -> dict[str, Any]:
        """What /save writes."""
        return {"messages": [*self._system_messages(), *self.messages]}

    def load_json(self, content: Any) -> None:
        """Replace the conversation by what `to_json` gave, or by a plain list of messages. Raises ValidationError."""
        messages = content.get("messages") if isinstance(content, dict) else content
        if not isinstance(messages, list) or not all(_is_message(m) for m in messages):
            raise ValidationError("the file holds no list of messages with a role and a text content")
        self.reset()
        first_is_system = bool(messages) and messages[0]["role"] == "system"
        self.system = messages[0]["content"] if first_is_system else None
        self.messages = [{"role": m["role"], "content": m["content"]} for m in messages[first_is_system:]]

    def sampling_params(self) -> SamplingParams:
        """The parameters of the next answer. Raises ValidationError."""
        return make_sampling_params({**self.params, "n": 1}, self._model_defaults, output_kind=RequestOutputKind.DELTA)

    def context_line(self) -> str:
        """How full the context is."""
        used = len(self._render()) if self.messages else 0
        return f"{used} of {self.max_model_len} tokens of context used"

    # -- answering ------------------------------------------------------------------------------------------------

    def answer(self, question: str, write: Callable[[str], None]) -> Answer:
        """Ask, hand each piece of the answer to `write`, and remember both. Ctrl-C ends the answer, not the chat.

        Raises ClientError (and forgets the question) when it cannot be asked.
        """
        first_kept = self._first_kept
        self.messages.append({"role": "user", "content": question})
        try:
            params = self.sampling_params()
            token_ids, num_dropped = self._fit(params.max_tokens)
            answer = self._generate(token_ids, params, num_dropped, write)
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

    def _fit(self, max_tokens: int | None) -> tuple[list[int], int]:
        """The prompt, and how many of the oldest messages had to be dropped to leave room for an answer."""
        room = min(max_tokens or self.max_model_len, self.max_model_len // 4)
        before = self._first_kept
        while len(token_ids := self._render()) > self.max_model_len - room:
            questions = [i for i, m in enumerate(self.messages) if m["role"] == "user" and i > self._first_kept]
            if not questions:
                if len(token_ids) < self.max_model_len:
                    break  # a long question alone: answer it in what room there is
                raise PromptTooLongError(
                    f"the message (with the system prompt) takes {len(token_ids)} tokens; the context holds "
                    f"{self.max_model_len}: shorten it, or raise --max-model-len if the model can take more",
                    param="messages",
                )
            self._first_kept = questions[0]
        return token_ids, self._first_kept - before

    def _render(self) -> list[int]:
        kept = [*self._system_messages(), *self.messages[self._first_kept :]]
        return list(self._tokenizer.apply_chat_template(kept, add_generation_prompt=True))

    def _system_messages(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def _generate(
        self, token_ids: list[int], params: SamplingParams, num_dropped: int, write: Callable[[str], None]
    ) -> Answer:
        request_id = f"chat-{self._num_requests}"
        self._num_requests += 1
        timing = RequestTiming(added_s=time.perf_counter())
        self._engine.add_request(request_id, {"prompt_token_ids": token_ids}, params)
        pieces: list[str] = []
        reason = error = None
        try:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    timing.record(output, time.perf_counter())
                    for o in output.outputs:
                        pieces.append(o.text)
                        write(o.text)
                        reason, error = o.finish_reason, o.error_message
        except KeyboardInterrupt:
            self._engine.abort_request([request_id])
        if reason == "error":
            raise GenerationError(error or "the engine failed to answer; ask again")
        return Answer("".join(pieces), reason, reason is None, num_dropped, timing)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
