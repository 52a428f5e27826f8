"""Who may call what: every endpoint has an `Access`, and is checked where it is called.

The check sits in the endpoint itself, behind the routing, so that there is no second reading of a path to disagree with
the first. Keys are kept and compared as SHA-256 digests, all of them in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from enum import Enum

from starlette.requests import Request

from quire.frontend.openai.errors import HttpError

_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class Access(Enum):
    """What a client must show."""

    OPEN = "open"
    """Nothing: probes and static pages, which hold no secrets."""
    METRICS = "metrics"
    """Nothing, or a key where the operator says so."""
    KEY = "key"
    """A key, if there are any."""
    ADMIN = "admin"
    """The same, and the Host header of the admin listener: a browser's page of elsewhere cannot send that."""


class Gatekeeper:
    """Knows the keys' digests, and what the admin listener is called. Raises HttpError for who may not pass."""

    def __init__(self, key_digests: Sequence[bytes], *, protect_metrics: bool = False, admin_host: str = "") -> None:
        self._digests = tuple(key_digests)
        self._protect_metrics = protect_metrics
        self._admin_names = _LOCAL_NAMES | ({admin_host.lower()} if admin_host else set())

    def check(self, access: Access, request: Request) -> None:
        """Raises HttpError 401 or 403."""
        if access is Access.OPEN or (access is Access.METRICS and not self._protect_metrics):
            return
        if access is Access.ADMIN:
            self._check_host(request)
        if self._digests and not self._knows(shown_key(request)):
            raise HttpError(401, "no valid API key was shown; send it as Authorization: Bearer KEY")

    def owner_of(self, request: Request) -> bytes:
        """Whose a request is: its key's, where there are keys; everybody's otherwise."""
        return hashlib.sha256(shown_key(request)).digest() if self._digests else b""

    def _knows(self, key: bytes) -> bool:
        digest = hashlib.sha256(key).digest()
        is_known = False
        for known in self._digests:  # all of them, whichever fits
            is_known |= hmac.compare_digest(digest, known)
        return is_known

    def _check_host(self, request: Request) -> None:
        host = request.headers.get("host", "")
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if host and name.lower() not in self._admin_names:
            raise HttpError(403, "the admin routes answer to the name of their own listener only (Host header)")


def shown_key(request: Request) -> bytes:
    """The key in a request's headers: OpenAI's form, or Anthropic's; empty if there is none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip().encode("latin-1")
    return request.headers.get("x-api-key", "").encode("latin-1")
