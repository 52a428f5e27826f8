"""`LLM`: a model in a few lines of Python.

::

    from quire import LLM, SamplingParams
    outputs = LLM("path/to/checkpoint").generate(["Hello"], SamplingParams(max_tokens=8))

A facade over `LLMEngine`: it names requests, runs the step loop and sorts the answers. It never talks to the engine
core itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from tqdm import tqdm

from quire.config.engine_args import EngineArgs
from quire.errors import ValidationError
from quire.frontend import beam_search
from quire.frontend.batch import BatchRunner, LoRAs, Params, UseTqdm
from quire.frontend.llm_engine import LLMEngine
from quire.frontend.new_request import PromptType
from quire.frontend.scoring import PairScorer, Texts, pair_texts
from quire.frontend.text.chat_template import ContentFormat, Message
from quire.logger import init_logger
from quire.lora_request import LoRARequest
from quire.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    Logprob,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from quire.pooling_params import PoolingParams
from quire.sampling_params import BeamSearchParams, SamplingParams

logger = init_logger(__name__)

Args = ParamSpec("Args")
Result = TypeVar("Result")


def _of_engine(method: Callable[Concatenate[LLMEngine, Args], Result]) -> Callable[Concatenate[LLM, Args], Result]:
    """Returns the method of `LLM` that calls `method` of its engine."""

    @functools.wraps(method)
    def call(self: LLM, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        return method(self.llm_engine, *args, **kwargs)

    return call


class LLM:
    """A model and the engine that runs it, for offline use. Names and defaults are those of vLLM's `LLM`.

    `model` is a checkpoint directory, a hub id, or nothing: the demo model inside the package. Every engine flag is a
    keyword argument. Statistics are off unless `disable_log_stats=False`. Raises ConfigError or ModelLoadError.

    Use it as a context manager, or call `shutdown()`, to release its memory early.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        runner: str = "auto",
        convert: str = "auto",
        tokenizer: str | None = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        chat_template: str | None = None,
        seed: int = 0,
        gpu_memory_utilization: float = 0.92,
        kv_cache_memory_bytes: int | None = None,
        hf_overrides: dict[str, Any] | None = None,
        disable_log_stats: bool = True,
        **kwargs: Any,
    ) -> None:
        keywords = {
            "runner": runner,
            "convert": convert,
            "tokenizer": tokenizer,
            "tokenizer_mode": tokenizer_mode,
            "skip_tokenizer_init": skip_tokenizer_init,
            "trust_remote_code": trust_remote_code,
            "dtype": dtype,
            "revision": revision,
            "tokenizer_revision": tokenizer_revision,
            "chat_template": chat_template,
            "seed": seed,
            "gpu_memory_utilization": gpu_memory_utilization,
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
            "hf_overrides": hf_overrides,
            **kwargs,
        }
        engine_args = EngineArgs(model, disable_log_stats=disable_log_stats, **keywords)
        given = {k: v for k, v in engine_args.non_default.items() if k != "disable_log_stats"}
        if given:
            logger.info("non-default arguments: %s", given)
        self.llm_engine = LLMEngine.from_engine_args(engine_args)
        self._batch = BatchRunner(self.llm_engine)

    def __repr__(self) -> str:
        return f"LLM(model={self.llm_engine.model_config.model!r})"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()

    # -- generation ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRAs = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generates for one prompt or many. Returns the outputs in the order of the prompts.

        Parameters, adapters and priorities are one for all prompts or one per prompt; no parameters are the model's
        defaults. Everything is validated before anything runs: an error in one prompt leaves nothing behind. Ctrl-C
        aborts these requests and leaves the engine usable. A request that fails inside the engine has the finish reason
        "error" and an `error_message`; if all of them fail, GenerationError (or EngineDeadError) is raised instead.
        """
        requests = self._batch.prepare(
            prompts, sampling_params, lora_request, priority, tokenization_kwargs, use_tqdm=use_tqdm
        )
        return self._batch.add_and_run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRAs = None,
        *,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or many. A conversation is a list of {"role": ..., "content": ...}."""
        tokenizer = self.get_tokenizer()
        single = not messages or isinstance(messages[0], Mapping)
        prompts = [
            tokenizer.apply_chat_template(
                conversation,
                tools=tools,
                chat_template=chat_template,
                content_format=chat_template_content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **(chat_template_kwargs or {}),
            )
            for conversation in cast("Sequence[Sequence[Message]]", [messages] if single else messages)
        ]
        return self.generate(
            cast("list[PromptType]", prompts),
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
            # The template writes its own special tokens.
            tokenization_kwargs={"add_special_tokens": False, **(tokenization_kwargs or {})},
        )

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRAs = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Queues requests and returns their ids. `wait_for_completion` runs them. The arguments are those of
        `generate`."""
        requests = self._batch.prepare(
            prompts, sampling_params, lora_request, priority, tokenization_kwargs, use_tqdm=use_tqdm
        )
        return self._batch.add(requests)

    def wait_for_completion(self, use_tqdm: UseTqdm = True) -> list[RequestOutput]:
        """Runs everything that was enqueued. Returns the outputs in the order of enqueueing."""
        return self._batch.run_added(use_tqdm)

    def beam_search(
        self,
        prompts: Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Returns the `beam_width` best continuations of each prompt, best first (see `frontend/beam_search.py`).

        Runs `concurrency_limit` prompts at a time, all of them by default. Needs a log-probability per token for each
        beam and each token that ends a text: wider beams than --max-logprobs allows raise ValidationError.
        `params.temperature` changes nothing: beams are ranked by the model's own probabilities, and nothing is drawn.
        """
        processor = self.llm_engine.input_processor
        eos_ids = frozenset[int]() if params.ignore_eos else processor.eos_token_ids
        count = params.beam_width + len(eos_ids)
        step_params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=count, ignore_eos=True)

        def next_tokens(sequences: list[list[int]]) -> list[dict[int, Logprob]]:
            requests = self._batch.prepare(sequences, step_params, lora_request=lora_request)
            outputs = self._batch.add_and_run(requests)
            return [(output.outputs[0].logprobs or [{}])[0] for output in outputs]

        prepared = self._batch.prepare(prompts, step_params, lora_request=lora_request)
        if any(request.prompt_embeds is not None for request, _ in prepared):
            raise ValidationError("beam_search takes text and token ids, not prompt_embeds", param="prompt_embeds")
        all_ids = [request.prompt_token_ids or [] for request, _ in prepared]
        size = max(1, concurrency_limit or len(all_ids))
        results = []
        with tqdm(total=len(all_ids), desc="Processed prompts", dynamic_ncols=True, disable=not use_tqdm) as bar:
            for start in range(0, len(all_ids), size):
                chunk = all_ids[start : start + size]
                results += beam_search.search(next_tokens, chunk, params, eos_ids, processor.max_model_len)
                bar.update(len(chunk))
        tokenizer = self.llm_engine.tokenizer
        if tokenizer is not None:
            for ids, sequences in zip(all_ids, results, strict=True):
                for sequence in sequences:
                    sequence.text = tokenizer.decode(sequence.tokens[len(ids) :], skip_special_tokens=True)
        return [BeamSearchOutput(sequences) for sequences in results]

    # -- pooling ------------------------------------------------------------------------------------------------------

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRAs = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Returns the float32 arrays that a pooling model computes, in the order of the prompts.

        `pooling_task` is one of the model's tasks: "embed", "token_embed" (an embedding per token), "classify",
        "token_classify", "score"; None is the first of them. A request that fails raises GenerationError.
        """
        params = PoolingParams() if pooling_params is None else pooling_params
        requests = self._batch.prepare_pooling(
            prompts, params, pooling_task, lora_request, tokenization_kwargs, use_tqdm=use_tqdm
        )
        return self._batch.pool(requests, use_tqdm)

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRAs = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Returns an embedding per prompt. Raises ValidationError where the model makes none."""
        options: dict[str, Any] = {"lora_request": lora_request, "tokenization_kwargs": tokenization_kwargs}
        outputs = self.encode(prompts, pooling_params, use_tqdm=use_tqdm, pooling_task="embed", **options)
        return [EmbeddingRequestOutput.from_base(output) for output in outputs]

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRAs = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Returns the probability of each class, per prompt. Raises ValidationError where the model knows no
        classes."""
        options: dict[str, Any] = {"lora_request": lora_request, "tokenization_kwargs": tokenization_kwargs}
        outputs = self.encode(prompts, pooling_params, use_tqdm=use_tqdm, pooling_task="classify", **options)
        return [ClassificationRequestOutput.from_base(output) for output in outputs]

    def score(
        self,
        data_1: Texts,
        data_2: Texts,
        /,
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Returns how well the texts of each pair match: one of `data_1` with each of `data_2`, or each with its
        counterpart.

        A classifier with one class reads both texts at once; `chat_template` makes a prompt of the roles query and
        document. The score of an embedding model is the cosine. Other models raise ValidationError.
        """
        scorer = PairScorer(self.llm_engine.input_processor, self.llm_engine.tokenizer, self.get_supported_tasks())
        job = scorer.plan(pair_texts(data_1, data_2), pooling_params, tokenization_kwargs, chat_template)
        requests = self._batch.prepare_pooling(
            job.prompts, job.params, job.task, lora_request, tokenization_kwargs, use_tqdm=use_tqdm
        )
        return job.results(self._batch.pool(requests, use_tqdm))

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters `generate` uses without any: the model's generation_config.json over the usual
        defaults."""
        return self.llm_engine.input_processor.get_default_sampling_params()

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Calls `func` with each worker's model. In-process engines only: no code crosses a process."""
        return self.collective_rpc(lambda worker: func(worker.get_model()))

    # -- of the engine ------------------------------------------------------------------------------------------------

    shutdown = _of_engine(LLMEngine.shutdown)
    get_supported_tasks = _of_engine(LLMEngine.get_supported_tasks)
    get_tokenizer = _of_engine(LLMEngine.get_tokenizer)
    get_metrics = _of_engine(LLMEngine.get_metrics)
    sleep = _of_engine(LLMEngine.sleep)
    wake_up = _of_engine(LLMEngine.wake_up)
    is_sleeping = _of_engine(LLMEngine.is_sleeping)
    release_kv_cache_memory = _of_engine(LLMEngine.release_kv_cache_memory)
    reset_prefix_cache = _of_engine(LLMEngine.reset_prefix_cache)
    reset_mm_cache = _of_engine(LLMEngine.reset_mm_cache)
    update_weights = _of_engine(LLMEngine.update_weights)
    get_weight_version = _of_engine(LLMEngine.get_weight_version)
    collective_rpc = _of_engine(LLMEngine.collective_rpc)
    start_profile = _of_engine(LLMEngine.start_profile)
    stop_profile = _of_engine(LLMEngine.stop_profile)
