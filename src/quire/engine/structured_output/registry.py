"""Which backend an engine uses, and what it is given."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from quire.config.engine import EngineConfig
from quire.config.model import ModelConfig
from quire.engine.request import Request
from quire.engine.structured_output.backend import GrammarBackend
from quire.engine.structured_output.compiler import CompilerSetup
from quire.engine.structured_output.manager import StructuredOutputManager
from quire.resolve import resolve

BACKENDS: Mapping[str, str] = {
    "guidance": "quire.engine.structured_output.llguidance_backend:LLGuidanceBackend",
    "xgrammar": "quire.engine.structured_output.xgrammar_backend:XGrammarBackend",
}
"""By --grammar-backend; auto is the first."""
PRELOAD_VOCAB_SIZE = 50_000
"""From here on reading a vocabulary holds the interpreter's lock for so long (0.3 s and more) that it is read while the
weights are. So it is where the library has to be loaded, too."""


def make_structured_output_manager(config: EngineConfig) -> StructuredOutputManager:
    """Costs nothing until a request has a grammar, but where `preload` is called for a large vocabulary."""
    model = config.model_config
    return StructuredOutputManager(
        partial(_make_backend, config),
        jumps=config.structured_outputs_config.grammar_jump_forward,
        preloads=_is_slow_to_load(config) and model.pooling is None and _tokenizer_file(model).is_file(),
    )


def _is_slow_to_load(config: EngineConfig) -> bool:
    vocab_size = config.model_config.hf_config.get("vocab_size") or 0
    return vocab_size >= PRELOAD_VOCAB_SIZE or config.structured_outputs_config.grammar_backend == "xgrammar"


def _tokenizer_file(model: ModelConfig) -> Path:
    return (model.tokenizer_dir / "tokenizer.json").absolute()


def _make_backend(config: EngineConfig, request: Request | None) -> GrammarBackend:
    """Raises ConfigError if the model's tokenizer cannot be used."""
    limits, model = config.structured_outputs_config, config.model_config
    library = "guidance" if limits.grammar_backend == "auto" else limits.grammar_backend
    setup = CompilerSetup(
        tokenizer_file=str(_tokenizer_file(model)),
        vocab_size=model.hf_config.vocab_size,
        eos_token_ids=_eos_token_ids(model, request),
        cpu_s=limits.grammar_compile_cpu_s,
        memory_bytes=limits.grammar_compile_memory_bytes,
        library=library,
    )
    backend: GrammarBackend = resolve(BACKENDS[library])(setup)
    return backend


def _eos_token_ids(model: ModelConfig, request: Request | None) -> list[int]:
    """All tokens that end a text of this model: the one the frontend knows, and those its configurations list."""
    listed = model.generation_defaults.get("eos_token_id")
    more = listed if isinstance(listed, list) else [listed]
    params = None if request is None else request.sampling_params
    ids = [None if params is None else params.eos_token_id, *more, *model.hf_config.eos_token_ids]
    return list(dict.fromkeys(int(i) for i in ids if i is not None and i < model.hf_config.vocab_size))
