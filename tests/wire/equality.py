"""Equality that looks into arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np


def assert_same(a: Any, b: Any) -> None:
    """Equal, arrays by type, shape and value."""
    if isinstance(b, np.ndarray):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()
    elif isinstance(b, msgspec.Struct) or dataclasses.is_dataclass(b):
        assert type(a) is type(b)
        names = b.__struct_fields__ if isinstance(b, msgspec.Struct) else [f.name for f in dataclasses.fields(b)]
        for name in names:
            assert_same(getattr(a, name), getattr(b, name))
    elif isinstance(b, dict):
        assert a.keys() == b.keys()
        for key in b:
            assert_same(a[key], b[key])
    elif isinstance(b, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b
