"""Forms of outputs through the whole engine, with a model that has learned nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.errors import ValidationError
from quire.structured_outputs import ReasoningTokens

from .conftest import Checkpoint
from .test_oracle import FEW_BLOCKS, engine, num_preemptions

ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "kind": {"enum": ["book", "paper"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
        "paid": {"type": "boolean"},
    },
    "required": ["id", "kind", "tags", "paid"],
    "additionalProperties": False,
}
PROMPT = {"prompt_token_ids": [40, 41, 42, 43]}


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint) -> Iterator[LLM]:
    with engine(checkpoint("llama"), max_num_seqs=8) as llm:
        yield llm


def outputs(llm: LLM, form: dict[str, Any], **fields: Any) -> list[Any]:
    params = SamplingParams(
        **{"max_tokens": 400, "seed": 5, **fields}, structured_outputs=StructuredOutputsParams(**form)
    )
    return list(llm.generate([PROMPT], params, use_tqdm=False)[0].outputs)


@pytest.mark.parametrize("temperature", [0, 1, 2])
def test_an_untrained_model_closes_its_json(temperature: float, llm: LLM) -> None:
    for output in outputs(llm, {"json": ORDER}, temperature=temperature, n=3 if temperature else 1):
        assert output.finish_reason == "stop"
        order = json.loads(output.text)
        assert list(order) == ["id", "kind", "tags", "paid"]
        assert order["kind"] in ("book", "paper")
        assert len(output.token_ids) < 250


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"logprobs": 3},
        {"ignore_eos": True, "min_tokens": 50},
        {"presence_penalty": 2.0, "repetition_penalty": 1.5, "top_k": 3, "min_p": 0.1},
    ],
)
def test_every_way_of_sampling_keeps_the_form(fields: dict[str, Any], llm: LLM) -> None:
    (output,) = outputs(llm, {"regex": r"\d{3}-[a-z]{4}( no)?"}, **fields)
    assert re.fullmatch(r"\d{3}-[a-z]{4}( no)?", output.text)
    assert output.finish_reason == "stop"
    if "logprobs" in fields:
        assert len(output.logprobs) == len(output.token_ids)


def test_an_output_is_one_of_the_choices(llm: LLM) -> None:
    texts = [output.text for output in outputs(llm, {"choice": ["left", "right", "lefty"]}, n=8)]
    assert set(texts) <= {"left", "right", "lefty"}
    assert len(set(texts)) > 1


def test_a_form_of_nothing_ends_at_once(llm: LLM) -> None:
    (output,) = outputs(llm, {"regex": "(a?){0}"})
    assert (output.text, output.finish_reason) == ("", "stop")


@pytest.mark.parametrize(
    ("form", "fields"),
    [
        ({"regex": "("}, {}),
        ({"grammar": "root ::= nothing"}, {}),
        ({"choice": ["left"]}, {"allowed_token_ids": [300], "temperature": 0}),
        ({"choice": ["left"]}, {"allowed_token_ids": [300]}),
    ],
)
def test_what_cannot_be_is_the_clients_error_and_costs_nobody_else(
    form: dict[str, Any], fields: dict[str, Any], llm: LLM
) -> None:
    with pytest.raises(ValidationError, match=r"structured_outputs|the form"):
        outputs(llm, form, **fields)
    bad = SamplingParams(**fields, structured_outputs=StructuredOutputsParams(**form))
    both = llm.generate([PROMPT, PROMPT], [bad, SamplingParams(max_tokens=3, ignore_eos=True)], use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in both] == ["error", "length"]


def test_chunks_and_preemption_change_nothing(checkpoint: Checkpoint, llm: LLM) -> None:
    params = SamplingParams(
        seed=7, max_tokens=150, structured_outputs=StructuredOutputsParams(json=ORDER, disable_any_whitespace=True)
    )
    prompts = [{"prompt_token_ids": [40 + i] * 30} for i in range(4)]
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    flags = {"max_num_seqs": 4, "max_num_batched_tokens": 24, **FEW_BLOCKS}
    with engine(checkpoint("llama"), **{**flags, "max_model_len": 128, "num_gpu_blocks_override": 9}) as small:
        got = small.generate(prompts, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in got] == expected
    assert num_preemptions(got) > 0


FORMS: list[dict[str, Any]] = [
    {"json": ORDER},
    {"json": ORDER, "disable_any_whitespace": True},
    {"choice": ["a rather long sentence that is known", "a rather long sentence that is not"]},
    {"regex": r"(yes|no), the quick brown fox jumps( over [a-z]{3})?"},
    {"grammar": 'root ::= "<note>" [a-z]{1,4} "</note><note>" [0-9]{2} "</note>"'},
    {
        "structural_tag": json.dumps(
            {"structures": [{"begin": "<a>", "schema": ORDER, "end": "</a>"}], "triggers": ["<a"]}
        )
    },
]


def test_jumps_change_no_token(checkpoint: Checkpoint, llm: LLM) -> None:
    """Also with penalties, stop strings, small chunks and preemption."""
    prompts = [{"prompt_token_ids": [40 + i] * 20} for i in range(len(FORMS))]
    common: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.5, "n": 2},
        {"presence_penalty": 2.0, "repetition_penalty": 1.5, "top_k": 3},
        {"stop": ["jumps", "kind"], "min_tokens": 3},
        {"max_tokens": 13, "prompt_logprobs": 1},
    ]
    params = [
        SamplingParams(**{"max_tokens": 90, "seed": 5, **fields}, structured_outputs=StructuredOutputsParams(**form))
        for fields in common
        for form in FORMS
    ]
    work = prompts * len(common)
    flags = {
        **FEW_BLOCKS,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        "max_model_len": 128,
        "num_gpu_blocks_override": 9,
    }
    with engine(checkpoint("llama"), grammar_jump_forward=False, max_num_seqs=8) as slow:
        expected = slow.generate(work, params, use_tqdm=False)
    got = llm.generate(work, params, use_tqdm=False)
    with engine(checkpoint("llama"), **flags) as small:
        squeezed = small.generate(work, params, use_tqdm=False)
    for one, other, third in zip(expected, got, squeezed, strict=True):
        for same in (other, third):
            assert (one.prompt_logprobs is None) == (same.prompt_logprobs is None)
            assert len(one.prompt_logprobs or ()) == len(same.prompt_logprobs or ())
        for a, b, c in zip(one.outputs, other.outputs, third.outputs, strict=True):
            assert (a.token_ids, a.text, a.finish_reason, a.stop_reason) == (
                b.token_ids, b.text, b.finish_reason, b.stop_reason,
            )  # fmt: skip
            assert (c.token_ids, c.text) == (a.token_ids, a.text)
    assert num_preemptions(squeezed) > 0


# -- behind reasoning ----------------------------------------------------------------------------------------------


REASONING = ReasoningTokens(close=200, open=201)


def reasoned(llm: LLM, reasoning: ReasoningTokens, bias: dict[int, float], **fields: Any) -> Any:
    form = {"json": ORDER, "reasoning": reasoning}
    (output,) = outputs(llm, form, temperature=0, logit_bias=bias, **fields)
    return output


def test_a_form_begins_behind_the_reasoning(llm: LLM) -> None:
    free = reasoned(llm, ReasoningTokens(close=200), {200: -100.0}, max_tokens=12)
    assert (free.finish_reason, len(free.token_ids)) == ("length", 12), "nothing ends before the reasoning does"
    closed = reasoned(llm, ReasoningTokens(close=200), {200: 100.0})
    assert closed.token_ids[0] == 200
    opened = reasoned(llm, REASONING, {201: 50.0, 200: 100.0})
    assert list(opened.token_ids[:2]) == [201, 200]
    at_once = reasoned(llm, REASONING, {201: -100.0})
    tokenizer = llm.get_tokenizer()
    for output, start in ((closed, 1), (opened, 2), (at_once, 0)):
        assert output.finish_reason == "stop"
        assert list(json.loads(tokenizer.decode(output.token_ids[start:]))) == ["id", "kind", "tags", "paid"]


def test_tokens_of_reasoning_that_do_not_exist_are_refused(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="the model has"):
        reasoned(llm, ReasoningTokens(close=10**6), {})
