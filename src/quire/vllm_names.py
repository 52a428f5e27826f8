"""Modules under the names that programs written for vLLM import, as one table of re-exports.

`from vllm.engine.arg_utils import EngineArgs` becomes `from quire.engine.arg_utils import EngineArgs`, and
`python -m vllm.entrypoints.openai.api_server` becomes `python -m quire.entrypoints.openai.api_server`. These modules
have no files: `import quire` adds a finder to the import system, which makes a module of the table when it is first
asked for. The names in it are imported when they are used, as those of `quire` itself are.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from quire.resolve import resolve

_ENGINE_ARGS = dict.fromkeys(("EngineArgs", "AsyncEngineArgs"), "quire.config.engine_args")
_ASYNC_ENGINE = {"AsyncLLMEngine": "quire.frontend.async_llm"}
_PARSER = {"FlexibleArgumentParser": "quire.cli.flexible_parser"}
_CLEANUP = dict.fromkeys(
    ("cleanup_dist_env_and_memory", "destroy_model_parallel", "destroy_distributed_environment"),
    "quire.vllm_names:collect_garbage",
)
_CONFIGS = {
    "VllmConfig": "quire.config.engine:EngineConfig",
    "CacheConfig": "quire.config.engine",
    "ModelConfig": "quire.config.model",
    "ParallelConfig": "quire.config.parallel",
    "SchedulerConfig": "quire.config.engine",
} | dict.fromkeys(
    (
        *("AttentionConfig", "CompilationConfig", "KernelConfig", "KVEventsConfig", "KVTransferConfig", "PoolerConfig"),
        *("ProfilerConfig", "SpeculativeConfig", "StructuredOutputsConfig"),
    ),
    "builtins:dict",  # the flag takes a JSON object
)
_INPUTS = dict.fromkeys(("PromptType", "TextPrompt", "TokensPrompt"), "quire.frontend.new_request")
_METRICS = ("Counter", "Gauge", "Histogram", "Metric", "Vector")

MODULES: Mapping[str, Mapping[str, str]] = {
    "quire.beam_search": {"BeamSearchSequence": "quire.outputs", "BeamSearchOutput": "quire.outputs"},
    "quire.collect_env": {"main": "quire.cli.main"},
    "quire.config": _CONFIGS,
    "quire.config.pooler": {"PoolerConfig": "builtins:dict"},
    "quire.distributed": _CLEANUP,
    "quire.distributed.parallel_state": _CLEANUP,
    "quire.engine.arg_utils": _ENGINE_ARGS,
    "quire.engine.async_llm_engine": _ASYNC_ENGINE | {"AsyncEngineArgs": "quire.config.engine_args"},
    "quire.engine.llm_engine": {"LLMEngine": "quire.frontend.llm_engine"},
    "quire.entrypoints.cli.main": {"main": "quire.cli.main"},
    "quire.entrypoints.llm": {"LLM": "quire.frontend.llm"},
    "quire.entrypoints.openai.api_server": {"main": "quire.cli.main"},
    "quire.entrypoints.openai.run_batch": {"main": "quire.cli.main"},
    "quire.inputs": _INPUTS,
    "quire.inputs.data": _INPUTS,
    "quire.logprobs": {"Logprob": "quire.outputs"},
    "quire.lora.request": {"LoRARequest": "quire.lora_request"},
    "quire.sequence": {"Logprob": "quire.outputs", "RequestMetrics": "quire.outputs:RequestStateStats"},
    "quire.usage.usage_lib": {"UsageContext": "quire.vllm_names"},
    "quire.utils": _PARSER | {"random_uuid": "quire.vllm_names"},
    "quire.utils.argparse_utils": _PARSER,
    "quire.v1.engine.async_llm": {"AsyncLLM": "quire.frontend.async_llm"},
    "quire.v1.engine.exceptions": {
        "EngineDeadError": "quire.errors",
        "EngineGenerateError": "quire.errors:GenerationError",
    },
    "quire.v1.engine.llm_engine": {"LLMEngine": "quire.frontend.llm_engine"},
    "quire.v1.metrics.reader": dict.fromkeys(_METRICS, "quire.frontend.metrics.publish.snapshot"),
}
"""Module -> name in it -> the module it comes from, with ":name" where it is called otherwise there."""

PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "quire.collect_env": ("collect-env",),
    "quire.entrypoints.cli.main": (),
    "quire.entrypoints.openai.api_server": ("serve",),
    "quire.entrypoints.openai.run_batch": ("batch",),
}
"""Modules that `python -m` starts, with the words that stand before their arguments on `quire`'s command line."""

_PACKAGES = frozenset(
    ".".join(parts[:length]) for parts in (name.split(".") for name in MODULES) for length in range(2, len(parts))
)
"""Packages that hold modules of the table. Those with a folder are found by Python before this finder is asked."""


class UsageContext:
    """Names of vLLM's for the values of `usage_context`, which pick the default budgets."""

    UNKNOWN_CONTEXT = LLM_CLASS = ENGINE_CONTEXT = OPENAI_BATCH_RUNNER = "offline"
    API_SERVER = OPENAI_API_SERVER = "serving"


def random_uuid() -> str:
    """Returns 32 random hexadecimal digits, for a request's id."""
    import uuid  # every process imports this module, and few need ids

    return uuid.uuid4().hex


def collect_garbage(*_args: Any, **_kwargs: Any) -> None:
    """Frees what no variable refers to any more, such as an `LLM` after `del`; there are no process groups to end."""
    gc.collect()


def attribute(module: str, name: str) -> Any:
    """Returns what `name` is in a module of the table. Raises AttributeError."""
    names = MODULES.get(module, {})
    if name not in names:
        has = f"it has {', '.join(names)}" if names else "it is there for the modules in it"
        raise AttributeError(f"module {module!r} has no attribute {name!r}; {has}")
    source = names[name]
    return resolve(source if ":" in source else f"{source}:{name}")


class _Reexports:
    """Makes one module of the table. (A base from importlib.abc would import a third of what `import quire` does.)"""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "A module of vLLM's by its name there: see quire.vllm_names."
        module.__dict__["__all__"] = list(MODULES.get(module.__name__, ()))
        module.__dict__["__getattr__"] = partial(attribute, module.__name__)

    def get_code(self, name: str) -> CodeType:
        """Returns what `python -m name` runs. Raises ImportError for a module that is no program."""
        if name not in PROGRAMS:
            raise ImportError(f"{name} is not a program; `python -m quire` is one", name=name)
        return _run_program.__code__

    def run(self, name: str) -> None:
        """Runs a program of the table with the process's arguments, and ends the process."""
        sys.exit(resolve("quire.cli.main:main")([*PROGRAMS[name], *sys.argv[1:]]))


def _run_program() -> None:
    """Runs the program whose module `python -m` loads: this code is executed with the globals of that module."""
    __loader__.run(__spec__.name)  # type: ignore[name-defined]


class VllmNames:
    """Finds the modules of the table, after every other finder has found nothing."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES and fullname not in _PACKAGES:
            return None
        loader: Any = _Reexports()
        return ModuleSpec(fullname, loader, is_package=fullname in _PACKAGES)


def install() -> None:
    """Adds the finder to the import system, once."""
    if not any(isinstance(finder, VllmNames) for finder in sys.meta_path):
        sys.meta_path.append(VllmNames())
