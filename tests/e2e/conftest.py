"""Tiny checkpoints and the answers of transformers to them, once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from tests.checkpoints import MakeCheckpoint

from .oracle import OUTPUT_LEN, Generation, generate_without_ties

Checkpoint = Callable[[str], Path]
Oracle = Callable[[str], list[Generation]]


@pytest.fixture(scope="module", autouse=True)
def _process_of_the_core(request: pytest.FixtureRequest) -> Iterator[None]:
    """Cores live in the process of the tests, which is quicker, but where a module says CORE_IN_ITS_OWN_PROCESS."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not getattr(request.module, "CORE_IN_ITS_OWN_PROCESS", False):
            monkeypatch.setenv("QUIRE_ENABLE_MULTIPROCESSING", "0")
        yield


@pytest.fixture(scope="session")
def checkpoint(tiny_checkpoint: MakeCheckpoint) -> Checkpoint:
    """`checkpoint(family)`: its directory."""
    return tiny_checkpoint


@pytest.fixture(scope="session")
def oracle(checkpoint: Checkpoint) -> Oracle:
    """`oracle(family)`: transformers' greedy continuation of 32 prompts."""
    return cache(lambda family: generate_without_ties(checkpoint(family), partial(guess, checkpoint(family))))


def guess(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Returns the engine's greedy continuations, which transformers checks."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    with LLM(str(path), device="cpu", dtype="float32", max_model_len=640, max_num_seqs=32) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
