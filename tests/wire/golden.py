"""The recorded bytes of every sample: `python -m tests.wire.golden` writes them anew.

A line of golden.txt per frame: name of the sample, number of the frame, hex.
"""

from __future__ import annotations

from pathlib import Path

from quire.wire.handshake import PROTOCOL_VERSION
from quire.wire.serial import Frame, MsgpackEncoder

from .samples import SAMPLES

PATH = Path(__file__).with_name("golden.txt")
HOW_TO_CHANGE = (
    "The bytes of what crosses a process boundary have changed. If that was meant: raise PROTOCOL_VERSION in "
    "src/quire/wire/handshake.py (only a new last field with a default may go without), then run "
    "`python -m tests.wire.golden` and commit golden.txt."
)


def encode(name: str) -> list[Frame]:
    """The frames of a sample now."""
    return MsgpackEncoder().encode(SAMPLES[name])


def read() -> dict[str, list[bytes]]:
    """The recorded frames by sample, and the version they were recorded with as `PROTOCOL_VERSION`."""
    recorded: dict[str, list[bytes]] = {}
    for line in PATH.read_text(encoding="ascii").splitlines():
        name, _, data = line.split(" ")
        recorded.setdefault(name, []).append(bytes.fromhex(data))
    return recorded


def write() -> None:
    """Record what is sent now."""
    lines = [f"PROTOCOL_VERSION 0 {PROTOCOL_VERSION:04x}"]
    lines += [f"{name} {i} {bytes(frame).hex()}" for name in SAMPLES for i, frame in enumerate(encode(name))]
    PATH.write_text("\n".join(lines) + "\n", encoding="ascii")


if __name__ == "__main__":
    write()
