"""The structs between frontend and engine core (checklist S3-DEF)."""

from __future__ import annotations

import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import (
    FINISH_REASON_STRINGS,
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from quire.wire.execution import LogprobsLists, SchedulerOutput
from quire.wire.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from quire.wire.stats import PrefillStats, PrefixCacheStats, SchedulerStats

STRUCTS = [EngineCoreRequest, EngineCoreOutput, EngineCoreOutputs, EngineCoreEvent, UtilityOutput, SchedulerOutput]


def test_finish_reasons_keep_their_numbers_and_words() -> None:
    assert FINISH_REASON_STRINGS == ("stop", "length", "abort", "error", "repetition")
    assert [str(r) for r in FinishReason] == list(FINISH_REASON_STRINGS)
    assert [int(r) for r in FinishReason] == [0, 1, 2, 3, 4]


def test_request_types_are_single_bytes() -> None:
    assert [t.value for t in EngineCoreRequestType] == [b"\x00", b"\x01", b"\x02", b"\x03", b"\x04", b"\x05", b"\x06"]


def test_an_event_has_a_monotonic_stamp() -> None:
    assert [int(t) for t in EngineCoreEventType] == [1, 2, 3]
    before = time.monotonic()
    event = EngineCoreEvent.new_event(EngineCoreEventType.QUEUED)
    assert before <= event.timestamp <= time.monotonic()
    assert EngineCoreEvent.new_event(EngineCoreEventType.PREEMPTED, 5.0).timestamp == 5.0


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda s: s.__name__)
def test_structs_are_positional_and_untracked(struct: type[msgspec.Struct]) -> None:
    config = struct.__struct_config__
    assert config.array_like
    assert config.omit_defaults
    assert not config.gc


def test_request_params_is_whichever_is_set() -> None:
    sampling, pooling = SamplingParams(), PoolingParams()
    assert EngineCoreRequest("a", [1], sampling, None, 0.0).params is sampling
    assert EngineCoreRequest("a", [1], None, pooling, 0.0).params is pooling
    with pytest.raises(AssertionError):
        _ = EngineCoreRequest("a", [1], None, None, 0.0).params


def test_request_round_trip() -> None:
    request = EngineCoreRequest("r", [1, 2], None, None, 0.5, priority=-3, cache_salt="")
    data = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(data, type=EngineCoreRequest) == request


def test_outputs_are_stamped_with_monotonic_time() -> None:
    before = time.monotonic()
    assert before <= EngineCoreOutputs().timestamp <= time.monotonic()
    assert EngineCoreOutputs(timestamp=7.0).timestamp == 7.0


def test_an_output_with_a_finish_reason_is_finished() -> None:
    assert not EngineCoreOutput("a", [1]).finished
    assert EngineCoreOutput("a", [], finish_reason=FinishReason.STOP).finished


def test_rows_of_logprobs_can_be_sliced() -> None:
    rows = LogprobsLists([[1], [2], [3]], [[-1.0], [-2.0], [-3.0]], [1, 2, 3])
    assert rows.slice_rows(1, 3) == LogprobsLists([[2], [3]], [[-2.0], [-3.0]], [2, 3])


def test_cached_tokens_are_local_and_remote_ones() -> None:
    stats = PrefillStats(10, 4, 5, 1)
    assert stats.num_cached_tokens == 6


def test_prefix_cache_stats_keep_preempted_look_ups_apart() -> None:
    stats = PrefixCacheStats()
    stats.record(10, 4, preempted=False)
    stats.record(20, 16, preempted=True)
    assert (stats.requests, stats.queries, stats.hits) == (1, 10, 4)
    assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 20, 16)


def test_stats_snapshots_do_not_share_counters() -> None:
    SchedulerStats().prefix_cache_stats.record(1, 1, preempted=False)
    assert SchedulerStats().prefix_cache_stats.queries == 0


def test_kv_cache_config_round_trip() -> None:
    config = KVCacheConfig(
        4,
        [],
        [
            KVCacheGroupSpec(["a"], FullAttentionSpec(16, 2, 8, "float32")),
            KVCacheGroupSpec(["b"], SlidingWindowSpec(16, 2, 8, "bfloat16", sliding_window=32)),
        ],
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=KVCacheConfig) == config
    assert config.block_sizes == [16, 16]
    assert config.kv_cache_groups[0].kv_cache_spec.page_size_bytes == 2 * 16 * 2 * 8 * 4
    assert config.kv_cache_groups[1].kv_cache_spec.page_size_bytes == 2 * 16 * 2 * 8 * 2


@given(st.lists(st.integers(0, 50), min_size=3, max_size=3), st.integers(0, 150))
def test_the_end_of_a_prompt_has_the_end_of_its_sources(parts: list[int], start: int) -> None:
    """Locally cached, cached elsewhere, computed: one after the other along the prompt."""
    local, external, computed = parts
    sources = "l" * local + "e" * external + "c" * computed
    start = min(start, len(sources))
    rest = sources[start:]
    stats = PrefillStats(len(sources), computed, local, external).after(start)
    assert stats == PrefillStats(len(rest), rest.count("c"), rest.count("l"), rest.count("e"))
