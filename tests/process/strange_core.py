"""Core processes that a frontend should refuse: `python -m tests.process.strange_core` in place of the real one.

STRANGE says how: "old" (another version of the protocol), "mute" (says nothing), "shy" (HELLO, then nothing), "noise".
"""

from __future__ import annotations

import argparse
import os
import signal

from quire.testing.fake_engine import FakeHandshake
from quire.wire.handshake import PROTOCOL_VERSION, EngineStatus


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--handshake-address", required=True)
    address = parser.parse_known_args()[0].handshake_address
    how = os.environ["STRANGE"]
    with FakeHandshake(address) as handshake:
        if how == "old":
            handshake.say(EngineStatus("HELLO", protocol_version=PROTOCOL_VERSION - 1, pid=os.getpid()))
        elif how == "shy":
            handshake.say(EngineStatus("HELLO", pid=os.getpid()))
        elif how == "noise":
            for frames in ([b""], [b"\xc1"], [b"\x80", b"\x80"], [b"\x81\xa6status\xa5READY"]):
                handshake.say_frames(frames)
        signal.pause()


if __name__ == "__main__":
    main()
