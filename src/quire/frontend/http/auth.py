"""Who may call what: every endpoint has an `Access`, and is checked where it is called.

The check sits in the endpoint itself, behind the routing, so that there is no second reading of a path to disagree with
the first. Keys are kept and compared as SHA-256 digests, all of them in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Sequence
from enum import Enum
from urllib.parse import urlsplit

from starlette.requests import Request

from quire.frontend.http.errors import HttpError

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
    """The same, and to be no browser's page of elsewhere: see `Gatekeeper`."""


class Gatekeeper:
    """Knows the keys' digests, and what the admin listener is called. Raises HttpError for who may not pass.

    Admin routes, and on the admin listener all but open ones, answer to the listener's own names in the Host header: a
    page whose own name was made to lead here (DNS rebinding) sends that name. An address cannot be made to, so a
    listener that others can reach answers to any. A page may also just send, without being shown the answer; then its
    browser says where the page is from (Origin).
    """

    def __init__(self, key_digests: Sequence[bytes], *, protect_metrics: bool = False, admin_host: str = "") -> None:
        self._digests = tuple(key_digests)
        self._protect_metrics = protect_metrics
        self._admin_names = _LOCAL_NAMES | ({admin_host.lower()} if admin_host else set())
        self._takes_addresses = bool(admin_host) and admin_host.lower() not in _LOCAL_NAMES

    def check(self, access: Access, request: Request, *, on_admin_listener: bool = False) -> None:
        """Raises HttpError 401 or 403."""
        if access is Access.ADMIN or (on_admin_listener and access is not Access.OPEN):
            self._check_host(request)
        if access is Access.OPEN or (access is Access.METRICS and not self._protect_metrics):
            return
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
        is_own = name.lower() in self._admin_names or (self._takes_addresses and _is_address(name))
        if host and not is_own:
            raise HttpError(
                403,
                f"the Host header says {host[:60]!r}, and the admin listener answers to its own names only: "
                f"{', '.join(sorted(self._admin_names))}{', or any address' if self._takes_addresses else ''}",
            )
        origin = request.headers.get("origin", "")
        if origin and urlsplit(origin).netloc.lower() != host.lower():
            raise HttpError(403, f"a page of {origin[:60]!r} may not use the admin listener: only its own pages may")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def shown_key(request: Request) -> bytes:
    """The key in a request's headers: OpenAI's form, or Anthropic's; empty if there is none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip().encode("latin-1")
    return request.headers.get("x-api-key", "").encode("latin-1")
