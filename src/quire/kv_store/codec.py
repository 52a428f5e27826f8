"""Codec 1 of records: byte planes, of which the highest is compressed, without loss.

::

    u32 bytes of an element | u32 bytes of the compressed plane
    | the highest bytes of all elements, compressed with zstd | the bytes below them | ... | the lowest bytes

The highest byte of a floating-point number is its sign and the upper bits of its exponent, which are much alike among
keys and values; the bits of its mantissa are not, and no time is spent on them. For sources that are slower than
decompressing, and to store more in as many bytes. It needs the extra `zstd`.
"""

from __future__ import annotations

import struct
import threading
from functools import cache

from quire.kv_store.record import CODEC_RAW, InvalidRecordError, RecordHeader, RecordMac

LEVEL = 1
"""Level of zstd. Higher ones are slower and, on these planes, hardly smaller."""
_HEAD = struct.Struct("<II")
_ELEMENTS = {1: "<u1", 2: "<u2", 4: "<u4"}
"""Unsigned integers by their bytes."""


class _Zstd(threading.local):
    """Holds a compressor and a decompressor for each thread: they cannot be shared, and making them takes long."""

    def __init__(self) -> None:
        import zstandard  # only if a record needs it

        self.errors = zstandard.ZstdError, ValueError
        self.compress = zstandard.ZstdCompressor(level=LEVEL).compress
        self._decompress = zstandard.ZstdDecompressor().decompress
        self._content_size = zstandard.frame_content_size

    def decompress(self, data: memoryview, num_bytes: int) -> bytes:
        """Returns what was compressed. Raises `errors`, before it takes memory, unless it is of `num_bytes`."""
        if (found := self._content_size(data)) != num_bytes:
            raise ValueError(f"{found} bytes, not {num_bytes}")
        return self._decompress(data)


@cache
def _find_zstd() -> _Zstd:
    """Returns zstd, for the thread that uses it. Raises InvalidRecordError if it is not installed."""
    try:
        return _Zstd()
    except ImportError:
        raise InvalidRecordError(
            "format", "the record is compressed, and zstandard is not installed: pip install 'quire[zstd]'"
        ) from None


def compress(payload: memoryview, element_bytes: int) -> bytes | None:
    """Returns a payload as codec 1 stores it; None: it would not be smaller. `element_bytes`: of a number in it."""
    if not payload or element_bytes not in _ELEMENTS or len(payload) % element_bytes:
        return None
    import numpy as np  # commands that compress nothing need not load it

    planes = np.frombuffer(payload, np.uint8).reshape(-1, element_bytes)
    highest = _find_zstd().compress(planes[:, -1].tobytes())
    below = [planes[:, i].tobytes() for i in reversed(range(element_bytes - 1))]
    stored = b"".join((_HEAD.pack(element_bytes, len(highest)), highest, *below))
    return stored if len(stored) < len(payload) else None


def decompress(stored: memoryview, payload_bytes: int) -> memoryview:
    """Returns the payload that `compress` made `stored` of. Raises InvalidRecordError."""
    zstd = _find_zstd()
    if len(stored) < _HEAD.size:
        raise InvalidRecordError("truncated", f"{len(stored)} bytes are no compressed payload")
    element_bytes, highest_bytes = _HEAD.unpack_from(stored)
    if element_bytes not in _ELEMENTS or payload_bytes % element_bytes:
        raise InvalidRecordError("format", f"a payload of {payload_bytes} bytes has no elements of {element_bytes}")
    count, start = payload_bytes // element_bytes, _HEAD.size + highest_bytes
    if start + count * (element_bytes - 1) != len(stored):
        raise InvalidRecordError("format", "the planes of a compressed payload have another length")
    try:
        highest = zstd.decompress(stored[_HEAD.size : start], count)
    except zstd.errors as e:
        raise InvalidRecordError("format", f"the highest bytes of a payload cannot be decompressed: {e}") from None
    return _join_planes(highest, stored[start:], element_bytes)


def prove_payload(mac: RecordMac, header: RecordHeader, head: memoryview, stored: memoryview) -> memoryview:
    """Returns the payload of a record that came as header with tag, and as it is stored. Raises InvalidRecordError
    unless it is the wanted one, of `header`."""
    codec = mac.check(header, head, [stored])
    return stored if codec == CODEC_RAW else decompress(stored, header.payload_bytes)


def _join_planes(highest: bytes, below: memoryview, element_bytes: int) -> memoryview:
    """Returns the elements whose highest bytes, and planes of bytes below, these are."""
    import numpy as np

    count, dtype = len(highest), np.dtype(_ELEMENTS[element_bytes])
    elements = np.frombuffer(highest, np.uint8).astype(dtype)
    for plane in range(element_bytes - 1):
        elements <<= np.array(8, dtype)
        elements |= np.frombuffer(below, np.uint8, count, plane * count)
    return elements.view(np.uint8).data
