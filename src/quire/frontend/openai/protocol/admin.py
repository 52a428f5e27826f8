"""The bodies of admin routes that have one."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from quire.frontend.http.bodies import Name, Object, PositiveCount, RequestBody, Word


class AbortBody(RequestBody, kw_only=True):
    """Requests to be aborted, by the ids of their answers."""

    request_ids: Annotated[list[Name], Meta(max_length=65536)]

    EXAMPLE = {"request_ids": ["chatcmpl-1"]}  # noqa: RUF012 - a ClassVar of the base class


class UpdateWeightsBody(RequestBody, kw_only=True):
    """Where new weights are."""

    path: Word
    """A checkpoint directory of the server's machine."""
    version: Name | None = None
    """What /weight_info is to say from then on."""

    EXAMPLE = {"path": "/models/new"}  # noqa: RUF012


class CollectiveRpcBody(RequestBody, kw_only=True):
    """A call of a method of every worker."""

    method: Name
    args: Annotated[list[Any], Meta(max_length=1024)] | None = None
    kwargs: Object | None = None
    timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None
    """In seconds."""

    EXAMPLE = {"method": "check_health"}  # noqa: RUF012


class ProfileBody(RequestBody, kw_only=True):
    """What the profiler is to record; nothing of it is needed."""

    profile_prefix: Name | None = None
    delay_iterations: PositiveCount | None = None
    max_iterations: PositiveCount | None = None
