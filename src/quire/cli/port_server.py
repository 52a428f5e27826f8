"""One server of several on ports that follow one another: `python -m quire.cli.port_server`, started by `PortServers`.

It serves like any other. Ctrl-C in the terminal reaches the process that has started it, with which it ends.
"""

from __future__ import annotations

import logging
import signal
import sys
import time

from quire.cli.serve import serve_model
from quire.config.server import decode_config, decode_server_config
from quire.errors import QuireError
from quire.frontend.fleet.ports import decode_launch
from quire.logger import init_logger, use_format
from quire.wire.process import die_with_parent, set_process_title

logger = init_logger("quire.cli.port_server")  # as a process this module is __main__


def main() -> int:
    """Runs the process. Returns its exit code."""
    start = time.monotonic()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launch = decode_launch(sys.stdin.buffer.read())
    die_with_parent(launch.parent_pid)
    set_process_title(f"quire-port-{launch.index}")
    try:
        server = decode_server_config(launch.server_config)
        if server.log_level is not None:
            logging.getLogger("quire").setLevel(server.log_level)
        if server.log_format is not None:
            use_format(server.log_format)
        return serve_model(decode_config(launch.engine_config), server, launch.key_digests, start)
    except QuireError as e:
        logger.error("the server on port %d cannot serve: %s", launch.port, e)
        return 1


if __name__ == "__main__":
    sys.exit(main())
