"""Programs written for vLLM, with `vllm` replaced by `quire` where they import it, and nothing else changed."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from quire.config.model import ASSETS_DIR
from quire.testing.tiny_models import make_tiny_checkpoint
from tests.process.serving import serving

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "from_vllm"
SCRIPTS = {str(path.relative_to(EXAMPLES))[:-3]: path for path in sorted(EXAMPLES.glob("*/*.py"))}
DEADLINE_S = 400

ANSWER = r"Prefix caching keeps the KV blocks of finished requests"
SHOWS: dict[str, str] = {
    "offline/async_engine": (
        r"whole: 400 tokens, length\naborted: \d+ tokens, abort\ncontext: 2048\ntokens: \[\d+, \d+\]\n"
        r""
    ),
    "offline/async_streaming": (
        r"(?=[^$]*stream-0: ([2-9]|\d\d) pieces: '.*same tokens)(?=[^$]*stream-1)"
        r"(?=[^$]*stream-2)"
    ),
    "offline/batch_inference": r"$",
    "offline/beam_search": r"( +-\d+\.\d+  1\d tokens  '.+'\n){9}$",
    "offline/chat": rf"one: {ANSWER}.*\n(of many: {ANSWER}.*\n){{3}}parts: {ANSWER}",
    "offline/chat_with_tools": (
        r"model: <tool_call>.*\ncalled: get_weather \{'city': 'Paris'\} -> .*\n"
        r"answer: It is 21 degrees"
    ),
    "offline/classify": r"'Hello!': class [01] of 2, 0\.\d{3}\n'.*': class [01] of 2, 0\.\d{3}\n$",
    "offline/collective_rpc": r"parameters: 5139712\nworkers: \['Worker'\]\n$",
    "offline/embed": r"('.*': 256 numbers, \[.*\n){3}norm of the first: 1\.0\nsimilarity: -?0\.\d+ -?0\.\d+\n$",
    "offline/encode": r"(\d tokens: \d x 256\n){2}$",
    "offline/generate": r"('.+' -> '.+' \((stop|length)\)\n){4}$",
    "offline/generate_with_flags": (
        r"prompt: What is a KV block\?\ntext: \n?A KV block is .*\ntokens: \d\d\n"
        r"prompt: Paged attention"
    ),
    "offline/guided_decoding": r"(Positive|Negative)\n$",
    "offline/llm_engine": r"(?=[^$]*request 2: \['.+', '.+'\]\n)(request [0-3]: \[.+\]\n){4}$",
    "offline/logprobs": (
        r"(prompt '.+': rank \d+, -.+\n)+perplexity of the prompt: \d.+\n(written '.+': \d+%, .+\n"
        r"){5}sum: -"
    ),
    "offline/metrics": (
        r"[^$]*vllm:generation_tokens \(counter\) = \d\d\n"
        r"[^$]*e2e_request_latency_seconds \(histogram\) .*count = 3"
    ),
    "offline/pause_resume": r"paused: True\npaused: False\n600 tokens\na gap of the pause's length: True\n$",
    "offline/prefix_caching": (
        r"3 prompts in .* s\n(192 of \d+ tokens were cached\n){3}same texts: True\nreset: True\ncached after it: 0\n$"
    ),
    "offline/profiling": r"[^$]*texts: 2\ntraces: [1-9]",
    "offline/reproducibility": (
        r"alone as together: True\nin any order: True\ndifferent seeds, different texts: True\n"
        r"$"
    ),
    "offline/score": r"0\.\d+  Prefix caching .*\n(0\.\d+  .*\n){2}$",
    "offline/sleep_mode": r"(level \d, asleep: True\nlevel \d, the same text: True\n){2}$",
    "offline/speculative_decoding": r"texts: \['.+', '.+'\]\nmean length of what was accepted: \d\.\d\d\n$",
    "offline/structured_outputs": (
        r"choice: (good|bad)\nregex: [a-z]+@[a-z]+\.com\njson: name=.*\n"
        r"grammar: SELECT \w+ FROM "
    ),
    "online/api_server": r"without a key: 401\nwith it: 200 '.+'\nended: 0\n$",
    "online/batched_chat": rf"0 {ANSWER}.*\n1 A KV block is ",
    "online/chat": rf"{ANSWER}.*\nstop 28\n$",
    "online/classification": r"('.*': LABEL_[01], 0\.\d{3} of 2 classes\n){2}pooled: 2\n$",
    "online/completions": r"0 '.+' -\d+\.\d+\n1 '.+' -\d+\.\d+\ntokens: \d+\n$",
    "online/embeddings": r"('.*': 256 numbers\n){2}the same in base64: True\nof a conversation: 256\n$",
    "online/prometheus": (
        r".*_tokens_total: \+7\n.*_tokens_total: \+16\n.*: \+2\nrunning: 0.0 .*\n.*\n.* is known: True\n"
        r"$"
    ),
    "online/reasoning": r"reasoning: Prefix caching.*\nanswer: [^$]+\nthe same streamed: True\n$",
    "online/rerank": r"/v1/rerank (\[\(1, .*)\n/v2/rerank \1\n/score \[0\.\d+\]\n/score \[0\.\d+, 0\.\d+, 0\.\d+\]\n$",
    "online/responses": rf"first: {ANSWER}.*\nsecond: Prefix .*\nevents: response.created ... response.completed\n$",
    "online/run_batch": rf"request-1 {ANSWER}.*\nrequest-2 A KV block is ",
    "online/structured_outputs": (
        r"choice: (good|bad)\nregex: \w+@\w+\.com\ngrammar: SELECT (id|name)\njson: Block\(.*\)\n"
        r"schema: Block"
    ),
    "online/tokens": (
        r"tokens: \[1943, 1288\] .* of at most 2048\ntokens of a conversation: 13\ntext: Prefix caching\n"
        r"$"
    ),
    "online/tools": (
        r"required: (get_weather \{'city': 'Paris'\})\nnamed: \1\nstreamed: \1\nauto: tool_calls\n"
        r"answer: It is 21"
    ),
}
"""Script -> regular expression that its whole output begins with."""
STREAMED = {"online/chat": ANSWER, "online/completions": r"([01] '.*'\n)+$"}
"""Scripts that are run with --stream, too."""
SLOWED = ("offline/async_engine", "offline/async_streaming", "offline/pause_resume")
"""Scripts that do something while an answer is written. Its first 60 steps are slowed down: a script that waits for a
processor would find the whole answer."""
FAILPOINTS = {"QUIRE_FAILPOINTS": "core.step.execute=sleep(0.05),times=60"}


def as_quire(source: str) -> str:
    """The program as its user changes it."""
    source = re.sub(r"^( *(?:from|import) )vllm\b", r"\1quire", source, flags=re.MULTILINE)
    return source.replace('"vllm.entrypoints', '"quire.entrypoints')


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_name_that_a_script_imports_is_here(name: str) -> None:
    tree = ast.parse(as_quire(SCRIPTS[name].read_text("utf-8")))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("quire"):
            module = import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_the_page_and_the_checks_have_every_script() -> None:
    page = (EXAMPLES / "README.md").read_text("utf-8")
    assert sorted(re.findall(r"^\| `(\w+/\w+)\.py`", page, re.MULTILINE)) == sorted(SCRIPTS) == sorted(SHOWS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The model of a script: the demo model, or one with classes, or one that thinks."""

    @cache
    def model(kind: str) -> str:
        directory = tmp_path_factory.mktemp("models") / kind
        if kind == "classes":
            return str(make_tiny_checkpoint(directory, "bert", head="classify"))
        if kind == "thinking":  # the demo model, with the name of its tool tags changed
            shutil.copytree(ASSETS_DIR / "demo", directory)
            for path in directory.glob("tokenizer*.json"):
                path.write_text(re.sub(r"tool_call>", "think>", path.read_text("utf-8")), "utf-8")
            return str(directory)
        return "demo"

    return model


@pytest.fixture(scope="module")
def url(models: Callable[[str], str]) -> Iterator[Callable[[str], str]]:
    """The base URL of a server for one kind of script, which is started at its first use."""
    flags = {
        "demo": (),
        "pooling": ("--runner", "pooling"),
        "classes": (),
        "thinking": ("--reasoning-parser", "deepseek_r1"),
    }
    with ExitStack() as stack:

        @cache
        def url_of(kind: str) -> str:
            return stack.enter_context(serving("--model", models(kind), *flags[kind])).url + "/v1"

        yield url_of


KINDS = {
    "offline/classify": "classes",
    "online/classification": "classes",
    "online/embeddings": "pooling",
    "online/rerank": "pooling",
    "online/reasoning": "thinking",
}


def run(name: str, directory: Path, *arguments: str) -> str:
    """The output of a script, changed to Quire."""
    program = directory / "program.py"
    program.write_text(as_quire(SCRIPTS[name].read_text("utf-8")), "utf-8")
    slow = FAILPOINTS if name in SLOWED else {}
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "QUIRE_LOGGING_LEVEL": "WARNING", **slow}
    command = [sys.executable, str(program), *arguments]
    done = subprocess.run(
        command, cwd=directory, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.scripts
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_for_vllm_runs(
    name: str, tmp_path: Path, models: Callable[[str], str], url: Callable[[str], str]
) -> None:
    kind = KINDS.get(name, "demo")
    is_client = "--base-url" in SCRIPTS[name].read_text("utf-8")
    arguments = ["--base-url", url(kind)] if is_client else ["--model", models(kind)]
    if name == "offline/batch_inference":
        rows = [{"id": i, "text": "A KV block is"} for i in range(9)]
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        arguments = ["in.jsonl", "out.jsonl", *arguments]
    for shown, more in ((SHOWS[name], []), (STREAMED.get(name), ["--stream"])):
        if shown is not None:
            out = run(name, tmp_path, *arguments, *more)
            assert re.match(shown, out), out
    if name == "offline/batch_inference":
        answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [row["id"] for row in answers] == list(range(9))
        assert all(row["tokens"] == [4, 20] for row in answers)
