"""The manager on worked examples: what is reused, in what order blocks go, and what a refusal leaves behind."""

from __future__ import annotations

import pytest

from quire.engine.kv_cache.block import IntegrityError
from quire.engine.kv_cache.manager import KVCacheManager
from quire.lora_request import LoRARequest
from quire.wire.block_hash import BlockHash, ExtraKeys, hash_block
from quire.wire.kv_cache import KVCacheConfig
from quire.wire.stats import PrefixCacheStats
from tests.unit.engine.kv_cache.model import (
    ModelRequest,
    admit,
    decode,
    free_ids,
    full,
    letters,
    make_manager,
    sliding,
    table,
)


def _hit(manager: KVCacheManager, text: str, **fields: object) -> int:
    """Tokens that a request with this prompt would find."""
    return manager.get_computed_blocks(ModelRequest("probe", letters(text), **fields))[1]  # type: ignore[arg-type]


def _no_groups() -> KVCacheConfig:
    return KVCacheConfig(1, [], [])


def _is_cached(manager: KVCacheManager, request: ModelRequest) -> list[bool]:
    return [block.block_hash is not None for block in manager.get_tables(request.request_id)[0]]


def test_worked_example_of_three_requests() -> None:
    """Quire's rules: block 0 is the null block, un-hashed blocks are freed to the head."""
    manager = make_manager(11)  # ten blocks can be given out: 1...10
    first = ModelRequest("0", letters("ABCDEFGHIJKLMNO"))
    assert admit(manager, first) == 0
    assert table(manager, first) == [1, 2, 3, 4]
    decode(manager, first, letters("PQ"))  # P fills block 4, Q opens block 5
    assert table(manager, first) == [1, 2, 3, 4, 5]
    assert _is_cached(manager, first) == [True] * 4 + [False]

    second = ModelRequest("1", letters("ABCDEFGHIJklmn"))
    assert admit(manager, second) == 8
    assert table(manager, second) == [1, 2, 6, 7]
    assert [block.ref_cnt for block in manager.get_tables("1")[0]] == [2, 2, 1, 1]
    assert free_ids(manager) == [8, 9, 10]

    manager.free(
        first
    )  # 5 was never full: head. 4 and 3 are cached: tail, end of the prefix first. 2 and 1 are shared.
    assert free_ids(manager) == [5, 8, 9, 10, 4, 3]

    third = ModelRequest("2", letters("ABCDEFGHIJKLabcdefghijklmnopq"))
    assert admit(manager, third) == 12  # block 3 is hit while it is free
    assert table(manager, third) == [1, 2, 3, 5, 8, 9, 10, 4]  # and block 4, though cached, is evicted
    assert free_ids(manager) == []
    manager.check_integrity()


# -- what is reused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "num_hit"),
    [
        ("ABCDEFG", 4),  # full blocks only
        ("ABCDEFGHI", 8),
        ("ABCDEFGH", 4),  # the last token is always computed
        ("ABCDE", 4),
        ("ABCD", 0),
        ("ABC", 0),
        ("XBCDEFGHI", 0),  # a block counts only after its own prefix
        ("ABCDXFGHI", 4),
    ],
)
def test_longest_prefix_of_full_blocks(prompt: str, num_hit: int) -> None:
    manager = make_manager(20)
    admit(manager, ModelRequest("0", letters("ABCDEFGHIJ")))
    assert _hit(manager, prompt) == num_hit


def test_first_example_of_allocation() -> None:
    """ABCD|EFGH are hits, IJ is new, and nothing more becomes full."""
    manager = make_manager(20)
    admit(manager, ModelRequest("0", letters("ABCDEFGHXX")))
    request = ModelRequest("1", letters("ABCDEFGHIJ"))
    blocks, num_hit = manager.get_computed_blocks(request)
    assert (blocks.get_block_ids(), num_hit) == (([1, 2],), 8)
    new_blocks = manager.allocate_slots(request, 2, num_hit, blocks)
    assert new_blocks is not None
    assert new_blocks.get_block_ids() == ([4],)
    assert _is_cached(manager, request) == [True, True, False]


def test_looking_up_changes_nothing() -> None:
    manager = make_manager(20)
    request = ModelRequest("0", letters("ABCDEFGH"))
    admit(manager, request)
    manager.free(request)
    before = free_ids(manager)
    assert _hit(manager, "ABCDEFGHI") == _hit(manager, "ABCDEFGHI") == 8
    assert free_ids(manager) == before
    manager.check_integrity()


@pytest.mark.parametrize("salts", [(None, ""), (None, "a"), ("", "a"), ("a", "b")])
def test_salts_part_caches(salts: tuple[str | None, str | None]) -> None:
    manager = make_manager(20)
    admit(manager, ModelRequest("0", letters("ABCDEFGHI"), cache_salt=salts[0]))
    assert _hit(manager, "ABCDEFGHI", cache_salt=salts[0]) == 8
    assert _hit(manager, "ABCDEFGHI", cache_salt=salts[1]) == 0


def test_adapters_part_caches() -> None:
    manager = make_manager(20)
    lora = LoRARequest("sql", 1, "/adapters/sql")
    admit(manager, ModelRequest("0", letters("ABCDEFGHI"), lora_request=lora))
    assert _hit(manager, "ABCDEFGHI") == 0
    assert _hit(manager, "ABCDEFGHI", lora_request=LoRARequest("sql", 2, "/adapters/sql")) == 8
    assert _hit(manager, "ABCDEFGHI", lora_request=LoRARequest("sql", 1, "/adapters/other")) == 0


def _one_bit(parent: BlockHash | None, token_ids: object, extra_keys: ExtraKeys | None) -> BlockHash:
    return bytes([hash_block(parent, token_ids, extra_keys)[0] & 1])  # type: ignore[arg-type]


def test_a_collision_is_no_hit() -> None:
    """Every prompt has the same hashes, and finds its own blocks and no other prompt's."""
    manager = make_manager(60)
    prompts = [left + middle + "Z" for left in ("ABCD", "EFGH", "IJKL") for middle in ("MNOP", "QRST", "UVWX")]

    def make(prompt: str) -> ModelRequest:
        return ModelRequest(prompt, letters(prompt), hash_function=lambda *_: b"same")

    requests = [make(prompt) for prompt in prompts]
    hits = [admit(manager, request) for request in requests]
    assert hits == [0, 4, 4] * 3
    for request in requests:
        blocks, num_hit = manager.get_computed_blocks(make(request.request_id))
        assert num_hit == 8
        assert blocks.get_block_ids()[0] == table(manager, request)[:2]
    manager.check_integrity()


def test_salts_survive_collisions() -> None:
    manager = make_manager(20)
    for index, salt in enumerate((None, "", "a")):
        request = ModelRequest(str(index), letters("ABCDEFGHI"), cache_salt=salt, hash_function=_one_bit)
        assert admit(manager, request) == 0
        assert _hit(manager, "ABCDEFGHI", cache_salt=salt, hash_function=_one_bit) == 8


def test_nothing_is_cached_when_caching_is_off() -> None:
    manager = make_manager(20, enable_caching=False)
    request = ModelRequest("0", letters("ABCDEFGHI"))
    assert admit(manager, request) == 0
    assert _is_cached(manager, request) == [False] * 3
    assert _hit(manager, "ABCDEFGHI") == 0
    manager.free(request)
    assert free_ids(manager)[:3] == [3, 2, 1]  # the last used are the next used


def test_a_request_may_write_the_cache_without_reading_it() -> None:
    manager = make_manager(20)
    admit(manager, ModelRequest("0", letters("ABCDEFGHI")))
    assert _hit(manager, "ABCDEFGHI", skip_reading_prefix_cache=True) == 0
    writer = ModelRequest("1", letters("abcdefgh"), skip_reading_prefix_cache=True)
    assert admit(manager, writer) == 0
    assert _hit(manager, "abcdefghi") == 8


def test_requests_of_one_step_share_what_it_computes() -> None:
    """Blocks can be hit from their allocation on: a worker writes keys and values before it reads any."""
    manager = make_manager(20)
    first, second = ModelRequest("0", letters("ABCDEFGHI")), ModelRequest("1", letters("ABCDEFGHJ"))
    assert manager.allocate_slots(first, 9) is not None  # num_computed_tokens is still 0
    assert admit(manager, second) == 8
    assert table(manager, second)[:2] == table(manager, first)[:2]


def test_tables_only_grow() -> None:
    """A full block of a running request is not exchanged for an equal block."""
    manager = make_manager(20)
    first, second = ModelRequest("0", letters("ABCDEFGHI")), ModelRequest("1", letters("ABCDEF"))
    admit(manager, first)
    assert admit(manager, second) == 4
    before = table(manager, second)
    decode(manager, second, letters("GHI"))
    assert table(manager, second)[: len(before)] == before
    assert table(manager, second)[1] != table(manager, first)[1]
    pool = manager.block_pool
    twins = [pool.blocks[table(manager, request)[1]] for request in (first, second)]
    assert twins[0].block_hash == twins[1].block_hash
    assert list(pool.cached_blocks.get(twins[0].block_hash or b"")) == twins
    manager.check_integrity()


def test_an_evicted_parent_computed_anew_leads_to_the_old_child() -> None:
    manager = make_manager(8)
    first = ModelRequest("0", letters("ABCDEFGHI"))
    admit(manager, first)
    manager.block_pool.evict_blocks(manager.get_tables("0")[0][:1])
    assert _hit(manager, "ABCDEFGHI") == 0
    second = ModelRequest("1", letters("ABCDX"))
    admit(manager, second)
    assert manager.get_computed_blocks(ModelRequest("2", letters("ABCDEFGHI")))[0].get_block_ids() == ([4, 2],)


# -- what is cached when -----------------------------------------------------------------------------------------------


def test_a_chunked_prompt_is_cached_chunk_by_chunk() -> None:
    manager = make_manager(20)
    request = ModelRequest("0", letters("ABCDEFGHIJKLM"))
    cached = []
    for num_new_tokens in (3, 3, 4, 3):
        assert manager.allocate_slots(request, num_new_tokens) is not None
        request.num_computed_tokens += num_new_tokens
        cached.append(_is_cached(manager, request))
    assert cached == [[False], [True, False], [True, True, False], [True, True, True, False]]


def test_drafts_are_never_cached() -> None:
    """Seven certain tokens and five drafts: slots for twelve, but the second block may still turn out otherwise."""
    manager = make_manager(20)
    request = ModelRequest("0", letters("ABCDEF"))
    admit(manager, request)
    request.append(*letters("G"))
    assert manager.allocate_slots(request, 6) is not None
    assert len(table(manager, request)) == 3
    assert _is_cached(manager, request) == [True, False, False]
    request.append(*letters("HI"))  # two drafts accepted, three rejected
    request.num_computed_tokens = 8
    assert manager.allocate_slots(request, 1) is not None
    assert _is_cached(manager, request) == [True, True, False]
    manager.check_integrity()


def test_lookahead_takes_blocks_ahead_and_stops_at_the_models_length() -> None:
    manager = make_manager(20, max_model_len=10)
    request = ModelRequest("0", letters("ABCDEF"))
    new_blocks = manager.allocate_slots(request, 6, num_lookahead_tokens=3)
    assert new_blocks is not None
    assert new_blocks.get_block_ids() == ([1, 2, 3],)
    assert _is_cached(manager, request) == [True, False, False]
    request.num_computed_tokens = 6
    decode(manager, request, letters("GHI"))
    request.append(*letters("J"))
    assert manager.allocate_slots(request, 1, num_lookahead_tokens=5) is manager.empty_kv_cache_blocks
    manager.check_integrity()


def test_a_request_without_hashes_is_served_uncached() -> None:
    manager = make_manager(20)
    request = ModelRequest("0", letters("ABCDEFGHI"))
    request.block_hashes = []
    assert admit(manager, request) == 0
    assert _is_cached(manager, request) == [False] * 3


# -- giving back -------------------------------------------------------------------------------------------------------


def test_the_end_of_a_prefix_is_evicted_first() -> None:
    """The order is IJ|EFGH|ABCD."""
    manager = make_manager(5)
    request = ModelRequest("0", letters("ABCDEFGHIJKL"))
    admit(manager, request)
    manager.free(request)
    assert free_ids(manager) == [4, 3, 2, 1]
    hits = []
    for index in range(4):
        admit(manager, ModelRequest(f"new {index}", [index]))
        hits.append(_hit(manager, "ABCDEFGHIJKLM"))
    assert hits == [12, 8, 4, 0]


def test_shared_blocks_stay() -> None:
    manager = make_manager(20)
    first, second = ModelRequest("0", letters("ABCDEFGHI")), ModelRequest("1", letters("ABCDEFGHJ"))
    admit(manager, first)
    admit(manager, second)
    manager.free(first)
    assert [block.ref_cnt for block in manager.get_tables("1")[0]] == [1, 1, 1]
    assert manager.get_tables("0") == ()
    manager.free(second)
    assert manager.usage == 0.0
    manager.check_integrity()


def test_freeing_what_was_never_admitted_does_nothing() -> None:
    manager = make_manager(20)
    manager.free(ModelRequest("0", letters("ABC")))
    assert manager.get_block_ids("0") == ([],)
    manager.check_integrity()


def test_a_preempted_request_finds_its_blocks_again() -> None:
    manager = make_manager(20)
    request = ModelRequest("0", letters("ABCDEF"))
    admit(manager, request)
    decode(manager, request, letters("GHIJ"))
    manager.free(request)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert admit(manager, request) == 8
    assert table(manager, request) == [1, 2, 3]


def test_blocks_of_a_step_that_does_not_happen_are_not_cached() -> None:
    """A running request is scheduled and, in the same `schedule()`, preempted: EFGH is never computed."""
    manager = make_manager(20)
    request = ModelRequest("0", letters("ABCDEFGHIJKLMN"))
    admit(manager, request, 6)
    assert manager.allocate_slots(request, 8) is not None
    assert _is_cached(manager, request) == [True, True, True, False]
    manager.free(request)  # num_computed_tokens is still 6
    assert _hit(manager, "ABCDEFGHIJKLMN") == 4
    assert free_ids(manager)[:3] == [4, 3, 2]
    manager.check_integrity()


def test_hits_of_a_request_preempted_at_once_stay_cached() -> None:
    manager = make_manager(20)
    first, second = ModelRequest("0", letters("ABCDEFGHI")), ModelRequest("1", letters("ABCDEFGHIJKLM"))
    admit(manager, first)
    blocks, num_hit = manager.get_computed_blocks(second)
    assert manager.allocate_slots(second, 5, num_hit, blocks) is not None
    manager.free(second)
    assert _hit(manager, "ABCDEFGHIJKLM") == 8
    manager.check_integrity()


def test_sharing_what_nobody_will_compute_is_an_error() -> None:
    manager = make_manager(20)
    first, second = ModelRequest("0", letters("ABCDEFGHI")), ModelRequest("1", letters("ABCDEFGHJ"))
    assert manager.allocate_slots(first, 9) is not None
    assert admit(manager, second) == 8
    with pytest.raises(IntegrityError, match=r"request 0 is freed with 0 computed tokens.*preempt before admitting"):
        manager.free(first)


def test_a_reset_waits_until_no_block_is_used() -> None:
    manager = make_manager(20)
    request = ModelRequest("0", letters("ABCDEFGHI"))
    admit(manager, request)
    assert not manager.reset_prefix_cache()
    manager.take_prefix_cache_stats()
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert _hit(manager, "ABCDEFGHI") == 0
    assert manager.take_prefix_cache_stats() == PrefixCacheStats(reset=True)
    assert manager.take_prefix_cache_stats() == PrefixCacheStats()


# -- refusing ----------------------------------------------------------------------------------------------------------


def _snapshot(manager: KVCacheManager, *requests: ModelRequest) -> object:
    manager.check_integrity()
    return (
        free_ids(manager),
        [(block.ref_cnt, block.block_hash) for block in manager.block_pool.blocks],
        [manager.get_block_ids(request.request_id) for request in requests],
    )


def test_a_refusal_changes_nothing_for_a_running_request() -> None:
    manager = make_manager(4)
    first, second = ModelRequest("0", letters("ABCDEFGH")), ModelRequest("1", letters("abcd"))
    admit(manager, first)
    admit(manager, second)
    first.append(*letters("I"))
    before = _snapshot(manager, first, second)
    assert manager.allocate_slots(first, 1) is None
    assert _snapshot(manager, first, second) == before
    manager.free(second)
    assert manager.allocate_slots(first, 1) is not None


def test_a_refusal_changes_nothing_for_a_new_request() -> None:
    """Two hits are free: they count as needed, so that 2 + 2 blocks do not fit into 3."""
    manager = make_manager(5)
    first, second = ModelRequest("0", letters("ABCDEFGH")), ModelRequest("1", letters("x"))
    admit(manager, first)
    manager.free(first)
    admit(manager, second)
    manager.take_prefix_cache_stats()
    third = ModelRequest("2", letters("ABCDEFGHIJKLM"))
    before = _snapshot(manager, second, third)
    assert admit(manager, third) is None
    assert _snapshot(manager, second, third) == before
    assert manager.take_prefix_cache_stats() == PrefixCacheStats()
    manager.free(second)
    assert admit(manager, third) == 8


def test_hits_in_use_by_others_take_no_room() -> None:
    manager = make_manager(5)
    admit(manager, ModelRequest("0", letters("ABCDEFGH")))
    assert admit(manager, ModelRequest("1", letters("ABCDEFGHIJKLMN"))) == 8


@pytest.mark.parametrize(("num_blocks", "fits"), [(5, True), (4, False)])
def test_the_whole_request_must_fit(num_blocks: int, fits: bool) -> None:
    manager = make_manager(num_blocks)
    request = ModelRequest("0", letters("ABCDEFGHIJKLM"))
    assert (manager.allocate_slots(request, 4, full_sequence_must_fit=True) is not None) is fits
    manager.check_integrity()


def test_the_whole_request_must_fit_beyond_its_hits() -> None:
    manager = make_manager(5)
    first, second = ModelRequest("0", letters("ABCDEFGH")), ModelRequest("1", letters("ABCDEFGHIJKLMN"))
    admit(manager, first)
    blocks, num_hit = manager.get_computed_blocks(second)
    assert manager.allocate_slots(second, 1, num_hit, blocks, full_sequence_must_fit=True) is not None


@pytest.mark.parametrize(("reserved", "fits"), [(0, True), (1, True), (2, False)])
def test_reserved_blocks_stay_free(reserved: int, fits: bool) -> None:
    manager = make_manager(4)
    request = ModelRequest("0", letters("ABCDEFGH"))
    assert (manager.allocate_slots(request, 8, reserved_blocks=reserved) is not None) is fits


def test_reserved_blocks_do_not_stop_who_needs_none() -> None:
    manager = make_manager(2)
    request = ModelRequest("0", letters("AB"))
    admit(manager, request)
    request.append(*letters("C"))
    assert manager.allocate_slots(request, 1, reserved_blocks=5) is manager.empty_kv_cache_blocks


def test_misuse_is_an_error() -> None:
    manager = make_manager(20)
    request = ModelRequest("0", letters("ABCDEFGHI"))
    admit(manager, request)
    other = ModelRequest("1", letters("ABCDEFGHJ"))
    blocks, num_hit = manager.get_computed_blocks(other)
    with pytest.raises(ValueError, match="0 new tokens for request 0"):
        manager.allocate_slots(request, 0)
    with pytest.raises(ValueError, match="2 hit blocks as 7 computed tokens for request 1"):
        manager.allocate_slots(other, 2, 7, blocks)
    with pytest.raises(ValueError, match="come at admission only"):
        manager.allocate_slots(request, 1, num_hit, blocks)


# -- sliding windows and several groups --------------------------------------------------------------------------------


def test_blocks_that_fall_out_of_the_window_are_freed() -> None:
    manager = make_manager(20, sliding(6))
    request = ModelRequest("0", letters("ABCDEFGHIJKL"))
    admit(manager, request)
    assert table(manager, request) == [1, 2, 3]  # one step: each of its tokens has to see its own window
    tables = []
    for letter in "MNOPQRS":
        decode(manager, request, letters(letter))
        tables.append(table(manager, request))
        manager.check_integrity()
    # Token M, at position 12, reads from position 7 on, in block 2; token N from 8 on.
    assert tables == [[0, 2, 3, 4], *[[0, 0, 3, 4]] * 3, *[[0, 0, 3, 4, 5]], *[[0, 0, 0, 4, 5]] * 2]
    assert free_ids(manager)[-3:] == [1, 2, 3]


def test_a_windows_own_old_blocks_make_room() -> None:
    """Four usable blocks and a window of 4: the request goes on as long as it likes."""
    manager = make_manager(4, sliding(4))
    request = ModelRequest("0", letters("ABCDEFGH"))
    admit(manager, request)
    decode(manager, request, range(40))
    assert len(table(manager, request)) == 12
    assert sum(block_id != 0 for block_id in table(manager, request)) <= 2
    manager.check_integrity()


def test_old_blocks_count_as_room_only_if_nobody_shares_them() -> None:
    manager = make_manager(4, sliding(4))
    first, second = ModelRequest("0", letters("ABCDEFGH")), ModelRequest("1", letters("ABCDE"))
    admit(manager, first)
    assert admit(manager, second) == 4
    assert table(manager, second) == [1, 3]
    first.append(*letters("I"))
    before = _snapshot(manager, first, second)
    assert manager.allocate_slots(first, 1) is None  # block 1 left its window, but the other request reads it
    assert _snapshot(manager, first, second) == before
    manager.free(second)
    assert manager.allocate_slots(first, 1) is not None
    assert table(manager, first) == [0, 2, 3]


def test_a_window_hit_needs_only_the_windows_blocks() -> None:
    manager = make_manager(20, sliding(5))
    first = ModelRequest("0", letters("ABCDEFGHIJKL"))
    admit(manager, first)
    decode(manager, first, letters("MNOP"))
    assert table(manager, first) == [0, 0, 3, 4]
    manager.block_pool.evict_blocks(manager.block_pool.blocks[1:3])
    second = ModelRequest("1", letters("ABCDEFGHIJKLX"))
    assert admit(manager, second) == 12
    assert table(manager, second) == [0, 0, 3, 5]
    assert _hit(manager, "ABCDEFGHijklX") == 0
    assert _hit(manager, "abcdEFGHIJKLX") == 0  # equal within the window is not enough
    decode(manager, second, letters("YZabc"))
    manager.check_integrity()
    manager.free(second)
    manager.free(first)
    manager.check_integrity()
    assert manager.usage == 0.0


def test_groups_have_tables_of_one_length() -> None:
    manager = make_manager(30, full(), sliding(5))
    first = ModelRequest("0", letters("ABCDEFGHIJKL"))
    admit(manager, first)
    assert manager.get_block_ids("0") == ([1, 2, 3], [4, 5, 6])
    decode(manager, first, letters("MN"))
    assert manager.get_block_ids("0") == ([1, 2, 3, 7], [0, 0, 6, 8])
    second = ModelRequest("1", letters("ABCDEFGHIJKLX"))
    assert admit(manager, second) == 12
    assert manager.get_block_ids("1") == ([1, 2, 3, 9], [0, 0, 6, 10])
    manager.block_pool.evict_blocks([manager.block_pool.blocks[6]])
    assert _hit(manager, "ABCDEFGHIJKLX") == 8  # the window before I is still there, though free
    manager.check_integrity()


def test_groups_are_freed_side_by_side() -> None:
    """A block that is evicted first is useless in every group."""
    manager = make_manager(7, full(), full())
    request = ModelRequest("0", letters("ABCDEFGHI"))
    admit(manager, request)
    assert manager.get_block_ids("0") == ([1, 2, 3], [4, 5, 6])
    manager.free(request)
    assert free_ids(manager) == [3, 6, 2, 5, 1, 4]


def test_the_whole_request_counts_a_window_once() -> None:
    """40 tokens: 10 blocks of full attention, and ceil((3 + 8) / 4) + 1 of the window while steps are of 8 tokens."""
    request = ModelRequest("0", list(range(40)))
    for num_blocks, fits in ((14, False), (15, True)):
        manager = make_manager(num_blocks, full(), sliding(4), max_step_tokens=8)
        assert (manager.allocate_slots(request, 8, full_sequence_must_fit=True) is not None) is fits
    while request.num_computed_tokens < 32:
        request.num_computed_tokens += 8
        assert manager.allocate_slots(request, 8, full_sequence_must_fit=True) is not None
        manager.check_integrity()
    manager = make_manager(20, full(), sliding(4))  # without a limit per step, a window is no bound
    assert manager.allocate_slots(ModelRequest("0", list(range(40))), 8, full_sequence_must_fit=True) is None


def test_a_rejected_draft_still_finds_its_window() -> None:
    """Computed counts drafts while they are in flight; what is dropped must not: the request may fall back to them."""
    manager = make_manager(20, sliding(4))
    request = ModelRequest("0", letters("ABCDEFGH"))
    admit(manager, request)
    request.append(*letters("I"))
    assert manager.allocate_slots(request, 4) is not None  # I and three drafts
    request.num_computed_tokens = 12
    assert manager.allocate_slots(request, 1) is not None  # the next step, scheduled before the result is known
    assert table(manager, request) == [0, 2, 3, 4]  # I, at position 8, reads from 5 on


def test_a_model_without_kv_cache() -> None:
    manager = KVCacheManager(_no_groups(), 100, enable_caching=True, log_stats=True)
    request = ModelRequest("0", letters("ABCDEFGHI"))
    assert admit(manager, request) == 0
    assert manager.get_block_ids("0") == ()
    manager.check_integrity()
    manager.free(request)
    assert manager.usage == 0.0


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_one_query_per_admission() -> None:
    """P12 (i): a request that waits for a hundred steps is counted once, when it is let in."""
    manager = make_manager(4)
    first, second = ModelRequest("0", letters("ABCDEFGHI")), ModelRequest("1", letters("ABCDEFGHJK"))
    admit(manager, first)
    assert manager.take_prefix_cache_stats() == PrefixCacheStats(requests=1, queries=9)
    for _ in range(100):
        assert admit(manager, second) is None
    decode(manager, first, letters("J"))
    assert manager.take_prefix_cache_stats() == PrefixCacheStats()
    manager.free(first)
    assert admit(manager, second) == 8
    assert manager.take_prefix_cache_stats() == PrefixCacheStats(requests=1, queries=10, hits=8)


def test_a_preempted_request_is_counted_apart() -> None:
    manager = make_manager(10)
    request = ModelRequest("0", letters("ABCDEFGHI"))
    admit(manager, request)
    manager.take_prefix_cache_stats()
    manager.free(request)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    admit(manager, request)
    expected = PrefixCacheStats(preempted_requests=1, preempted_queries=9, preempted_hits=8)
    assert manager.take_prefix_cache_stats() == expected


def test_who_does_not_ask_is_not_counted() -> None:
    manager = make_manager(10)
    admit(manager, ModelRequest("0", letters("ABCDEFGHI"), skip_reading_prefix_cache=True))
    assert manager.take_prefix_cache_stats() == PrefixCacheStats()
    manager = make_manager(10, enable_caching=False)
    admit(manager, ModelRequest("0", letters("ABCDEFGHI")))
    assert manager.take_prefix_cache_stats() == PrefixCacheStats()


def test_stats_can_be_off() -> None:
    manager = KVCacheManager(_no_groups(), 100, enable_caching=True)
    assert manager.take_prefix_cache_stats() is None
    assert manager.reset_prefix_cache()


# -- the integrity check -----------------------------------------------------------------------------------------------


def _two_requests() -> KVCacheManager:
    manager = make_manager(20)
    admit(manager, ModelRequest("0", letters("ABCDEFGHI")))
    admit(manager, ModelRequest("1", letters("ABCDEFGHJ")))
    manager.check_integrity()
    return manager


def test_integrity_check_finds_a_lost_table() -> None:
    manager = _two_requests()
    del manager._requests["0"]
    with pytest.raises(IntegrityError, match=r"KVCacheBlock\(1, ref_cnt=2, .*\) is in 1 tables"):
        manager.check_integrity()


def test_integrity_check_finds_a_foreign_block() -> None:
    manager = _two_requests()
    manager._requests["0"].tables[0][2] = manager.block_pool.blocks[9]
    with pytest.raises(IntegrityError, match="is in 1 tables"):
        manager.check_integrity()


def test_integrity_check_finds_a_hole() -> None:
    manager = _two_requests()
    manager._requests["0"].tables[0][1] = manager.block_pool.null_block
    with pytest.raises(IntegrityError, match="lost a block of full attention"):
        manager.check_integrity()


def test_integrity_check_finds_a_table_of_another_length() -> None:
    manager = _two_requests()
    manager._requests["0"].tables[0].pop()
    with pytest.raises(IntegrityError, match="the tables of request 0 and their lengths differ"):
        manager.check_integrity()


def test_integrity_check_finds_a_shared_partial_block() -> None:
    manager = _two_requests()
    manager._requests["0"].num_cached_blocks = 2
    block = manager._requests["0"].tables[0][2]
    block.block_hash = b"k"
    with pytest.raises(IntegrityError, match="shares blocks that are not full"):
        manager.check_integrity()
