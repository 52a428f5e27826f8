"""`quire serve`: from its command line to a configuration, and what stands in its way."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.cli.serve import command_line, describe_pages, is_open_to_others, server_config
from quire.config.engine_args import FLAGS
from quire.config.flags import flags_of
from quire.config.server import ServerConfig, read_api_keys
from quire.errors import ConfigError
from quire.frontend.http.server import Listeners


def config_of(*argv: str) -> ServerConfig:
    return server_config(command_line().parse(argv))


def test_no_flag_of_the_server_is_one_of_the_engine() -> None:
    assert not {spec.name for spec in flags_of(ServerConfig)} & set(FLAGS)


def test_defaults_are_vllms() -> None:
    config = config_of()
    assert (config.host, config.port, config.root_path, config.uds) == (None, 8000, None, None)
    assert (config.allowed_origins, config.allowed_methods) == ((), ("*",))
    assert not config.enable_admin
    assert config == ServerConfig()


def test_lists_by_repetition_and_as_json() -> None:
    config = config_of("--api-key", "a", "--api-key", "b", "--allowed-origins", '["x", "y"]', "--middleware", "m.f")
    assert config.api_key == ("a", "b")
    assert config.allowed_origins == ("x", "y")
    assert config.middleware == ("m.f",)


@pytest.mark.parametrize(
    "argv",
    [
        ["--port", "70000"],
        ["--port", "x"],
        ["--allowed-origins", "[1]"],
        ["--ssl-keyfile", "k"],
        ["--uds", "s", "--ssl-keyfile", "k", "--ssl-certfile", "c"],
    ],
)
def test_what_cannot_work_is_said_at_once(argv: list[str]) -> None:
    with pytest.raises(ConfigError):
        config_of(*argv)


def test_keys_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nsecond\n\nthird\n")
    monkeypatch.setenv("QUIRE_API_KEY", "fourth")
    digests = read_api_keys(config_of("--api-key", "first", "--api-key-file", str(file)))
    assert set(digests) == {hashlib.sha256(key).digest() for key in (b"first", b"second", b"third", b"fourth")}
    file.write_text("\n")
    with pytest.raises(ConfigError, match="no key"):
        read_api_keys(config_of("--api-key-file", str(file)))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_api_keys(config_of("--api-key-file", str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="empty"):
        read_api_keys(config_of("--api-key", " "))


def test_a_taken_port_is_told_of_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--host", "127.0.0.1", "--port", str(port)]) == 2
    assert f"--port {port}" in capsys.readouterr().err


def test_listeners_are_bound_where_they_are_asked_for(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    listeners = Listeners.bind(ServerConfig(uds=path, enable_admin=True, admin_port=0))
    assert listeners.url == f"unix:{path}"
    assert listeners.admin_url is not None
    assert listeners.admin_url.startswith("http://127.0.0.1:")
    with pytest.raises(ConfigError, match=f"--uds {path} cannot be listened on: another process listens there"):
        Listeners.bind(ServerConfig(uds=path))
    listeners.main.close()  # a server that was killed leaves the file
    again = Listeners.bind(ServerConfig(uds=path))
    again.close()
    assert not Path(path).exists()
    assert listeners.admin is not None
    listeners.admin.close()
    (tmp_path / "socket").write_text("not a socket")
    with pytest.raises(ConfigError, match="--uds"):
        Listeners.bind(ServerConfig(uds=path))
    both = Listeners.bind(ServerConfig(host="::1", port=0))
    assert both.url.startswith("http://[::1]:")
    both.close()


def test_where_the_pages_are() -> None:
    """An address that can be opened, also where the server listens on every one."""
    everywhere = describe_pages("http://0.0.0.0:8000", None)
    assert "http://localhost:8000/ui " in everywhere
    assert "abort" not in everywhere
    assert "https://localhost:1/ui/dashboard" in describe_pages("https://[::]:1", None)
    assert "http://[::1]:1/ui " in describe_pages("http://[::1]:1", None)
    assert "http://10.0.0.0:8000/ui " in describe_pages("http://10.0.0.0:8000", None)
    assert "http://127.0.0.1:8001/ui/dashboard can abort" in describe_pages("http://a:1", "http://127.0.0.1:8001")
    assert "/ui" in describe_pages("unix:/run/quire", None)


@pytest.mark.parametrize(
    ("url", "is_open"),
    [
        ("http://0.0.0.0:8000", True),
        ("http://[::]:8000", True),
        ("https://10.0.0.7:443", True),
        ("http://gateway:8000", True),
        ("http://127.0.0.1:8000", False),
        ("http://[::1]:8000", False),
        ("http://localhost:8000", False),
        ("unix:/run/quire", False),
    ],
)
def test_who_can_reach_the_server(url: str, is_open: bool) -> None:
    assert is_open_to_others(url) is is_open
