"""Clients that take their time, or send without end: cut off, while others are served."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx2
import pytest

from .serving import ServerProcess, serving

TIME_LIMIT_S = 60
HEADER_TIMEOUT_S = 1.0
MAX_HEADER_BYTES = 1 << 16
BODY = {"prompt": [50], "max_tokens": 100, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """With short times; a stream of 100 tokens takes twice as long as headers may."""
    flags = ("--header-timeout-s", str(HEADER_TIMEOUT_S), "--body-timeout-s", "1")
    with serving(*flags, "--h11-max-incomplete-event-size", str(MAX_HEADER_BYTES), executor="Leisurely") as running:
        yield running


def connect(server: ServerProcess) -> socket.socket:
    url = urlsplit(server.url)
    return socket.create_connection((url.hostname, url.port), timeout=TIME_LIMIT_S)


def read_all(client: socket.socket) -> bytes:
    """Until the server closes the connection."""
    parts = []
    while part := client.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def test_headers_that_never_end_are_cut_off(server: ServerProcess) -> None:
    """So are connections on which nothing is said; a stream that lasts longer is not, nor one after a first request."""
    beginnings = [b"", b"G", b"POST /v1/completions HTTP/1.1\r\n", b"GET /version HTTP/1.1\r\nhost: x\r\nx-slow: "]
    clients = [connect(server) for _ in beginnings]
    for client, beginning in zip(clients, beginnings, strict=True):
        client.sendall(beginning)
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=BODY, timeout=TIME_LIMIT_S) as response:
        *_, end = (line for line in response.iter_lines() if line)
        assert end == "data: [DONE]"
    for client in clients:
        answer = read_all(client)
        assert answer.startswith(b"HTTP/1.1 408 ")
        client.close()


def test_a_second_request_on_a_connection_has_its_own_time(server: ServerProcess) -> None:
    with connect(server) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        client.sendall(b"GET /version HT")
        assert read_all(client).startswith(b"HTTP/1.1 408 ")


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


def test_a_body_that_never_ends_is_cut_off(server: ServerProcess) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n"
    with connect(server) as client:
        client.sendall(head + b'{"prompt":')
        answer = read_all(client)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"--body-timeout-s" in answer
