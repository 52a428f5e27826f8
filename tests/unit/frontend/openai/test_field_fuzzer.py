"""100,000 bodies made of the table of fields: taken, or refused by the name of a field, and never our fault."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.errors import ValidationError
from quire.frontend.http.auth import Access
from quire.frontend.http.bodies import BodyReader, RequestBody
from quire.frontend.http.endpoint import Endpoint
from quire.frontend.openai.protocol.sampling import GenerationBody, make_sampling_params
from tests.seeds import FRESH, seed_of, volume

from .field_fuzzer import Case, FieldFuzzer
from .serving import Server, check
from .test_fields import ENDPOINTS

NUM_MIXTURES = volume(1_500)
NUM_SERVED = 20_000 if FRESH else 300
CANARY = {"prompt": [40, 41, 42], "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
LEAKS = re.compile(r"Traceback|0x[0-9a-f]{6,}|/(?:home|root|usr|work|tmp)/|\.py\b")
FUZZER = FieldFuzzer(ENDPOINTS)


def verdict(case: Case) -> bool:
    """Returns whether a body is accepted. A refusal must name a field that is at fault."""
    assert case.endpoint.body is not None
    error = None
    try:
        body = case.endpoint.body.read(case.body)
    except ValidationError as e:
        error = e
    if error is not None:
        assert (error.param or "").partition(".")[0] in (*case.fields, "body"), (case.body[:500], error.param)
        assert not LEAKS.search(str(error)), str(error)
        assert len(str(error)) < 1000
        return False
    if isinstance(body, GenerationBody):
        with contextlib.suppress(ValidationError):
            make_sampling_params(body, {}, max_tokens=None, logprobs=None)
    return True


def test_the_fuzzer_reaches_every_field_of_every_endpoint() -> None:
    """Also those of future routes: it has no list of fields."""
    reached = {(case.endpoint.path, name) for case in FUZZER.every_value() for name in case.fields}
    assert reached == {
        (endpoint.path, name) for endpoint in ENDPOINTS if endpoint.body for name in _names(endpoint.body.kind)
    }
    for endpoint in FUZZER.endpoints:
        assert endpoint.body is not None
        endpoint.body.read(msgspec.json.encode(FUZZER.good_body(endpoint.body.kind)))


def _names(kind: type[RequestBody]) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(kind)]


@pytest.mark.fresh
def test_random_bodies_are_judged_by_the_bounds_of_their_fields() -> None:
    """Each value of each field, then mixtures. A body outside a bound is refused, one inside is taken."""
    rng = random.Random(seed_of(17))
    outcomes: Counter[bool] = Counter()

    def run(num: int) -> None:
        for _ in range(num):
            case = FUZZER.draw(rng)
            taken = verdict(case)
            outcomes[taken] += 1
            assert case.is_good in (None, taken), (case.endpoint.path, case.body[:500])

    for case in FUZZER.every_value() if FRESH else FUZZER.every_value_once():
        taken = verdict(case)
        outcomes[taken] += 1
        assert case.is_good in (None, taken), (case.endpoint.path, case.body[:500])
    run(1000)
    before = _num_objects()
    run(NUM_MIXTURES)
    assert _num_objects() - before < 200
    assert min(outcomes.values()) > outcomes.total() // 20


def _num_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


class LooseBody(RequestBody, kw_only=True):
    """A door with holes: numbers without bounds, a text that is turned into a number."""

    share: float = 0.0
    size: int = 0

    def __post_init__(self) -> None:
        if self.size > 1 << 60:
            raise OverflowError("kept for the worker to find")


def test_a_door_with_a_hole_is_found() -> None:
    async def handler(context: object) -> None: ...

    endpoint = Endpoint(path="/x", handler=handler, access=Access.KEY, body=BodyReader(LooseBody))  # type: ignore[arg-type]
    found = []
    for case in FieldFuzzer([endpoint]).every_value():
        try:
            if case.is_good not in (None, verdict(case)):
                found.append("a wrong verdict")
        except OverflowError:
            found.append("no ValidationError")
    assert found


# -- through the server ------------------------------------------------------------------------------------------------


async def post(app: Any, path: str, body: bytes) -> tuple[int, bytes]:
    """One request, without a client's own idea of what may be sent."""
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "scheme": "http", "server": ("localhost", 80),
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
    }  # fmt: skip
    never = asyncio.Event()

    async def receive() -> Any:
        if messages:
            return messages.pop()
        return await never.wait()

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def _resident_kib(pid: int | str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS")))


async def bombard(server: Server, num_cases: int) -> None:
    """Many at a time; the canary among them always sings the same."""
    rng = random.Random(seed_of(23))
    tasks = server.state.supported_tasks
    endpoints = [e for e in server.app.state.endpoints if e.access is Access.KEY and e.is_for(tasks)]
    fuzzer = FieldFuzzer(endpoints, max_text=1 << 16)
    client: Any = server.engine.engine_core
    pid = client.core_pid
    expected = (await server.answer("/v1/completions", **CANARY))["choices"]
    outcomes: Counter[int] = Counter()

    async def one(case: Case) -> None:
        status, answer = await post(server.app, case.endpoint.path, case.body)
        outcomes[status] += 1
        assert status < 500, (case.endpoint.path, case.body[:500], answer[:500])
        if status == 200:
            return
        error = json.loads(answer)["error"]
        if isinstance(error, str):  # Ollama's shape
            error = {"message": error}
        assert error["message"], case.body[:500]
        assert not LEAKS.search(answer.decode()), (case.body[:500], answer[:500])
        if "code" in error:
            assert error["code"] == status
            assert error["param"] is not None or status != 400, (case.body[:500], answer[:500])

    async def some(num: int) -> None:
        for _ in range(0, num, 50):
            canary = asyncio.ensure_future(server.answer("/v1/completions", **CANARY))
            await asyncio.gather(*(one(fuzzer.draw(rng)) for _ in range(50)))
            assert (await canary)["choices"] == expected

    await some(num_cases // 3)
    before = [_resident_kib("self"), _resident_kib(pid)]
    await some(num_cases - num_cases // 3)
    await server.state.lifecycle.wait_idle()  # responses in the background
    grown = [now - then for now, then in zip([_resident_kib("self"), _resident_kib(pid)], before, strict=True)]
    assert max(grown) < 64 << 10, f"KiB: {grown}"
    assert client.core_pid == pid, "the same core as at the beginning"
    assert outcomes[200] > num_cases // 30
    assert outcomes[400] > num_cases // 20


@pytest.fixture
def _own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ENABLE_MULTIPROCESSING", "1")


@pytest.mark.usefixtures("_own_process")
def test_a_few_thousand_through_the_server_and_its_model() -> None:
    flags: dict[str, Any] = {"in_process": False, "enable_scale_out": True}
    check(lambda server: bombard(server, NUM_SERVED), executor=None, timeout_s=3600 if FRESH else 300, **flags)


@pytest.mark.slow
@pytest.mark.usefixtures("_own_process")
def test_a_hundred_thousand_through_the_server() -> None:
    flags: dict[str, Any] = {"in_process": False, "enable_scale_out": True, "disable_uvicorn_access_log": True}
    check(lambda server: bombard(server, 100_000), executor=None, timeout_s=3600, **flags)
