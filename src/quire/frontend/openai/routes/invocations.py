"""POST /invocations: SageMaker's one route for all work. The body's fields select the route."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from starlette.responses import Response

from quire.errors import ValidationError
from quire.frontend.http.auth import Access
from quire.frontend.http.endpoint import Endpoint, Exchange

ROUTES: tuple[tuple[str, str], ...] = (
    ("messages", "/v1/chat/completions"),
    ("prompt", "/v1/completions"),
    ("documents", "/rerank"),
    ("text_1", "/score"),
    ("input", "/v1/embeddings"),
    ("input", "/classify"),
    ("input", "/pooling"),
)
"""A field that only one kind of body has, and its route. The first route that is served wins."""


async def invocations(exchange: Exchange) -> Response:
    """Answers a request of any kind that the model supports."""
    try:
        fields = msgspec.json.decode(await exchange.read_bytes(), type=dict[str, msgspec.Raw]).keys()
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ValidationError(f"the body is not a JSON object: {e}", param="body") from None
    return await _meant(exchange, fields).handler(exchange)


def _meant(exchange: Exchange, fields: Iterable[str]) -> Endpoint:
    served = {
        endpoint.path: endpoint
        for endpoint in exchange.request.app.state.endpoints
        if endpoint.is_for(exchange.state.supported_tasks)
    }
    for field, path in ROUTES:
        if field in fields and path in served:
            found: Endpoint = served[path]
            return found
    known = dict.fromkeys(field for field, path in ROUTES if path in served)
    raise ValidationError(f"the body has none of {', '.join(known)}, which say what is asked for", param="body")


ENDPOINTS = (Endpoint(path="/invocations", handler=invocations, access=Access.KEY, is_work=True),)
