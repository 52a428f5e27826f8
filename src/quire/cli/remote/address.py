"""Where a server is: a --url, taken apart."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from quire.errors import ConfigError

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class ServerAddress:
    """A server's URL. `path` is what stands before /v1 and the other routes: empty, or a proxy's prefix."""

    scheme: str
    host: str
    port: int
    path: str = ""

    @staticmethod
    def parse(text: str) -> ServerAddress:
        """Of http://HOST:PORT, with or without /v1 behind it. Raises ConfigError."""
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
        """Whether it is https."""
        return self.scheme == "https"

    @property
    def host_header(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host_header}{self.path}"


def _without_user(text: str) -> str:
    return text.partition("?")[0].rpartition("@")[2]
