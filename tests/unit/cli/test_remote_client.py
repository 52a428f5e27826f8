"""The HTTP client against servers that answer well, badly, or not at all."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.remote.client import HttpClient, given_api_key
from quire.cli.remote.protocol import Chunk, EventReader, RefusedError, RemoteError, ServerAddress, kind_of
from quire.errors import ConfigError, NotFoundError, QuireError

from .fake_server import FakeServer, Reply, always, saying, serving

T = TypeVar("T")
STREAM = "/v1/completions"


def ask(url: str, question: Callable[[HttpClient], Awaitable[T]], key: str | None = None) -> T:
    async def main() -> T:
        client = HttpClient(ServerAddress.parse(url), key)
        try:
            return await question(client)
        finally:
            await client.close()

    return asyncio.run(main())


def texts(url: str) -> list[str]:
    chunks: list[Chunk] = []
    ask(url, lambda client: client.stream(STREAM, b"{}", chunks.append))
    return [choice.text for chunk in chunks for choice in chunk.choices if choice.text]


def failure(url: str) -> QuireError:
    with pytest.raises(QuireError) as raised:
        texts(url)
    return raised.value


# -- addresses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown", "host", "port", "path"),
    [
        ("http://host", "http://host", "host", 80, ""),
        ("http://host:81/v1/", "http://host:81", "host", 81, ""),
        ("https://host/base/v1", "https://host/base", "host", 443, "/base"),
        ("https://[::1]:8443", "https://[::1]:8443", "::1", 8443, ""),
    ],
)
def test_an_address_is_read_from_its_url(url: str, shown: str, host: str, port: int, path: str) -> None:
    address = ServerAddress.parse(url)
    assert (str(address), address.host, address.port, address.path) == (shown, host, port, path)


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "localhost:8000",
        "ftp://x",
        "http://",
        "http://h:99999",
        "http://h/?a",
        "http://h/#a",
        "http://h /",
        "",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="the server's URL"):
        ServerAddress.parse(url)


def test_a_user_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as raised:
        ServerAddress.parse("http://me:secret@host/")
    assert "secret" not in str(raised.value)


def test_the_nearest_api_key_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    assert given_api_key(None) == "theirs"
    monkeypatch.setenv("QUIRE_API_KEY", "ours")
    assert given_api_key(None) == "ours"
    assert given_api_key("given") == "given"
    with pytest.raises(ConfigError, match="header"):
        given_api_key("a\r\nX: y")


# -- answers ------------------------------------------------------------------------------------------------------


def test_a_stream_a_model_and_the_key() -> None:
    with serving(FakeServer(answer=saying("é", "b"))) as server:
        card = ask(server.url + "/v1", lambda client: client.find_model(None), "secret")
        assert (card.id, card.max_model_len) == ("m", 2048)
        assert server.requests[0].headers["authorization"] == "Bearer secret"
        assert texts(server.url) == ["é", "b"]
        assert "authorization" not in server.requests[1].headers
        with pytest.raises(NotFoundError, match="does not serve 'n' but m; --model names one of them"):
            ask(server.url, lambda client: client.find_model("n"))


def test_a_connection_is_used_again() -> None:
    async def five_times(client: HttpClient) -> None:
        for _ in range(5):
            await client.stream(STREAM, b"{}", lambda chunk: None)
            await client.models()

    with serving(FakeServer()) as server:
        ask(server.url, five_times)
        assert (len(server.requests), server.num_connections) == (10, 1)


def test_a_connection_that_died_idle_is_replaced() -> None:
    async def twice(client: HttpClient) -> Any:
        for _ in range(5):
            await client.get("/once")
            await client.stream(STREAM, b"{}", lambda chunk: None)
        await client.get("/once")
        return await client.get("/v1/models")

    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    with serving(FakeServer(routes={"/once": always(Reply(raw=raw))})) as server:
        assert ask(server.url, twice)["data"][0]["id"] == "m"
        assert server.num_connections == 7


@pytest.mark.parametrize("ending", ["length", "connection", "chunks of one byte", "after a 100"])
def test_bodies_of_all_kinds(ending: str) -> None:
    data = b': hello\n\ndata: {"choices":[{"text":"\xc3\xa9"}]}\n\ndata:{"choices":[{"text":"b"}]}\n\ndata: [DONE]\n\n'
    head = b"HTTP/1.1 200 OK\r\n"
    raw = {
        "length": head + b"Content-Length: %d\r\n\r\n" % len(data) + data,
        "connection": head + b"\r\n" + data,
        "chunks of one byte": head
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"1\r\n%c\r\n" % byte for byte in data)
        + b"0\r\n\r\n",
        "after a 100": b"HTTP/1.1 100 Continue\r\n\r\n" + head + b"Content-Length: %d\r\n\r\n" % len(data) + data,
    }[ending]
    with serving(FakeServer(routes={STREAM: always(Reply(raw=raw))})) as server:
        assert texts(server.url) == ["é", "b"]


@given(st.lists(st.text(max_size=8), max_size=6), st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_events_do_not_depend_on_where_the_pieces_end(words: list[str], cuts: list[int]) -> None:
    import json

    stream = "".join(f": c\n\ndata: {json.dumps({'choices': [{'text': w}]})}\r\n\r\n" for w in words).encode()
    stream += b"data: [DONE]\n\n"
    seen: list[str | None] = []
    reader = EventReader(lambda chunk: seen.extend(c.text for c in chunk.choices), ServerAddress.parse("http://h"))
    position = i = 0
    while position < len(stream):
        size = cuts[i % len(cuts)]
        reader.feed(stream[position : position + size])
        position, i = position + size, i + 1
    assert seen == words
    assert reader.is_complete


def test_leaving_a_stream_hangs_up() -> None:
    async def endless(body: dict[str, Any]) -> AsyncIterator[str]:
        while True:
            yield "x"
            await asyncio.sleep(0.001)

    async def leave(client: HttpClient) -> None:
        has_begun = asyncio.Event()
        task = asyncio.ensure_future(client.stream(STREAM, b"{}", lambda chunk: has_begun.set()))
        await has_begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with serving(FakeServer(answer=endless)) as server:
        ask(server.url, leave)
        assert server.hung_up.wait(60)


# -- failures -----------------------------------------------------------------------------------------------------


def error(status: int, message: str, param: str | None = None) -> Reply:
    return Reply({"error": {"message": message, "param": param}}, status)


@pytest.mark.parametrize(
    ("reply", "kind", "words", "exit_is_ours"),
    [
        (
            error(400, "max_tokens is too big", "max_tokens"),
            "HTTP 400",
            "refused the request (400): max_tokens is",
            False,
        ),
        (error(401, "no"), "HTTP 401", "--api-key KEY, or QUIRE_API_KEY (401: no)", False),
        (error(404, "no such model"), "HTTP 404", "no such model", False),
        (error(429, "slowly"), "HTTP 429", "slowly", True),
        (error(500, "oh"), "HTTP 500", "failed (500): oh", True),
        (error(503, "full"), "HTTP 503", "full", True),
        (Reply({"detail": "Not Found"}, 404), "HTTP 404", "Not Found", False),
        (Reply("just words", 502), "HTTP 502", "just words", True),
        (Reply({}, 307, headers={"Location": "http://there"}), "HTTP 307", "--url http://there", False),
        (Reply(raw=b"HTTP/1.1 500 X\r\n\r\n"), "HTTP 500", "no reason given", True),
        (Reply(raw=b"HTTP/1.1 500 X\r\n\r\n" + b"x" * 9999), "HTTP 500", "xxx...", True),
        (Reply(raw=b""), "no answer", "if it speaks TLS, its URL begins with https://", True),
        (Reply(raw=b"SSH-2.0-OpenSSH\r\n"), "not HTTP", "does not speak HTTP", True),
        (Reply(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\ndata: {}"), "broken stream", "broke off", True),
        (Reply(raw=b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n"), "broken stream", "broke off", True),
        (Reply(raw=b"HTTP/1.1 200 OK\r\n\r\ndata: {nonsense\n\n"), "not an event", "an event that is not one", True),
        (Reply(raw=b"HTTP/1.1 200 OK\r\n\r\ndata: \xff\n\n"), "not an event", "an event that is not one", True),
        (
            Reply(raw=b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {"message": "the core died", "code": 500}}\n\n'),
            "stream error 500",
            "failed while it answered: the core died",
            True,
        ),
    ],
)
def test_what_goes_wrong_is_told(reply: Reply, kind: str, words: str, exit_is_ours: bool) -> None:
    with serving(FakeServer(routes={STREAM: always(reply)})) as server:
        error = failure(server.url)
    assert kind_of(error) == kind
    assert words in str(error)
    assert isinstance(error, RemoteError) == exit_is_ours
    assert isinstance(error, RefusedError) != exit_is_ours


def test_the_field_at_fault_is_named() -> None:
    with serving(FakeServer(routes={STREAM: always(error(400, "no", "seed"))})) as server:
        raised = failure(server.url)
    assert isinstance(raised, RefusedError)
    assert raised.param == "seed"


@pytest.mark.parametrize("value", [[], {"data": "x"}, {"data": [{"id": 5}]}])
def test_a_list_of_models_that_is_none(value: Any) -> None:
    with (
        serving(FakeServer(routes={"/v1/models": always(Reply(value))})) as server,
        pytest.raises(RemoteError, match="not a list of models"),
    ):
        ask(server.url, lambda client: client.models())


def test_an_answer_that_is_not_json() -> None:
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>"
    with (
        serving(FakeServer(routes={"/v1/models": always(Reply(raw=raw))})) as server,
        pytest.raises(RemoteError, match="is it the right --url"),
    ):
        ask(server.url, lambda client: client.models())


def test_a_server_that_does_not_answer() -> None:
    async def never(request: Any) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    with (
        serving(FakeServer(routes={"/slow": never})) as server,
        pytest.raises(RemoteError, match="has not answered within"),
    ):
        ask(server.url, lambda client: client.get("/slow", limit_s=0.05))


def test_a_refused_connection_says_how_to_start_a_server() -> None:
    with socket.socket() as probe:  # bound, and not listening: no other process can take the port
        probe.bind(("127.0.0.1", 0))
        raised = failure(f"http://127.0.0.1:{probe.getsockname()[1]}")
    assert kind_of(raised) == "connection refused"
    assert "is it running? quire serve starts one" in str(raised)


def test_an_unknown_host() -> None:
    raised = failure("http://no-such-host.invalid")
    assert kind_of(raised) == "unknown host"


# -- TLS ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(certificate, key) of 127.0.0.1, signed by itself."""
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run([*command, *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl to make a certificate with")
    return cert, key


@pytest.fixture
def tls_server(certificate: tuple[Path, Path]) -> FakeServer:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return FakeServer(answer=saying("safe"), tls=context)


def test_a_certificate_is_trusted_when_it_is_named(
    tls_server: FakeServer, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tls_server):
        raised = failure(tls_server.url)
        assert kind_of(raised) == "TLS"
        assert "SSL_CERT_FILE" in str(raised)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        assert texts(tls_server.url) == ["safe"]


def test_tls_where_there_is_none_and_the_other_way_round(tls_server: FakeServer) -> None:
    with serving(FakeServer()) as plain:
        raised = failure(plain.url.replace("http:", "https:"))
        assert kind_of(raised) == "TLS"
        assert "try http://" in str(raised)
    with serving(tls_server):
        assert "https://" in str(failure(tls_server.url.replace("https:", "http:")))
