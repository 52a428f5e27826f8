from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.field_bounds import INT64_MAX
from quire.frontend.output_processor import fan_out
from quire.frontend.request_state import ParentRequest
from quire.outputs import CompletionOutput
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.wire.engine_core import EngineCoreRequest


def request(**params: object) -> EngineCoreRequest:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return EngineCoreRequest("r-1", [1, 2], sampling, None, 5.0, external_req_id="r", priority=3, cache_salt="s")


def completion(index: int, finished: bool) -> CompletionOutput:
    return CompletionOutput(index, f"{index}", [index], None, None, "length" if finished else None)


def test_one_output_is_one_request() -> None:
    single = request(n=1)
    assert fan_out(single) == (None, [single])
    pooling = EngineCoreRequest("r", [1], None, None, 0.0)
    assert fan_out(pooling) == (None, [pooling])


def test_a_request_of_n_outputs_has_n_children() -> None:
    original = request(n=3, seed=10, temperature=0.5, stop=["x"])
    parent, children = fan_out(original)
    assert parent is not None
    assert [c.request_id for c in children] == ["0_r-1", "1_r-1", "2_r-1"]
    params = [c.sampling_params for c in children]
    assert all(p is not None for p in params)
    assert [(p.n, p.seed, p.temperature, p.stop) for p in params if p] == [(1, 10 + i, 0.5, ["x"]) for i in range(3)]
    assert {(c.external_req_id, c.priority, c.cache_salt, c.arrival_time) for c in children} == {("r", 3, "s", 5.0)}
    assert (parent.request_id, parent.external_req_id, parent.n) == ("r-1", "r", 3)
    assert parent.child_requests == {c.request_id for c in children}
    assert original.sampling_params is not None
    assert (original.sampling_params.n, original.sampling_params.seed) == (3, 10)  # the parent's is not touched


def test_children_of_params_that_skip_cloning_are_apart() -> None:
    _, children = fan_out(request(n=2, seed=1, skip_clone=True))
    assert [c.sampling_params.seed for c in children if c.sampling_params] == [1, 2]


@pytest.mark.parametrize(
    ("seed", "child_seeds"), [(INT64_MAX, [INT64_MAX, -INT64_MAX - 1]), (-2, [-2, -1]), (None, [None, None])]
)
def test_child_seeds_stay_within_int64(seed: int | None, child_seeds: list[int | None]) -> None:
    _, children = fan_out(request(n=2, seed=seed))
    assert [c.sampling_params.seed for c in children if c.sampling_params] == child_seeds


@given(order=st.permutations(range(4)))
def test_final_only_shows_all_at_the_end_in_order(order: list[int]) -> None:
    parent = ParentRequest(request(n=4, output_kind=RequestOutputKind.FINAL_ONLY))
    for index in range(4):
        parent.get_child_info(index)
    for count, index in enumerate(order, start=1):
        outputs, finished = parent.get_outputs(f"{index}_r-1", completion(index, True))
        assert finished == (count == 4)
        assert [o.index for o in outputs] == ([0, 1, 2, 3] if finished else [])


@given(order=st.permutations([0, 0, 1, 1, 2, 2]), kind=st.sampled_from(["CUMULATIVE", "DELTA"]))
def test_streams_pass_every_output_on(order: list[int], kind: str) -> None:
    """Each child gives two outputs, the second its last."""
    parent = ParentRequest(request(n=3, output_kind=RequestOutputKind[kind]))
    for index in range(3):
        parent.get_child_info(index)
    seen: set[int] = set()
    for count, index in enumerate(order, start=1):
        output = completion(index, index in seen)
        seen.add(index)
        assert parent.get_outputs(f"{index}_r-1", output) == ([output], count == 6)


def test_the_longest_child() -> None:
    parent = ParentRequest(request(n=2))
    assert [parent.observe_num_generation_tokens(n) for n in (3, 7, 5)] == [3, 7, 7]
