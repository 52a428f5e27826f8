"""The demo model's tokenizer, and a backend on it whose child process lives as long as the session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers

import quire
from quire.engine.structured_output.compiler import CompilerSetup
from quire.engine.structured_output.llguidance_backend import LLGuidanceBackend

TOKENIZER_FILE = Path(quire.__file__).parent / "assets" / "demo" / "tokenizer.json"
VOCAB_SIZE = 3072
EOS = 2
SETUP = CompilerSetup(str(TOKENIZER_FILE), VOCAB_SIZE, [EOS], cpu_s=3.0, memory_bytes=1 << 29)


@pytest.fixture(scope="session")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(TOKENIZER_FILE))


@pytest.fixture(scope="session")
def backend() -> Iterator[LLGuidanceBackend]:
    backend = LLGuidanceBackend(SETUP)
    yield backend
    backend.close()
