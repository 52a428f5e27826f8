"""Access control: every endpoint has an `Access`, which is checked where the endpoint is called; and quotas of keys.

The check is part of the endpoint, after the routing, so that a path is never read twice with different results. Keys
are stored as SHA-256 digests and all of them compared in constant time. A key that has as much under way as it may is
refused with 429; other keys are served.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from enum import Enum
from urllib.parse import urlsplit

from starlette.requests import Request

from quire.errors import QuotaExceededError
from quire.frontend.admission import Charge, Quota, QuotaRule, SharedQuota
from quire.frontend.http.errors import HttpError

REQS_OF_KEY = QuotaRule("max_requests_per_key", "requests of this key are under way", QuotaExceededError)
TOKENS_OF_KEY = QuotaRule("max_tokens_per_key", "tokens are promised to this key's requests", QuotaExceededError)
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class Access(Enum):
    """Credentials that a route requires."""

    OPEN = "open"
    """Nothing: probes and static pages, which hold no secrets."""
    METRICS = "metrics"
    """Nothing; with --protect-metrics a key."""
    KEY = "key"
    """A key, if the server has keys."""
    ADMIN = "admin"
    """A key, and a Host and Origin of the listener's own: see `Gatekeeper`."""


class Gatekeeper:
    """Checks keys, and the Host and Origin headers of admin requests.

    Admin routes, and on the admin listener all but open ones, require one of the listener's own names in the Host
    header: a page that reaches the listener by DNS rebinding sends another name. An address cannot be rebound, so a
    listener on a public address accepts any address. A page can also send a request whose answer it cannot read; then
    the browser names the page's origin in the Origin header.
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
        """Returns the digest of the request's key; empty where the server has no keys."""
        return hashlib.sha256(shown_key(request)).digest() if self._digests else b""

    def _knows(self, key: bytes) -> bool:
        digest = hashlib.sha256(key).digest()
        is_known = False
        for known in self._digests:  # all of them, for constant time
            is_known |= hmac.compare_digest(digest, known)
        return is_known

    def _check_host(self, request: Request) -> None:
        host = request.headers.get("host", "")
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        is_own = name.lower() in self._admin_names or (self._takes_addresses and _is_address(name))
        if host and not is_own:
            raise HttpError(
                403,
                f"the Host header is {host[:60]!r}, and the admin listener answers to its own names only: "
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
    """Returns the key in a request's headers, in OpenAI's form or Anthropic's; empty if there is none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip().encode("latin-1")
    return request.headers.get("x-api-key", "").encode("latin-1")


class Tenants:
    """Counts requests under way by key, each of the n outputs of a prompt as one. A limit of None is none."""

    def __init__(
        self,
        max_num_reqs: int | None,
        max_num_tokens: int | None,
        shared: Mapping[bytes, tuple[SharedQuota, SharedQuota]] | None = None,
    ) -> None:
        """`shared` holds the requests and tokens of each key in all processes of the server."""
        self._limits = (max_num_reqs, max_num_tokens)
        self._shared = shared or {}
        self._quotas: dict[bytes, tuple[Quota, Quota]] = {}
        """Requests and tokens of each key. Bounded: only a request with a valid key comes this far."""

    def charges(self, owner: bytes, num_reqs: int, num_tokens: int) -> list[Charge]:
        """Returns the part of the limits of `owner` (`Gatekeeper.owner_of`) that so many requests take, with so many
        tokens of prompts and outputs. Nothing is checked or taken yet: `AdmissionControl.reserve_all` does both."""
        if self._limits == (None, None):
            return []
        if owner not in self._quotas:
            self._quotas[owner] = Quota(REQS_OF_KEY, self._limits[0]), Quota(TOKENS_OF_KEY, self._limits[1])
            for quota, shared in zip(self._quotas[owner], self._shared.get(owner, ()), strict=False):
                quota.share(shared)
        return list(zip(self._quotas[owner], (num_reqs, num_tokens), strict=True))
