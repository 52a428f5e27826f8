"""Objects of a connector's own classes as bytes, for halves in processes of their own.

Plain values, their containers, arrays and tensors, enums, and objects that have nothing but fields: dataclasses, named
tuples, and classes whose instances are made by `object`. Decoding calls no method of a class and imports none: both
processes have the connector's module.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import msgspec
import numpy as np

from quire.resolve import resolve
from quire.wire.serial import ARRAY_DTYPES, WireError

_CONTAINERS: dict[str, Callable[[Any], Any]] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, deque)}


def encode_object(value: Any) -> bytes:
    """Returns the bytes of an object. Raises TypeError for one that has more than fields."""
    return msgspec.msgpack.encode(_pack(value))


def decode_object(data: bytes) -> Any:
    """Returns the object of `encode_object`. Raises WireError for what is none, or of a class that is not loaded."""
    try:
        return _unpack(msgspec.msgpack.decode(data))
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError) as e:
        raise WireError(f"a connector's object of {len(data)} bytes cannot be decoded: {e}") from e


def _pack(value: Any) -> Any:
    """Returns plain values as they are, and the rest as a list of its kind and its parts."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return value
    if kind.__name__ in _CONTAINERS and _CONTAINERS[kind.__name__] is kind:
        return [kind.__name__, [_pack(item) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[_pack(key), _pack(item)] for key, item in value.items()]]
    if isinstance(value, Enum):
        return ["enum", _name_of(kind), value.name]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return ["array", *_pack_array(value)]
    if kind.__module__ == "torch" and hasattr(value, "numpy"):
        return ["tensor", *_pack_array(value.detach().cpu().numpy())]
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return ["namedtuple", _name_of(kind), [_pack(item) for item in value]]
    return ["object", _name_of(kind), [[name, _pack(item)] for name, item in _fields_of(value).items()]]


def _unpack(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    match value:
        case [str(name), list(items)] if name in _CONTAINERS:
            return _CONTAINERS[name]([_unpack(item) for item in items])
        case ["dict", items]:
            return {_unpack(key): _unpack(item) for key, item in items}
        case ["enum", name, member]:
            return _find_class(name, Enum)[member]
        case ["array", *parts]:
            return _unpack_array(*parts)
        case ["tensor", *parts]:
            return resolve("torch:from_numpy")(_unpack_array(*parts))
        case ["namedtuple", name, items]:
            return tuple.__new__(_find_class(name, tuple), [_unpack(item) for item in items])
        case ["object", name, fields]:
            made = object.__new__(_find_class(name, object))
            for field, item in fields:
                object.__setattr__(made, field, _unpack(item))
            return made
    raise ValueError(f"{value[:1]!r} is no kind of object")


def _pack_array(array: Any) -> list[Any]:
    if array.dtype.str not in ARRAY_DTYPES:
        raise TypeError(f"an array of {array.dtype} cannot go to another process; use a plain number type")
    return [array.dtype.str, list(array.shape), array.tobytes()]


def _unpack_array(dtype: str, shape: list[int], data: bytes) -> Any:
    if dtype not in ARRAY_DTYPES:
        raise ValueError(f"array of unknown element type {dtype!r}")
    return np.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _fields_of(value: Any) -> dict[str, Any]:
    """Returns what an object has, by name. Raises TypeError for one that may have more."""
    kind = type(value)
    if dataclasses.is_dataclass(value):
        named = {
            field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)
        }
        return {**named, **getattr(value, "__dict__", {})}
    if not _is_plain(kind) or not hasattr(value, "__dict__"):
        raise TypeError(
            f"a {kind.__module__}.{kind.__qualname__} cannot go to another process; use plain values, arrays, tensors, "
            "and dataclasses of them"
        )
    return dict(vars(value))


def _is_plain(kind: type) -> bool:
    """Returns whether `object` makes the instances of a class."""
    make: Any = kind.__new__
    return make is object.__new__


def _name_of(kind: type) -> str:
    if "<" in kind.__qualname__:
        raise TypeError(f"{kind.__qualname__} cannot go to another process; define it at the top of its module")
    return f"{kind.__module__}:{kind.__qualname__}"


def _find_class(name: str, base: type) -> Any:
    """Returns a class of a loaded module. Raises LookupError, AttributeError or TypeError."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules[module]
    for part in qualname.split("."):
        found = getattr(found, part)
    if not isinstance(found, type) or not issubclass(found, base):
        raise TypeError(f"{name} is no {base.__name__}")
    if base is object and not _is_plain(found):
        raise TypeError(f"objects of {name} are not made of fields alone")
    return found
