"""The one place where an exception becomes an answer, in the shape of the API that was asked.

A client's error is described, with the field's name. An internal error is answered with a sentence without details,
which are logged with the request's id. No path, address or traceback leaves the server.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response

from quire.errors import ClientError, EngineDeadError, NotFoundError, OverloadedError, QuireError
from quire.logger import init_logger

logger = init_logger(__name__)

RETRY_AFTER_S = 1
_KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "PayloadTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
    504: "DeadlineExceededError",
}
_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
HIDDEN = "the server failed on this request; its log has the reason, with the request's id"


ErrorShape = Callable[[BaseException], dict[str, Any]]
"""Writes the body of an error in the shape of one API."""


class HttpError(ClientError):
    """An error that only HTTP has: no key, a body too large, an unknown route."""

    def __init__(self, status_code: int, message: str, *, param: str | None = None, close: bool = False) -> None:
        super().__init__(message, param=param)
        self.status_code = status_code
        self.close = close
        """True: the connection ends with the answer."""


class UnavailableError(OverloadedError):
    """The server takes no requests now because it restarts its core or shuts down."""

    def __init__(self, message: str, *, close: bool = False) -> None:
        super().__init__(message)
        self.close = close
        """True: the connection ends with the answer."""


def status_of(error: BaseException) -> int:
    """Returns the HTTP status of the answer to an exception."""
    return error.status_code if isinstance(error, QuireError) else 500


def message_of(error: BaseException) -> str:
    """Returns the message that a client sees. Errors other than `QuireError` are not described."""
    return str(error) if isinstance(error, QuireError) else HIDDEN


def error_body(error: BaseException) -> dict[str, Any]:
    """Returns `{"error": {...}}`, OpenAI's shape."""
    status = status_of(error)
    param = error.param if isinstance(error, ClientError) else None
    kind = _KINDS.get(status, "InternalServerError")
    return {"error": {"message": message_of(error), "type": kind, "param": param, "code": status}}


def anthropic_error(error: BaseException) -> dict[str, Any]:
    """Returns an error in Anthropic's shape."""
    kind = _ANTHROPIC_KINDS.get(status_of(error), "api_error")
    return {"type": "error", "error": {"type": kind, "message": message_of(error)}}


def ollama_error(error: BaseException) -> dict[str, Any]:
    """Returns an error in Ollama's shape."""
    return {"error": message_of(error)}


def shape_of(path: str) -> ErrorShape:
    """Returns the shape of errors of the API that a path belongs to, whether the path exists or not."""
    if path.startswith("/api/"):
        return ollama_error
    return anthropic_error if path.startswith("/v1/messages") else error_body


def error_response(error: BaseException, shape: ErrorShape = error_body) -> Response:
    """Returns the answer to a request that failed before the first byte was sent."""
    status = status_of(error)
    headers = {}
    if status in (429, 503) or isinstance(error, EngineDeadError):
        headers["retry-after"] = str(getattr(error, "retry_after_s", RETRY_AFTER_S))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if getattr(error, "close", False):
        headers["connection"] = "close"
    body = msgspec.json.encode(shape(error))
    return Response(body, status, headers, media_type="application/json")


def note_error(error: BaseException, request_id: str) -> None:
    """Logs an internal error. Errors of clients are not logged."""
    if not isinstance(error, QuireError):
        logger.error("request %s failed", request_id, exc_info=error)
    elif not isinstance(error, ClientError):
        logger.error("request %s failed: %s", request_id, error)


def unknown_route(path: str, *, is_admin: bool = False) -> NotFoundError:
    """Returns the error for a path that no endpoint has, or (`is_admin`) only one for operators elsewhere."""
    advice = (
        "quire serve --enable-admin serves it, on a port of its own" if is_admin else "GET /openapi.json lists them all"
    )
    return NotFoundError(f"there is no route {path[:200]} here; {advice}")


def wrong_method(method: str, path: str, allowed: str) -> HttpError:
    """Returns the error for a path that has endpoints, but none for this method."""
    return HttpError(405, f"{path[:200]} does not take {method[:20]}; it takes {allowed}")


def http_status_error(status: int) -> HttpError:
    """Returns the error for a request that the HTTP framework refuses itself."""
    return HttpError(status, HTTPStatus(status).phrase)
