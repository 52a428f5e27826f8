"""The hash chain: what it tells apart, and that it is the same everywhere."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.kv_cache.hashing import block_extra_keys, make_block_hasher, stored_hashes
from quire.engine.request import Request
from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams
from quire.wire.block_hash import NONE_HASH, ExtraKeys, hash_block
from quire.wire.engine_core import EngineCoreRequest
from quire.wire.lora import NEVER
from tests.unit.engine.kv_cache.model import ModelRequest, letters

LORA = LoRARequest("sql", 1, "/adapters/sql")
GOLDEN = "5aebc9818935889216730ad770951c01ec6c793492a06bdb844d568f58f956b7"


def test_full_blocks_are_chained_and_the_rest_is_not_hashed() -> None:
    """Block size 4, thirteen tokens: three hashes, none for the partial fourth block."""
    request = ModelRequest("r", letters("ABCDEFGHIJKLM"))
    first = hash_block(None, letters("ABCD"), None)
    second = hash_block(first, letters("EFGH"), None)
    third = hash_block(second, letters("IJKL"), None)
    assert request.block_hashes == [first, second, third]
    request.append(*letters("NOP"))
    assert request.block_hashes == [first, second, third, hash_block(third, letters("MNOP"), None)]


@pytest.mark.parametrize("length", range(10))
def test_only_full_blocks_are_hashed(length: int) -> None:
    assert len(ModelRequest("r", list(range(length))).block_hashes) == length // 4


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 9), st.integers(0, 40))
def test_hashes_do_not_depend_on_how_tokens_arrive(tokens: list[int], block_size: int, cut: int) -> None:
    whole = ModelRequest("a", list(tokens), block_size=block_size)
    parts = ModelRequest("b", tokens[:cut], block_size=block_size)
    for token_id in tokens[cut:]:
        parts.append(token_id)
    assert parts.block_hashes == whole.block_hashes


def test_same_block_after_another_prefix_differs() -> None:
    one, other = ModelRequest("a", letters("ABCDSAME")), ModelRequest("b", letters("abcdSAME"))
    assert one.block_hashes[1] != other.block_hashes[1]


EXTRA_KEYS = st.one_of(
    st.none(),
    st.lists(
        st.lists(st.one_of(st.text(max_size=3), st.integers(-9, 99), st.binary(max_size=3)), max_size=3).map(tuple),
        min_size=1,
        max_size=3,
    ).map(tuple),
)
HASH_INPUTS = st.tuples(
    st.sampled_from([None, b"\0" * 32, b"\1" * 32]),
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 2), max_size=4).map(tuple),
    EXTRA_KEYS,
)


@given(HASH_INPUTS, HASH_INPUTS)
def test_equal_exactly_when_inputs_are(
    one: tuple[bytes | None, tuple[int, ...], ExtraKeys | None],
    other: tuple[bytes | None, tuple[int, ...], ExtraKeys | None],
) -> None:
    assert (hash_block(*one) == hash_block(*other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((("a", "b"),), (("a",), ("b",))),
        ((("ab",),), (("a", "b"),)),
        ((("a",),), ((b"a",),)),
        ((("1",),), ((1,),)),
        ((("a", ""),), (("a",),)),
        ((("s1:a",),), (("a",),)),
        ((("\ud800",),), (("\ud801",),)),
        ((("",),), None),
    ],
)
def test_encoding_of_extra_keys_is_injective(one: ExtraKeys, other: ExtraKeys | None) -> None:
    assert hash_block(None, [1], one) != hash_block(None, [1], other)


@pytest.mark.parametrize("value", [True, 1.5, [1], {"a"}])
def test_extra_keys_of_other_types_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="no str, int, bytes, None or tuple"):
        hash_block(None, [1], (("mm", value),))  # type: ignore[arg-type]


def test_none_inside_a_key_is_encoded() -> None:
    assert hash_block(None, [1], (("mm", None),)) != hash_block(None, [1], (("mm",),))  # type: ignore[arg-type]


def test_parent_of_the_first_block_is_a_constant() -> None:
    assert NONE_HASH.hex() == "e2dcc88e97fca13ab6355a8d0bb314bb1a1ed449420f721039d8b90cdf46a53e"
    assert hash_block(None, [1], None) == hash_block(NONE_HASH, [1], None)


def test_encoding_byte_for_byte() -> None:
    message = b"quire kv block 1\n" + NONE_HASH + struct.pack("<Qqq", 2, 70000, -1) + b"t1:t2:s1:ai12:"
    assert hash_block(None, [70000, -1], (("a", 12),)) == hashlib.sha256(message).digest()


def test_digest_is_the_same_in_every_process() -> None:
    """Golden digests, also under another hash seed: a change here invalidates caches shared between hosts."""
    keys = (("lora", "sql", "/adapters/sql"), ("cache_salt", "tenant-7"))
    golden = hash_block(hash_block(None, range(16), None), [70000, 1, 2, 3], keys).hex()
    assert golden == GOLDEN
    code = (
        "from quire.wire.block_hash import hash_block\n"
        f"print(hash_block(hash_block(None, range(16), None), [70000, 1, 2, 3], {keys!r}).hex())"
    )
    env = os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": str(Path(__file__).parents[4] / "src")}
    run = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    assert run.stdout.strip() == golden


def test_salt_enters_the_first_block_only_and_none_is_not_empty() -> None:
    tokens = letters("ABCDEFGH")
    unsalted, empty, salted = (ModelRequest("r", list(tokens), cache_salt=salt) for salt in (None, "", "x"))
    assert block_extra_keys(unsalted, 0, 4) is None
    assert block_extra_keys(empty, 0, 4) == (("cache_salt", ""),)
    assert block_extra_keys(salted, 1, 4) is None
    for index in range(2):  # the second block is told apart by its parent
        assert len({request.block_hashes[index] for request in (unsalted, empty, salted)}) == 3


def test_lora_enters_every_block_by_name_and_path() -> None:
    requests = [
        ModelRequest("r", letters("ABCDEFGH"), lora_request=lora)
        for lora in (None, LORA, LoRARequest("sql", 1, "/adapters/sql-2"), LoRARequest("sql2", 1, "/adapters/sql"))
    ]
    assert block_extra_keys(requests[1], 5, 4) == (("lora", "sql", "/adapters/sql"),)
    assert len({request.block_hashes[0] for request in requests}) == 4
    reloaded = ModelRequest("r", letters("ABCDEFGH"), lora_request=LORA, lora_revision=2)
    assert block_extra_keys(reloaded, 5, 4) == (("lora", "sql", "/adapters/sql"), ("lora_revision", 2))
    assert not set(reloaded.block_hashes) & set(requests[1].block_hashes)
    same = ModelRequest("r", letters("ABCDEFGH"), lora_request=LoRARequest("sql", 9, "/adapters/sql"))
    assert same.block_hashes == requests[1].block_hashes  # the int id is local to a process


def test_blocks_before_an_adapter_begins_are_the_base_model_s() -> None:
    base, whole, late, later, never = (
        ModelRequest("r", letters("ABCDEFGHIJKL"), lora_request=lora, lora_start=start, lora_revision=2)
        for lora, start in ((None, 0), (LORA, 0), (LORA, 5), (LORA, 6), (LORA, NEVER))
    )
    lora = (("lora", "sql", "/adapters/sql"), ("lora_revision", 2))
    assert [block_extra_keys(late, i, 4) for i in range(3)] == [None, (*lora, ("lora_start", 1)), lora]
    assert base.block_hashes[0] == late.block_hashes[0] == later.block_hashes[0] != whole.block_hashes[0]
    for index in (1, 2):
        assert len({request.block_hashes[index] for request in (base, whole, late, later)}) == 4
    assert never.block_hashes == base.block_hashes
    at_a_border = ModelRequest("r", letters("ABCDEFGHIJKL"), lora_request=LORA, lora_start=4, lora_revision=2)
    assert [block_extra_keys(at_a_border, i, 4) for i in range(3)] == [None, lora, lora]


def stored_of(digest: str, lora: LoRARequest | None = LORA, start: int = 0, revision: int = 1) -> list[bytes]:
    request: Any = ModelRequest(
        "r", letters("ABCDEFGHIJKLM"), lora_request=lora, lora_start=start, lora_revision=revision
    )
    request.report.adapter_digest = digest
    return stored_hashes(request, 4)


def test_outside_the_engine_an_adapter_counts_by_its_content() -> None:
    """Not by its name, its path or the number of its revision; without one hashes are those in the cache."""
    base = ModelRequest("r", letters("ABCDEFGHIJKLM")).block_hashes
    assert stored_of("", None) == base
    assert stored_of("") == [], "it was not loaded yet"
    first = stored_of("aa")
    assert first == stored_of("aa", LoRARequest("other", 9, "/elsewhere"), revision=3)
    assert (
        len(
            {
                *first,
                *stored_of("bb"),
                *base,
                *ModelRequest("r", letters("ABCDEFGHIJKL"), lora_request=LORA).block_hashes,
            }
        )
        == 12
    )
    late = stored_of("aa", start=6)
    assert late[0] == base[0], "before it begins the base model computes"
    assert late[1:] != stored_of("aa", start=7)[1:]
    assert stored_of("aa", start=NEVER) == base


def test_hashes_outside_the_engine_follow_tokens_and_other_files() -> None:
    request = Request(
        EngineCoreRequest("r", letters("ABCD"), SamplingParams(), None, 0.0, lora_request=LORA), make_block_hasher(4)
    )
    request.report.adapter_digest = "aa"
    assert len(stored_hashes(request, 4)) == 1
    request.append_output_token_ids(letters("EFGH"))
    assert stored_hashes(request, 4) == stored_of("aa")[:2]
    request.bind_adapter((1, 2))
    assert stored_hashes(request, 4) == [], "the files of another revision are not known yet"
    request.report.adapter_digest = "bb"
    assert stored_hashes(request, 4) == stored_of("bb")[:2]


def test_image_hash_tells_equal_placeholders_apart() -> None:
    """A multimodal request will pass its hashes through the extra keys."""
    placeholders = [99] * 4
    assert hash_block(None, placeholders, (("mm", "cat", 0),)) != hash_block(None, placeholders, (("mm", "dog", 0),))


def test_hash_function_can_be_replaced() -> None:
    hasher = make_block_hasher(2, lambda parent, tokens, keys: (parent or b"") + bytes(tokens))
    request = ModelRequest("r", [1, 2, 3, 4, 5])
    request.block_hashes = []
    assert hasher(request) == [b"\1\2", b"\1\2\3\4"]


# -- prompt embeddings ------------------------------------------------------------------------------------------------


def embeds_request(rows: Any, is_token_ids: list[bool] | None = None, ids: list[int] | None = None) -> Request:
    origin = EngineCoreRequest("r", ids or [0] * len(rows), SamplingParams(), None, 0.0)
    origin.prompt_embeds, origin.prompt_is_token_ids = rows, is_token_ids
    return Request(origin, make_block_hasher(4))


def test_rows_enter_the_blocks_that_they_are_in() -> None:
    rows = np.arange(24, dtype=np.float32).reshape(12, 2)
    others = rows.copy()
    others[5] += 1
    first, second = embeds_request(rows), embeds_request(others)
    assert first.block_hashes == embeds_request(rows.copy()).block_hashes
    assert first.block_hashes[0] == second.block_hashes[0]
    assert first.block_hashes[1] != second.block_hashes[1]
    assert block_extra_keys(first, 2, 4) == block_extra_keys(second, 2, 4)  # the chain differs
    assert first.block_hashes[2] != second.block_hashes[2]


def test_which_positions_are_tokens_counts_and_rows_of_tokens_do_not() -> None:
    rows = np.ones((8, 2), np.float32)
    mask = [True, False, True, True, True, True, True, True]
    ids = [5, 0, 6, 7, 1, 2, 3, 4]
    first = embeds_request(rows, mask, ids)
    others = rows.copy()
    others[[0, 2, 3]] = 9
    assert embeds_request(others, mask, ids).block_hashes == first.block_hashes
    assert embeds_request(rows, [True, False, False, *mask[3:]], ids).block_hashes[0] != first.block_hashes[0]
    assert block_extra_keys(first, 1, 4) is None  # tokens only
