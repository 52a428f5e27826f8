"""`quire batch` through the server's routes on a fake model: rows, errors, resuming after anything."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.cli import batch_files
from quire.cli.batch_files import ResultFile
from quire.cli.batch_rows import RowServer
from quire.cli.main import main
from quire.frontend.client.inproc import AsyncInprocClient
from quire.wire.engine_core import EngineCoreOutputs
from tests.adapters import write_adapter
from tests.seeds import examples

Capture = pytest.CaptureFixture[str]
Row = dict[str, Any]


def row(custom_id: str, url: str, **body: Any) -> Row:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat_row(custom_id: str, content: str = "Hi you", **body: Any) -> Row:
    return row(custom_id, "/v1/chat/completions", **{"messages": [{"role": "user", "content": content}], **body})


def text_row(custom_id: str, prompt: Any = "Hi you", **body: Any) -> Row:
    return row(custom_id, "/v1/completions", **{"prompt": prompt, "max_tokens": 4, **body})


FAKE = [
    "--distributed-executor-backend", "tests.process.executors:Quick", "--max-model-len", "512",
    "--num-gpu-blocks-override", "256",
]  # fmt: skip


class Batch:
    """Runs `quire batch` on files in a directory of its own, with a fake model in this process."""

    def __init__(self, directory: Path) -> None:
        self.source, self.target = directory / "in.jsonl", directory / "out.jsonl"

    def write(self, *rows: Row | str) -> None:
        self.source.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))

    def run(self, *argv: str, executor: str = "Quick") -> int:
        fake = [*FAKE, "--distributed-executor-backend", f"tests.process.executors:{executor}"]
        return main(["batch", str(self.source), "-o", str(self.target), *fake, *argv])

    def results(self) -> dict[str, Row]:
        """Returns rows by custom_id, or by id for rows without one; every line must parse and occur once."""
        rows = [json.loads(line) for line in self.target.read_text().splitlines()]
        by_id = {row["custom_id"] or row["id"]: row for row in rows}
        assert len(by_id) == len(rows)
        return by_id

    def answers(self) -> dict[str, Row]:
        """Returns the bodies of rows that must all have been answered."""
        results = self.results()
        assert [row["error"] for row in results.values()] == [None] * len(results)
        assert {row["response"]["status_code"] for row in results.values()} == {200}
        return {name: row["response"]["body"] for name, row in results.items()}

    def texts(self) -> dict[str, str]:
        """Returns the first text of each answer of /v1/completions."""
        return {name: body["choices"][0]["text"] for name, body in self.answers().items()}


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Batch:
    monkeypatch.setenv("QUIRE_ENABLE_MULTIPROCESSING", "0")
    return Batch(tmp_path)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found = Calls()
    post = RowServer._post

    async def counted(server: RowServer, *args: Any) -> tuple[int, bytes]:
        found.num += 1
        found.num_under_way += 1
        found.max_under_way = max(found.max_under_way, found.num_under_way)
        try:
            return await post(server, *args)
        finally:
            found.num_under_way -= 1

    monkeypatch.setattr(RowServer, "_post", counted)
    return found


class Calls:
    """Counts the requests to routes."""

    num = num_under_way = max_under_way = 0


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def test_rows_of_every_route_are_answered(batch: Batch, capsys: Capture) -> None:
    messages = [{"role": "user", "content": "Hi you"}]
    batch.write(
        chat_row("chat", max_tokens=4),
        chat_row("call", tools=[TOOL], tool_choice="required", max_completion_tokens=200),
        text_row("text", echo=True),
        text_row("ids", [3, 4]),
        text_row("many", ["a", "b"], n=2, temperature=1, stream=False),
        row("chats", "/v1/chat/completions/batch", messages=[messages, messages], max_tokens=4),
        row("responses", "/v1/responses", input="Hi you", max_output_tokens=4),
        row("messages", "/v1/messages", model="demo", messages=messages, max_tokens=4),
        row("ollama", "/api/chat", model="demo", messages=messages, options={"num_predict": 4}),
    )
    assert batch.run("--tool-call-parser", "hermes") == 0
    answers = batch.answers()
    chat = answers["chat"]
    assert (chat["object"], chat["model"], chat["id"][:9]) == ("chat.completion", "demo", "chatcmpl-")
    assert chat["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert answers["call"]["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look"
    assert answers["text"]["choices"][0]["text"].startswith("Hi you")
    assert answers["ids"]["usage"]["prompt_tokens"] == 2
    assert [c["index"] for c in answers["many"]["choices"]] == [0, 1, 2, 3]
    assert len(answers["chats"]["choices"]) == 2
    assert (answers["responses"]["object"], answers["messages"]["type"]) == ("response", "message")
    assert answers["ollama"]["done"]
    assert "9 results" in capsys.readouterr().err


def test_an_alias_takes_flags_for_files(batch: Batch) -> None:
    batch.write(text_row("a"))
    assert main(["run-batch", "-i", str(batch.source), "-o", str(batch.target), *FAKE]) == 0
    assert set(batch.answers()) == {"a"}


def test_the_user_may_do_what_a_server_allows_no_client(batch: Batch) -> None:
    """Templates are not refused, and nothing is for its size or the length of a queue. The model's path is a name."""
    batch.write(
        chat_row("template", chat_template="{{ messages[0].content }}", return_prompt_text=True, max_tokens=1),
        text_row("values", allowed_token_ids=[7] * 300_000, max_tokens=1),
        *(text_row(f"queued{i}", priority=i, cache_salt="s", metadata={"a": "b"}, model="demo") for i in range(9)),
    )
    flags = ["--max-num-queued-reqs", "1", "--max-num-queued-tokens", "1", "--max-num-reserved-tokens", "1"]
    assert batch.run(*flags, "--scheduling-policy", "priority", "--served-model-name", "other") == 0
    assert batch.answers()["template"]["prompt_text"] == "Hi you"


BAD_ROWS: list[tuple[Row | str, int, str | None, str]] = [
    ("{not json", 400, None, "line 2 is not valid JSON"),
    ("[1]", 400, None, "line 3 holds a list"),
    ('{"custom_id": "x", "body": {"temperature": NaN}}', 400, None, "NaN is not JSON"),
    ({"url": "/v1/completions", "body": {"prompt": "x"}}, 400, "custom_id", "no custom_id"),
    ({**text_row("x"), "custom_id": 7}, 400, "custom_id", "no custom_id"),
    ({**text_row("x"), "method": "GET"}, 400, "method", "GET"),
    ({**text_row("x"), "body": "text"}, 400, "body", "must be an object"),
    (row("x", "/v1/models"), 400, "url", "'/v1/models' is not one of /v1/completions, /v1/chat/completions, "),
    ({**text_row("x"), "url": ["/v1/completions"]}, 400, "url", "is not one of"),
    (row("x", "/v1/embeddings", input="x"), 404, None, "supports generate; --runner pooling loads it for that"),
    (text_row("x", temperature=3), 400, "temperature", "<= 2"),
    (text_row("x", temprature=1), 400, "temprature", "did you mean temperature?"),
    (text_row("x", **{"half a \ud800": 1}), 400, "half a \ud800", "is not a field of requests to /v1/completions"),
    (text_row("x", stream=True), 400, "stream", "stream is not supported in a batch"),
    (row("x", "/v1/responses", input="x", background=True), 400, "background", "background is not supported"),
    (row("x", "/v1/messages", messages=[], max_tokens=1), 400, None, "model is missing"),
    (row("x", "/api/chat", model="other"), 404, None, "'other' is not served"),
    (text_row("x", priority="high"), 400, "priority", "expected `int`"),
    (text_row("x", prompt=[]), 400, "prompt", "missing or empty"),
    (text_row("x", model="gpt-9"), 404, "model", "--served-model-name"),
    (chat_row("x", top_logprobs=2), 400, "top_logprobs", "needs logprobs"),
    (chat_row("x", response_format={"type": "magic"}), 400, "response_format", "is not one of text"),
    (chat_row("x", guided_regex="a", guided_choice=["b"]), 400, "guided_choice", "in one field"),
    (text_row("x", ["a", "w " * 600]), 400, "prompt", "512"),
    (text_row("x", [[3]] * 2048 + [[1 << 30]]), 400, "prompt", "outside the vocabulary"),  # and not too many prompts
]


def test_a_bad_row_is_an_error_row_and_stops_no_other(batch: Batch, calls: Calls) -> None:
    bad = [r if isinstance(r, str) else {**r, **({"custom_id": str(i)} if r.get("custom_id") == "x" else {})}
           for i, (r, *_) in enumerate(BAD_ROWS, start=2)]  # fmt: skip
    batch.write(text_row("before"), *bad, text_row("after"))
    assert batch.run() == 1
    results = batch.results()
    assert results.pop("before")["error"] is results.pop("after")["error"] is None
    assert len(results) == len(BAD_ROWS)
    for line, (_, status, param, message) in enumerate(BAD_ROWS, start=2):
        result = results.get(str(line)) or results[f"batch_req_line_{line}"]
        assert (result["response"]["status_code"], result["error"]["code"]) == (status, status), result
        assert "error" in result["response"]["body"]
        assert result["error"]["param"] == param
        assert message in result["error"]["message"], result
    assert results["14"]["error"]["type"] == "BadRequestError"
    before, num_calls = batch.target.read_bytes(), calls.num
    assert batch.run() == 1  # a rerun repeats nothing, and still reports
    assert (batch.target.read_bytes(), calls.num) == (before, num_calls)


def test_a_custom_id_used_twice(batch: Batch) -> None:
    batch.write(text_row("a", "first"), text_row("a", "second"))
    assert batch.run() == 1
    results = batch.results()
    assert results["a"]["error"] is None
    assert "'a' is used twice; line 2" in results["batch_req_line_2"]["error"]["message"]


# -- resuming -----------------------------------------------------------------------------------------------------


def test_resume_after_interrupt(batch: Batch, capsys: Capture, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    write = ResultFile.write

    def interrupt_at_third(file: ResultFile, key: str, result: Row) -> None:
        write(file, key, result)
        if len(file.done) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    batch.write(*(text_row(f"r{i}", max_tokens=2 * i + 1, ignore_eos=True) for i in range(12)))
    with monkeypatch.context() as patch:
        patch.setattr(ResultFile, "write", interrupt_at_third)
        assert batch.run("--max-num-seqs", "3") == 130
    num_done = len(batch.results())
    assert 3 <= num_done < 12
    assert f"stopped with {num_done} results" in capsys.readouterr().err
    calls.num = 0
    assert batch.run() == 0
    assert calls.num == 12 - num_done
    assert set(batch.answers()) == {f"r{i}" for i in range(12)}


def test_rows_name_adapters_as_their_model(batch: Batch, tmp_path: Path, capsys: Capture) -> None:
    directory = write_adapter(tmp_path / "sql")
    batch.write(text_row("a", model="sql", seed=1), text_row("b", seed=1), text_row("c", model="other"))
    assert batch.run("--lora", f"sql={directory}") == 1
    results = batch.results()
    bodies = {name: results[name]["response"]["body"] for name in "ab"}
    assert (bodies["a"]["model"], bodies["b"]["model"]) == ("sql", "demo")
    assert bodies["a"]["choices"] != bodies["b"]["choices"]
    assert results["c"]["response"]["status_code"] == 404
    batch.target.unlink()
    assert batch.run("--lora", "sql=/no/where") == 2
    assert "--lora-modules sql: there is no adapter at /no/where" in capsys.readouterr().err


def test_resume_after_the_engine_died_for_good(batch: Batch, capsys: Capture) -> None:
    batch.write(*(text_row(f"r{i}", max_tokens=2 * i + 1, ignore_eos=True) for i in range(4)))
    assert batch.run(executor="Mortal") == 1
    assert "run the same command again to go on" in capsys.readouterr().err
    assert 0 < len(batch.answers()) < 4
    assert batch.run() == 0
    assert set(batch.answers()) == {"r0", "r1", "r2", "r3"}


def test_a_row_that_meets_a_dead_engine_before_its_death_is_known_has_no_answer(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core dies while its last outputs wait to be taken: the end of r0 among them, after which r2 is sent."""
    get_output, post, has_failed = AsyncInprocClient.get_output_async, RowServer._post, asyncio.Event()
    num_taken = 0

    async def take_late(client: AsyncInprocClient) -> EngineCoreOutputs:
        nonlocal num_taken
        num_taken += 1
        outputs = await get_output(client)
        while not client.engine_dead:
            await asyncio.sleep(0.001)
        if num_taken > 1:
            await has_failed.wait()
        return outputs

    async def watched(server: RowServer, *args: Any) -> tuple[int, bytes]:
        status, answer = await post(server, *args)
        if status >= 500:
            has_failed.set()
        return status, answer

    batch.write(text_row("r0", max_tokens=1), *(text_row(f"r{i}", max_tokens=9, ignore_eos=True) for i in (1, 2, 3)))
    with monkeypatch.context() as patch:
        patch.setattr(AsyncInprocClient, "get_output_async", take_late)
        patch.setattr(RowServer, "_post", watched)
        assert batch.run("--max-num-seqs", "1", executor="Mortal") == 1
    assert has_failed.is_set()
    assert set(batch.answers()) == {"r0"}
    assert batch.run() == 0
    assert set(batch.answers()) == {"r0", "r1", "r2", "r3"}


@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 2000))
def test_resume_after_a_cut_at_any_byte(cut: int, batch: Batch) -> None:
    """The machine may die at any moment: whatever prefix of the file is left, a rerun completes it."""
    batch.target.unlink(missing_ok=True)
    rows: list[Row | str] = [text_row("a"), "broken", chat_row("ü"), text_row("d", temperature=9)]
    batch.write(*rows)
    assert batch.run() == 1
    whole = batch.target.read_bytes()
    batch.target.write_bytes(whole[: cut % len(whole)])
    kept = whole[: cut % len(whole)].rpartition(b"\n")[0]
    assert batch.run() == 1
    assert batch.target.read_bytes().startswith(kept)
    assert set(batch.results()) == {"a", "batch_req_line_2", "ü", "d"}


def test_a_finished_batch_loads_no_model(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    batch.write(text_row("a"))
    assert batch.run() == 0
    monkeypatch.setattr("quire.cli.batch.make_engine", lambda *args: pytest.fail("nothing is left to do"))
    assert main(["batch", str(batch.source), "-o", str(batch.target), "--model", "/no/such/model"]) == 0


def test_another_file_is_never_damaged(batch: Batch, capsys: Capture) -> None:
    batch.write(text_row("a"))
    batch.target.write_text('{"my": "data"}\nand more\n')
    assert batch.run() == 2
    assert "line 1 is not a batch result" in capsys.readouterr().err
    assert batch.target.read_text() == '{"my": "data"}\nand more\n'
    assert main(["batch", str(batch.source), "-o", str(batch.source)]) == 2
    assert "is the input file" in capsys.readouterr().err


def test_results_on_stdout_are_not_resumed(batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch.write(chat_row("a"), chat_row("b"))
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with (tmp_path / "stdout").open("w") as file, redirect_stdout(file):
            assert batch.run("-o", "-") == 0
        rows = [json.loads(line) for line in (tmp_path / "stdout").read_text().splitlines()]
        assert {row["custom_id"] for row in rows} == {"a", "b"}
    assert not (tmp_path / "-").exists()


def test_a_pipe_is_written_and_never_read(batch: Batch, tmp_path: Path) -> None:
    batch.write(chat_row("a"))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert batch.run("-o", str(pipe)) == 0
        assert json.loads(os.read(reader, 65536))["custom_id"] == "a"
    finally:
        os.close(reader)
    assert main(["batch", str(pipe), "-o", str(batch.target)]) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_is_told_in_one_line(batch: Batch, capsys: Capture) -> None:
    batch.write(chat_row("a"))
    assert batch.run("-o", "/dev/full") == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "quire: error: -o /dev/full cannot be written: No space left on device"
    )


def test_an_endless_line_is_no_result(batch: Batch, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_files, "MAX_RESULT_BYTES", 1000)
    batch.write(chat_row("a"))
    batch.target.write_text("x" * 5000)
    assert batch.run() == 2
    assert "line 1 is not a batch result" in capsys.readouterr().err
    assert batch.target.read_text() == "x" * 5000


def test_files_that_cannot_be_used(batch: Batch, tmp_path: Path, capsys: Capture) -> None:
    assert batch.run() == 2
    assert "in.jsonl cannot be read: No such file" in capsys.readouterr().err
    batch.write(text_row("a"))
    assert main(["batch", str(batch.source), "-o", str(tmp_path / "none" / "out.jsonl")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_only_a_window_of_rows_is_in_flight(batch: Batch, calls: Calls) -> None:
    batch.write(*(text_row(str(i)) for i in range(20)))
    assert batch.run("--max-num-seqs", "2") == 0
    assert calls.max_under_way == 4
    assert len(batch.answers()) == 20


def test_blank_lines_and_odd_ids(batch: Batch) -> None:
    batch.write(text_row("a"), "", "   ", text_row("half a pair: \ud800"))
    assert batch.run() == 0
    assert batch.run() == 0
    assert set(batch.results()) == {"a", "half a pair: \ud800"}


# -- anything may stand in a file -------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ["prompt", "messages", "input", "stream", "seed", "temperature", "stop", "n", "tools", "xyzzy"]
ROWS = st.fixed_dictionaries(
    {"url": st.sampled_from(["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]) | JSON},
    optional={"method": JSON, "body": st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3) | JSON},
)


@settings(max_examples=examples(6), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(ROWS, max_size=12))
def test_no_row_can_do_more_than_be_refused(rows: list[Row], batch: Batch) -> None:
    batch.target.unlink(missing_ok=True)
    batch.write(*({**content, "custom_id": str(i)} for i, content in enumerate(rows)))
    assert batch.run("--max-num-seqs", "4") in (0, 1)
    assert len(batch.results()) == len(rows)
    assert all(result["response"]["status_code"] < 500 for result in batch.results().values())
