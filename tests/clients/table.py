"""The clients that must work, one row each: what to install and which program of theirs to run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).with_name("programs")


@dataclass(frozen=True, kw_only=True)
class Client:
    """A client in an environment of its own. Its program exits with 0 if every answer was right."""

    name: str
    tier: int
    """1: in every CI run; 2: by `python -m tests.clients --tier 2`."""
    requirements: tuple[str, ...]
    time_limit_s: float = 300
    server_flags: tuple[str, ...] = ()
    """Flags of the server. Clients with the same flags share one."""

    @property
    def program(self) -> Path:
        """The client's program. Its environment has QUIRE_URL (the server's base without /v1), QUIRE_API_KEY,
        QUIRE_DEV_PYTHON (the interpreter of the development environment) and QUIRE_DEMO_MODEL (the model's files)."""
        return PROGRAMS / f"{self.name}_client.py"


CLIENTS = (
    Client(name="openai", tier=1, requirements=("openai>=2",)),
    Client(name="vllm_script", tier=1, requirements=("openai>=2", "requests>=2")),
    Client(name="anthropic", tier=1, requirements=("anthropic>=1",)),
    Client(name="ollama", tier=1, requirements=("ollama>=0.6",)),
    Client(name="openai_embeddings", tier=1, requirements=("openai>=2",), server_flags=("--runner", "pooling")),
    Client(name="schemathesis", tier=1, requirements=("schemathesis>=4",)),
    Client(name="litellm", tier=2, requirements=("litellm>=1.80",)),
    Client(name="langchain", tier=2, requirements=("langchain-openai>=1",)),
    Client(name="llama_index", tier=2, requirements=("llama-index-llms-openai-like>=0.8",)),
    Client(name="instructor", tier=2, requirements=("instructor>=1.14",)),
    Client(name="pydantic_ai", tier=2, requirements=("pydantic-ai-slim[openai]>=2",)),
    Client(name="openai_agents", tier=2, requirements=("openai-agents>=0.17",)),
    Client(
        name="lm_eval",
        tier=2,
        requirements=("lm-eval[api]>=0.4.9",),
        server_flags=("--enable-tokenizer-info-endpoint", "--dtype", "float32"),
    ),
)
