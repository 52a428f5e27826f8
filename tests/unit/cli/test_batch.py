"""`quire batch` on a scripted engine: rows, errors, resuming after anything."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.cli import batch_files, batch_requests
from quire.cli.batch_files import InputRow
from quire.cli.batch_requests import CHAT_URL, TEXT_URL, RequestReader
from quire.cli.main import main
from quire.config.engine_args import EngineArgs
from quire.errors import ClientError, EngineDeadError
from quire.frontend.llm_engine import LLMEngine
from quire.frontend.new_request import NewRequest
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind
from tests.seeds import examples

from .scripted_engine import ScriptedEngine

Capture = pytest.CaptureFixture[str]
Row = dict[str, Any]


def chat_row(custom_id: str, content: str = "Hi you", **body: Any) -> Row:
    messages = [{"role": "user", "content": content}]
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions",
            "body": {"messages": messages, **body}}  # fmt: skip


def text_row(custom_id: str, prompt: Any = "Hi you", **body: Any) -> Row:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt, **body}}


class Batch:
    """Runs `quire batch` on files in a directory of its own."""

    def __init__(self, directory: Path, model_dir: Path, use_engine: Callable[[ScriptedEngine], Any]) -> None:
        self.source, self.target = directory / "in.jsonl", directory / "out.jsonl"
        self._model_dir, self._use_engine = model_dir, use_engine

    def write(self, *rows: Row | str) -> None:
        self.source.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))

    def run(self, engine: ScriptedEngine | None = None, *argv: str) -> int:
        self._use_engine(engine or ScriptedEngine())
        return main(["batch", str(self.source), "-o", str(self.target), "--model", str(self._model_dir), *argv])

    def results(self) -> dict[str, Row]:
        """Returns rows by custom_id, or by id for rows without one; every line must parse and occur once."""
        rows = [json.loads(line) for line in self.target.read_text().splitlines()]
        by_id = {row["custom_id"] or row["id"]: row for row in rows}
        assert len(by_id) == len(rows)
        return by_id


@pytest.fixture
def batch(tmp_path: Path, model_dir: Path, use_engine: Callable[[ScriptedEngine], Any]) -> Batch:
    return Batch(tmp_path, model_dir, use_engine)


def test_rows_of_both_endpoints_are_answered(batch: Batch, model_dir: Path, capsys: Capture) -> None:
    batch.write(chat_row("c"), text_row("t", echo=True), text_row("ids", [3, 4]), text_row("many", ["a", "b"], n=2))
    assert batch.run() == 0
    results = batch.results()
    chat = results["c"]
    assert chat["error"] is None
    assert chat["response"]["status_code"] == 200
    body = chat["response"]["body"]
    assert (body["object"], body["model"], body["id"][:9]) == ("chat.completion", str(model_dir), "chatcmpl-")
    assert body["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "Hello there"}, "logprobs": None,
         "finish_reason": "stop", "stop_reason": None}
    ]  # fmt: skip
    assert body["usage"] == {
        "prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1},
    }  # fmt: skip
    assert results["t"]["response"]["body"]["choices"][0]["text"] == "Hi youHello there"
    assert results["ids"]["response"]["body"]["usage"]["prompt_tokens"] == 2
    many = results["many"]["response"]["body"]
    assert [c["index"] for c in many["choices"]] == [0, 1, 2, 3]
    assert many["usage"]["completion_tokens"] == 8
    assert "4 results" in capsys.readouterr().err


def test_aliases_and_flags(batch: Batch, model_dir: Path, use_engine: Callable[[ScriptedEngine], Any]) -> None:
    use_engine(ScriptedEngine())
    batch.write(text_row("a"))
    assert main(["run-batch", "-i", str(batch.source), "-o", str(batch.target), "--model", str(model_dir)]) == 0
    assert set(batch.results()) == {"a"}


def test_parameters_of_a_row_reach_the_engine(batch: Batch) -> None:
    engine = ScriptedEngine()
    batch.write(
        chat_row("a", temperature=0.1, top_p=None, max_completion_tokens=7, stop="x", logprobs=True, top_logprobs=1),
        text_row("b", seed=4, max_tokens=9, cache_salt="s", user="someone", stream=False, tools=[]),
        text_row("c", repetition_detection={"max_pattern_size": 3, "min_count": 2}),
        chat_row("d"),
    )
    assert batch.run(engine) == 0
    a, b, c, d = engine.params_seen
    assert (a.temperature, a.top_p, a.max_tokens, a.stop, a.logprobs) == (0.1, 0.9, 7, ["x"], 1)
    assert (b.seed, b.max_tokens, b.temperature) == (4, 9, 0.6)
    assert (c.max_tokens, d.max_tokens) == (16, None)
    assert c.repetition_detection is not None
    assert c.repetition_detection.max_pattern_size == 3
    assert engine.prompts_seen[1] == {"prompt": "Hi you", "cache_salt": "s"}
    assert all(p.output_kind is RequestOutputKind.FINAL_ONLY for p in engine.params_seen)


def test_logprobs_in_openai_shape(batch: Batch) -> None:
    batch.write(chat_row("c", logprobs=True, top_logprobs=2), text_row("t", logprobs=1))
    assert batch.run() == 0
    results = batch.results()
    first = results["c"]["response"]["body"]["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["logprob"], first["bytes"]) == ("Hello", -1.5, list(b"Hello"))
    assert sorted(t["token"] for t in first["top_logprobs"]) == ["Hello", "alt0", "alt1"]
    text = results["t"]["response"]["body"]["choices"][0]["logprobs"]
    assert text["tokens"] == ["Hello", " there"]
    assert text["text_offset"] == [0, 5]
    assert text["token_logprobs"] == [-1.5, -1.5]
    assert text["top_logprobs"][0] == {"Hello": -1.5, "alt0": -0.5}


BAD_ROWS: list[tuple[Row | str, int, str | None, str]] = [
    ("{not json", 400, None, "line 2 is not valid JSON"),
    ("[1]", 400, None, "line 2 holds a list"),
    ('{"custom_id": "x", "body": {"temperature": NaN}}', 400, None, "NaN is not JSON"),
    ({"url": "/v1/completions", "body": {"prompt": "x"}}, 400, "custom_id", "no custom_id"),
    ({**text_row("x"), "custom_id": 7}, 400, "custom_id", "no custom_id"),
    ({**text_row("x"), "url": "/v1/embeddings"}, 400, "url", "for embeddings and scores add --runner pooling"),
    ({**text_row("x"), "method": "GET"}, 400, "method", "GET"),
    ({**text_row("x"), "body": "text"}, 400, "body", "must be an object"),
    (text_row("x", temperature=3), 400, "temperature", "must be in [0, 2]"),
    (text_row("x", temperature="hot"), 400, "temperature", "must be a finite number"),
    (text_row("x", temprature=1), 400, "temprature", "did you mean temperature?"),
    (text_row("x", stream=True), 400, "stream", "not supported"),
    (text_row("x", prompt_logprobs=1), 400, "prompt_logprobs", "is not a field of batch requests"),
    (text_row("x", priority="high"), 400, "priority", "integer"),
    (text_row("x", prompt=None), 400, "prompt", "must be text"),
    (text_row("x", prompt=[]), 400, "prompt", "must be text"),
    (text_row("x", prompt=[1, "a"]), 400, "prompt", "must be text"),
    (text_row("x", model="gpt-9"), 404, "model", "--served-model-name"),
    (text_row("x", echo=True, logprobs=1), 400, "echo", "not supported"),
    (text_row("x", echo=1), 400, "echo", "true or false"),
    (text_row("x", logit_bias={"a": 1}), 400, "logit_bias", "token id"),
    (text_row("x", repetition_detection={"min_count": "2"}), 400, "repetition_detection", "integers"),
    (chat_row("x", messages="Hi"), 400, "messages", "must be a list"),
    (chat_row("x", "REFUSE"), 400, "messages", "the template refused"),
    (chat_row("x", top_logprobs=2), 400, "top_logprobs", "needs logprobs"),
    (chat_row("x", logprobs=True, top_logprobs="2"), 400, "top_logprobs", "integer"),
    (chat_row("x", chat_template_kwargs=[1]), 400, "chat_template_kwargs", "object"),
    (chat_row("x", tools=[{"type": "function"}]), 400, "tools", "not supported"),
    (chat_row("x", response_format={"type": "magic"}), 400, "response_format", "is not one of text"),
    (chat_row("x", response_format=3), 400, "response_format", "Expected"),
    (chat_row("x", guided_regex="a", guided_choice=["b"]), 400, "guided_choice", "in one field"),
    (text_row("x", structured_outputs={"regex": ""}), 400, "structured_outputs.regex", "empty"),
    (text_row("x", "w " * 64), 400, "prompt", "do not fit 64"),
    (text_row("x", ["a", "w " * 64]), 400, "prompt", "do not fit 64"),
]


@pytest.mark.parametrize(("row", "status", "param", "message"), BAD_ROWS)
def test_a_bad_row_is_an_error_row_and_stops_no_other(
    row: Row | str, status: int, param: str | None, message: str, batch: Batch
) -> None:
    batch.write(text_row("before"), row, text_row("after"))
    engine = ScriptedEngine()
    assert batch.run(engine) == 1
    results = batch.results()
    assert results["before"]["error"] is results["after"]["error"] is None
    (bad,) = (r for name, r in results.items() if name not in ("before", "after"))
    assert (bad["response"]["status_code"], bad["error"]["code"]) == (status, status)
    assert bad["response"]["body"] == {"error": bad["error"]}
    assert bad["error"]["param"] == param
    assert message in bad["error"]["message"]
    assert bad["error"]["type"] == ("NotFoundError" if status == 404 else "BadRequestError")
    assert not engine.has_unfinished_requests()
    before = batch.target.read_bytes()
    assert batch.run(ScriptedEngine()) == 1  # a rerun repeats nothing, and still reports
    assert batch.target.read_bytes() == before


def test_engine_failure_of_one_row(batch: Batch) -> None:
    batch.write(text_row("bad", "fail"), text_row("good", "x"))
    assert batch.run(ScriptedEngine(lambda p, _: ["ERROR"] if p["prompt"] == "fail" else ["ok"])) == 1
    results = batch.results()
    assert results["bad"]["error"]["code"] == 500
    assert results["good"]["error"] is None


def test_a_custom_id_used_twice(batch: Batch) -> None:
    batch.write(text_row("a", "first"), text_row("a", "second"))
    assert batch.run() == 1
    results = batch.results()
    assert results["a"]["error"] is None
    assert "'a' is used twice; line 2" in results["batch_req_line_2"]["error"]["message"]


# -- resuming -----------------------------------------------------------------------------------------------------


def test_resume_after_interrupt(batch: Batch, capsys: Capture) -> None:
    rows = [text_row(f"r{i}", "w " * (i + 1)) for i in range(6)]
    batch.write(*rows)
    answer = lambda prompt, _: ["x"] * len(prompt["prompt"].split())  # noqa: E731
    assert batch.run(ScriptedEngine(answer, interrupt_at_step=3)) == 130
    assert set(batch.results()) == {"r0", "r1", "r2"}
    assert "stopped with 3 results" in capsys.readouterr().err
    engine = ScriptedEngine(answer)
    assert batch.run(engine) == 0
    assert len(engine.prompts_seen) == 3
    assert set(batch.results()) == {f"r{i}" for i in range(6)}


def test_resume_after_the_engine_died(batch: Batch, capsys: Capture) -> None:
    class Dying(ScriptedEngine):
        def step(self) -> list[RequestOutput]:
            if self.num_steps == 2:
                raise EngineDeadError("the engine core is gone")
            return super().step()

    batch.write(*(text_row(f"r{i}", "w " * (i + 1)) for i in range(4)))
    answer = lambda prompt, _: ["x"] * len(prompt["prompt"].split())  # noqa: E731
    assert batch.run(Dying(answer)) == 1
    assert "run the same command again to go on" in capsys.readouterr().err
    assert batch.run(ScriptedEngine(answer)) == 0
    assert len(batch.results()) == 4


def test_a_resumed_batch_draws_the_same_seeds(batch: Batch) -> None:
    batch.write(text_row("a"), text_row("b"), text_row("c"))
    whole = ScriptedEngine()
    batch.run(whole)
    lines = batch.target.read_text().splitlines(keepends=True)
    batch.target.write_text("".join(line for line in lines if json.loads(line)["custom_id"] == "a"))
    rest = ScriptedEngine()
    batch.run(rest)
    seeds = [p.seed for p in whole.params_seen]
    assert [p.seed for p in rest.params_seen] == seeds[1:]
    assert len(set(seeds)) == 3


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 2000))
def test_resume_after_a_cut_at_any_byte(cut: int, batch: Batch) -> None:
    """The machine may die at any moment: whatever prefix of the file is left, a rerun completes it."""
    batch.target.unlink(missing_ok=True)
    rows = [text_row("a"), "broken", chat_row("ü"), text_row("d", temperature=9)]
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
    monkeypatch.setattr("quire.cli.batch.make_engine", lambda args: pytest.fail("nothing is left to do"))
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
            assert batch.run(None, "-o", "-") == 0
        rows = [json.loads(line) for line in (tmp_path / "stdout").read_text().splitlines()]
        assert {row["custom_id"] for row in rows} == {"a", "b"}
    assert not (tmp_path / "-").exists()


def test_a_pipe_is_written_and_never_read(batch: Batch, tmp_path: Path) -> None:
    batch.write(chat_row("a"))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert batch.run(None, "-o", str(pipe)) == 0
        assert json.loads(os.read(reader, 65536))["custom_id"] == "a"
    finally:
        os.close(reader)
    assert main(["batch", str(pipe), "-o", str(batch.target)]) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_is_told_in_one_line(batch: Batch, capsys: Capture) -> None:
    batch.write(chat_row("a"))
    assert batch.run(None, "-o", "/dev/full") == 2
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


def test_only_a_window_of_rows_is_in_flight(batch: Batch) -> None:
    batch.write(*(text_row(str(i)) for i in range(20)))
    engine = ScriptedEngine(lambda p, _: ["a", "b", "c"])
    assert batch.run(engine, "--max-num-seqs", "2") == 0
    assert engine.max_running == 4
    assert len(batch.results()) == 20


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
FIELDS = sorted(
    {*batch_requests._SAMPLING_FIELDS, *batch_requests._REQUEST_FIELDS, *batch_requests._CHAT_FIELDS}
    | {
        *batch_requests._TEXT_FIELDS,
        *batch_requests._FORM_FIELDS,
        *batch_requests._IGNORED_FIELDS,
        *batch_requests._NEUTRAL_VALUES,
        "xyzzy",
    }
)


@pytest.fixture(scope="module")
def real_engine() -> LLMEngine:
    return LLMEngine.from_engine_args(EngineArgs(max_model_len=64, num_gpu_blocks_override=64, disable_log_stats=True))


@settings(max_examples=examples(100))
@given(
    url=st.sampled_from([CHAT_URL, TEXT_URL]),
    body=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
    variables=st.dictionaries(st.sampled_from(["tokenize", "conversation", "messages", "tools", "x"]), JSON),
)
def test_no_row_can_do_more_than_be_refused(
    url: str, body: dict[str, Any], variables: dict[str, Any], real_engine: LLMEngine
) -> None:
    """With the demo model's tokenizer and template and the real validation door: a ClientError, or a request."""
    reader = RequestReader(["demo"], {}, 0, real_engine.get_tokenizer().apply_chat_template)
    whole = {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": variables} | body
    row = InputRow(1, {"custom_id": "x", "url": url, "body": whole if url == CHAT_URL else {"prompt": "Hi", **body}})
    try:
        request = reader.read(row)
        for prompt in request.prompts:
            new = NewRequest(request_id="x", prompt=prompt, params=request.params, priority=request.priority)
            real_engine.input_processor.process_inputs(new)
    except ClientError:
        return
    assert request.custom_id == "x"
