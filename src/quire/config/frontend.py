"""How long requests and their readers may take."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class FrontendConfig:
    """Limits that are kept where text is made."""

    request_timeout_s: float | None = flag(
        None,
        "Seconds a request may take; then it ends with an error (504). A request may ask for less or more itself. "
        "Default: no limit.",
        parse=float,
        minimum=0.001,
    )
    slow_client_timeout_s: float = flag(
        60.0,
        "Seconds a stream's reader may leave output lying; then the request is aborted (408). 0 for no limit.",
        parse=float,
        minimum=0,
    )
