"""Defaults, bounds and meaning of SamplingParams (spec/vllm.md §1)."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from quire.errors import ClientError, ValidationError
from quire.sampling_params import (
    BEAM_FIELDS,
    MIN_TEMPERATURE,
    SAMPLING_FIELDS,
    BeamSearchParams,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
)
from quire.structured_outputs import ReasoningTokens

DEFAULTS: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "output_kind": RequestOutputKind.CUMULATIVE,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "skip_reading_prefix_cache": False,
}
BOUNDS = {bound.name: bound for bound in SAMPLING_FIELDS}
HOSTILE: list[Any] = [
    math.nan,
    math.inf,
    -math.inf,
    1e308,
    2**31,
    -(2**31),
    2**63,
    -(2**63) - 1,
    -1,
    "",
    "x" * 10_000,
    True,
    [None],
    {"a": 1},
    {1: math.nan},
    object(),
    b"bytes",
    [2**70],
    list(range(5000)),
]


@pytest.mark.parametrize(("name", "value"), DEFAULTS.items())
def test_a_default_is_that_of_the_field(name: str, value: Any) -> None:
    assert getattr(SamplingParams(), name) == value


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("n", 0),
        ("n", 16385),
        ("n", 1.5),
        ("n", True),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.5),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", ["x" * 4097]),
        ("bad_words", ["x" * 1025]),
        ("stop_token_ids", ["a"]),
        ("bad_words", ["  "]),
        ("bad_words", ["w"] * 129),
        ("allowed_token_ids", []),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {"1": 1.0}),
        ("logprob_token_ids", list(range(129))),
        ("thinking_token_budget", -2),
        ("reasoning_tokens", 5),
        ("reasoning_tokens", ReasoningTokens("9")),  # type: ignore[arg-type]
        ("reasoning_tokens", ReasoningTokens(9, 8.0)),  # type: ignore[arg-type]
        ("max_tokens", None),  # allowed: the control of this table
    ],
)
def test_a_value_outside_its_bound_names_the_field(field: str, bad: Any) -> None:
    if field == "max_tokens" and bad is None:
        assert SamplingParams(max_tokens=None).max_tokens is None
        return
    with pytest.raises(ValidationError) as e:
        SamplingParams(**{field: bad})
    assert e.value.param == field
    assert field in str(e.value)
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 300
    assert e.value.status_code == 400


@pytest.mark.parametrize("name", [b.name for b in SAMPLING_FIELDS])
@pytest.mark.parametrize("value", HOSTILE, ids=lambda v: repr(v)[:20])
def test_hostile_values_are_accepted_or_refused_by_name(name: str, value: Any) -> None:
    """Every field takes any value without an exception of another kind, and what is accepted can cross the wire."""
    refused: ClientError | None = None
    try:
        msgspec.msgpack.encode(SamplingParams(**{name: value}))
    except ClientError as e:
        refused = e
    # two fields against each other may name the other one
    assert refused is None or refused.param in {name, "n", "min_tokens", "stop"}


def test_every_declared_bound_is_a_field() -> None:
    assert set(BOUNDS) <= set(SamplingParams.__struct_fields__)
    undeclared = set(SamplingParams.__struct_fields__) - set(BOUNDS)
    # what has its own validator, an enum, is filled by the frontend, or is not read by the engine
    assert undeclared == {
        "flat_logprobs",
        "output_kind",
        "skip_clone",
        "repetition_detection",
        "extra_args",
        "eos_token_id",
        "bad_words_token_ids",
        "structured_outputs",
        "reasoning_tokens",
    }


def test_seed_minus_one_means_none() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=-2).seed == -2


def test_a_single_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="END").stop == ["END"]


def test_stop_strings_need_detokenization() -> None:
    with pytest.raises(ValidationError, match="detokenize"):
        SamplingParams(stop="END", detokenize=False)


def test_greedy_resets_the_filters_and_allows_one_output() -> None:
    params = SamplingParams(temperature=0.0, top_p=0.5, top_k=3, min_p=0.2)
    assert params.is_greedy
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    with pytest.raises(ValidationError, match="n=2 with temperature 0"):
        SamplingParams(temperature=0.0, n=2)


def test_small_temperatures_are_raised() -> None:
    assert SamplingParams(temperature=0.001).temperature == MIN_TEMPERATURE
    assert SamplingParams(temperature=1e-6).is_greedy


def test_top_k_minus_one_means_all() -> None:
    assert SamplingParams(top_k=-1).top_k == 0


def test_min_tokens_against_max_tokens() -> None:
    with pytest.raises(ValidationError, match="min_tokens=5 is more than max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    SamplingParams(min_tokens=5, max_tokens=None)


def test_n_is_bounded_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_N_SEQUENCES", "4")
    SamplingParams(n=4)
    with pytest.raises(ValidationError, match="QUIRE_MAX_N_SEQUENCES"):
        SamplingParams(n=5)


def test_prompt_logprobs_do_not_read_the_prefix_cache() -> None:
    assert SamplingParams(prompt_logprobs=0).skip_reading_prefix_cache is True
    assert SamplingParams(prompt_logprobs=0, skip_reading_prefix_cache=False).skip_reading_prefix_cache is False


def test_all_stop_token_ids() -> None:
    params = SamplingParams(stop_token_ids=[5])
    params.eos_token_id = 2
    assert params.all_stop_token_ids == {2, 5}
    params.ignore_eos = True
    assert params.all_stop_token_ids == {5}


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


def test_every_default_is_within_its_bound() -> None:
    """They are not checked for each request."""
    params = SamplingParams()
    for bound in SAMPLING_FIELDS:
        bound.validate(getattr(params, bound.name))


def test_a_field_that_was_changed_is_settled_again() -> None:
    params = SamplingParams(top_p=0.5, top_k=7)
    params.temperature, params.seed, params.stop = 0.0, -1, "end"
    clone = params.clone()
    clone.settle()
    assert clone == SamplingParams(temperature=0.0, stop=["end"])
    settled = clone.clone()
    settled.settle()
    assert settled == clone
    for name, value in (("n", 0), ("n", True), ("temperature", math.nan), ("stop", [1]), ("max_tokens", 0)):
        wrong = params.clone()
        setattr(wrong, name, value)
        with pytest.raises(ValidationError, match=name):
            wrong.settle()


def test_clone_is_independent() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 1.0}, seed=3)
    clone = params.clone()
    assert clone == params
    clone.stop.append("b")  # type: ignore[union-attr]
    clone.logit_bias[2] = 1.0  # type: ignore[index]
    assert params.stop == ["a"]
    assert params.logit_bias == {1: 1.0}
    full = {
        "stop": ["a"],
        "stop_token_ids": [1],
        "logprob_token_ids": [2],
        "logit_bias": {3: 1.0},
        "allowed_token_ids": [4],
        "bad_words": ["b"],
        "extra_args": {"c": 1},
        "bad_words_token_ids": [[5]],
    }
    params = SamplingParams(**full)  # type: ignore[arg-type]
    clone = params.clone()
    for name, value in vars_of(params).items():
        copied = getattr(clone, name)
        assert copied == value
        if isinstance(value, list | dict):
            assert copied is not value, name
            assert name in full
    assert SamplingParams(skip_clone=True).clone() is not None
    shared = SamplingParams(skip_clone=True)
    assert shared.clone() is shared


def test_from_optional_takes_none_for_the_default() -> None:
    params = SamplingParams.from_optional(temperature=None, top_p=0.5, max_tokens=None, logit_bias={"7": 300, 8: -300})
    assert params.temperature == 1.0
    assert params.top_p == 0.5
    assert params.max_tokens is None
    assert params.logit_bias == {7: 100.0, 8: -100.0}


@pytest.mark.parametrize(
    ("bias", "shown"),
    [
        ({"7": 1.0, "x": 1.0}, "got ('x', 1.0)"),
        ({7: 1.0, 8: math.nan}, "got (8, nan)"),
        ({7: "much"}, "got (7, 'much')"),
        ([7], "got [7]"),
    ],
)
def test_a_bad_bias_is_named(bias: Any, shown: str) -> None:
    with pytest.raises(ValidationError, match="logit_bias must be a map") as caught:
        SamplingParams.from_optional(logit_bias=bias)
    assert shown in str(caught.value)


def test_validate_for_model() -> None:
    for field, value in {
        "stop_token_ids": [10],
        "allowed_token_ids": [-1],
        "logit_bias": {10: 1.0},
        "logprob_token_ids": [10],
    }.items():
        with pytest.raises(ValidationError, match="outside the vocabulary") as e:
            SamplingParams(**{field: value}).validate_for_model(10, 20)
        assert e.value.param == field
    with pytest.raises(ValidationError, match="--max-logprobs"):
        SamplingParams(logprobs=21).validate_for_model(100, 20)
    with pytest.raises(ValidationError, match="100 log-probabilities"):
        SamplingParams(prompt_logprobs=-1).validate_for_model(100, 20)
    SamplingParams(logprobs=-1, prompt_logprobs=50).validate_for_model(100, -1)


def test_repetition_detection_bounds() -> None:
    with pytest.raises(ValidationError, match="repetition_detection must be RepetitionDetectionParams, got dict"):
        SamplingParams(repetition_detection={"min_count": 3})  # type: ignore[arg-type]
    assert not RepetitionDetectionParams().enabled
    assert RepetitionDetectionParams(max_pattern_size=4, min_count=2).enabled
    for bad in (
        {"max_pattern_size": 4, "min_count": 1},
        {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
        {"max_pattern_size": 4097, "min_count": 2},
        {"min_count": 2},
    ):
        with pytest.raises(ValidationError) as e:
            RepetitionDetectionParams(**bad)
        assert e.value.param == "repetition_detection"


def test_survives_the_wire() -> None:
    params = SamplingParams(
        n=2, temperature=0.5, stop=["x"], repetition_detection=RepetitionDetectionParams(4, 1, 3), logit_bias={1: 2.0}
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_beam_search_params() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    assert (params.temperature, params.length_penalty, params.ignore_eos) == (0.0, 1.0, False)
    for field, bad in {"beam_width": 0, "max_tokens": 0, "temperature": -1, "length_penalty": math.nan}.items():
        with pytest.raises(ValidationError) as e:
            BeamSearchParams(**{"beam_width": 1, "max_tokens": 1, field: bad})
        assert e.value.param == field
    assert {b.name for b in BEAM_FIELDS} == set(BeamSearchParams.__struct_fields__)


@pytest.mark.parametrize("bad", [-1, 129, "2", None, True, 1.5])
def test_the_cap_of_drafts_has_a_bound(bad: Any) -> None:
    for good in (0, 128):
        SamplingParams(extra_args={"num_speculative_tokens": good, "mine": object()}).validate_fields()
    with pytest.raises(ValidationError, match="num_speculative_tokens must") as e:
        SamplingParams(extra_args={"num_speculative_tokens": bad}).validate_fields()
    assert e.value.param == "num_speculative_tokens"


def test_extra_args_are_a_dict() -> None:
    with pytest.raises(ValidationError, match="extra_args must be a dict, got list"):
        SamplingParams(extra_args=["num_speculative_tokens"]).validate_fields()  # type: ignore[arg-type]
