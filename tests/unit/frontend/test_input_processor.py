"""The input processor: prompts, bounds, defaults, ids."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.errors import PromptTooLongError, ValidationError
from quire.frontend.input_processor import InputProcessor
from quire.frontend.new_request import NewRequest
from quire.frontend.text.tokenizer import Tokenizer
from quire.lora_request import LoRARequest
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.structured_outputs import ReasoningTokens
from quire.wire.engine_core import EngineCoreRequest

MAX_MODEL_LEN = 32


def model_config(generation: dict[str, Any] | None = None, vocab_size: int = 500, **fields: Any) -> ModelConfig:
    hf_config = HFConfig({"vocab_size": vocab_size, "eos_token_id": [40, 41]}, Path("config.json"))
    return ModelConfig(hf_config=hf_config, generation_defaults=generation or {}, **fields)


def processor(tokenizer: Tokenizer | None, generation: dict[str, Any] | None = None, **fields: Any) -> InputProcessor:
    return InputProcessor(model_config(generation, **fields), tokenizer, MAX_MODEL_LEN)


def process(p: InputProcessor, prompt: Any, params: Any = None, **options: Any) -> EngineCoreRequest:
    params = SamplingParams() if params is None else params
    return p.process_inputs(NewRequest(request_id="r", prompt=prompt, params=params, **options))[0]


def sampling(request: EngineCoreRequest) -> SamplingParams:
    assert request.sampling_params is not None
    return request.sampling_params


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_a_prediction_is_sent_as_ids_and_no_longer_than_a_context(tokenizer: Tokenizer) -> None:
    p = processor(tokenizer)
    ids = tokenizer.encode("the fox", False)
    assert process(p, {"prompt": "a", "prediction": "the fox"}).prediction_token_ids == ids
    assert process(p, {"prompt_token_ids": [5], "prediction": "the fox"}).prediction_token_ids == ids
    assert len(process(p, {"prompt": "a", "prediction": "fox " * 100_000}).prediction_token_ids) == MAX_MODEL_LEN
    assert (
        process(p, "a").prediction_token_ids == process(p, {"prompt": "a", "prediction": ""}).prediction_token_ids == []
    )
    assert process(processor(None), {"prompt_token_ids": [5], "prediction": "the fox"}).prediction_token_ids == []
    with pytest.raises(ValidationError, match="'prediction' must be text, got list") as e:
        process(p, {"prompt": "a", "prediction": [1]})
    assert e.value.param == "prediction"


def test_every_form_of_prompt_is_taken(tokenizer: Tokenizer) -> None:
    p = processor(tokenizer)
    ids = tokenizer.encode("the fox")
    assert ids[0] == tokenizer.bos_token_id
    for prompt, text in (
        ("the fox", "the fox"),
        (ids, None),
        ({"prompt": "the fox"}, "the fox"),
        ({"prompt_token_ids": ids, "prompt": "shown"}, "shown"),
    ):
        request, shown = p.process_inputs(NewRequest(request_id="r", prompt=prompt, params=SamplingParams()))
        assert (request.prompt_token_ids, shown) == (ids, text)
        assert (request.request_id, request.external_req_id, request.pooling_params) == ("r", None, None)


def test_what_passes_through(tokenizer: Tokenizer) -> None:
    with_two_engines = processor(tokenizer)
    with_two_engines.get_ranks = lambda: (0, 1)
    request = process(
        with_two_engines,
        {"prompt": "a", "cache_salt": "s"},
        arrival_time=5.0,
        priority=-3,
        data_parallel_rank=1,
        trace_headers={"traceparent": "x"},
        resumable=True,
    )
    assert (request.cache_salt, request.arrival_time, request.priority) == ("s", 5.0, -3)
    assert (request.data_parallel_rank, request.trace_headers, request.resumable) == (1, {"traceparent": "x"}, True)


@pytest.mark.parametrize("rank", [1, -1, True, "0", 1.0])
def test_an_engine_that_is_not_there_is_refused(tokenizer: Tokenizer, rank: Any) -> None:
    with pytest.raises(ValidationError, match=r"must name an engine of this server \(0\), got") as error:
        process(processor(tokenizer), "a", data_parallel_rank=rank)
    assert error.value.param == "data_parallel_rank"


def test_arrival_time_is_the_wall_clock_unless_given(tokenizer: Tokenizer) -> None:
    p = processor(tokenizer)
    before = time.time()
    assert before <= process(p, "a").arrival_time <= time.time()
    assert process(p, {"prompt_token_ids": [5], "arrival_time": 7.0}).arrival_time == 7.0


def test_empty_prompts_are_refused(tokenizer: Tokenizer) -> None:
    p = processor(tokenizer)
    for prompt in ([], {"prompt_token_ids": []}):
        with pytest.raises(ValidationError, match="the prompt is empty"):
            process(p, prompt)
    with pytest.raises(ValidationError, match="the prompt is empty"):
        process(p, "", tokenization_kwargs={"add_special_tokens": False})


@given(ids=st.lists(st.integers(-3, 503), min_size=1, max_size=20))
def test_ids_must_be_in_the_vocabulary(tokenizer: Tokenizer, ids: list[int]) -> None:
    p = processor(tokenizer)
    bad = [i for i in ids if not 0 <= i < 500]
    if bad:
        with pytest.raises(ValidationError, match=rf"token id {bad[0]}, outside the vocabulary \[0, 500\)"):
            process(p, ids)
    else:
        assert process(p, ids).prompt_token_ids == ids


def test_a_prompt_must_leave_room_for_a_token(tokenizer: Tokenizer) -> None:
    p = processor(tokenizer)
    assert sampling(process(p, [5] * (MAX_MODEL_LEN - 1), SamplingParams(max_tokens=None))).max_tokens == 1
    with pytest.raises(PromptTooLongError, match=r"has 32 tokens and the context 32.*raise --max-model-len"):
        process(p, [5] * MAX_MODEL_LEN)


def test_tokenization_kwargs_change_the_tokens(tokenizer: Tokenizer) -> None:
    p = processor(tokenizer)
    ids = tokenizer.encode("one two three")

    def tokens(**kwargs: Any) -> list[int] | None:
        return process(p, "one two three", tokenization_kwargs=kwargs).prompt_token_ids

    assert tokens(add_special_tokens=False) == ids[1:]
    assert tokens(truncate_prompt_tokens=2) == ids[-2:]
    assert tokens(truncate_prompt_tokens=2, truncation_side="right") == ids[:2]
    assert tokens(truncate_prompt_tokens=None) == ids
    long = process(p, [5] * 100, tokenization_kwargs={"truncate_prompt_tokens": -1}).prompt_token_ids
    assert long == [5] * (MAX_MODEL_LEN - 1)
    for bad, message in (
        ({"padding": True}, "cannot hold 'padding'"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be in"),
        ({"truncation_side": "up"}, "'left' or 'right'"),
        ({"add_special_tokens": 1}, "true or false"),
    ):
        with pytest.raises(ValidationError, match=message):
            tokens(**bad)


def test_lora_ids_priorities_and_types_are_checked(tokenizer: Tokenizer) -> None:
    p = processor(tokenizer)
    with pytest.raises(ValidationError, match=r"'tuned' was asked for.*start it with --enable-lora"):
        process(p, "a", lora_request=LoRARequest("tuned", 1))
    with pytest.raises(ValidationError, match="priority must be an integer"):
        process(p, "a", priority=1.5)
    with pytest.raises(ValidationError, match="got dict"):
        process(p, "a", {})
    with pytest.raises(TypeError, match="must be a str, got int"):
        p.process_inputs(NewRequest(request_id=5, prompt="a", params=SamplingParams()))  # type: ignore[arg-type]


def test_a_task_that_the_model_does_not_support_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValidationError, match="this model supports generate only; --runner pooling"):
        process(processor(tokenizer), "a", PoolingParams())
    pooling = InputProcessor(model_config(), tokenizer, MAX_MODEL_LEN, ("embed",))
    request = process(pooling, "a", PoolingParams(task="embed"))
    assert request.pooling_params == PoolingParams(task="embed")
    assert request.sampling_params is None
    with pytest.raises(ValidationError, match=r"the task 'generate'.*call LLM\.embed"):
        process(pooling, "a")


# -- parameters -------------------------------------------------------------------------------------------------------


def test_the_users_object_is_not_changed(tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=None, bad_words=["x"], stop_token_ids=[3])
    process(processor(tokenizer, {"eos_token_id": [1, 7]}), "a", params)
    assert params == SamplingParams(max_tokens=None, bad_words=["x"], stop_token_ids=[3])


def test_max_tokens_defaults_to_the_room_that_is_left(tokenizer: Tokenizer) -> None:
    p = processor(tokenizer)
    assert sampling(process(p, [5] * 10, SamplingParams(max_tokens=None))).max_tokens == MAX_MODEL_LEN - 10
    assert sampling(process(p, [5] * 10, SamplingParams(max_tokens=100))).max_tokens == 100


@pytest.mark.parametrize(
    ("listed", "with_tokenizer", "primary", "more"),
    [
        (None, True, 1, [40, 41]),  # config.json's, as in transformers
        (1, True, 1, []),
        ([7, 1, 8], True, 1, [7, 8]),
        ([7, 8], False, 7, [8]),
        (None, False, 40, [41]),
    ],
)
def test_eos_tokens_come_from_model_and_tokenizer(
    tokenizer: Tokenizer, listed: Any, with_tokenizer: bool, primary: int, more: list[int]
) -> None:
    assert tokenizer.eos_token_id == 1
    p = processor(tokenizer if with_tokenizer else None, {} if listed is None else {"eos_token_id": listed})
    params = sampling(process(p, [5], SamplingParams(stop_token_ids=[3])))
    assert (params.eos_token_id, params.stop_token_ids) == (primary, [3, *more])
    assert p.eos_token_ids == {primary, *more}
    ignoring = sampling(process(p, [5], SamplingParams(stop_token_ids=[3], ignore_eos=True)))
    assert (ignoring.stop_token_ids, ignoring.all_stop_token_ids) == ([3], {3})


def test_vllms_defaults_have_no_eos_tokens_of_the_model(tokenizer: Tokenizer) -> None:
    assert processor(tokenizer, generation_config="vllm").eos_token_ids == {1}
    assert processor(None, generation_config="vllm").eos_token_ids == {40}


def test_bad_words_are_spelt_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    params = sampling(process(processor(tokenizer), "a", SamplingParams(bad_words=["dog"])))
    spellings = [tokenizer.encode(text, add_special_tokens=False) for text in ("dog", " dog")]
    assert params.bad_words_token_ids == spellings
    assert spellings[0] != spellings[1]


def test_what_the_model_has_no_token_for_is_left_out(tokenizer: Tokenizer) -> None:
    """A tokenizer may know more tokens than the model has rows."""
    dog = max(tokenizer.encode(" dog", add_special_tokens=False))
    small = processor(tokenizer, {"eos_token_id": [1, dog]}, vocab_size=dog)
    params = sampling(process(small, [5], SamplingParams(bad_words=["dog", "a"])))
    assert params.bad_words_token_ids
    assert max(map(max, params.bad_words_token_ids)) < dog
    assert small.eos_token_ids == {1}
    assert processor(tokenizer, vocab_size=1).eos_token_ids == frozenset()


def test_a_bad_word_spelt_one_way_counts_once(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    wordpiece = tokenizers_by_kind["wordpiece"]
    params = sampling(process(processor(wordpiece), "a", SamplingParams(bad_words=["dog"])))
    assert params.bad_words_token_ids == [wordpiece.encode("dog", add_special_tokens=False)]


def test_parameters_are_checked_against_the_model(tokenizer: Tokenizer) -> None:
    p = processor(tokenizer)
    for params, message in (
        (SamplingParams(logprobs=21), "the limit is 20"),
        (SamplingParams(prompt_logprobs=-1), "the limit is 20"),
        (SamplingParams(allowed_token_ids=[500]), "outside the vocabulary"),
        (SamplingParams(stop_token_ids=[-1]), "outside the vocabulary"),
        (SamplingParams(flat_logprobs=True), "one dict per position"),
    ):
        with pytest.raises(ValidationError, match=message):
            process(p, "a", params)
    changed = SamplingParams()
    changed.temperature = 9.0
    with pytest.raises(ValidationError, match="temperature must be in"):
        process(p, "a", changed)


def test_without_a_tokenizer_there_is_no_text(tokenizer: Tokenizer) -> None:
    p = processor(None)
    assert process(p, [5, 6]).prompt_token_ids == [5, 6]
    for prompt, params in (
        ("text", SamplingParams()),
        ([5], SamplingParams(stop=["x"])),
        ([5], SamplingParams(bad_words=["x"])),
    ):
        with pytest.raises(ValidationError, match="skip_tokenizer_init"):
            process(p, prompt, params)


def test_a_budget_of_reasoning_needs_the_tokens_around_it(tokenizer: Tokenizer) -> None:
    p = processor(tokenizer)
    tokens = ReasoningTokens(close=4, open=3)
    limited = sampling(process(p, "a", SamplingParams(thinking_token_budget=0, reasoning_tokens=tokens)))
    assert (limited.thinking_token_budget, limited.reasoning_tokens) == (0, tokens)
    assert sampling(process(p, "a", SamplingParams(thinking_token_budget=-1))).thinking_token_budget is None
    with pytest.raises(ValidationError, match="needs reasoning_tokens") as e:
        process(p, "a", SamplingParams(thinking_token_budget=5))
    assert e.value.param == "thinking_token_budget"
    for bad in (ReasoningTokens(-1), ReasoningTokens(1 << 40), ReasoningTokens(4, 1 << 40)):
        with pytest.raises(ValidationError, match="outside the vocabulary") as e:
            process(p, "a", SamplingParams(thinking_token_budget=5, reasoning_tokens=bad))
        assert e.value.param == "reasoning_tokens"


def test_seeds_come_from_the_engines(tokenizer: Tokenizer) -> None:
    def seeds(engine_seed: int, given: tuple[int | None, ...]) -> list[int | None]:
        p = processor(tokenizer, seed=engine_seed)
        return [sampling(process(p, "a", SamplingParams(seed=seed))).seed for seed in given]

    nothing = (None, None, None)
    assert seeds(0, nothing) == seeds(0, nothing)
    assert len(set(seeds(0, nothing))) == 3
    assert seeds(0, nothing) != seeds(1, nothing)
    mixed = seeds(0, (None, 77, None))
    assert mixed == [
        seeds(0, nothing)[0],
        77,
        seeds(0, nothing)[2],
    ]  # a request with a seed of its own changes the seed of no other


def test_default_sampling_params(tokenizer: Tokenizer) -> None:
    assert processor(tokenizer).get_default_sampling_params() == SamplingParams()
    generation = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": None,
        "max_new_tokens": 9,
        "eos_token_id": 1,
        "do_sample": True,
    }
    expected = SamplingParams(temperature=0.6, top_p=0.9, max_tokens=9)
    assert processor(tokenizer, generation).get_default_sampling_params() == expected


# -- ids --------------------------------------------------------------------------------------------------------------


def test_internal_ids_are_unique_and_hold_the_external_one(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = processor(tokenizer)
    first, second = process(p, "a"), process(p, "a")
    for request in (first, second):
        p.assign_request_id(request)
        external, _, suffix = request.request_id.rpartition("-")
        assert (external, request.external_req_id, len(suffix)) == ("r", "r", 32)
        assert int(suffix, 16) >= 0
    assert first.request_id != second.request_id
    long, _ = p.process_inputs(NewRequest(request_id="x" * 65536, prompt=[5], params=SamplingParams()))
    p.assign_request_id(long)
    assert len(long.request_id) < 100
    assert long.external_req_id == "x" * 65536
    with pytest.raises(ValueError, match="already has an internal id"):
        p.assign_request_id(first)
    monkeypatch.setenv("QUIRE_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    third = process(p, "a")
    processor(tokenizer).assign_request_id(third)
    assert (third.request_id, third.external_req_id) == ("r", "r")
