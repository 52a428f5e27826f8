"""Connections while a model loads: each gets an answer or is closed, and the sockets stay the server's."""

from __future__ import annotations

import contextlib
import json
import socket
import threading

import pytest

from quire.frontend.http.connection import MAX_HEAD_BYTES, WaitingRoom

TIME_LIMIT_S = 120.0


def visit(address: tuple[str, int], *pieces: bytes) -> bytes:
    """All that comes back on one connection."""
    with socket.create_connection(address, TIME_LIMIT_S) as visitor:
        for piece in pieces:
            visitor.sendall(piece)
        answer = b""
        while got := visitor.recv(1 << 16):
            answer += got
        return answer


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /health/live HTTP/1.1", 200),
        (b"GET /health/live?x=1 HTTP/1.1", 200),
        (b"GET /api/health/live HTTP/1.1", 200),
        (b"GET /health/ready HTTP/1.1", 503),
        (b"GET /health HTTP/1.1", 503),
        (b"POST /v1/completions HTTP/1.1", 503),
        (b"nonsense", 503),
        (b"", 503),
    ],
)
def test_an_answer_to_everyone(request_line: bytes, status: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, WaitingRoom([listener], root_path="/api"):
        half = len(request_line) // 2
        answer = visit(listener.getsockname(), request_line[:half], request_line[half:], b"\r\nhost: x\r\n\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d" % status)
        assert f"content-length: {len(body)}".encode() in head
        assert (b"retry-after" in head) == (status == 503)


def test_a_browser_gets_a_page_that_names_the_model_and_tries_again() -> None:
    lines = b"GET /ui HTTP/1.1\r\nhost: x\r\nAccept: text/html,*/*;q=0.8\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener, WaitingRoom([listener], model="a<b"):
        head, _, body = visit(listener.getsockname(), lines).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert b"refresh: 2" in head
        assert b"Quire is loading a&lt;b" in body
        plain = visit(listener.getsockname(), lines.replace(b"text/html", b"application/json"))
        assert b'"message":"the server is loading a<b; come again"' in plain


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"error": "the server is loading m; come again"}),
        (
            "/under/v1/messages?beta=true",
            {"type": "error", "error": {"type": "overloaded_error", "message": "the server is loading m; come again"}},
        ),
    ],
)
def test_each_api_has_its_shape_of_errors(path: str, body: dict[str, object]) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        WaitingRoom([listener], root_path="/under", model="m"),
    ):
        answer = visit(listener.getsockname(), f"POST {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == body


def test_a_body_is_not_waited_for() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1000000\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener, WaitingRoom([listener]):
        assert visit(listener.getsockname(), head, b"x" * 1000).startswith(b"HTTP/1.1 503")


def test_a_head_without_end_is_shown_the_door() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        WaitingRoom([listener]),
        pytest.raises(ConnectionError),
    ):
        visit(listener.getsockname(), b"x" * (MAX_HEAD_BYTES + 1), b"x" * (1 << 22))


def test_the_socket_is_the_servers_afterwards() -> None:
    """Also a socket with a connection that has sent nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with WaitingRoom([listener]), socket.create_connection(listener.getsockname(), TIME_LIMIT_S) as silent:
            assert visit(listener.getsockname(), b"GET /health HTTP/1.1\r\n\r\n")
        with pytest.raises(OSError):
            silent.getpeername()
        with socket.create_connection(listener.getsockname(), TIME_LIMIT_S) as visitor:
            listener.setblocking(True)
            accepted, _ = listener.accept()
            with accepted:
                accepted.sendall(b"served")
            assert visitor.recv(100) == b"served"


def test_two_doors_and_a_unix_socket(tmp_path: object) -> None:
    path = f"{tmp_path}/socket"
    with socket.socket(socket.AF_UNIX) as first, socket.create_server(("127.0.0.1", 0)) as second:
        first.bind(path)
        first.listen()
        with WaitingRoom([first, second]), socket.socket(socket.AF_UNIX) as visitor:
            visitor.settimeout(TIME_LIMIT_S)
            visitor.connect(path)
            visitor.sendall(b"GET /health/live HTTP/1.1\r\n\r\n")
            assert visitor.recv(1 << 16).startswith(b"HTTP/1.1 200")
            assert visit(second.getsockname(), b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 503")
        with socket.socket(socket.AF_UNIX) as later:  # the file is there still
            later.connect(path)


@pytest.mark.parametrize("num_turns", range(6))
def test_a_connection_at_the_end_is_closed_or_left_to_the_server(num_turns: int) -> None:
    """A connection is accepted and made in several turns of the loop; the end may come between any two of them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        room = WaitingRoom([listener])
        is_held, goes_on = threading.Event(), threading.Event()

        def hold() -> None:
            is_held.set()
            goes_on.wait(TIME_LIMIT_S)

        def end_after(turns: int) -> None:
            if turns:
                room._loop.call_soon(end_after, turns - 1)
            else:
                room._is_over.set()

        room.__enter__()
        visit(listener.getsockname(), b"GET / HTTP/1.1\r\n\r\n")  # it accepts
        room._loop.call_soon_threadsafe(hold)
        is_held.wait(TIME_LIMIT_S)
        visitor = socket.create_connection(listener.getsockname(), TIME_LIMIT_S)
        room._loop.call_soon_threadsafe(end_after, num_turns)
        goes_on.set()
        room._thread.join()
        listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            listener.accept()[0].close()
        with visitor:
            assert visitor.recv(1) == b""
