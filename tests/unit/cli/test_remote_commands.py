"""`quire complete --url` and `quire chat --url` on a fake server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from quire.cli.main import main

from .fake_server import MODELS, FakeServer, Reply, always, saying, serving

Capture = pytest.CaptureFixture[str]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving(FakeServer(answer=saying("Hello", " there"))) as server:
        yield server


def press_ctrl_c_at(text: str, monkeypatch: pytest.MonkeyPatch) -> threading.Thread:
    """Another thread presses it as soon as `text` has been printed."""
    reached = threading.Event()
    shown: list[str] = []
    write = sys.stdout.write

    def watch(piece: str) -> int:
        shown.append(piece)
        count = write(piece)
        if "".join(shown) == text:
            reached.set()
        return count

    def press() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        assert reached.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(sys.stdout, "write", watch)
    presser = threading.Thread(target=press)
    presser.start()
    return presser


def endless(*pieces: str) -> Callable[[dict[str, Any]], AsyncIterator[str]]:
    """These pieces, and then nothing more."""

    async def answer(body: dict[str, Any]) -> AsyncIterator[str]:
        for piece in pieces:
            yield piece
        await asyncio.Event().wait()
        yield ""

    return answer


# -- complete -----------------------------------------------------------------------------------------------------


def test_complete_prints_the_text_and_nothing_else(server: FakeServer, capsys: Capture) -> None:
    assert main(["complete", "one prompt", "--url", server.url]) == 0
    assert capsys.readouterr() == ("Hello there\n", "")
    (body,) = server.bodies(COMPLETIONS)
    assert (body["model"], body["prompt"], body["max_tokens"], body["stream"]) == ("m", "one prompt", 256, True)
    assert "temperature" not in body  # the server has its own


def test_complete_hands_parameters_on(server: FakeServer) -> None:
    flags = ["--temperature", "0.5", "--top-k", "7", "--stop", "END", "--stop", "X", "--seed", "3", "--max-tokens", "9"]
    more = ["--logit-bias", '{"42": -5}', "--ignore-eos", "--choice", "a", "--choice", "b"]
    assert main(["complete", "p", "--url", server.url + "/v1", *flags, *more]) == 0
    (body,) = server.bodies(COMPLETIONS)
    assert (body["temperature"], body["top_k"], body["stop"], body["seed"]) == (0.5, 7, ["END", "X"], 3)
    assert (body["max_tokens"], body["logit_bias"], body["ignore_eos"]) == (9, {"42": -5}, True)
    assert body["structured_outputs"] == {"choice": ["a", "b"]}


def test_complete_runs_prompts_at_once_and_prints_them_in_order(capsys: Capture) -> None:
    second_is_done = asyncio.Event()

    async def answer(body: dict[str, Any]) -> AsyncIterator[str]:
        if body["prompt"] == "a":
            await second_is_done.wait()
        yield body["prompt"]
        second_is_done.set()

    with serving(FakeServer(answer=answer)) as server:
        assert main(["complete", "a", "b", "--url", server.url, "--stats"]) == 0
    out, err = capsys.readouterr()
    assert out == "==> a <==\na\n\n==> b <==\nb\n"
    assert err.startswith("10 prompt tokens (4 cached), 2 generated; TTFT ")


def test_a_remote_answer_becomes_a_json_row(capsys: Capture) -> None:
    top = {"token_id:5": -0.5, "token_id:9": -1.5}
    event = {"choices": [{"index": 0, "text": "w", "token_ids": [9], "logprobs": {"top_logprobs": [top]}}]}
    with serving(FakeServer(answer=saying(event, "x"))) as server:
        assert main(["complete", "p", "--url", server.url, "--json", "--logprobs", "1"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["prompt_index"], row["prompt"]) == (0, "p")
    assert row["usage"] == {"prompt_tokens": 5, "cached_tokens": 2, "completion_tokens": 1}
    (output,) = row["outputs"]
    assert (output["text"], output["token_ids"], output["finish_reason"]) == ("wx", [9, 1], "stop")
    ranks = {token_id: entry["rank"] for token_id, entry in output["logprobs"][0].items()}
    assert ranks == {"5": 1, "9": None}


def test_a_server_without_extensions_is_not_asked_for_them(capsys: Capture) -> None:
    card = {k: v for k, v in MODELS["data"][0].items() if k != "max_model_len"}  # type: ignore[attr-defined]
    with serving(FakeServer(routes={"/v1/models": always(Reply({"data": [card]}))})) as server:
        assert main(["complete", "p", "--url", server.url, "--max-tokens", "2"]) == 0
        assert "return_token_ids" not in server.bodies(COMPLETIONS)[0]
        assert main(["complete", "p", "--url", server.url, "--model", "other"]) == 2
    assert "does not serve 'other' but m" in capsys.readouterr().err


def test_ctrl_c_hangs_up(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(FakeServer(answer=endless("some"))) as server:
        presser = press_ctrl_c_at("some", monkeypatch)
        assert main(["complete", "p", "--url", server.url]) == 130
        presser.join()
        assert server.hung_up.wait(60)
    assert capsys.readouterr() == ("some\n", "")


def test_ctrl_c_that_comes_just_before_the_wait_is_heard(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal interrupts one waiting thread only: here the main thread waits on, as if it had been another one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with serving(FakeServer(answer=endless("some"))) as server:
            presser = press_ctrl_c_at("some", monkeypatch)
            assert main(["complete", "p", "--url", server.url]) == 130
            presser.join()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    assert capsys.readouterr() == ("some\n", "")


@pytest.mark.parametrize(
    ("reply", "code", "words"),
    [
        (Reply({"error": {"message": "max_tokens: too many", "param": "max_tokens"}}, 400), 2, "max_tokens: too many"),
        (Reply({"error": {"message": "nobody knows you"}}, 401), 2, "--api-key KEY, or QUIRE_API_KEY"),
        (Reply({"error": {"message": "the queue is full"}}, 503), 1, "failed (503): the queue is full"),
        (Reply(raw=b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n"), 1, "broke off its answer"),
    ],
)
def test_failures_are_one_line(capsys: Capture, reply: Reply, code: int, words: str) -> None:
    with serving(FakeServer(routes={COMPLETIONS: always(reply), CHAT: always(reply)})) as server:
        assert main(["complete", "p", "--url", server.url]) == code
    err = capsys.readouterr().err
    assert words in err
    assert err.startswith("quire: error: http://127.0.0.1:")
    assert err.count("\n") == 1


def test_a_prompt_that_fails_does_not_hold_up_the_others(capsys: Capture) -> None:
    async def answer(body: dict[str, Any]) -> AsyncIterator[Any]:
        yield {"choices": [{"index": 1, "text": "one", "finish_reason": "stop"}]}
        if body["prompt"] == "bad":
            yield {"error": {"message": "the core died"}}
        yield "zero"

    with serving(FakeServer(answer=answer)) as server:
        assert main(["complete", "bad", "good", "--n", "2", "--temperature", "1", "--url", server.url]) == 1
    out, err = capsys.readouterr()
    assert out.endswith("==> good [1/2] <==\nzero\n\n==> good [2/2] <==\none\n")
    assert "failed while it answered: the core died" in err


def test_flags_of_an_engine_and_bad_values_are_refused_here(server: FakeServer, capsys: Capture) -> None:
    for command in (["complete", "p"], ["chat"]):
        assert main([*command, "--url", server.url, "--max-num-seqs", "4"]) == 2
        assert "--max-num-seqs is for a model that runs here" in capsys.readouterr().err
    assert main(["complete", "p", "--url", server.url, "--min-tokens", "9", "--max-tokens", "3"]) == 2
    assert main(["complete", "p", "--url", "localhost:8000"]) == 2
    assert "does not begin with http://" in capsys.readouterr().err
    assert server.bodies(COMPLETIONS) == []


def test_a_missing_server_is_an_error(capsys: Capture) -> None:
    for command in (["complete", "p"], ["chat"]):
        assert main([*command, "--url", "http://127.0.0.1:1"]) == 1
        assert "no server answers at http://127.0.0.1:1 (connection refused); is it running?" in capsys.readouterr().err


# -- chat ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def chat(stdin: Callable[[str], None]) -> Callable[..., int]:
    def run(server: FakeServer, lines: str, *flags: str) -> int:
        stdin(lines)
        return main(["chat", "--url", server.url, *flags])

    return run


def test_a_remote_conversation_keeps_its_context(server: FakeServer, chat: Callable[..., int], capsys: Capture) -> None:
    lines = "one\ntwo\n/stats\n/params temperature=0.5\nthree\n/params top_p=7\n"
    assert chat(server, lines, "--system", "Be brief.", "--top-k", "5") == 0
    out, err = capsys.readouterr()
    assert out == "Hello there\n" * 3
    assert "5 prompt tokens (2 cached), 2 generated; TTFT" in err
    assert "8 of 2048 tokens of context used" in err
    assert "error: top_p must be in (0, 1], got 7.0" in err
    first, second, third = server.bodies(CHAT)
    assert (first["model"], first["top_k"], "temperature" in first) == ("m", 5, False)
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "user"]
    assert third["temperature"] == 0.5


def test_old_messages_are_dropped_where_the_server_counts(chat: Callable[..., int], capsys: Capture) -> None:
    card = {**MODELS["data"][0], "max_model_len": 12}  # type: ignore[dict-item]
    routes = {"/v1/models": always(Reply({"data": [card]}))}
    with serving(FakeServer(answer=saying("a b", " c"), routes=routes)) as server:
        assert chat(server, "q r s\nt u v\nw x y\n") == 0
        assert [len(body["messages"]) for body in server.bodies(CHAT)] == [1, 3, 3]
    assert "the 2 oldest messages were left out" in capsys.readouterr().err


def test_a_server_that_does_not_count(chat: Callable[..., int], capsys: Capture) -> None:
    routes = {"/tokenize": always(Reply({"detail": "Not Found"}, 404))}
    with serving(FakeServer(answer=saying("a"), routes=routes)) as server:
        assert chat(server, "x\ny\n/stats\n") == 0
        assert len(server.bodies("/tokenize")) == 1
    assert "; 4 messages" in capsys.readouterr().err


def test_reasoning_is_shown_and_not_remembered(chat: Callable[..., int], capsys: Capture) -> None:
    thought = {"choices": [{"index": 0, "delta": {"reasoning": "Hm."}}]}
    with serving(FakeServer(answer=saying(thought, "Yes"))) as server:
        assert chat(server, "x\ny\n") == 0
        assert server.bodies(CHAT)[1]["messages"][1] == {"role": "assistant", "content": "Yes"}
    assert capsys.readouterr().out == "Hm.\n\nYes\n" * 2


def test_ctrl_c_ends_the_answer_and_not_the_chat(
    chat: Callable[..., int], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = endless("some", " words")

    async def answer(body: dict[str, Any]) -> AsyncIterator[str]:
        async for piece in stuck(body) if len(body["messages"]) == 1 else saying("more")(body):
            yield piece

    with serving(FakeServer(answer=answer)) as server:
        presser = press_ctrl_c_at("some words", monkeypatch)
        assert chat(server, "x\ny\n") == 0
        presser.join()
        assert server.hung_up.wait(60)
        assert server.bodies(CHAT)[1]["messages"][1]["content"] == "some words"
    out, err = capsys.readouterr()
    assert out == "some words\nmore\n"
    assert err == "stopped\n"


def test_errors_do_not_end_the_chat(chat: Callable[..., int], capsys: Capture) -> None:
    async def fickle(request: Any) -> Reply:
        if request.body["messages"][-1]["content"] == "bad":
            return Reply({"error": {"message": "no"}}, 400)
        return Reply(events=server._stream(True, request.body))

    with serving(FakeServer(answer=saying("ok"), routes={CHAT: fickle})) as server:
        assert chat(server, "bad\ngood\n") == 0
        assert len(server.bodies(CHAT)[1]["messages"]) == 1
    out, err = capsys.readouterr()
    assert out == "ok\n"
    assert "refused the request (400): no" in err


def test_neither_torch_nor_a_tokenizer_is_loaded(server: FakeServer) -> None:
    """One process runs the commands, and none of them may load any."""
    program = (
        "import sys\nfrom quire.cli.main import main\n"
        "for command in ('complete p', 'chat', 'bench serve --num-prompts 2 --output-len 2'):\n"
        "    code = main([*command.split(), '--url', sys.argv[1]])\n"
        "    found = {'torch', 'tokenizers', 'transformers', 'numpy'} & set(sys.modules)\n"
        "    if found or code:\n"
        "        sys.exit(f'{command} ended with {code} and has loaded {found}')"
    )
    command = [sys.executable, "-c", program, server.url]
    done = subprocess.run(command, input="hi\n", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.stdout, done.stderr)
