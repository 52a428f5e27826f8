"""The trace a client is in goes on in the engine: from the header to the collector."""

from __future__ import annotations

from ..otlp_sink import Sink, values
from .serving import Server, check

TRACE_ID, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_request_over_http_is_a_span_of_its_clients_trace() -> None:
    with Sink() as sink:

        async def test(server: Server) -> None:
            for headers in ({"traceparent": f"00-{TRACE_ID}-{PARENT}-01"}, {"traceparent": "x" * 4000}, {}):
                body = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}
                response = await server.post("/v1/completions", body, headers={"x-request-id": "mine", **headers})
                assert response.status_code == 200
            server.engine.pipeline.close()

        check(test, engine_flags={"otlp_traces_endpoint": sink.url})
    ours, *others = sink.spans
    assert (ours.trace_id.hex(), ours.parent_span_id.hex()) == (TRACE_ID, PARENT)
    assert values(ours.attributes)["gen_ai.request.id"] == "cmpl-mine"
    assert len({span.trace_id for span in others}) == 2
    assert all(not span.parent_span_id for span in others)
