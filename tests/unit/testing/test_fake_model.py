"""The oracle's stop rules, and that a slot depends on all it should."""

from __future__ import annotations

from typing import Any

import pytest

from quire.lora_request import LoRARequest
from quire.sampling_params import RepetitionDetectionParams, SamplingParams
from quire.testing.fake_model import KV_IDENTITY, ExpectedOutput, FakeModel, FakeSequence, expected_output, kv_identity
from quire.wire.engine_core import FinishReason

PROMPT = [3, 1, 4, 1, 5]
MODEL = FakeModel(vocab_size=16)


def ask(max_model_len: int = 100, model: FakeModel = MODEL, **params: Any) -> ExpectedOutput:
    return expected_output(model, PROMPT, SamplingParams(**params), max_model_len)


def test_an_output_ends_at_its_length() -> None:
    assert len(ask(max_tokens=7).token_ids) == 7
    assert ask(max_tokens=7).finish_reason is FinishReason.LENGTH
    assert len(ask(max_tokens=None, max_model_len=30).token_ids) == 25
    assert ask(max_tokens=3).token_ids == ask(max_tokens=7).token_ids[:3]


def test_stop_tokens_and_min_tokens() -> None:
    tokens = ask(max_tokens=60).token_ids
    token = tokens[4]
    first = tokens.index(token) + 1
    assert ask(max_tokens=60, stop_token_ids=[token]) == ExpectedOutput(tokens[:first], FinishReason.STOP, token)
    assert ask(max_tokens=60, eos_token_id=token) == ExpectedOutput(tokens[:first], FinishReason.STOP)
    assert ask(max_tokens=60, eos_token_id=token, ignore_eos=True).finish_reason is FinishReason.LENGTH
    later = ask(max_tokens=60, eos_token_id=token, min_tokens=first + 1)
    assert len(later.token_ids) > first
    # The limit and a stop token at once: the stop token is the reason.
    assert ask(max_tokens=first, eos_token_id=token).finish_reason is FinishReason.STOP


def test_an_output_ends_at_a_repetition() -> None:
    rule = RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=1, min_count=2)
    stopped = ask(max_tokens=200, max_model_len=1000, model=FakeModel(vocab_size=4), repetition_detection=rule)
    assert stopped.finish_reason is FinishReason.REPETITION
    tail = stopped.token_ids
    assert tail[-1] == tail[-2] or tail[-2:] == tail[-4:-2]


@pytest.mark.parametrize("position", range(len(PROMPT)))
def test_every_prompt_token_matters(position: int) -> None:
    other = PROMPT.copy()
    other[position] += 1
    params = SamplingParams(max_tokens=12)
    for model in (MODEL, FakeModel((2,), 16), FakeModel((None, 3), 16)):
        assert expected_output(model, other, params, 100) != expected_output(model, PROMPT, params, 100)


def test_salts_and_adapters_change_the_identity_of_the_cache() -> None:
    assert kv_identity(None, None) == kv_identity(SamplingParams(), None) == 0
    salted = SamplingParams(extra_args={KV_IDENTITY: ""})
    ids = {kv_identity(salted, None), kv_identity(None, LoRARequest("a", 1)), kv_identity(None, LoRARequest("b", 1)), 0}
    assert len(ids) == 4


def test_a_window_sees_its_last_slots_only() -> None:
    model = FakeModel((3,))
    short, long = FakeSequence(model, 0, [b"abcdefgh"]), FakeSequence(model, 0, [b"....abcdefgh"])
    assert short.compute(1, 9) == long.compute(1, 9)
    assert FakeSequence(model, 0, [b"abcdefgX"]).compute(1, 9) != short.compute(1, 9)


def test_groups_keep_different_slots() -> None:
    sequence = FakeSequence(FakeModel((None, 4)), 0, [b"", b""])
    sequence.compute(1, 0)
    assert len({sequence.slots(0), sequence.slots(1)}) == 2


def test_top_tokens_start_with_the_sampled_one() -> None:
    assert MODEL.top_tokens(0x0F00, 3) == [15, 0, 1]
    assert len(MODEL.top_tokens(0, 99)) == 16
