"""The names that `import quire` gives, and the cost of the import."""

from __future__ import annotations

import os
import subprocess
import sys

import quire

from .sources import SRC

EXPORTS = [
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLM",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StreamingInput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "ReasoningTokens",
    "__version__",
]
HEAVY = ["torch", "transformers", "tokenizers", "jinja2", "numpy", "huggingface_hub", "safetensors", "yaml"]


def _loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(' '.join(sys.modules))"
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
    return set(run.stdout.split())


def test_every_exported_name_is_there() -> None:
    assert sorted(quire.__all__) == sorted(EXPORTS)
    for name in EXPORTS:
        assert getattr(quire, name) is not None
    assert set(EXPORTS) <= set(dir(quire))


def test_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(quire, "LLMM")


def test_import_quire_loads_nothing_heavy() -> None:
    loaded = _loaded_after("import quire")
    assert not loaded & set(HEAVY)


def test_params_and_args_load_nothing_heavy() -> None:
    loaded = _loaded_after("from quire import EngineArgs, SamplingParams, RequestOutput")
    assert not loaded & set(HEAVY)


def test_frontend_does_not_load_torch() -> None:
    loaded = _loaded_after("from quire import LLM, AsyncLLM, LLMEngine")
    assert "torch" not in loaded
    assert "quire.engine.core" not in loaded


def test_engine_does_not_load_torch() -> None:
    assert "torch" not in _loaded_after("import quire.engine.core, quire.engine.executor.uniproc")


def test_an_engine_core_starts_without_what_only_frontends_need() -> None:
    """Importing is most of what starting a core again takes, while requests wait."""
    assert not _loaded_after("import quire.engine.proc") & {"torch", "asyncio", "ssl"}
