"""Clients of a server of several API processes, each connected to a process that it knows."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from quire.sampling_params import SamplingParams
from quire.testing.fake_model import FakeModel, expected_output

from .serving import ServerProcess

TIME_LIMIT_S = 120.0


_clients: list[Client] = []


@contextmanager
def closing_clients() -> Iterator[None]:
    """Closes at its end the clients that were made inside."""
    try:
        yield
    finally:
        while _clients:
            _clients.pop().close()


class Client:
    """One connection."""

    def __init__(self, url: str, key: str | None = None, *, context: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme == "unix":
            self._connection: http.client.HTTPConnection = _UnixConnection(url.removeprefix("unix:"))
        elif context is not None:
            self._connection = http.client.HTTPSConnection(parts.netloc, timeout=TIME_LIMIT_S, context=context)
        else:
            self._connection = http.client.HTTPConnection(parts.netloc, timeout=TIME_LIMIT_S)
        self._headers = {"content-type": "application/json"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        _clients.append(self)

    def begin(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        """Send a request; its answer up to its headers."""
        content = None if body is None else json.dumps(body)
        self._connection.request(method, path, content, self._headers)
        return self._connection.getresponse()

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """The status and the body of an answer, decoded where it is JSON."""
        response = self.begin(method, path, body)
        content = response.read()
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return response.status, json.loads(content) if is_json else content.decode()

    def close(self) -> None:
        self._connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIME_LIMIT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIME_LIMIT_S)
        self.sock.connect(self._path)


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """These processes do nothing meanwhile, those that have just died left aside."""

    def tell_all(signum: int) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    tell_all(signal.SIGSTOP)
    try:
        yield
    finally:
        tell_all(signal.SIGCONT)


def client_of(server: ServerProcess, pid: int, key: str | None = None, *, is_admin: bool = False) -> Client:
    """A connection that process `pid` has accepted: the others could not."""
    client = Client((server.admin_url or "") if is_admin else server.url, key)
    with stopped([other for other in server.api_pids() if other != pid]):
        assert client.ask("GET", "/health/live")[0] == 200
    return client


def clients_of_each(server: ServerProcess, key: str | None = None) -> dict[int, Client]:
    """One per API process, by its id."""
    return {pid: client_of(server, pid, key) for pid in server.api_pids()}


class Stream:
    """A streamed completion of the fake model, and the tokens it has brought."""

    def __init__(self, client: Client, prompt: list[int], max_tokens: int, **fields: Any) -> None:
        self._prompt, self._max_tokens = prompt, max_tokens
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True} | fields
        self._response = client.begin("POST", "/v1/completions", body | {"return_token_ids": True})
        self.status = self._response.status
        self.tokens: list[int] = []
        self.is_done = False
        """The end was announced."""

    def read(self, num_tokens: int | None = None) -> list[int]:
        """Up to so many tokens more, or all; raises what the connection does. An error event is an AssertionError."""
        wanted = None if num_tokens is None else len(self.tokens) + num_tokens
        while not self.is_done and (wanted is None or len(self.tokens) < wanted):
            line = self._response.readline()
            if not line:
                raise ConnectionResetError("the stream has ended without its end")
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                self._response.read()  # to its end, or the connection could not be used again
                self.is_done = True
            elif data.startswith("{"):
                event = json.loads(data)
                assert "error" not in event, event
                self.tokens += event["choices"][0]["token_ids"]
        return self.tokens

    @property
    def expected(self) -> list[int]:
        """Returns what undisturbed streams bring."""
        params = SamplingParams(max_tokens=self._max_tokens, ignore_eos=True)
        return expected_output(FakeModel(), self._prompt, params, 2048).token_ids


def wait_until(condition: Callable[[], bool]) -> None:
    """Look now and then; fail after TIME_LIMIT_S."""
    deadline = time.monotonic() + TIME_LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
