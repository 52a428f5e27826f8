"""Objects of connectors as bytes: what comes back is what was sent, and nothing else is made."""

from __future__ import annotations

import collections
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from quire.kv_store.connector import KVConnectorMetadata
from quire.kv_store.objects import decode_object, encode_object
from quire.wire.serial import WireError


class Kind(Enum):
    LOAD = "load"


class Number(IntEnum):
    TWO = 2


class Slots(NamedTuple):
    block_id: int
    offsets: tuple[int, ...] = ()


@dataclass
class Order:
    request_id: str
    slots: Slots
    kind: Kind = Kind.LOAD
    hidden: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.hidden = "made"


@dataclass(frozen=True, slots=True)
class Frozen:
    tokens: frozenset[int]


class Plain(KVConnectorMetadata):
    """Metadata as vLLM's connectors write it: its constructor takes arguments, and is not called again."""

    def __init__(self, orders: list[Order]) -> None:
        self.orders = orders
        self.by_id = {order.request_id: order for order in orders}

    class Inner:
        """A class in a class."""

        def __init__(self) -> None:
            self.value = 1


PLAIN: list[Any] = [
    None,
    True,
    -5,
    1.5,
    "text",
    b"bytes",
    [],
    [1, [2]],
    (1, "a"),
    {1, 2},
    frozenset({3}),
    {},
    deque([1]),
]


@pytest.mark.parametrize("value", [*PLAIN, {1: "a", (2, 3): [b"x"], None: {"k": ()}}, ["list", [1]], ["dict", 7]])
def test_plain_values_come_back(value: Any) -> None:
    found = decode_object(encode_object(value))
    assert found == value
    assert type(found) is type(value)


def test_objects_come_back_without_their_constructors() -> None:
    order = Order("r", Slots(7, (1, 2)))
    order.hidden = "changed"
    order.extra = Frozen(frozenset({1}))  # type: ignore[attr-defined]
    found = decode_object(encode_object(Plain([order])))
    assert type(found) is Plain
    assert found.orders == [order]
    assert vars(found.orders[0]) == vars(order)
    assert type(found.by_id["r"].slots) is Slots
    assert decode_object(encode_object([Number.TWO, Plain.Inner()]))[0] is Number.TWO


@pytest.mark.parametrize("value", [Counter(a=2), OrderedDict(a=2), defaultdict(int, a=2)])
def test_other_dicts_become_dicts(value: Any) -> None:
    assert decode_object(encode_object(value)) == {"a": 2}


def test_arrays_and_tensors_come_back() -> None:
    array, tensor = np.arange(6, dtype="<i8").reshape(2, 3).T, torch.arange(4.0).reshape(2, 2)
    found = decode_object(encode_object({"array": array, "tensor": tensor, "one": np.float32(2.0)}))
    np.testing.assert_array_equal(found["array"], array)
    assert torch.equal(found["tensor"], tensor)
    assert found["one"] == 2.0
    found["array"][0, 0] = 9  # as its own


def test_what_has_more_than_fields_is_refused() -> None:
    @dataclass
    class Hidden:
        pass

    for value, words in [
        (threading.Lock(), "_thread.lock cannot go to another process; use plain values"),
        (len, "builtin_function_or_method"),
        (collections, "builtins.module"),
        (Hidden(), "define it at the top of its module"),
        (np.array([None]), "an array of object"),
        (1 << 70, "serialize ints"),
    ]:
        with pytest.raises((TypeError, OverflowError), match=words):
            encode_object(value)


@pytest.mark.parametrize(
    "packed",
    [
        ["object", "os:environ", []],
        ["object", "no.such:Thing", []],
        ["object", "os:nothing", []],
        ["object", "subprocess:Popen", 3],
        ["object", "builtins:int", []],
        ["object", "io:BytesIO", []],
        ["enum", "subprocess:Popen", "x"],
        ["namedtuple", "subprocess:Popen", []],
        ["array", "O", [1], b"x"],
        ["array", "<i8", [3], b"x"],
        ["call", "os:system", ["true"]],
        [],
    ],
)
def test_other_bytes_make_nothing(packed: Any) -> None:
    with pytest.raises(WireError):
        decode_object(msgspec.msgpack.encode(packed))


def test_no_prefix_of_an_object_is_one() -> None:
    data = encode_object(Plain([Order("r", Slots(7))]))
    for size in range(len(data)):
        with pytest.raises(WireError):
            decode_object(data[:size])
