"""Programs as users write them: however they end, the engine ends with them, and nothing is left (promise P23)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .pace import processor_seconds_until

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0
MAKE_LLM = """
import os, signal, sys, threading, time
from quire import LLM, SamplingParams
llm = LLM("demo", distributed_executor_backend="tests.process.executors:Steady", max_model_len=4096,
          hf_overrides={"max_position_embeddings": 4096}, num_gpu_blocks_override=2000)
LONG = SamplingParams(max_tokens=4000, ignore_eos=True)
SHORT = SamplingParams(max_tokens=20, ignore_eos=True)
def generate(params, n=4):
    return llm.generate([f"prompt {i}" for i in range(n)], params, use_tqdm=False)
resources = llm.llm_engine.engine_core.resources
print("core", resources.supervisor.core_pid, resources.directory.path, flush=True)
"""


class Program:
    """A user's script and what it says."""

    def __init__(self, path: Path, text: str) -> None:
        path.write_text(MAKE_LLM + text)
        self.process = subprocess.Popen(
            [sys.executable, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
            start_new_session=True,  # so that a Ctrl-C can be sent to its whole terminal
        )
        _, pid, directory = self.read_line().split()
        self.core_pid, self.directory = int(pid), Path(directory)

    def read_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            _, errors = self.process.communicate(timeout=DEADLINE_S)
            pytest.fail(f"the program has ended:\n{errors}")
        return line.strip()

    def wait(self) -> int:
        """Its exit code. Nothing had to be waited for in vain on the way."""
        _, log = self.process.communicate(timeout=DEADLINE_S)
        assert "did not end" not in log
        return self.process.returncode

    @property
    def is_core_running(self) -> bool:
        try:
            os.kill(self.core_pid, 0)
        except ProcessLookupError:
            return False
        # Of a killed program the core is an orphan; until the system's first process has buried it, it is a zombie.
        stat = Path(f"/proc/{self.core_pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[[str], Program]]:
    started = []

    def start(text: str) -> Program:
        started.append(Program(tmp_path / "script.py", text))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


@pytest.mark.parametrize(
    ("text", "exit_code"),
    [
        pytest.param("generate(SHORT)", 0, marks=pytest.mark.slow),  # below, beside files named like modules
        pytest.param("raise RuntimeError('a bug of the user')", 1, marks=pytest.mark.slow),
        ("threading.Timer(0.3, lambda: signal.raise_signal(signal.SIGINT)).start()\ngenerate(LONG)", -signal.SIGINT),
        ("generate(SHORT)\nllm.shutdown()\nllm.shutdown()\nsys.exit(3)", 3),
        pytest.param("del llm\nprint(llm)", 1, marks=pytest.mark.slow),
        ("global_cycle = [llm]\nglobal_cycle.append(global_cycle)\ndel llm", 0),
        ("llm.llm_engine.add_request('a', 'x', LONG)", 0),
    ],
    ids=["end", "error", "interrupt", "shutdown, exit", "del", "cycle", "live request"],
)
def test_the_engine_ends_with_its_program(program: Callable[[str], Program], text: str, exit_code: int) -> None:
    running = program(text)
    assert running.wait() in (exit_code, 130 if exit_code == -signal.SIGINT else exit_code)
    assert not running.is_core_running
    assert not running.directory.exists()


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(5)"])
def test_a_program_that_is_gone_at_once_leaves_no_core(program: Callable[[str], Program], ending: str) -> None:
    running = program(f"llm.llm_engine.add_request('a', 'x', LONG)\n{ending}")
    running.wait()
    assert processor_seconds_until(lambda: not running.is_core_running) < 2.0, "promise P23"


def test_neither_ctrl_c_nor_a_fork_ends_the_engine(program: Callable[[str], Program]) -> None:
    """The terminal sends Ctrl-C to every process: it stops the prompts, and the core must ignore it, as if it were in
    this process. No `if __name__ == "__main__"` is needed: the core is not made by multiprocessing."""
    running = program(
        """
before = [output.outputs[0].token_ids for output in generate(SHORT)]
try:
    print("go", flush=True)
    generate(LONG)
except KeyboardInterrupt:
    print("stopped", llm.llm_engine.has_unfinished_requests(), flush=True)
after = [output.outputs[0].token_ids for output in generate(SHORT)]
print("same", after == before, resources.supervisor.core_pid, flush=True)
child = os.fork()
if child == 0:
    sys.exit(0)  # runs what a program runs at its end
os.waitpid(child, 0)
after = [output.outputs[0].token_ids for output in generate(SHORT)]
print("same", after == before, resources.supervisor.core_pid, flush=True)
"""
    )
    assert running.read_line() == "go"
    time.sleep(0.2)  # in the middle of 4000 steps of 2 ms, wherever that is
    os.killpg(running.process.pid, signal.SIGINT)
    assert running.read_line() == "stopped False"
    for after in ("Ctrl-C", "the fork"):
        assert running.read_line() == f"same True {running.core_pid}", after
    assert running.wait() == 0
    assert not running.directory.exists()


def test_a_file_named_like_a_module_in_the_working_directory_does_no_harm(
    program: Callable[[str], Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("json", "msgspec", "quire"):
        (elsewhere / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(elsewhere)
    running = program("generate(SHORT)")
    assert running.wait() == 0
    assert not running.is_core_running
    assert not running.directory.exists()
