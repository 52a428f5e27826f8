"""What a request to a server can come to, other than an answer: each with a kind to be counted by, and words."""

from __future__ import annotations

import errno
import json
import socket
import ssl
from typing import Any

from quire.cli.remote.address import ServerAddress
from quire.errors import ClientError, GenerationError, QuireError

_MAX_WORDS = 500


class RemoteError(GenerationError):
    """The server, or the way to it, failed. `kind` is a word or two by which failures are counted."""

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
    """What `error` is counted as."""
    return getattr(error, "kind", type(error).__name__)


def connection_error(error: BaseException, address: ServerAddress) -> RemoteError:
    """What it means that no connection could be made."""
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
        return RemoteError(f"{address} hangs up instead of speaking TLS; try http://", "TLS")
    if isinstance(error, ConnectionRefusedError) or f"[Errno {errno.ECONNREFUSED}]" in str(error):
        return RemoteError(
            f"no server answers at {address} (connection refused); is it running? quire serve starts one",
            "connection refused",
        )
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return RemoteError(f"no connection to {address}: {words}", "connect")


def lost_connection(address: ServerAddress, *, has_begun: bool) -> RemoteError:
    """What it means that a connection ended before the answer did."""
    if has_begun:
        return RemoteError(f"{address} broke off its answer", "broken stream")
    hint = "" if address.is_tls else "; if it speaks TLS, its URL begins with https://"
    return RemoteError(f"{address} closed the connection without an answer{hint}", "no answer")


def status_error(status: int, body: bytes, address: ServerAddress, location: str = "") -> QuireError:
    """What an answer other than 200 means."""
    message, param = _words(body)
    if status in (401, 403):
        return RefusedError(
            f"{address} wants a valid API key: --api-key KEY, or QUIRE_API_KEY ({status}: {message})", status
        )
    if 300 <= status < 400:
        return RefusedError(
            f"{address} sends us elsewhere ({status}): --url {location or 'must name the place'}", status
        )
    if 400 <= status < 500 and status not in (408, 429):
        return RefusedError(f"{address} refused the request ({status}): {message}", status, param)
    return RemoteError(f"{address} failed ({status}): {message}", f"HTTP {status}", status)


def event_error(error: Any, address: ServerAddress) -> RemoteError:
    """An error that a stream ended in."""
    message, _ = _words(json.dumps({"error": error}).encode())
    code = error.get("code") if isinstance(error, dict) else None
    return RemoteError(f"{address} failed while it answered: {message}", f"stream error {code or ''}".strip())


def _words(body: bytes) -> tuple[str, str | None]:
    """(message, the field at fault) of an error in OpenAI's shape, or in others'."""
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
