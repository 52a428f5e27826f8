"""Clients that take their time, or send without end: cut off, while others are served."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx2
import pytest

from .pace import LEISURELY_STEP_S
from .serving import ServerProcess, serving

TIME_LIMIT_S = 120.0
SLOW_S = 5.0
"""Longest time of headers and bodies: no client of the tests that means to be quick is as slow. uvicorn keeps an idle
connection as long, unless it is configured otherwise."""
MAX_HEADER_BYTES = 1 << 16
VERSION = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n"
BEGINNINGS = {
    "nothing": (b"",),
    "a letter": (b"G",),
    "no headers": (b"POST /v1/completions HTTP/1.1\r\n",),
    "half a header": (b"GET /version HTTP/1.1\r\nhost: x\r\nx-slow: ",),
    "half a second request": (VERSION, b"GET /version HT"),
    "half a body": (POST + b'{"prompt":',),
    "no second request": (VERSION, b""),
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    flags = ("--header-timeout-s", str(SLOW_S), "--body-timeout-s", str(SLOW_S))
    with serving(*flags, "--h11-max-incomplete-event-size", str(MAX_HEADER_BYTES), executor="Leisurely") as running:
        yield running


@pytest.fixture(scope="module")
def waited(server: ServerProcess) -> Iterator[dict[str, socket.socket]]:
    """Clients that have sent one of BEGINNINGS, read the answers to complete requests, and waited for too long: as long
    as a stream lasts, which is not cut off."""
    clients = {name: begin(server, *pieces) for name, pieces in BEGINNINGS.items()}
    body = {"prompt": [50], "max_tokens": int(1.2 * SLOW_S / LEISURELY_STEP_S), "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=TIME_LIMIT_S) as response:
        *_, end = (line for line in response.iter_lines() if line)
        assert end == "data: [DONE]"
    yield clients
    for client in clients.values():
        client.close()


def connect(server: ServerProcess) -> socket.socket:
    url = urlsplit(server.url)
    return socket.create_connection((url.hostname, url.port), timeout=TIME_LIMIT_S)


def begin(server: ServerProcess, *pieces: bytes) -> socket.socket:
    """A connection on which these pieces were sent, the answer to each but the last one read."""
    client = connect(server)
    for piece in pieces[:-1]:
        client.sendall(piece)
        assert read_answer(client).startswith(b"HTTP/1.1 200 ")
    client.sendall(pieces[-1])
    return client


def read_answer(client: socket.socket) -> bytes:
    """Head and body; the body is a JSON object."""
    answer = b""
    while not answer.endswith(b"}"):
        answer += (part := client.recv(1 << 16))
        assert part, answer
    return answer


def read_all(client: socket.socket) -> bytes:
    """Reads until the server closes the connection."""
    parts = []
    while part := client.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    "name", ["nothing", "a letter", "no headers", "half a header", "half a second request", "half a body"]
)
def test_what_never_ends_is_cut_off(waited: dict[str, socket.socket], name: str) -> None:
    """So are connections on which nothing is ever said."""
    answer = read_all(waited[name])
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert (b"--body-timeout-s" in answer) == (name == "half a body")


def test_an_idle_connection_is_kept_longer_than_clients_keep_theirs(waited: dict[str, socket.socket]) -> None:
    """Else a request on its way meets a connection that the server has just closed."""
    client = waited["no second request"]
    client.sendall(VERSION)
    assert read_answer(client).startswith(b"HTTP/1.1 200 ")


def test_headers_without_end_take_no_memory(server: ServerProcess) -> None:
    with connect(server) as client:
        client.sendall(b"GET /version HTTP/1.1\r\n")
        answer = b""
        try:
            for number in range(1 << 14):
                client.sendall(b"x-%d: " % number + b"y" * 1000 + b"\r\n")
            answer = read_all(client)
        except (BrokenPipeError, ConnectionResetError):
            return  # refused while it was still sending
        assert answer.startswith(b"HTTP/1.1 431 ")
    with connect(server) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nx: " + b"y" * MAX_HEADER_BYTES)
        assert read_all(client).startswith(b"HTTP/1.1 431 ")
