"""Prints the functions and files that one request passes: `python -m tools.path_of_a_request [--http] [--list]`.

The request goes to the demo model, with the engine core in this process; it is the second one, so that nothing of it is
start-up. Every named function of `src/quire` counts once, however often it is called; lambdas, comprehensions and class
bodies do not count. In the order of their first calls the functions form *stays*: a stay is a run of functions of one
file. A *return* is a stay in a file that was left before. *Steps* are functions but for properties, constructors and
other methods that Python calls, and but for the vocabulary (the modules of `src/quire` itself) and `wire/`.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

os.environ["QUIRE_ENABLE_MULTIPROCESSING"] = "0"  # before the engine is imported

import quire
from quire import LLM, SamplingParams
from quire.config.engine_args import EngineArgs
from quire.config.server import ServerConfig
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http.state import ServerState
from quire.frontend.openai.app import add_parts, build_app

ROOT = Path(quire.__file__).resolve().parent
OTHER_SIDE = ("engine", "worker")
PROMPT, MAX_TOKENS = "What is prefix caching?", 4

Step = tuple[str, str]
"""(a file, relative to `src/quire`; the qualified name of a function in it)."""


class Recorder:
    """Notes each function of Quire when it is first called while `is_on`, in this thread and in threads made later."""

    def __init__(self) -> None:
        self._is_on = False
        self._seen: dict[CodeType, None] = {}
        threading.setprofile(self._note)

    @property
    def is_on(self) -> bool:
        """True while functions are noted; otherwise this thread is as quick as ever."""
        return self._is_on

    @is_on.setter
    def is_on(self, is_on: bool) -> None:
        self._is_on = is_on
        sys.setprofile(self._note if is_on else None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and self._is_on:
            self._seen.setdefault(frame.f_code)

    @property
    def path(self) -> list[Step]:
        """The functions in the order of their first calls."""
        steps = []
        for code in self._seen:
            file = Path(code.co_filename)
            if file.is_relative_to(ROOT) and not code.co_name.startswith("<") and code.co_qualname.split(".")[0]:
                steps.append((str(file.relative_to(ROOT)), code.co_qualname))
        return steps


def generate(recorder: Recorder) -> None:
    """One `LLM.generate`."""
    params = SamplingParams(max_tokens=MAX_TOKENS)
    with LLM() as llm:
        for is_on in (False, True):
            recorder.is_on = is_on
            llm.generate(PROMPT, params, use_tqdm=False)
            recorder.is_on = False


def chat(recorder: Recorder) -> None:
    """One streamed POST /v1/chat/completions."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": MAX_TOKENS,
        "stream": True,
    }

    async def run() -> None:
        async with AsyncLLM.from_engine_args(EngineArgs("demo")) as engine:
            app = build_app(add_parts(ServerState(engine, ServerConfig())))
            for is_on in (False, True):
                recorder.is_on = is_on
                status = await post(app, "/v1/chat/completions", body)
                recorder.is_on = False
                assert status == 200, status

    asyncio.run(run())


async def post(app: Callable[..., Any], path: str, body: Any) -> int:
    """The status of the answer to a request that is given to an ASGI application without a socket."""
    data = json.dumps(body).encode()
    messages = [{"type": "http.request", "body": data}]
    answer: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.sleep(3600)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        answer.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"}
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers}
    scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {}}
    await app(scope, receive, send)
    return int(answer[0]["status"])


def stays(path: Iterable[Step]) -> list[str]:
    """The files of `path`, one entry per stay."""
    files: list[str] = []
    for file, _ in path:
        if not files or files[-1] != file:
            files.append(file)
    return files


def describe(name: str, path: Sequence[Step]) -> str:
    """One row of the table."""
    visits = stays(path)
    files = set(visits)
    return f"{name:34} {len(path):9} {len(files):5} {len(visits):5} {len(visits) - len(files):7} {count_steps(path):5}"


def count_steps(path: Iterable[Step]) -> int:
    """The functions of `path` that are steps."""
    return sum(1 for step in path if side(step) not in ("wire", step[0]) and not is_called_by_python(step))


def is_called_by_python(step: Step) -> bool:
    """True for a property and for a method like __init__."""
    file, name = step
    if name.rpartition(".")[2].startswith("__"):
        return True
    owner: Any = sys.modules["quire." + file.removesuffix(".py").replace("/", ".")]
    for part in name.split("."):
        owner = inspect.getattr_static(owner, part, None)
    return isinstance(owner, property | cached_property)


def side(step: Step) -> str:
    """The first folder of a step's file."""
    return step[0].split("/")[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and with --list the path itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--http", action="store_true", help="a streamed chat over HTTP instead of LLM.generate")
    parser.add_argument("--list", action="store_true", help="print every function, in the order of the first calls")
    options = parser.parse_args(arguments)
    recorder = Recorder()
    (chat if options.http else generate)(recorder)
    path = recorder.path
    if options.list:
        previous = ""
        for file, function in path:
            print(f"{file if file != previous else '':50} {function}")
            previous = file
    print(f"{'':34} {'functions':>9} {'files':>5} {'stays':>5} {'returns':>7} {'steps':>5}")
    print(describe("to the engine client and back", [step for step in path if side(step) not in OTHER_SIDE]))
    for folder in OTHER_SIDE:
        print(describe(folder, [step for step in path if side(step) == folder]))
    print(describe("all", path))


if __name__ == "__main__":
    main()
