"""GET /debug/trace: what the engine and the frontend did, for Perfetto."""

from __future__ import annotations

from typing import Any

from quire.frontend.openai.app import build_app
from tests.unit.wire.trace_rules import check_events

from .serving import Server, check, client_of


def test_a_trace_of_the_last_seconds() -> None:
    async def test(server: Server) -> None:
        await server.answer("/v1/completions", model="demo", prompt=[5, 6, 7], max_tokens=4, ignore_eos=True)
        async with client_of(build_app(server.state, is_admin=True)) as admin:
            response = await admin.get("/debug/trace?seconds=60")
            assert response.status_code == 200
            assert "quire-trace.json" in response.headers["content-disposition"]
            trace: dict[str, Any] = response.json()
            check_events(trace["traceEvents"])
            names = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
            assert names.count("update") == 4
            assert names.count("outputs") == 4
            assert {"queued", "prefill 3", "decode", "schedule", "IPC"} <= set(names)
            assert trace["otherData"]["model"] == "demo"
            for seconds in ("0", "-1", "nan", "x", "1e9"):
                error = (await admin.get(f"/debug/trace?seconds={seconds}")).json()["error"]
                assert error["param"] == "seconds"

    check(test, engine_flags={"trace_events": 1000}, enable_admin=True)


def test_without_trace_events_there_is_nothing_to_show() -> None:
    async def test(server: Server) -> None:
        async with client_of(build_app(server.state, is_admin=True)) as admin:
            response = await admin.get("/debug/trace")
            assert response.status_code == 400
            assert "--trace-events" in response.json()["error"]["message"]

    check(test, enable_admin=True)
