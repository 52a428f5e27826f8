"""Many prompts as one piece of work: prepare all, add all, step until all are finished.

`BatchRunner` sits between `LLM` and `LLMEngine`. It names requests, keeps finished outputs until they are asked for,
and leaves nothing behind when something goes wrong.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any, TypeVar, cast

import msgspec
from tqdm import tqdm

from quire.errors import ClientError, EngineDeadError, GenerationError, ValidationError, make_error
from quire.frontend.input_processor import as_prompt_list
from quire.frontend.llm_engine import LLMEngine
from quire.frontend.new_request import NewRequest, PromptType
from quire.interrupts import InterruptShield
from quire.logger import init_logger
from quire.lora_request import LoRARequest
from quire.outputs import PoolingRequestOutput, RequestOutput
from quire.pooling_params import PoolingParams
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.wire.engine_core import EngineCoreRequest

logger = init_logger(__name__)

T = TypeVar("T")
UseTqdm = bool | Callable[..., Any]
Params = SamplingParams | Sequence[SamplingParams] | None
LoRAs = LoRARequest | Sequence[LoRARequest | None] | None
Output = RequestOutput | PoolingRequestOutput
PreparedRequest = tuple[EngineCoreRequest, str | None]
"""A validated request and the text of its prompt, if it was text."""


class BatchRunner:
    """Runs prompts on an engine and gives their outputs in the order they were added.

    A request that fails inside the engine costs the others nothing: its output has the finish reason "error", a
    message, and the tokens it had. Only where every request has failed is there an exception: GenerationError, or
    EngineDeadError from an engine that is gone for good.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._request_counter = itertools.count()
        self._outputs: dict[str, Output | None] = {}
        """Outputs of the requests that were added and not yet returned; None until a request is finished."""

    def prepare(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        lora_request: LoRAs = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        *,
        use_tqdm: UseTqdm = False,
    ) -> list[PreparedRequest]:
        """Returns every prompt as a validated request, none of them added yet."""
        if "generate" not in self._engine.get_supported_tasks():
            raise ValidationError("this model does not generate text; it was started for pooling", param="runner")
        if sampling_params is None:
            sampling_params = self._engine.input_processor.get_default_sampling_params()
        params = _one_per_prompt("sampling_params", sampling_params, prompt_list := as_prompt_list(prompts))
        return self._prepare(prompt_list, params, lora_request, priority, tokenization_kwargs, use_tqdm)

    def prepare_pooling(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams],
        task: str | None,
        lora_request: LoRAs = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        *,
        use_tqdm: UseTqdm = False,
    ) -> list[PreparedRequest]:
        """Returns the same for requests to pool for `task`; None: the task of the parameters, or the model's first."""
        params = _one_per_prompt("pooling_params", pooling_params, prompt_list := as_prompt_list(prompts))
        for given in params:
            if task is not None and given.task not in (None, task):
                raise ValidationError(
                    f"pooling_params ask for the task {given.task!r}, and {task!r} was called for", param="task"
                )
        if task is not None:
            params = [msgspec.structs.replace(given, task=task) for given in params]
        return self._prepare(prompt_list, params, lora_request, None, tokenization_kwargs, use_tqdm)

    def _prepare(
        self,
        prompt_list: Sequence[PromptType],
        params: Sequence[SamplingParams | PoolingParams],
        lora_request: LoRAs,
        priority: int | Sequence[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
        use_tqdm: UseTqdm,
    ) -> list[PreparedRequest]:
        loras = _one_per_prompt("lora_request", lora_request, prompt_list)
        priorities = _one_per_prompt("priority", 0 if priority is None else priority, prompt_list)
        rows: Any = enumerate(zip(prompt_list, params, loras, priorities, strict=True))
        if use_tqdm and len(prompt_list) > 1:
            rows = tqdm(rows, total=len(prompt_list), desc="Rendering prompts", dynamic_ncols=True)
        requests = []
        for index, (prompt, prompt_params, lora, prompt_priority) in rows:
            try:
                requests.append(
                    self._engine.input_processor.process_inputs(
                        NewRequest(
                            request_id=str(next(self._request_counter)),
                            prompt=prompt,
                            params=prompt_params,
                            priority=prompt_priority,
                            tokenization_kwargs=tokenization_kwargs or {},
                            lora_request=lora,
                        )
                    )
                )
            except ClientError as e:
                if len(prompt_list) > 1:
                    e.args = (f"prompt {index}: {e}",)
                raise
        return requests

    def add(self, requests: Sequence[PreparedRequest]) -> list[str]:
        """Queues prepared requests, all or none. Returns the users' ids. Raises ClientError while the engine is
        paused."""
        if self._engine.pause_mode is not None:
            raise ClientError("the engine is paused or asleep, and a request would wait for ever; call wake_up() first")
        ids = [request.request_id for request, _ in requests]
        with self._all_or_none(ids):
            for request, text in requests:
                request.params.output_kind = RequestOutputKind.FINAL_ONLY
                self._outputs[request.request_id] = None
                self._engine.add_prepared(request, text)
        return ids

    def add_and_run(self, requests: Sequence[PreparedRequest], use_tqdm: UseTqdm = False) -> list[RequestOutput]:
        """Queues prepared requests and steps until they are finished. Returns their outputs in the same order."""
        with self._all_or_none([request.request_id for request, _ in requests]):
            outputs = cast("list[RequestOutput]", self._run(self.add(requests), use_tqdm))
        self._check_failures(outputs)
        return outputs

    def pool(self, requests: Sequence[PreparedRequest], use_tqdm: UseTqdm = False) -> list[PoolingRequestOutput]:
        """Runs requests to pool. One that fails fails them all: nothing can stand in an embedding's place."""
        with self._all_or_none([request.request_id for request, _ in requests]):
            outputs = cast("list[PoolingRequestOutput]", self._run(self.add(requests), use_tqdm))
        for output in outputs:
            if output.outputs.data is None:
                message = f"request {output.request_id}: {output.error_message or 'it was ended without a result'}"
                raise self._error(output.error_type, message)
        return outputs

    def run_added(self, use_tqdm: UseTqdm = False) -> list[RequestOutput]:
        """Steps until everything that was added is finished. Returns the outputs in the order of adding.

        Raises ClientError, and forgets nothing, if the engine was paused and its requests were kept.
        """
        if self._engine.pause_mode == "keep" and None in self._outputs.values():
            raise ClientError("the engine is paused and its requests are frozen; call wake_up() first")
        ids = list(self._outputs)
        with self._all_or_none(ids):
            outputs = cast("list[RequestOutput]", self._run(ids, use_tqdm))
        self._check_failures(outputs)
        return outputs

    @contextmanager
    def _all_or_none(self, ids: Sequence[str]) -> Iterator[None]:
        """Aborts and forgets the requests `ids` on any error, Ctrl-C among them."""
        try:
            yield
        except BaseException:
            with InterruptShield():
                self._engine.abort_request(ids)
                for request_id in ids:
                    self._outputs.pop(request_id, None)
            raise

    def _run(self, ids: Sequence[str], use_tqdm: UseTqdm) -> list[Output]:
        pending = {request_id for request_id in ids if self._outputs[request_id] is None}
        progress = GenerationProgress(len(ids), use_tqdm) if use_tqdm else None
        with progress or nullcontext():
            while pending and self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    if output.finished and output.request_id in self._outputs:
                        self._outputs[output.request_id] = output
                        if output.request_id in pending:
                            pending.remove(output.request_id)
                            if progress is not None:
                                progress.update(output)
        outputs = [done for request_id in ids if (done := self._outputs.pop(request_id)) is not None]
        if len(outputs) < len(ids):
            raise GenerationError(f"the engine has lost {len(ids) - len(outputs)} requests; this is a bug")
        return outputs

    def _check_failures(self, outputs: Sequence[RequestOutput]) -> None:
        """Logs failed requests. Raises the error if all of them failed."""
        failures = {
            output.request_id: completion.error_message or "it failed inside the engine"
            for output in outputs
            for completion in output.outputs
            if completion.finish_reason == "error"
        }
        for request_id, message in failures.items():
            logger.error("request %s failed: %s", request_id, message)
        if failures and len(failures) == len(outputs):
            first = next(c for c in outputs[0].outputs if c.finish_reason == "error")
            raise self._error(first.error_type, failures[outputs[0].request_id])

    def _error(self, error_type: str, message: str) -> Exception:
        is_dead = self._engine.engine_core.engine_dead
        return EngineDeadError(message) if is_dead else make_error(error_type, message, GenerationError)


def _one_per_prompt(name: str, value: T | Sequence[T], prompts: Sequence[Any]) -> Sequence[T]:
    """Returns one value for all prompts, or a sequence of as many values as there are prompts."""
    if not isinstance(value, list | tuple):
        return [cast("T", value)] * len(prompts)
    if len(value) != len(prompts):
        raise ValidationError(f"{name} has {len(value)} entries for {len(prompts)} prompts", param=name)
    return value


class GenerationProgress:
    """A tqdm bar over `total` prompts. A callable `use_tqdm` is used in tqdm's place.

    A context manager: its end closes the bar.
    """

    def __init__(self, total: int, use_tqdm: bool | Callable[..., Any]) -> None:
        self._start = time.perf_counter()
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        self._bar = make_bar(
            total=total, desc="Processed prompts", dynamic_ncols=True, postfix=self._speed(), unit="prompt"
        )

    def update(self, output: RequestOutput | PoolingRequestOutput) -> None:
        """Counts a finished prompt."""
        self._num_prompt_tokens += len(output.prompt_token_ids or ())
        if isinstance(output, RequestOutput):
            self._num_output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        self._bar.set_postfix_str(self._speed(), refresh=False)
        self._bar.update(1)

    def _speed(self) -> str:
        elapsed = max(time.perf_counter() - self._start, 1e-9)
        read, written = self._num_prompt_tokens / elapsed, self._num_output_tokens / elapsed
        return f"est. speed input: {read:.2f} toks/s, output: {written:.2f} toks/s"

    def __enter__(self) -> GenerationProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bar.close()
