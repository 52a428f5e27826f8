"""An engine whose answers are written down beforehand: what the commands are tested against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from quire.errors import PromptTooLongError, ValidationError
from quire.lora_request import LoRARequest
from quire.outputs import CompletionOutput, Logprob, RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams


class WordTokenizer:
    """One token per word; a chat is rendered as role:word tokens, and the token id is the word's length."""

    chat_templates: dict[str, str] = {"default": "words"}  # noqa: RUF012 - tests replace it on the instance

    def __init__(self) -> None:
        self.rendered: list[list[dict[str, str]]] = []

    def apply_chat_template(self, conversation: Any, *, add_generation_prompt: bool, **_: Any) -> list[int]:
        if any(m.get("content") == "REFUSE" for m in conversation):
            raise ValidationError("the template refused", param="messages")
        self.rendered.append([dict(m) for m in conversation])
        words = [w for m in conversation for w in str(m["content"]).split()]
        return [len(w) for w in words] + [0] * add_generation_prompt


@dataclass
class _Running:
    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    pieces: list[str]
    emitted: int = 0


@dataclass
class ScriptedEngine:
    """Each request gets `answer(prompt, params)`, one piece (one token) per step."""

    answer: Callable[[Any, SamplingParams], list[str]] = lambda prompt, params: ["Hello", " there"]
    max_model_len: int = 64
    interrupt_at_step: int | None = None
    """Ctrl-C is pressed before this step (the first is 0)."""
    num_steps: int = 0
    params_seen: list[SamplingParams] = field(default_factory=list)
    prompts_seen: list[Any] = field(default_factory=list)
    loras_seen: list[LoRARequest | None] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    max_running: int = 0

    def __post_init__(self) -> None:
        self.input_processor = SimpleNamespace(max_model_len=self.max_model_len)
        self._running: list[_Running] = []
        self._tokenizer = WordTokenizer()

    def get_tokenizer(self) -> WordTokenizer:
        return self._tokenizer

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> str:
        if isinstance(priority, str):
            raise ValidationError("priority must be an integer", param="priority")
        text = prompt if isinstance(prompt, str) else prompt.get("prompt")
        ids = [len(w) for w in text.split()] if text is not None else list(prompt["prompt_token_ids"])
        if len(ids) >= self.max_model_len:
            raise PromptTooLongError(f"{len(ids)} tokens do not fit {self.max_model_len}", param="prompt")
        self.params_seen.append(params)
        self.loras_seen.append(lora_request)
        self.prompts_seen.append(prompt)
        pieces = self.answer(prompt, params)[: params.max_tokens or None]
        self._running.append(_Running(request_id, text, ids, params, pieces))
        self.max_running = max(self.max_running, len(self._running))
        return request_id

    def abort_request(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        self._running = [r for r in self._running if r.request_id not in request_ids]

    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def step(self) -> list[RequestOutput]:
        if self.num_steps == self.interrupt_at_step:
            self.interrupt_at_step = None
            raise KeyboardInterrupt
        self.num_steps += 1
        outputs = [output for r in self._running if (output := self._advance(r)) is not None]
        done = {output.request_id for output in outputs if output.finished}
        self._running = [r for r in self._running if r.request_id not in done]
        return outputs

    def _advance(self, running: _Running) -> RequestOutput | None:
        running.emitted += 1
        is_last = running.emitted >= len(running.pieces)
        if running.params.output_kind is RequestOutputKind.DELTA:
            pieces, first = running.pieces[running.emitted - 1 : running.emitted], running.emitted - 1
        elif is_last:
            pieces, first = running.pieces, 0
        else:
            return None
        ids = list(range(first, first + len(pieces)))
        return RequestOutput(
            request_id=running.request_id,
            prompt=running.prompt,
            prompt_token_ids=running.prompt_ids,
            prompt_logprobs=None,
            outputs=[self._sequence(running, i, pieces, ids, is_last) for i in range(running.params.n)],
            finished=is_last,
            num_cached_tokens=1,
        )

    def _sequence(
        self, running: _Running, index: int, pieces: list[str], ids: list[int], is_last: bool
    ) -> CompletionOutput:
        k = running.params.logprobs
        rows = None
        if k is not None:
            # The sampled token (rank 2) and the k most likely ones.
            rows = [
                {t: Logprob(-1.5, 2, piece), **{1000 + r: Logprob(-0.5 - r, r + 1, f"alt{r}") for r in range(k)}}
                for t, piece in zip(ids, pieces, strict=True)
            ]
        reason = "length" if len(running.pieces) == running.params.max_tokens else "stop"
        if running.pieces[-1:] == ["ERROR"]:
            reason = "error"
        return CompletionOutput(index, "".join(pieces), ids, None, rows, reason if is_last else None)
