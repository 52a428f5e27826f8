"""--enable-log-requests, --enable-log-outputs: what was asked and how it ended, in lines of bounded length.

Text is in them only with --max-log-len.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.server import ServerConfig
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.new_request import TokensPrompt
from quire.logger import init_logger
from quire.outputs import PoolingRequestOutput, RequestOutput
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams

logger = init_logger("quire.requests")


@dataclass(slots=True)
class _Output:
    num_tokens: int = 0
    num_chars: int = 0
    text: str = ""


class RequestLog:
    """The lines of one HTTP request, which have its id as a fact of theirs."""

    def __init__(
        self, http_id: str, engine: AsyncLLM, max_len: int, *, with_requests: bool, with_outputs: bool
    ) -> None:
        self._facts = {"request_id": http_id}
        self._engine = engine
        self._max_len = max_len
        self._with_requests = with_requests
        self._with_outputs = with_outputs
        self._outputs: dict[tuple[str, int], _Output] = {}
        """Of requests that have not ended: no more text than is to be shown."""

    @classmethod
    def from_config(cls, config: ServerConfig, http_id: str, engine: AsyncLLM) -> RequestLog | None:
        """None where neither requests nor their ends are logged."""
        with_requests, with_outputs = config.enable_log_requests, config.enable_log_outputs
        if not with_requests and not with_outputs:
            return None
        return cls(http_id, engine, config.max_log_len, with_requests=with_requests, with_outputs=with_outputs)

    def note_request(self, request_id: str, prompt: TokensPrompt, params: SamplingParams | PoolingParams) -> None:
        """A request was handed to the engine under this id."""
        if not self._with_requests:
            return
        line = f"request {request_id}: {len(prompt['prompt_token_ids'])} prompt tokens, {_describe(params)}"
        if self._max_len:
            line += f", prompt: {self._prompt_text(prompt)}"
        logger.info("%s", line, extra=self._facts)

    def note_output(self, output: RequestOutput | PoolingRequestOutput) -> None:
        """The engine has given something for a request: deltas, or all at once."""
        if not self._with_outputs or isinstance(output, PoolingRequestOutput):
            return
        for completion in output.outputs:
            key = (output.request_id, completion.index)
            kept = self._outputs.setdefault(key, _Output())
            kept.num_tokens += len(completion.token_ids)
            kept.num_chars += len(completion.text)
            kept.text += completion.text[: self._max_len - len(kept.text)]
            if completion.finish_reason is not None:
                self._outputs.pop(key)
                line = f"request {output.request_id}, output {completion.index}: {kept.num_tokens} tokens, "
                line += f"finish_reason={completion.finish_reason}"
                if self._max_len:
                    line += f", text: {_shown(kept.text, kept.num_chars)}"
                logger.info("%s", line, extra=self._facts)

    def _prompt_text(self, prompt: TokensPrompt) -> str:
        """Its start: as it came, or decoded from no more tokens than can be shown."""
        text = prompt.get("prompt")
        if text is not None:
            return _shown(text[: self._max_len], len(text))
        token_ids = prompt["prompt_token_ids"]
        tokenizer = self._engine.pipeline.tokenizer
        if tokenizer is None:
            return _shown(str(token_ids[: self._max_len])[: self._max_len], len(token_ids), "tokens")
        text = tokenizer.decode(token_ids[: self._max_len])
        is_whole = len(token_ids) <= self._max_len and len(text) <= self._max_len
        return _shown(text[: self._max_len], self._max_len if is_whole else len(token_ids), "tokens")


def _shown(text: str, length: int, unit: str = "characters") -> str:
    """A text that is perhaps only the start of one of `length`."""
    return f'"{text}"' if length <= len(text) else f'"{text}"... ({length} {unit})'


def _describe(params: SamplingParams | PoolingParams) -> str:
    if isinstance(params, PoolingParams):
        return f"task={params.task}"
    form = "" if params.structured_outputs is None else f", {params.structured_outputs.source.kind}"
    return (
        f"max_tokens={params.max_tokens}, n={params.n}, temperature={params.temperature:g}, top_p={params.top_p:g}, "
        f"top_k={params.top_k}, seed={params.seed}{form}"
    )
