"""`LLM` on a scripted core."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.errors import (
    ClientError,
    ConfigError,
    EngineDeadError,
    GenerationError,
    PromptTooLongError,
    ValidationError,
)
from quire.frontend.llm import LLM
from quire.outputs import RequestOutput
from quire.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.wire.engine_core import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason

from .fake_client import FakeClient


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    client = FakeClient()
    monkeypatch.setattr("quire.frontend.llm_engine.make_client", lambda *a, **k: client)
    return client


@pytest.fixture
def llm(model_dir: Path, client: FakeClient) -> LLM:
    return LLM(str(model_dir))


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


GREEDY = SamplingParams(temperature=0, max_tokens=2)


# -- generate ---------------------------------------------------------------------------------------------------------


def test_every_form_of_prompt_is_taken(llm: LLM) -> None:
    text = llm.get_tokenizer().decode([50])
    for prompts in (text, [text], {"prompt": text}, [{"prompt": text}], (text,)):
        (output,) = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert (output.prompt, output.prompt_token_ids) == (text, [0, 50])
    for prompts in ([50], [[50]], {"prompt_token_ids": [50]}, [{"prompt_token_ids": [50]}]):
        (output,) = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert (output.prompt, output.prompt_token_ids, ids([output])) == (None, [50], [[51, 52]])
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def fail(client: FakeClient, monkeypatch: pytest.MonkeyPatch, *poisons: int) -> None:
    """The core fails requests whose prompt is one of these tokens, in its first step."""
    step = client.get_output

    def get_output() -> EngineCoreOutputs:
        failed = [i for i, (request, _) in client.live.items() if (request.prompt_token_ids or [0])[0] in poisons]
        for request_id in failed:
            del client.live[request_id]
        outputs = step()
        outputs.outputs += [
            EngineCoreOutput(i, [], finish_reason=FinishReason.ERROR, error_message=f"{i} is bad") for i in failed
        ]
        return outputs

    monkeypatch.setattr(client, "get_output", get_output)


def test_a_request_that_fails_costs_the_others_nothing(
    llm: LLM, client: FakeClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail(client, monkeypatch, 60)
    outputs = llm.generate([[50], [60], [70]], GREEDY, use_tqdm=False)
    assert ids(outputs) == [[51, 52], [], [71, 72]]
    (failed,) = outputs[1].outputs
    assert failed.finish_reason == "error"
    assert failed.error_message is not None
    assert failed.error_message.endswith("is bad")
    assert "request 1 failed" in caplog.text


@pytest.mark.parametrize(("is_dead", "error"), [(False, GenerationError), (True, EngineDeadError)])
def test_if_all_requests_fail_that_is_an_error(
    llm: LLM, client: FakeClient, monkeypatch: pytest.MonkeyPatch, is_dead: bool, error: type[Exception]
) -> None:
    fail(client, monkeypatch, 60, 61)
    monkeypatch.setattr(FakeClient, "engine_dead", is_dead)
    with pytest.raises(error, match="is bad"):
        llm.generate([[60], [61]], GREEDY, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    """Outputs are in the order of the prompts; ids count up from "0" over calls."""
    lengths = [5, 1, 3, 2, 12, 1, 1, 4, 1, 2, 3, 7]
    prompts = [[50 + n] for n in range(len(lengths))]
    params = [SamplingParams(max_tokens=length) for length in lengths]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.request_id for o in outputs] == [str(n) for n in range(len(lengths))]
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(tokens) for tokens in ids(outputs)] == lengths
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}
    assert llm.generate([50], GREEDY, use_tqdm=False)[0].request_id == str(len(lengths))


def test_n_outputs_are_one_result(llm: LLM) -> None:
    (output,) = llm.generate([50], SamplingParams(n=3, max_tokens=2), use_tqdm=False)
    assert [(c.index, list(c.token_ids)) for c in output.outputs] == [(i, [51, 52]) for i in range(3)]


def test_only_final_outputs_and_the_users_params_untouched(llm: LLM, client: FakeClient) -> None:
    params = SamplingParams(max_tokens=3)
    (output,) = llm.generate([50], params, use_tqdm=False)
    assert output.finished
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    sent = client.added[0].sampling_params
    assert sent is not None
    assert sent.output_kind is RequestOutputKind.FINAL_ONLY


def test_defaults_are_the_models(llm: LLM, client: FakeClient) -> None:
    assert llm.get_default_sampling_params().temperature == 0.5
    llm.generate([50], use_tqdm=False)
    sent = client.added[0].sampling_params
    assert sent is not None
    assert (sent.temperature, sent.max_tokens) == (0.5, 16)


def test_priorities_are_given_one_by_one_or_for_all(llm: LLM, client: FakeClient) -> None:
    llm.generate([[50], [51]], GREEDY, priority=[3, -1], use_tqdm=False)
    llm.generate([[50], [51]], GREEDY, priority=7, use_tqdm=False)
    assert [r.priority for r in client.added] == [3, -1, 7, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling_params": [GREEDY]}, "sampling_params has 1 entries for 2 prompts"),
        ({"priority": [1, 2, 3]}, "priority has 3 entries for 2 prompts"),
        ({"lora_request": []}, "lora_request has 0 entries for 2 prompts"),
    ],
)
def test_list_lengths_must_match(llm: LLM, client: FakeClient, options: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        llm.generate([[50], [51]], use_tqdm=False, **options)
    assert not client.added


def test_an_error_in_one_prompt_comes_before_anything_runs(llm: LLM, client: FakeClient) -> None:
    with pytest.raises(PromptTooLongError, match="prompt 2: the prompt has 99 tokens") as error:
        llm.generate([[50], [51], [5] * 99], GREEDY, use_tqdm=False)
    assert error.value.param == "prompt"
    with pytest.raises(ValidationError, match=r"^the prompt is empty"):
        llm.generate({"prompt_token_ids": []}, GREEDY, use_tqdm=False)
    assert (client.added, client.num_steps) == ([], 0)
    assert ids(llm.generate([50], GREEDY, use_tqdm=False)) == [[51, 52]]


def test_an_error_while_adding_takes_back_what_was_added(
    llm: LLM, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = client.add_request

    def refuse_third(request: EngineCoreRequest) -> None:
        if len(client.added) == 2:
            raise ValidationError("full")
        add(request)

    monkeypatch.setattr(client, "add_request", refuse_third)
    with pytest.raises(ValidationError, match="full"):
        llm.generate([[50], [51], [52]], GREEDY, use_tqdm=False)
    assert not client.live
    assert not llm.llm_engine.has_unfinished_requests()
    monkeypatch.undo()
    assert ids(llm.generate([50], GREEDY, use_tqdm=False)) == [[51, 52]]


def test_an_error_in_a_step_leaves_nothing_behind(llm: LLM, client: FakeClient) -> None:
    def fail() -> None:
        if client.num_steps == 1:
            raise GenerationError("broken")

    client.before_step = fail
    with pytest.raises(GenerationError, match="broken"):
        llm.generate([[50], [51]], GREEDY, use_tqdm=False)
    assert not client.live
    client.before_step = lambda: None
    assert ids(llm.generate([50], GREEDY, use_tqdm=False)) == [[51, 52]]


def test_a_core_that_loses_requests_is_found_out(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.llm_engine, "has_unfinished_requests", lambda: False)
    with pytest.raises(GenerationError, match="lost 1 requests"):
        llm.generate([50], GREEDY, use_tqdm=False)


def test_a_model_for_pooling_does_not_generate(llm: LLM, client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.llm_engine, "get_supported_tasks", lambda: ("embed",))
    with pytest.raises(ValueError, match="does not generate"):
        llm.generate([50], GREEDY)


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def _sigint() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_sigint")
def test_ctrl_c_aborts_and_leaves_the_engine_usable(llm: LLM, client: FakeClient) -> None:
    kept = llm.enqueue([60], SamplingParams(max_tokens=30), use_tqdm=False)

    def press() -> None:
        if client.num_steps == 3:
            os.kill(os.getpid(), signal.SIGINT)

    client.before_step = press
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[50], [51]], SamplingParams(max_tokens=20), use_tqdm=False)
    assert len(client.aborted) == 2
    assert [request.external_req_id for request, _ in client.live.values()] == kept  # others live on
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    client.before_step = lambda: None
    assert ids(llm.generate([50], GREEDY, use_tqdm=False)) == [[51, 52]]
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert (output.request_id, len(output.outputs[0].token_ids)) == (kept[0], 30)


# -- enqueue ----------------------------------------------------------------------------------------------------------


def test_enqueue_then_wait(llm: LLM, client: FakeClient) -> None:
    first = llm.enqueue([[50], [51]], [SamplingParams(max_tokens=4), GREEDY], use_tqdm=False)
    second = llm.enqueue([52], GREEDY, use_tqdm=False)
    assert (first, second, client.num_steps) == (["0", "1"], ["2"], 0)
    assert ids(llm.generate([60], GREEDY, use_tqdm=False)) == [[61, 62]]  # runs the others on the way
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [o.request_id for o in outputs] == ["0", "1", "2"]
    assert ids(outputs) == [[51, 52, 53, 54], [52, 53], [53, 54]]
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_an_error_while_waiting_forgets_what_was_enqueued(llm: LLM, client: FakeClient) -> None:
    def fail() -> None:
        raise GenerationError("broken")

    llm.enqueue([[50], [51]], GREEDY, use_tqdm=False)
    client.before_step = fail
    with pytest.raises(GenerationError):
        llm.wait_for_completion(use_tqdm=False)
    client.before_step = lambda: None
    assert not client.live
    assert llm.wait_for_completion(use_tqdm=False) == []


# -- chat -------------------------------------------------------------------------------------------------------------


def test_chat_renders_tokenizes_and_answers(llm: LLM) -> None:
    messages = [{"role": "user", "content": "the fox"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt == "<|begin|><|user|>the fox<|end|><|assistant|>"
    assert output.prompt_token_ids == llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True)
    assert output.prompt_token_ids[:2] != [0, 0]  # one BOS: the template's


def test_chat_options_change_the_prompt(llm: LLM) -> None:
    def prompts(messages: Any, **options: Any) -> list[str | None]:
        return [output.prompt for output in llm.chat(messages, GREEDY, use_tqdm=False, **options)]

    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    assert prompts([[user], [user, assistant]], add_generation_prompt=False) == [
        "<|begin|><|user|>a<|end|>",
        "<|begin|><|user|>a<|end|><|assistant|>b<|end|>",
    ]
    assert prompts([user, assistant], add_generation_prompt=False, continue_final_message=True) == [
        "<|begin|><|user|>a<|end|><|assistant|>b"
    ]
    template = "{{ x }}{{ tools | tojson }}{{ messages[0].content }}"
    options = {"chat_template": template, "chat_template_kwargs": {"x": "X"}, "tools": [{"name": "f"}]}
    assert prompts([user], **options) == ['X[{"name": "f"}]a']
    with pytest.raises(ValidationError, match="messages is empty"):
        prompts([])


# -- beam search ------------------------------------------------------------------------------------------------------


def test_beam_search_keeps_the_likeliest_sequences(llm: LLM, client: FakeClient) -> None:
    """Three choices per step, -0.5 for +1, -1 for +2, -2 for +3."""
    params = BeamSearchParams(beam_width=3, max_tokens=2)
    (result,) = llm.beam_search([{"prompt_token_ids": [50]}], params)
    assert [(s.tokens, s.cum_logprob, s.finish_reason) for s in result.sequences] == [
        ([50, 51, 52], -1.0, "length"),
        ([50, 51, 53], -1.5, "length"),
        ([50, 52, 53], -1.5, "length"),
    ]
    first = result.sequences[0]
    assert first.text == llm.get_tokenizer().decode([51, 52])
    assert [next(iter(position)) for position in first.logprobs] == [51, 52]
    assert first.logprobs[0][51].decoded_token is not None
    assert not client.live


def test_beam_search_of_several_prompts(llm: LLM, client: FakeClient) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    prompts = [[50], [60, 61], "the fox"]
    together = llm.beam_search(prompts, params)
    steps = client.num_steps
    apart = llm.beam_search(prompts, params, concurrency_limit=1, use_tqdm=False)
    assert together == apart
    assert client.num_steps == steps + 9


def test_beam_search_ends_texts(llm: LLM) -> None:
    """Token 1 ends a text (the tokenizer's), and token 2 (generation_config.json)."""
    (result,) = llm.beam_search([[0]], BeamSearchParams(beam_width=2, max_tokens=3, include_stop_str_in_output=True))
    assert {(tuple(s.tokens), s.stop_reason) for s in result.sequences} >= {((0, 1), 1)}
    (ignoring,) = llm.beam_search([[0]], BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True))
    assert {len(s.tokens) for s in ignoring.sequences} == {4}


def test_beams_wider_than_the_logprobs_allow_are_refused(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="--max-logprobs"):
        llm.beam_search([[50]], BeamSearchParams(beam_width=20, max_tokens=2))


def test_beam_search_stops_where_the_context_is_full(llm: LLM) -> None:
    (result,) = llm.beam_search([[50] * 60], BeamSearchParams(beam_width=2, max_tokens=50))
    assert {len(s.tokens) for s in result.sequences} == {64}


# -- construction -----------------------------------------------------------------------------------------------------


def test_arguments_become_flags(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[Any] = []
    monkeypatch.setattr(
        "quire.frontend.llm_engine.make_client", lambda config, **k: (configs.append((config, k)), FakeClient())[1]
    )
    LLM(str(model_dir), dtype="float32", seed=7, max_num_seqs=3, enforce_eager=True, tensor_parallel_size=1)
    LLM(model=str(model_dir), disable_log_stats=False)
    (config, options), (other, more) = configs
    assert (config.model_config.dtype, config.model_config.seed) == ("float32", 7)
    assert config.scheduler_config.max_num_seqs == 3
    assert (options["log_stats"], more["log_stats"]) == (False, True)
    assert not other.observability_config.disable_log_stats


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2 is not supported: the tokens"),
        ({"nnodes": 2, "tensor_parallel_size": 3}, "--nnodes 2 does not divide the 3 workers"),
        ({"default_mm_loras": {"audio": "x"}}, "default_mm_loras=.* is not supported"),
        ({"port": 8000}, "'port' is no argument of the engine: it is a flag of `quire serve`"),
        ({"quantization": "int3"}, "--quantization 'int3' is not one of int8, int4, compressed-tensors, gptq, awq"),
        ({"max_num_seq": 2}, "unknown argument 'max_num_seq'; did you mean max_num_seqs"),
        ({"dtype": "int3"}, "--dtype 'int3' is not one of"),
    ],
)
def test_keywords_are_never_ignored(model_dir: Path, client: FakeClient, keywords: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(model_dir), **keywords)


def test_keywords_without_effect_are_warned_of(
    model_dir: Path, client: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    LLM(
        str(model_dir),
        trust_remote_code=True,
        swap_space=4,
        tensor_parallel_size=1,
        enforce_eager=True,
        enable_lora=False,
        speculative_config=None,
    )
    warned = {record.getMessage().partition(" ")[0] for record in caplog.records if record.levelname == "WARNING"}
    assert warned == {"trust_remote_code", "swap_space"}


def test_context_manager_and_repr(llm: LLM, client: FakeClient, model_dir: Path) -> None:
    assert repr(llm) == f"LLM(model={str(model_dir)!r})"
    with llm as entered:
        assert entered is llm
        llm.enqueue([50], GREEDY, use_tqdm=False)
    assert client.is_shut_down
    assert not client.live


def test_pass_through_calls(llm: LLM, client: FakeClient) -> None:
    client.utility_results |= {"is_sleeping": True, "update_weights": "v", "get_weight_version": "v"}
    assert llm.reset_prefix_cache() is True
    assert llm.collective_rpc("check_health") == ["pong"]
    llm.start_profile("run", delay_iterations=2)
    llm.stop_profile()
    llm.reset_mm_cache()
    llm.release_kv_cache_memory("keep")
    assert llm.is_sleeping() is True
    assert llm.update_weights(Path("/new"), "v") == "v"
    assert llm.get_weight_version() == "v"
    assert client.utilities == [
        ("reset_prefix_cache", False, False),
        ("collective_rpc", "check_health", None, (), {}),
        ("profile", True, "run", 2, None),
        ("profile", False),
        ("release_kv_cache_memory", "keep"),
        ("is_sleeping",),
        ("update_weights", "/new", "v"),
        ("get_weight_version",),
    ]


def test_a_request_that_would_wait_for_ever_is_refused(llm: LLM, client: FakeClient) -> None:
    llm.sleep(1)
    for call in (llm.generate, llm.enqueue):
        with pytest.raises(ClientError, match="wait for ever"):
            call([[3, 4]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert not client.added
    client.utility_results["wake_up"] = False
    assert llm.wake_up(["weights"]) is False
    with pytest.raises(ClientError, match="wait for ever"):
        llm.generate([[3, 4]], SamplingParams(max_tokens=2), use_tqdm=False)
    client.utility_results["wake_up"] = True
    assert llm.wake_up() is True
    llm.enqueue([[3, 4]], SamplingParams(max_tokens=2), use_tqdm=False)
    llm.sleep(0, "keep")
    for _ in range(2):
        with pytest.raises(ClientError, match="frozen"):
            llm.wait_for_completion(use_tqdm=False)
    llm.wake_up()
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert list(output.outputs[0].token_ids) == [5, 6], "refusing has lost nothing"


def test_metrics_are_not_made_up(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="disable_log_stats=False"):
        llm.get_metrics()


# -- progress ---------------------------------------------------------------------------------------------------------


class Bar:
    """Stands in for tqdm."""

    made: list[Bar]

    def __init__(self, **options: Any) -> None:
        self.options, self.count, self.closed, self.postfix = options, 0, False, ""
        Bar.made.append(self)

    def update(self, count: int) -> None:
        self.count += count

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self.postfix = text

    def close(self) -> None:
        self.closed = True


def test_a_bar_of_ones_own(llm: LLM) -> None:
    Bar.made = []
    llm.generate([[50], [51]], GREEDY, use_tqdm=Bar)
    (bar,) = Bar.made
    assert (bar.options["total"], bar.options["desc"], bar.count, bar.closed) == (2, "Processed prompts", 2, True)
    assert bar.postfix.startswith("est. speed input: ")
    assert "toks/s, output: " in bar.postfix


def test_the_bar_is_closed_after_an_error(llm: LLM, client: FakeClient) -> None:
    def fail() -> None:
        raise GenerationError("broken")

    Bar.made, client.before_step = [], fail
    with pytest.raises(GenerationError):
        llm.generate([50], GREEDY, use_tqdm=Bar)
    assert Bar.made[0].closed


def test_tqdm_writes_to_standard_error(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate([[50], [51]], GREEDY)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "Rendering prompts" in captured.err
    assert "Processed prompts" in captured.err
    llm.generate([[50], [51]], GREEDY, use_tqdm=False)
    assert capfd.readouterr().err == ""


def test_an_empty_step_is_no_end(llm: LLM, client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A core may have nothing to say for a while."""
    get_output, quiet = client.get_output, [3]

    def sometimes() -> EngineCoreOutputs:
        quiet[0] -= 1
        return EngineCoreOutputs() if quiet[0] >= 0 else get_output()

    monkeypatch.setattr(client, "get_output", sometimes)
    assert ids(llm.generate([50], GREEDY, use_tqdm=False)) == [[51, 52]]
