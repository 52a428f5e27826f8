"""Structs to frames and back: msgpack, with the bytes of large arrays in frames of their own.

The first frame is msgpack. An array stands in it as (dtype, shape, payload), the payload being its bytes or, from
`OUT_OF_BAND_BYTES` on, the number of the frame that holds them: such bytes are never copied here, neither in encoding
nor in decoding. Decoding is typed: what does not fit the declared struct is a `WireError`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from quire.errors import ServerError

T = TypeVar("T")
Frame = bytes | bytearray | memoryview

OUT_OF_BAND_BYTES = 256
"""Arrays from this size on travel in a frame of their own; below, a frame costs more than the copy."""
MAX_ARRAY_DIMENSIONS = 8
ARRAY_DTYPES = frozenset(
    np.dtype(t).str for t in ("bool", "u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8")
)
"""The element types that may cross: plain numbers, little-endian. Never objects."""


class WireError(ServerError):
    """A message is not what its type declares: corrupt, truncated, foreign, or of another version."""


class MsgpackEncoder:
    """Encodes one struct after the other. Not thread-safe: one per thread."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_array)
        self._arrays: list[memoryview] = []

    def encode(self, value: Any) -> list[Frame]:
        """Returns the frames of a value: msgpack first, then the large arrays in order of appearance."""
        self._arrays = []
        return [self._encoder.encode(value), *self._arrays]

    def encode_into(self, value: Any, buffer: bytearray) -> list[Frame]:
        """Encodes msgpack into `buffer`, which grows or shrinks to fit and must stay unchanged until it is sent."""
        self._arrays = []
        self._encoder.encode_into(value, buffer)
        return [buffer, *self._arrays]

    def _encode_array(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"a {type(value).__name__} cannot cross a process boundary; only plain values and arrays")
        array = np.ascontiguousarray(value)
        if array.dtype.str not in ARRAY_DTYPES:
            raise TypeError(f"an array of {array.dtype} cannot cross a process boundary; use a plain number type")
        data = array.reshape(-1).view(np.uint8).data
        if array.nbytes < OUT_OF_BAND_BYTES:
            return array.dtype.str, value.shape, bytes(data)
        self._arrays.append(data)
        return array.dtype.str, value.shape, len(self._arrays)


class MsgpackDecoder(Generic[T]):
    """Decodes one type of struct. Not thread-safe: one per thread. Arrays are read-only views of their frame."""

    def __init__(self, decoded_type: type[T]) -> None:
        self._decoder = msgspec.msgpack.Decoder(decoded_type, dec_hook=self._decode_array)
        self._frames: Sequence[Frame] = ()

    def decode(self, frames: Sequence[Frame]) -> T:
        """Returns the value of a message. Raises WireError for anything that is not exactly one such value."""
        self._frames = frames
        try:
            if not frames:
                raise WireError("a message without frames arrived; a peer of another version may be connected")
            return self._decoder.decode(frames[0])
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError) as e:
            raise WireError(f"a message of {len(frames[0])} bytes cannot be decoded: {e}") from e
        finally:
            self._frames = ()

    def _decode_array(self, declared: Any, value: Any) -> npt.NDArray[Any]:
        dtype_name, shape, payload = value
        if dtype_name not in ARRAY_DTYPES:
            raise ValueError(f"array of unknown element type {dtype_name!r}")
        if len(shape) > MAX_ARRAY_DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError(f"array of impossible shape {shape!r}")
        if type(payload) is int:
            if not 0 < payload < len(self._frames):
                raise ValueError(f"array in frame {payload} of {len(self._frames)}")
            payload = self._frames[payload]
        dtype = np.dtype(dtype_name)
        if len(memoryview(payload).cast("B")) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"array of shape {shape!r} and type {dtype_name} in a payload of another size")
        array = np.frombuffer(payload, dtype=dtype).reshape(shape)
        array.flags.writeable = False
        return array
