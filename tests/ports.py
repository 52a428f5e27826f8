"""Ports that a test gives to processes before these listen."""

from __future__ import annotations

import contextlib
import random
import socket

PORTS = range(10_000, 32_000)
"""Below those that the system gives to sockets which name none (Linux: from 32768 on): no connection that any process
makes meanwhile takes one of them."""


def free_ports(count: int = 1) -> int:
    """Returns the first of ports that follow one another and are free."""
    while True:
        first = random.SystemRandom().choice(PORTS[: -count or None])
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
