"""Wrong messages, made of right ones. Reused by the tests that send them over a real socket."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

NASTY_BYTES = bytes.fromhex(
    "00 01 7f 80 8f 90 9f a0 bf c0 c1 c2 c3 c4 c6 c7 c9 ca cb cc cf d0 d3 d4 d9 db dc dd de df e0 ff"
)
"""Where msgpack's types begin and end."""

Mutation = Callable[[random.Random, bytearray, bytes], None]
"""Changes a frame in place; the last argument is another right frame to take pieces from."""


def _flip_bit(rng: random.Random, frame: bytearray, _: bytes) -> None:
    if frame:
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)


def _set_byte(rng: random.Random, frame: bytearray, _: bytes) -> None:
    if frame:
        frame[rng.randrange(len(frame))] = rng.choice(NASTY_BYTES)


def _insert(rng: random.Random, frame: bytearray, _: bytes) -> None:
    at = rng.randint(0, len(frame))
    frame[at:at] = rng.randbytes(rng.choice((1, 1, 2, 4, 9)))


def _delete(rng: random.Random, frame: bytearray, _: bytes) -> None:
    at = rng.randint(0, len(frame))
    del frame[at : at + rng.choice((1, 1, 2, 4, 9))]


def _truncate(rng: random.Random, frame: bytearray, _: bytes) -> None:
    del frame[rng.randint(0, len(frame)) :]


def _repeat(rng: random.Random, frame: bytearray, _: bytes) -> None:
    start = rng.randint(0, len(frame))
    frame[start:start] = frame[start : start + rng.randint(1, 20)] * rng.randint(1, 5)


def _splice(rng: random.Random, frame: bytearray, other: bytes) -> None:
    at, start = rng.randint(0, len(frame)), rng.randint(0, len(other))
    frame[at : at + rng.randint(0, 10)] = other[start : start + rng.randint(1, 30)]


def _replace(rng: random.Random, frame: bytearray, other: bytes) -> None:
    frame[:] = other if rng.random() < 0.5 else rng.randbytes(rng.randint(0, 40))


MUTATIONS: tuple[Mutation, ...] = (_flip_bit, _set_byte, _insert, _delete, _truncate, _repeat, _splice, _replace)


def mutate(rng: random.Random, message: Sequence[bytes], other: Sequence[bytes]) -> list[bytes]:
    """`message` with one to four things wrong; pieces come from `other`. Often its frames no longer fit one another."""
    frames = [bytearray(frame) for frame in message]
    for _ in range(rng.choice((1, 1, 2, 4))):
        kind = rng.random()
        if kind < 0.85 and frames:
            position = 0 if rng.random() < 0.8 else rng.randrange(len(frames))
            rng.choice(MUTATIONS)(rng, frames[position], rng.choice(other))
        elif kind < 0.9 and frames:
            del frames[rng.randrange(len(frames))]
        elif kind < 0.95:
            frames.insert(rng.randint(0, len(frames)), bytearray(rng.choice(other)))
        else:
            rng.shuffle(frames)
    return [bytes(frame) for frame in frames]
