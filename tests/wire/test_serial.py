"""Structs to frames and back: nothing changes, large arrays are not copied, and what does not fit is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    UtilityOutput,
)
from quire.wire.execution import LogprobsLists, LogprobsTensors
from quire.wire.serial import (
    ARRAY_DTYPES,
    OUT_OF_BAND_BYTES,
    Frame,
    MsgpackDecoder,
    MsgpackEncoder,
    WireError,
)
from quire.wire.stats import PrefillStats, PrefixCacheStats, SchedulerStats
from tests.seeds import examples

from .equality import assert_same
from .samples import LARGE_ARRAY, PROMPT_LOGPROBS, SMALL_ARRAY

# -- round trips ---------------------------------------------------------------------------------------------------

TEXT = st.text(max_size=20)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=50)
COUNT = st.integers(0, 2**63 - 1)
SECONDS = st.floats(0, 1e12)
ARRAYS = st.one_of(
    st_numpy.arrays(np.dtype(name), st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=12))
    for name in sorted(ARRAY_DTYPES)
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)
PARAMS = st.builds(
    SamplingParams,
    n=st.just(1),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(-1, 1000),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3),
    stop_token_ids=TOKENS,
    max_tokens=st.none() | st.integers(1, 2**31),
    logprobs=st.none() | st.integers(-1, 20),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=4),
    extra_args=st.none() | st.dictionaries(TEXT, PLAIN, max_size=3),
)
LORAS = st.builds(
    LoRARequest,
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20),
    st.integers(1, 2**63 - 1),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20),
)
REQUESTS = st.builds(
    EngineCoreRequest,
    request_id=TEXT,
    prompt_token_ids=st.none() | TOKENS,
    sampling_params=st.none() | PARAMS,
    pooling_params=st.none(),
    arrival_time=SECONDS,
    lora_request=st.none() | LORAS,
    cache_salt=st.none() | TEXT,
    prompt_embeds=st.none() | ARRAYS,
    priority=st.integers(-(2**63), 2**63 - 1),
    trace_headers=st.none() | st.dictionaries(TEXT, TEXT, max_size=3),
    resumable=st.booleans(),
    external_req_id=st.none() | TEXT,
    output_token_ids=TOKENS,
)
OUTPUTS = st.builds(
    EngineCoreOutput,
    request_id=TEXT,
    new_token_ids=TOKENS,
    new_logprobs=st.none() | st.builds(LogprobsLists, st.lists(TOKENS, max_size=3), st.just([[-0.5]]), TOKENS),
    new_prompt_logprobs_tensors=st.none() | st.just(PROMPT_LOGPROBS),
    pooling_output=st.none() | ARRAYS,
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_reason=st.none() | COUNT | TEXT,
    events=st.none() | st.lists(st.builds(EngineCoreEvent, st.sampled_from(EngineCoreEventType), SECONDS), max_size=3),
    prefill_stats=st.none() | st.builds(PrefillStats, COUNT, COUNT, COUNT, COUNT),
    kv_transfer_params=st.none() | st.dictionaries(TEXT, PLAIN, max_size=3),
    routed_experts=st.none() | ARRAYS,
    error_message=st.none() | TEXT,
)
STATS = st.builds(
    SchedulerStats, COUNT, COUNT, COUNT, prefix_cache_stats=st.builds(PrefixCacheStats, st.booleans(), COUNT, COUNT)
)
STEPS = st.builds(
    EngineCoreOutputs,
    engine_index=st.integers(0, 65535),
    outputs=st.lists(OUTPUTS, max_size=4),
    scheduler_stats=st.none() | STATS,
    timestamp=st.floats(1, 1e9),
    utility_output=st.none() | st.builds(UtilityOutput, COUNT, st.none() | TEXT, PLAIN),
    finished_requests=st.none() | st.sets(TEXT, max_size=4),
    incarnation=COUNT,
)


def _sent(frames: list[Frame]) -> list[bytes]:
    """Returns the frames in the form in which the other process gets them."""
    return [bytes(frame) for frame in frames]


@settings(max_examples=examples(60))
@given(REQUESTS)
def test_requests_come_back_equal(request: EngineCoreRequest) -> None:
    assert_same(MsgpackDecoder(EngineCoreRequest).decode(_sent(MsgpackEncoder().encode(request))), request)


@settings(max_examples=examples(60))
@given(STEPS)
def test_outputs_come_back_equal(outputs: EngineCoreOutputs) -> None:
    assert_same(MsgpackDecoder(EngineCoreOutputs).decode(_sent(MsgpackEncoder().encode(outputs))), outputs)


def test_one_encoder_and_one_decoder_serve_many_messages() -> None:
    """Frame numbers start anew for each."""
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    steps = [
        EngineCoreOutputs(outputs=[EngineCoreOutput(str(i), [i], pooling_output=LARGE_ARRAY + i)], timestamp=1.0)
        for i in range(3)
    ]
    sent = [_sent(encoder.encode(step)) for step in steps]
    for frames, step in zip(sent, steps, strict=True):
        assert len(frames) == 2
        assert_same(decoder.decode(frames), step)


# -- arrays --------------------------------------------------------------------------------------------------------


class Holder(msgspec.Struct, array_like=True):
    """Something with an array."""

    array: np.ndarray[Any, Any]


def _round_trip(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return MsgpackDecoder(Holder).decode(_sent(MsgpackEncoder().encode(Holder(array)))).array


def test_a_large_array_is_not_copied_on_its_way_out() -> None:
    _, frame = MsgpackEncoder().encode(Holder(LARGE_ARRAY))
    assert np.shares_memory(np.frombuffer(frame, dtype=np.int32), LARGE_ARRAY)


def test_a_large_array_is_not_copied_on_its_way_in() -> None:
    head, frame = _sent(MsgpackEncoder().encode(Holder(LARGE_ARRAY)))
    array = MsgpackDecoder(Holder).decode([head, frame]).array
    assert np.shares_memory(array, np.frombuffer(frame, dtype=np.int32))
    assert not array.flags.writeable


def test_a_small_array_travels_inside() -> None:
    assert SMALL_ARRAY.nbytes < OUT_OF_BAND_BYTES <= LARGE_ARRAY.nbytes
    assert len(MsgpackEncoder().encode(Holder(SMALL_ARRAY))) == 1
    assert_same(_round_trip(SMALL_ARRAY), SMALL_ARRAY)


def test_an_array_whose_items_are_not_side_by_side() -> None:
    for array in (LARGE_ARRAY.T, LARGE_ARRAY[::2, ::3], np.broadcast_to(np.float32(2), (3, 200)), np.array(7)):
        assert_same(_round_trip(array), np.asarray(array))


def test_a_decoded_array_outlives_the_call() -> None:
    """An array keeps its frame alive."""
    decoder = MsgpackDecoder(Holder)
    array = decoder.decode(_sent(MsgpackEncoder().encode(Holder(LARGE_ARRAY)))).array
    decoder.decode(_sent(MsgpackEncoder().encode(Holder(LARGE_ARRAY + 1))))
    assert_same(array, LARGE_ARRAY)


@pytest.mark.parametrize(
    "value", [np.array(["a"]), np.array([object()]), np.array([1j]), np.zeros(2, "M8[s]"), object()]
)
def test_what_may_not_cross_is_not_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot cross a process boundary"):
        MsgpackEncoder().encode(Holder(value))


@pytest.mark.parametrize(
    "frames",
    [
        [[["O", [1], b"12345678"]]],
        [[["<M8[s]", [1], b"12345678"]]],
        [[[">i4", [1], b"1234"]]],
        [[["|V4", [1], b"1234"]]],
        [[[["<i4"], [1], b"1234"]]],
        [[["<i4", [2], b"1234"]]],
        [[["<i4", [-1], b"1234"]]],
        [[["<i4", [-1, -1], b"1234"]]],
        [[["<i4", [1.0], b"1234"]]],
        [[["<i4", [True], b"1234"]]],
        [[["<i4", ["1"], b"1234"]]],
        [[["<i4", [1] * 9, b"1234"]]],
        [[["<i4", [2**40, 2**40], b"1234"]]],
        [[["<i4", [2**63, 0], b""]]],
        [[["<i4", 1, b"1234"]]],
        [[["<i4", [1], "1234"]]],
        [[["<i4", [1], None]]],
        [[["<i4", [1], [1]]]],
        [[["<i4", [1], True]]],
        [[["<i4", [1], 0]], b"1234"],
        [[["<i4", [1], 2]], b"1234"],
        [[["<i4", [1], -1]], b"1234"],
        [[["<i4", [1], 2**63]], b"1234"],
        [[["<i4", [1], 1]], b"123"],
        [[["<i4", [1], 1, 2]], b"1234"],
        [[["<i4"]]],
        [["<i4"]],
        [[None]],
        [[1]],
        [[{}]],
        [[]],
        [{}],
        [None],
    ],
    ids=repr,
)
def test_an_impossible_array_is_refused(frames: list[Any]) -> None:
    head, *rest = frames
    with pytest.raises(WireError, match="cannot be decoded"):
        MsgpackDecoder(Holder).decode([msgspec.msgpack.encode(head), *rest])


# -- messages that are none ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frames",
    [[], [b""], [b"\xc1"], [b"\x91"], [b"junk"], [msgspec.msgpack.encode("a string")], [b"\x90\x90"]],
    ids=repr,
)
def test_anything_else_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        MsgpackDecoder(EngineCoreRequest).decode(frames)


def test_params_out_of_bounds_are_refused_on_arrival_too() -> None:
    """The core does not rely on the frontend's door."""
    head = MsgpackEncoder().encode(EngineCoreRequest("a", [1], SamplingParams(temperature=0.5), None, 0.0))[0]
    sent = bytes(head).replace(msgspec.msgpack.encode(0.5), msgspec.msgpack.encode(float("nan")))
    assert sent != bytes(head)
    with pytest.raises(WireError, match="temperature"):
        MsgpackDecoder(EngineCoreRequest).decode([sent])


@pytest.mark.parametrize("size", ["dd", "df", "db", "c6", "c9"])
def test_a_length_nobody_sent_takes_no_memory(size: str) -> None:
    """A header that announces four thousand million items is believed only as far as there are bytes."""
    for declared in (list[int], tuple[int, ...], dict[str, int], set[int], str, bytes, Any, EngineCoreOutputs):
        with pytest.raises(WireError):
            MsgpackDecoder(declared).decode([bytes.fromhex(size + "ffffffff") + b"\x01" * 10])


def test_nesting_without_end_is_refused() -> None:
    for opening in (b"\x91", b"\x81\xa1a"):
        with pytest.raises(WireError):
            MsgpackDecoder(Any).decode([opening * 100_000 + b"\xc0"])


# -- reusable buffers ----------------------------------------------------------------------------------------------


def test_encode_into_writes_into_the_buffer_it_is_given() -> None:
    encoder, decoder, buffer = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs), bytearray()
    for tokens in ([1], [2] * 1000, [3], []):
        step = EngineCoreOutputs(outputs=[EngineCoreOutput("a", tokens, pooling_output=LARGE_ARRAY)], timestamp=1.0)
        frames = encoder.encode_into(step, buffer)
        assert frames[0] is buffer
        assert _sent(frames) == _sent(MsgpackEncoder().encode(step))
        assert_same(decoder.decode(_sent(frames)), step)


def test_logprobs_of_a_long_prompt_take_three_frames() -> None:
    output = EngineCoreOutput("a", [], new_prompt_logprobs_tensors=PROMPT_LOGPROBS)
    frames = MsgpackEncoder().encode(output)
    assert len(frames) == 3  # the ranks are small
    decoded = MsgpackDecoder(EngineCoreOutput).decode(_sent(frames)).new_prompt_logprobs_tensors
    assert isinstance(decoded, LogprobsTensors)
    assert_same(decoded, PROMPT_LOGPROBS)
