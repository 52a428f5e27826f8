"""HTTPS, with and without certificates of clients."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx2
import openai
import pytest

from quire.cli.main import main

from .serving import serving

TIME_LIMIT_S = 120.0
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")


def make_certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """A certificate of its own authority for 127.0.0.1, and its key."""
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    words = f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN={name}".split()
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *words], check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    for name in ("server", "client", "stranger"):
        make_certificate(directory, name)
    return directory


@pytest.mark.parametrize("num_processes", ["1", "2"])
def test_https_is_spoken_and_nothing_else(directory: Path, num_processes: str) -> None:
    """Encrypted and authenticated; nothing but TLS 1.2 and later is spoken, and no plain HTTP."""
    files = ("--ssl-certfile", str(directory / "server.pem"), "--ssl-keyfile", str(directory / "server.key"))
    flags = ("--api-key", "secret", "--api-server-count", num_processes)
    with serving(*files, *flags, executor="Quick") as server:
        assert server.url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=str(directory / "server.pem"))
        with httpx2.Client(base_url=server.url, verify=trusting, timeout=TIME_LIMIT_S) as http:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, http_client=http)
            chunks = client.completions.create(model="demo", prompt="x", max_tokens=5, stream=True)
            assert [chunk.choices[0].finish_reason for chunk in chunks][-1] is not None
        with pytest.raises(httpx2.ConnectError, match=r"(?i)certificate"):
            httpx2.get(f"{server.url}/health", timeout=TIME_LIMIT_S)
        with pytest.raises(httpx2.HTTPError):
            httpx2.get(f"{server.url.replace('https', 'http')}/health", timeout=TIME_LIMIT_S)
        old = ssl.create_default_context(cafile=str(directory / "server.pem"))
        with pytest.warns(DeprecationWarning, match="TLSv1"):
            old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{server.url}/health", verify=old, timeout=TIME_LIMIT_S)


def test_clients_may_have_to_show_a_certificate(directory: Path) -> None:
    files = ("--ssl-certfile", str(directory / "server.pem"), "--ssl-keyfile", str(directory / "server.key"))
    required = ("--ssl-ca-certs", str(directory / "client.pem"), "--ssl-cert-reqs", "2")
    with serving(*files, *required, executor="Quick") as server:
        for name, is_let_in in (("client", True), ("stranger", False), (None, False)):
            context = ssl.create_default_context(cafile=str(directory / "server.pem"))
            if name is not None:
                context.load_cert_chain(directory / f"{name}.pem", directory / f"{name}.key")
            try:
                answer = httpx2.get(f"{server.url}/health", verify=context, timeout=TIME_LIMIT_S)
                assert is_let_in
                assert answer.status_code == 200
            except httpx2.TransportError:
                assert not is_let_in


@pytest.mark.parametrize(
    "flags",
    [
        ["--ssl-certfile", "server.pem", "--ssl-keyfile", "client.key"],
        ["--ssl-certfile", "none.pem", "--ssl-keyfile", "server.key"],
        ["--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key", "--ssl-ca-certs", "server.key"],
        ["--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key", "--ssl-ciphers", "none"],
    ],
)
def test_tls_files_that_cannot_be_used_are_told_of_at_once(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    monkeypatch.chdir(directory)
    assert main(["serve", "--host", "127.0.0.1", "--port", "0", *flags]) == 2
    assert "TLS cannot be had" in capsys.readouterr().err
