"""Prompt embeddings: what a user gives, as an array of float32.

Over HTTP they come as base64 of a safetensors file with one tensor, or of a .npy file. Both are parsed without running
anything: a torch file, which is a pickle, is refused. In Python they are arrays or tensors, read by their interface, so
that this process needs no torch.
"""

from __future__ import annotations

import binascii
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

from quire.errors import PromptTooLongError, ValidationError

PARAM = "prompt_embeds"
MAX_HEADER_BYTES = 1 << 16
"""Bytes of a payload beside its numbers."""

Embeds = npt.NDArray[np.float32]
"""[num_positions, hidden_size]"""
RawEmbeds = npt.NDArray[Any]
"""The same in another type, its numbers not checked."""

_NUMPY_MAGIC, _ZIP_MAGIC, _PICKLE_MAGIC = b"\x93NUMPY", b"PK\x03\x04", b"\x80"
_SAFETENSORS_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


class EmbedsReader:
    """Reads prompt embeddings for one model. Every method raises ValidationError."""

    def __init__(self, hidden_size: int, max_model_len: int) -> None:
        self._hidden_size, self._max_model_len = hidden_size, max_model_len
        self._max_bytes = 4 * max_model_len * hidden_size + MAX_HEADER_BYTES

    def decode(self, payload: str) -> RawEmbeds:
        """Returns the array in base64 of a safetensors or .npy file, [n, hidden]. `read` checks its numbers."""
        if len(payload) > self._max_bytes * 4 // 3 + 4:
            raise _refused(
                f"has {len(payload)} characters of base64; a context of {self._max_model_len} positions takes at most "
                f"{self._max_bytes} bytes"
            )
        try:
            data = binascii.a2b_base64(payload, strict_mode=True)
        except (binascii.Error, ValueError) as e:
            raise _refused(f"is no base64: {e}") from None
        if data.startswith(_NUMPY_MAGIC):
            return self._validate(_read_numpy(data))
        if data.startswith((_ZIP_MAGIC, _PICKLE_MAGIC)):
            raise _refused("is a torch or zip file, which is never opened; send safetensors.torch.save({'e': tensor})")
        return self._validate(_read_safetensors(data))

    def read(self, value: Any) -> Embeds:
        """Returns the embeddings in an array or a tensor of any library, [n, hidden] or [1, n, hidden]: as float32, a
        copy of the caller's."""
        if hasattr(value, "detach"):  # a tensor of torch: bfloat16 has no type in numpy
            value = value.detach().to("cpu").float().numpy()
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as e:
            raise _refused(f"is a {type(value).__name__} that is no array: {e}") from None
        with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite
            embeds = np.array(self._validate(array), np.float32)
        if not np.isfinite(embeds).all():
            raise _refused("holds NaN or infinity; blocks of the cache are shared, and would keep them")
        return embeds

    def _validate(self, array: RawEmbeds) -> RawEmbeds:
        """Returns the array without a first dimension of 1."""
        if array.ndim == 3 and array.shape[0] == 1:
            array = array[0]
        if array.ndim != 2 or array.shape[1] != self._hidden_size or not len(array):
            raise _refused(
                f"has the shape {list(array.shape)}; it must be [number of positions, {self._hidden_size}], the hidden "
                "size of the model"
            )
        if array.dtype.kind != "f":
            raise _refused(f"holds {array.dtype}; it must hold floats")
        if len(array) >= self._max_model_len:
            raise PromptTooLongError(
                f"{PARAM} has {len(array)} positions and the context {self._max_model_len} (max_model_len): there is "
                "no room for a single output token; shorten it or raise --max-model-len",
                param=PARAM,
                value=len(array),
            )
        return array


def _read_numpy(data: bytes) -> npt.NDArray[Any]:
    """Returns the array of a .npy file. Its header is a literal, which numpy reads without evaluating it."""
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in readers:
            raise _refused(f"is a .npy file of version {version[0]}.{version[1]}; 1.0 and 2.0 are read")
        shape, is_fortran, dtype = readers[version](file, max_header_size=MAX_HEADER_BYTES)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as e:
        raise _refused(f"is no readable .npy file: {str(e)[:200]}") from None
    if is_fortran or dtype.hasobject or dtype.kind != "f" or dtype.itemsize > 4:
        raise _refused(f"is a .npy file of {dtype}{' in Fortran order' * is_fortran}; send f4 or f2 in C order")
    return _view(data[file.tell() :], dtype, shape)


def _read_safetensors(data: bytes) -> npt.NDArray[Any]:
    """Returns the only tensor of a safetensors file."""
    try:
        tensors = deserialize(data)  # type: ignore[no-untyped-call]  # the library has no types
    except (SafetensorError, ValueError, OverflowError) as e:
        raise _refused(f"is neither a safetensors nor a .npy file: {str(e)[:200]}") from None
    if len(tensors) != 1:
        raise _refused(f"holds {len(tensors)} tensors; send one")
    tensor = tensors[0][1]
    dtype = _SAFETENSORS_DTYPES.get(tensor["dtype"])
    if dtype is None:
        raise _refused(f"holds {tensor['dtype']}; send F32, F16 or BF16")
    array = _view(bytes(tensor["data"]), dtype, tensor["shape"])
    if tensor["dtype"] != "BF16":
        return array
    return (array.astype("<u4") << 16).view("<f4")  # bfloat16 is the upper half of float32


def _view(data: bytes, dtype: np.dtype[Any], shape: Sequence[int]) -> npt.NDArray[Any]:
    try:
        return np.frombuffer(data, dtype).reshape(shape)
    except (ValueError, OverflowError):
        raise _refused(f"has {len(data)} bytes, which are not {list(shape)} of {dtype}") from None


def _refused(why: str) -> ValidationError:
    return ValidationError(f"{PARAM} {why}", param=PARAM)
