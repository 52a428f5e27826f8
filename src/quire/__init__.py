"""Quire: an LLM inference engine you can read.

The public face. Names are imported on first use, so that `import quire` is quick and does not load torch::

    from quire import LLM, SamplingParams
    print(LLM().generate("What is prefix caching?", SamplingParams(max_tokens=64))[0].outputs[0].text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from quire import timeline as timeline  # first of all: its first stamp says when the interpreter was up
from quire import vllm_names
from quire.version import __version__

if TYPE_CHECKING:
    from quire.config.engine_args import AsyncEngineArgs as AsyncEngineArgs
    from quire.config.engine_args import EngineArgs as EngineArgs
    from quire.frontend.async_llm import AsyncLLM as AsyncLLM
    from quire.frontend.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from quire.frontend.llm import LLM as LLM
    from quire.frontend.llm_engine import LLMEngine as LLMEngine
    from quire.frontend.new_request import PromptType as PromptType
    from quire.frontend.new_request import TextPrompt as TextPrompt
    from quire.frontend.new_request import TokensPrompt as TokensPrompt
    from quire.frontend.session import StreamingInput as StreamingInput
    from quire.lora_request import LoRARequest as LoRARequest
    from quire.outputs import BeamSearchOutput as BeamSearchOutput
    from quire.outputs import ClassificationOutput as ClassificationOutput
    from quire.outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from quire.outputs import CompletionOutput as CompletionOutput
    from quire.outputs import EmbeddingOutput as EmbeddingOutput
    from quire.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from quire.outputs import Logprob as Logprob
    from quire.outputs import PoolingOutput as PoolingOutput
    from quire.outputs import PoolingRequestOutput as PoolingRequestOutput
    from quire.outputs import RequestOutput as RequestOutput
    from quire.outputs import ScoringOutput as ScoringOutput
    from quire.outputs import ScoringRequestOutput as ScoringRequestOutput
    from quire.pooling_params import PoolingParams as PoolingParams
    from quire.sampling_params import BeamSearchParams as BeamSearchParams
    from quire.sampling_params import RequestOutputKind as RequestOutputKind
    from quire.sampling_params import SamplingParams as SamplingParams
    from quire.structured_outputs import ReasoningTokens as ReasoningTokens
    from quire.structured_outputs import StructuredOutputsParams as StructuredOutputsParams


_EXPORTS: dict[str, str] = {
    "LLM": "quire.frontend.llm",
    "LLMEngine": "quire.frontend.llm_engine",
    "AsyncLLM": "quire.frontend.async_llm",
    "AsyncLLMEngine": "quire.frontend.async_llm",
    "StreamingInput": "quire.frontend.session",
    "PromptType": "quire.frontend.new_request",
    "TokensPrompt": "quire.frontend.new_request",
    "TextPrompt": "quire.frontend.new_request",
    "EngineArgs": "quire.config.engine_args",
    "AsyncEngineArgs": "quire.config.engine_args",
    "SamplingParams": "quire.sampling_params",
    "BeamSearchParams": "quire.sampling_params",
    "RequestOutputKind": "quire.sampling_params",
    "StructuredOutputsParams": "quire.structured_outputs",
    "ReasoningTokens": "quire.structured_outputs",
    "PoolingParams": "quire.pooling_params",
    "RequestOutput": "quire.outputs",
    "CompletionOutput": "quire.outputs",
    "Logprob": "quire.outputs",
    "BeamSearchOutput": "quire.outputs",
    "PoolingOutput": "quire.outputs",
    "PoolingRequestOutput": "quire.outputs",
    "EmbeddingOutput": "quire.outputs",
    "EmbeddingRequestOutput": "quire.outputs",
    "ClassificationOutput": "quire.outputs",
    "ClassificationRequestOutput": "quire.outputs",
    "ScoringOutput": "quire.outputs",
    "ScoringRequestOutput": "quire.outputs",
    "LoRARequest": "quire.lora_request",
}

__all__ = ["__version__", *sorted(_EXPORTS)]


vllm_names.install()


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
