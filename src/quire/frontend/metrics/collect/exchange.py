"""One HTTP request that was answered, as the metrics see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpExchange:
    """`handler` is the route's path, never the client's words: those have no bound."""

    method: str
    handler: str
    status: int
    duration_s: float
    request_bytes: int
    response_bytes: int
