"""The answers of a server of OpenAI's API: addresses, failures in words, and the events of a stream.

Nothing here opens a connection or needs an HTTP library.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from quire import envs
from quire.errors import ClientError, ConfigError, GenerationError, QuireError

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class ServerAddress:
    """A server's URL. `path` is the prefix of all routes: empty, or that of a proxy."""

    scheme: str
    host: str
    port: int
    path: str = ""

    @staticmethod
    def parse(text: str) -> ServerAddress:
        """Parses http://HOST:PORT, with or without /v1 after it. Raises ConfigError."""
        try:
            url = urlsplit(text)
            port = url.port
        except ValueError as e:
            raise ConfigError(f"the server's URL {text!r} is not one: {e}") from None
        if url.scheme not in _DEFAULT_PORTS or not url.hostname:
            raise ConfigError(f"the server's URL {text!r} does not begin with http://HOST or https://HOST")
        if url.query or url.fragment or url.username is not None:
            raise ConfigError(
                f"the server's URL {_without_user(text)!r} may hold no user, ? or #; keys go to --api-key"
            )
        if any(c.isspace() or not c.isprintable() for c in text):
            raise ConfigError(f"the server's URL {text!r} holds white space or control characters")
        path = url.path.rstrip("/").removesuffix("/v1")
        return ServerAddress(url.scheme, url.hostname, port or _DEFAULT_PORTS[url.scheme], path)

    @property
    def is_tls(self) -> bool:
        """True for https."""
        return self.scheme == "https"

    @property
    def host_header(self) -> str:
        """Host and port, as the Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host_header}{self.path}"


def _without_user(text: str) -> str:
    return text.partition("?")[0].rpartition("@")[2]


_MAX_WORDS = 500


def given_api_key(given: str | None) -> str | None:
    """Returns the key to send: `given`, else that of the environment."""
    key = given or envs.API_KEY.get() or os.environ.get("OPENAI_API_KEY") or None
    if key is not None and (not key.isascii() or not key.isprintable()):
        raise ConfigError("the API key holds characters that a header cannot: non-ASCII or control characters")
    return key


class RemoteError(GenerationError):
    """The server or the connection to it failed. `kind` is a word or two by which failures are counted."""

    def __init__(self, message: str, kind: str, status_code: int = 500) -> None:
        super().__init__(message)
        self.kind = kind
        self.status_code = status_code


class RefusedError(ClientError):
    """The server refused the request as it is (4xx): asking again would not help."""

    def __init__(self, message: str, status_code: int, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.kind = f"HTTP {status_code}"
        self.status_code = status_code


def kind_of(error: BaseException) -> str:
    """Returns the kind under which `error` is counted."""
    return getattr(error, "kind", type(error).__name__)


def connection_error(error: BaseException, address: ServerAddress) -> RemoteError:
    """Returns the error for a connection that could not be made."""
    if isinstance(error, TimeoutError):
        return RemoteError(f"no server answers at {address}: it takes too long to connect", "connect timeout")
    if isinstance(error, socket.gaierror):
        return RemoteError(f"the host of {address} is not known: {error.strerror or error}", "unknown host")
    if isinstance(error, ssl.SSLCertVerificationError):
        return RemoteError(
            f"the certificate of {address} is not trusted: {error.verify_message}; "
            "SSL_CERT_FILE=FILE names the certificate to trust",
            "TLS",
        )
    if isinstance(error, ssl.SSLError):
        return RemoteError(f"{address} does not speak TLS ({error.reason or error}); try http://", "TLS")
    if isinstance(error, ConnectionResetError) and address.is_tls:
        return RemoteError(f"{address} closes the connection instead of speaking TLS; try http://", "TLS")
    if isinstance(error, ConnectionRefusedError) or f"[Errno {errno.ECONNREFUSED}]" in str(error):
        return RemoteError(
            f"no server answers at {address} (connection refused); is it running? quire serve starts one",
            "connection refused",
        )
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return RemoteError(f"no connection to {address}: {words}", "connect")


def lost_connection(address: ServerAddress, *, has_begun: bool) -> RemoteError:
    """Returns the error for a connection that ended before the answer did."""
    if has_begun:
        return RemoteError(f"{address} broke off its answer", "broken stream")
    hint = "" if address.is_tls else "; if it speaks TLS, its URL begins with https://"
    return RemoteError(f"{address} closed the connection without an answer{hint}", "no answer")


def status_error(status: int, body: bytes, address: ServerAddress, location: str = "") -> QuireError:
    """Returns the error for an answer with a status other than 200."""
    message, param = _words(body)
    if status in (401, 403):
        return RefusedError(
            f"{address} needs a valid API key: --api-key KEY, or QUIRE_API_KEY ({status}: {message})", status
        )
    if 300 <= status < 400:
        return RefusedError(
            f"{address} redirects to another address ({status}); use --url {location or 'with that address'}", status
        )
    if 400 <= status < 500 and status not in (408, 429):
        return RefusedError(f"{address} refused the request ({status}): {message}", status, param)
    return RemoteError(f"{address} failed ({status}): {message}", f"HTTP {status}", status)


def event_error(error: Any, address: ServerAddress) -> RemoteError:
    """Returns the error for an error event in a stream."""
    message, _ = _words(json.dumps({"error": error}).encode())
    code = error.get("code") if isinstance(error, dict) else None
    return RemoteError(f"{address} failed while it answered: {message}", f"stream error {code or ''}".strip())


def _words(body: bytes) -> tuple[str, str | None]:
    """Returns (message, the field at fault) of an error body, in OpenAI's form or another."""
    text = body.decode(errors="replace").strip()
    try:
        content = json.loads(text)
    except ValueError:
        return _cut(text or "no reason given"), None
    error = content.get("error", content) if isinstance(content, dict) else content
    if not isinstance(error, dict):
        return _cut(str(error)), None
    message, param = error.get("message") or error.get("detail"), error.get("param")
    return _cut(str(message or text)), param if isinstance(param, str) else None


def _cut(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _MAX_WORDS else words[:_MAX_WORDS] + "..."


MAX_LINE = 16 << 20
"""Largest size of one event in bytes."""


class Delta(msgspec.Struct):
    """The part of a conversation that a chunk adds. Text is in one of the three text fields."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def has_output(self) -> bool:
        """True if the chunk holds anything that the model wrote."""
        return bool(self.content or self.reasoning or self.reasoning_content or self.tool_calls)


class Choice(msgspec.Struct):
    """One output in a chunk: `text` of a completion, `delta` of a conversation."""

    index: int = 0
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: Any = None


class TokenDetails(msgspec.Struct):
    """The number of prompt tokens found in the prefix cache."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts of a whole request."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: TokenDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Cached prompt tokens; 0 where the server does not report them."""
        return (self.prompt_tokens_details.cached_tokens or 0) if self.prompt_tokens_details else 0


class ModelCard(msgspec.Struct):
    """A row of /v1/models. Servers that report `max_model_len` speak vLLM's extensions of OpenAI's API."""

    id: str
    max_model_len: int | None = None
    owned_by: str | None = None


class Chunk(msgspec.Struct):
    """One event of /v1/completions or /v1/chat/completions. Fields that are not here are skipped."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None
    prompt_token_ids: list[int] | None = None


_DECODER = msgspec.json.Decoder(Chunk)


class EventReader:
    """Passes each chunk of a stream to `on_chunk`. The pieces fed to it may end anywhere; comments are skipped."""

    def __init__(self, on_chunk: Callable[[Chunk], None], address: ServerAddress) -> None:
        self._on_chunk = on_chunk
        self._address = address
        self._rest = b""
        self.is_complete = False
        """True once [DONE] has arrived."""

    def feed(self, data: bytes) -> None:
        """Takes the next bytes. Raises RemoteError for an error event, and for a line that is no event."""
        *lines, rest = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        self._rest = rest
        if len(rest) > MAX_LINE:
            raise RemoteError(f"{self._address} sent an event of more than {MAX_LINE >> 20} MiB", "event too long")
        for line in lines:
            if line.startswith(b"data:"):
                self._read(line[5:].strip())

    def _read(self, payload: bytes) -> None:
        if payload == b"[DONE]":
            self.is_complete = True
            return
        try:
            chunk = _DECODER.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise RemoteError(f"{self._address} sent an event that is not one: {e}", "not an event") from None
        if chunk.error:
            raise event_error(chunk.error, self._address)
        self._on_chunk(chunk)
