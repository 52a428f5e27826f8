"""A client's connection to the coordinator of engines that step together (`quire.coordinator`).

It follows the present wave, which stands in each request, and asks for a wave when a request is sent while none runs:
the other engines are started sooner than by the notice of the engine that gets it. Nothing depends on either.
"""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from quire.logger import init_logger
from quire.wire.handshake import SUBSCRIPTION
from quire.wire.sockets import CurveKeys, make_zmq_socket

logger = init_logger(__name__)


class CoordinatorLink:
    """The socket, and what was published last. Belongs to the link's thread; `wave` is for any."""

    def __init__(self, context: zmq.Context[Any], address: str, curve: CurveKeys | None = None) -> None:
        self.socket = make_zmq_socket(context, address, zmq.XSUB, bind=False, curve=curve)
        self.socket.send(SUBSCRIPTION)
        self.wave = 0
        self._is_running = False

    def receive(self) -> None:
        """Takes in what the coordinator has published."""
        message = self.socket.recv()
        try:
            self.wave, self._is_running = msgspec.msgpack.decode(message, type=tuple[int, bool])
        except msgspec.MsgspecError as e:
            logger.warning("a message of the coordinator was dropped: %s", e)

    def note_request(self, engine: int) -> None:
        """Asks for a wave if none runs: a request was sent to `engine`."""
        if not self._is_running:
            self.socket.send(msgspec.msgpack.encode((engine, self.wave)))

    def close(self) -> None:
        """Closes the socket."""
        self.socket.close(linger=0)
