"""The addresses of a running server, and the hosts that can reach them."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import httpx2

from .serving import serving

TIME_LIMIT_S = 120.0
LISTENS = "0A"
BODY = {"prompt": "x", "max_tokens": 2}


def listening_ports(*pids: int) -> set[int]:
    """TCP ports, of any address, that these processes listen on."""
    inodes = {os.readlink(fd) for pid in pids for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    ports = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pids[0]}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def test_one_port_is_open_and_no_other() -> None:
    """Neither the core nor what lies between the processes listens on the network."""
    with serving(executor="Quick") as server:
        assert httpx2.post(f"{server.url}/v1/completions", json=BODY, timeout=TIME_LIMIT_S).status_code == 200
        assert listening_ports(server.process.pid, server.core_pid()) == {int(server.url.rpartition(":")[2])}


def test_a_unix_socket_is_for_its_user(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    with serving("--uds", str(path), executor="Quick") as server:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
        transport = httpx2.HTTPTransport(uds=str(path))
        with httpx2.Client(transport=transport, base_url="http://localhost", timeout=TIME_LIMIT_S) as client:
            assert client.post("/v1/completions", json=BODY).status_code == 200
        assert listening_ports(server.process.pid, server.core_pid()) == set()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIME_LIMIT_S) == 0
        assert not path.exists()
