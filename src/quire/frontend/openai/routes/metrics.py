"""GET /metrics, for Prometheus."""

from __future__ import annotations

from starlette.responses import Response

from quire.errors import NotFoundError
from quire.frontend.metrics.exposition import CONTENT_TYPES, choose_format
from quire.frontend.openai.auth import Access
from quire.frontend.openai.endpoint import Endpoint, RequestContext
from quire.frontend.openai.errors import HttpError


async def metrics(context: RequestContext) -> Response:
    """All metrics of this server in Prometheus' text format, or OpenMetrics where the Accept header asks."""
    stats = context.state.engine.pipeline.stats
    if stats.metrics is None:
        raise NotFoundError("there are no metrics: the server was started with --disable-log-stats")
    if stats.exporter_failed:
        raise HttpError(503, "the metrics exporter has failed and counts nothing any more; the log says why")
    format = choose_format(context.request.headers.get("accept", ""))
    text = stats.metrics.exposition(format) + context.state.process_metrics.exposition(format)
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
