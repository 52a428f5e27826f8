"""GET /metrics, for Prometheus."""

from __future__ import annotations

from starlette.responses import Response

from quire.errors import ServerError
from quire.frontend.http.auth import Access
from quire.frontend.http.endpoint import Endpoint, RequestContext
from quire.frontend.http.errors import HttpError
from quire.frontend.metrics.publish.exposition import CONTENT_TYPES, choose_format


async def metrics(context: RequestContext) -> Response:
    """All metrics of this server in Prometheus' text format, or OpenMetrics where the Accept header asks."""
    format = choose_format(context.request.headers.get("accept", ""))
    try:
        text = await context.state.metrics.write(format)
    except ServerError as e:
        raise HttpError(503, str(e)) from e
    return Response(text, headers={"content-type": CONTENT_TYPES[format]})


ENDPOINTS = (
    Endpoint(
        path="/metrics",
        handler=metrics,
        access=Access.METRICS,
        methods=("GET",),
        is_on_admin=True,
        is_polled=True,
    ),
)
