"""GET /metrics, for Prometheus."""

from __future__ import annotations

from starlette.responses import Response

from quire.errors import NotFoundError
from quire.frontend.metrics.prometheus import CONTENT_TYPE
from quire.frontend.openai.auth import Access
from quire.frontend.openai.endpoint import Endpoint, RequestContext


async def metrics(context: RequestContext) -> Response:
    """Counters, gauges and histograms of this server, in Prometheus' text format."""
    exporter = context.state.metrics
    if exporter is None:
        raise NotFoundError("there are no metrics: the server was started with --disable-log-stats")
    return Response(exporter.exposition(), headers={"content-type": CONTENT_TYPE})


ENDPOINTS = (Endpoint(path="/metrics", handler=metrics, access=Access.METRICS, methods=("GET",), is_on_admin=True),)
