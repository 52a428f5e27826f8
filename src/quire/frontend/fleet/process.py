"""One API process as its parent sees it: started, spoken with, ended.

The child is a plain command, `python -m quire.frontend.fleet.proc`. It inherits the listening sockets, the
environment but for keys, standard error, and as its standard input one end of a socket pair: what that ends, ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys

from quire import envs
from quire.errors import ConfigError, ServerError
from quire.logger import child_level
from quire.wire.peers import ApiLaunch, encode_peer
from quire.wire.process import search_path

API_MODULE = "quire.frontend.fleet.proc"
KILL_TIMEOUT_S = 10.0
"""How long a process may take to end once its connection has ended, and once more after SIGKILL."""
_LOOK_S = 0.02


class ApiProcess:
    """Belongs to the thread that makes it, which must live as long: the system kills the process with it."""

    def __init__(self, launch: ApiLaunch) -> None:
        """Raises ServerError if the system refuses to start it."""
        self.index = launch.index
        self.connection, theirs = socket.socketpair()
        """To the process; whoever speaks with it closes it."""
        try:
            self._process = _spawn(launch, theirs)
        except BaseException:
            self.connection.close()
            raise
        finally:
            theirs.close()
        with contextlib.suppress(OSError):  # it has died already, which will be noticed
            self.connection.sendall(encode_peer(launch))

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def signal(self, number: int) -> None:
        """Send it a signal; nothing happens where it has ended."""
        self._process.send_signal(number)

    def kill(self) -> int:
        """End it, whatever it does; its exit code, negative for a signal."""
        self._process.kill()
        return self._process.wait(KILL_TIMEOUT_S)

    async def wait_end(self, timeout_s: float) -> int:
        """The exit code of a process that is about to end; after `timeout_s` it is killed."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while (code := self._process.poll()) is None:
            if asyncio.get_running_loop().time() > deadline:
                return self.kill()
            await asyncio.sleep(_LOOK_S)
        return code


def _spawn(launch: ApiLaunch, standard_input: socket.socket) -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise ConfigError("this Python does not know its own executable, so no API process can be started")
    environment = {name: value for name, value in os.environ.items() if name != envs.API_KEY.name}
    environment["PYTHONPATH"] = search_path()
    environment[envs.LOGGING_LEVEL.name] = child_level()
    listeners = [fd for fd in (launch.listener, launch.admin_listener) if fd is not None]
    try:
        # -P: a file json.py in the working directory must not stand in for a module.
        return subprocess.Popen(
            [sys.executable, "-P", "-m", API_MODULE],
            stdin=standard_input.fileno(),
            pass_fds=listeners,
            env=environment,
            start_new_session=True,  # Ctrl-C in the user's terminal is for the parent to decide on
        )
    except OSError as e:
        raise ServerError(f"no API process can be started: {e}") from e
