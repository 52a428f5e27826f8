"""Adapters' files are data, and each fault of one is answered in words: without a step delayed, a file outside opened,
or another request's token changed."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.config.adapter import AdapterIndex
from quire.config.lora import LoRAConfig
from quire.errors import AdapterError, ClientError, NotFoundError, QuireError
from quire.failpoints import install
from quire.lora_request import LoRARequest
from quire.testing.failpoints import injected
from quire.testing.tiny_models import make_tiny_checkpoint
from quire.wire.lora import AdapterLoad
from tests.adapters import tensors, write_adapter
from tests.lora_worker import LoRAWorker, Work

from .adapters import BAD, LARGE, LOADS, SECRET, write_all
from .loader import Auditor

MAX_S = 1.0
MAX_GROWTH_MIB = 64.0
BASE = [Work([7, 8, 9, 10]), Work(list(range(20, 60)))]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoRAWorker]:
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama")
    made = LoRAWorker(path, max_lora_rank=64)
    yield made
    made.worker.shutdown()


def load(engine: LoRAWorker, path: str | Path, name: str = "x", during: Callable[[], None] | None = None) -> str:
    """Returns what loading says."""
    try:
        future = engine.worker.load_adapter(AdapterLoad(LoRARequest(name, 99, str(path)), 0))
        if during is not None:
            during()
        future.result(timeout=60)
    except QuireError as e:
        return f"{type(e).__name__} {e.status_code}: {e}"
    engine.worker.drop_adapter((99, 0))
    return LOADS


def test_adapters_that_mean_ill(engine: LoRAWorker, tmp_path: Path) -> None:
    directories = write_all(tmp_path)
    auditor = Auditor(tmp_path)
    before = engine.run(BASE, 6, seed=0)
    problems = []
    for name, directory in directories.items():
        auditor.seen.clear()
        start, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        auditor.is_on = True
        outcome = load(engine, directory)
        auditor.is_on = False
        seconds = time.process_time() - start
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
        if BAD[name][1] not in outcome or ("GenerationError" in outcome):
            problems.append(f"{name}: expected {BAD[name][1]!r}, got {outcome[:300]!r}")
        if outcome != LOADS and str(directory) not in outcome:
            problems.append(f"{name}: does not name the file: {outcome[:300]!r}")
        if len(outcome) > 1000 or SECRET in outcome or auditor.seen or seconds > MAX_S or grown > MAX_GROWTH_MIB:
            problems.append(f"{name}: {seconds:.2f} s, {grown:.0f} MiB, {auditor.seen}, {outcome[:300]!r}")
    assert not problems, "\n".join(problems)
    assert not Path("/tmp/owned").exists()
    for result, again in zip(before, engine.run(BASE, 6, seed=1), strict=True):
        assert result.tokens == again.tokens


@pytest.mark.parametrize("path", ["", "..", "../..", "/", "~no-such-user/x", "/dev/null", "/proc/self/fd", "x" * 3000])
def test_paths_that_are_no_adapters(engine: LoRAWorker, path: str) -> None:
    assert load(engine, path).startswith(("AdapterError 400", "NotFoundError 404"))


@pytest.mark.parametrize(
    ("name", "path"), [("x", "/tmp/a\0b"), ("", "/tmp"), ("x" * 10**6, "/tmp"), ("x", "/" * 10**5)]
)
def test_names_and_paths_that_are_refused_at_once(name: str, path: str) -> None:
    with pytest.raises(ClientError):
        LoRARequest(name, 1, path)


def test_a_path_with_nul_reaches_no_file() -> None:
    with pytest.raises(ClientError, match="there is no directory"):
        AdapterIndex.read("/tmp/a\0b", LoRAConfig())


@pytest.mark.parametrize("change", ["shortened", "written to", "swapped"])
def test_files_that_change_while_they_are_read(engine: LoRAWorker, tmp_path: Path, change: str) -> None:
    path = write_adapter(tmp_path / "adapter", tensors(num_layers=3))
    other = write_adapter(tmp_path / "other", tensors(seed=5))
    file = path / "adapter_model.safetensors"

    def meddle(_: str, __: str) -> None:
        install(None)  # once
        if change == "shortened":
            os.truncate(file, 2000)
        elif change == "written to":
            with file.open("r+b") as opened:
                opened.seek(-4, os.SEEK_END)
                opened.write(b"\0\0\0\0")
            os.utime(file, ns=(1, 1))
        else:
            path.rename(tmp_path / "gone")
            other.rename(path)

    with injected("lora.pack", meddle):
        outcome = load(engine, path)
    assert outcome.startswith("AdapterError 400")
    assert "shortened while it was read" in outcome or "was changed while it was read" in outcome
    assert load(engine, write_adapter(tmp_path / "good")) == LOADS


def test_an_error_of_ours_fails_one_adapter(engine: LoRAWorker, tmp_path: Path) -> None:
    path = write_adapter(tmp_path)

    def fail(_: str, __: str) -> None:
        raise RuntimeError("no memory for it")

    for place in ("lora.read", "lora.pack"):
        with injected(place, fail):
            assert load(engine, path) == (
                "GenerationError 500: adapter 'x' cannot be loaded: RuntimeError: no memory for it"
            )
    assert load(engine, path) == LOADS


def test_faults_that_need_no_model_are_found_before_the_engine_is_asked(tmp_path: Path) -> None:
    outcomes = {name: check(directory) for name, directory in write_all(tmp_path, without=LARGE).items()}
    assert sum(outcome == LOADS for outcome in outcomes.values()) < len(outcomes) / 4
    assert all(BAD[name][1] in outcome for name, outcome in outcomes.items() if BAD[name][1].startswith("r is"))


def check(directory: Path) -> str:
    """Returns what the headers of an adapter are refused with."""
    try:
        AdapterIndex.read(directory, LoRAConfig(max_lora_rank=64))
    except (AdapterError, NotFoundError) as e:
        return str(e)
    return LOADS
