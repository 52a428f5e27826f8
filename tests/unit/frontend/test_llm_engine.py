"""`LLMEngine` on a scripted core."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.errors import ConfigError, NotFoundError, ValidationError
from quire.frontend.llm_engine import LLMEngine
from quire.frontend.metrics.collect.events import IterationStats
from quire.frontend.metrics.publish.stat_loggers import StatLogger
from quire.frontend.new_request import NewRequest
from quire.lora_request import LoRARequest
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.wire.engine_core import EngineCoreRequest, FinishReason
from quire.wire.lora import AdapterInfo
from quire.wire.stats import SchedulerStats
from tests.adapters import write_adapter

from .fake_client import FakeClient


class Recorder(StatLogger):
    def __init__(self) -> None:
        self.seen: list[tuple[SchedulerStats | None, IterationStats | None]] = []

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_index: int = 0
    ) -> None:
        self.seen.append((scheduler_stats, iteration_stats))


def make_engine(
    model_dir: Path, client: FakeClient | None = None, **flags: Any
) -> tuple[LLMEngine, FakeClient, Recorder]:
    client, recorder = client or FakeClient(), Recorder()
    config = EngineArgs(str(model_dir), **flags).create_engine_config()
    return LLMEngine(config, client=client, stat_loggers=[recorder]), client, recorder


def run(engine: LLMEngine) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if isinstance(output, RequestOutput)]
    return outputs


def process(engine: LLMEngine, request_id: str, params: SamplingParams) -> EngineCoreRequest:
    return engine.input_processor.process_inputs(NewRequest(request_id=request_id, prompt=[50], params=params))[0]


def test_a_request_end_to_end(model_dir: Path) -> None:
    engine, client, _ = make_engine(model_dir)
    internal = engine.add_request("mine", [50, 51], SamplingParams(max_tokens=3))
    assert internal.startswith("mine-")
    assert [r.request_id for r in client.added] == [internal]
    outputs = run(engine)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [[52], [52, 53], [52, 53, 54]]
    assert {o.request_id for o in outputs} == {"mine"}
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].text == engine.get_tokenizer().decode([52, 53, 54])
    assert not client.aborted


def test_ids_are_strings(model_dir: Path) -> None:
    engine, _, _ = make_engine(model_dir)
    with pytest.raises(TypeError, match="must be a str"):
        engine.add_request(7, [50])  # type: ignore[arg-type]


def test_no_params_are_the_models_defaults(model_dir: Path) -> None:
    engine, client, _ = make_engine(model_dir)
    engine.add_request("a", [50])
    params = client.added[0].sampling_params
    assert params is not None
    assert (params.temperature, params.eos_token_id, params.stop_token_ids) == (0.5, 1, [2])


def test_only_what_the_core_needs_goes_down(model_dir: Path) -> None:
    """There is one request per output of a prompt, and no text."""
    engine, client, _ = make_engine(model_dir)
    internal = engine.add_request("a", "the fox", SamplingParams(n=3, seed=5, max_tokens=2), priority=4)
    assert [r.request_id for r in client.added] == [f"{i}_{internal}" for i in range(3)]
    assert [(r.sampling_params.n, r.sampling_params.seed) for r in client.added if r.sampling_params] == [
        (1, 5),
        (1, 6),
        (1, 7),
    ]
    assert {r.priority for r in client.added} == {4}
    assert engine.get_num_unfinished_requests() == 3
    outputs = run(engine)
    assert {o.prompt for o in outputs} == {"the fox"}
    assert sorted(o.outputs[0].index for o in outputs if o.outputs[0].finished()) == [0, 1, 2]
    assert [o.finished for o in outputs] == [False] * 5 + [True]


def test_a_prepared_request_is_taken_as_it_is(model_dir: Path) -> None:
    engine, client, _ = make_engine(model_dir)
    request = process(engine, "a", SamplingParams(max_tokens=1))
    engine.add_request("a", request, prompt_text="shown")
    assert run(engine)[0].prompt == "shown"
    with pytest.raises(ValueError, match="already has an internal id"):
        engine.add_request(client.added[0].request_id, client.added[0])
    other = process(engine, "b", SamplingParams())
    with pytest.raises(ValidationError, match="'c' is not that of the request, 'b'"):
        engine.add_request("c", other)


def test_the_core_hears_of_a_request_after_the_output_processor(model_dir: Path) -> None:
    known: list[bool] = []

    class Watching(FakeClient):
        def add_request(self, request: EngineCoreRequest) -> None:
            known.append(request.request_id in engine.output_processor.request_states)
            super().add_request(request)

    engine, _, _ = make_engine(model_dir, Watching())
    engine.add_request("a", [50], SamplingParams(n=2))
    assert known == [True, True]


def test_a_refusing_core_leaves_nothing_behind(model_dir: Path) -> None:
    class Refusing(FakeClient):
        def add_request(self, request: EngineCoreRequest) -> None:
            if request.request_id.startswith("1_"):
                raise ValidationError("no")
            super().add_request(request)

    engine, client, _ = make_engine(model_dir, Refusing())
    with pytest.raises(ValidationError, match="no"):
        engine.add_request("a", [50], SamplingParams(n=3))
    assert not engine.has_unfinished_requests()
    assert not client.live
    assert engine.output_processor.external_req_ids == {}


def test_a_stop_string_is_an_abort_to_the_core(model_dir: Path) -> None:
    engine, client, recorder = make_engine(model_dir)
    stop = engine.get_tokenizer().decode([53])
    internal = engine.add_request("a", [50, 51], SamplingParams(max_tokens=9, stop=[stop]))
    outputs = run(engine)
    assert outputs[-1].outputs[0].stop_reason == stop
    assert (client.aborted, client.live) == ([internal], {})
    last = recorder.seen[-1][1]
    assert last is not None
    assert [f.finish_reason for f in last.finished_requests] == [FinishReason.STOP]


def test_statistics_of_a_step(model_dir: Path) -> None:
    engine, _, recorder = make_engine(model_dir)
    engine.add_request("a", [50, 51], SamplingParams(max_tokens=2), arrival_time=1.0)
    outputs = run(engine)
    (scheduler, first), (_, second) = recorder.seen
    assert scheduler is not None
    assert first is not None
    assert second is not None
    assert (first.num_prompt_tokens, first.num_generation_tokens) == (2, 1)
    assert first.time_to_first_tokens == [first.iteration_timestamp - 1.0]
    assert second.inter_token_latencies == {1.0: 1}
    (finished,) = second.finished_requests
    assert (finished.queued_time, finished.prefill_time, finished.decode_time) == (0.25, 0.5, 1.0)
    assert outputs[-1].metrics is not None
    assert outputs[-1].metrics.arrival_time == 1.0


def test_an_idle_step_has_scheduler_statistics_only(model_dir: Path) -> None:
    engine, _, recorder = make_engine(model_dir)
    assert engine.step() == []
    assert [iteration for _, iteration in recorder.seen] == [None]


def test_without_statistics_nothing_is_recorded(model_dir: Path) -> None:
    engine, _, recorder = make_engine(model_dir, disable_log_stats=True)
    engine.add_request("a", [50], SamplingParams(max_tokens=1))
    engine.add_request("b", [50], SamplingParams(max_tokens=9))
    assert run(engine)[0].metrics is None
    engine.abort_request(["b"])
    assert recorder.seen == []
    assert engine.pipeline.stat_loggers.loggers == []


def test_an_abort_ends_all_outputs_of_a_request(model_dir: Path) -> None:
    engine, client, recorder = make_engine(model_dir)
    engine.add_request("a", [50], SamplingParams(n=2))
    engine.add_request("b", [50], SamplingParams())
    engine.abort_request(["a", "nobody"])
    assert len(client.aborted) == 2
    assert len(client.live) == 1
    iteration = recorder.seen[-1][1]
    assert iteration is not None
    assert [f.finish_reason for f in iteration.finished_requests] == [FinishReason.ABORT] * 2
    count = len(recorder.seen)
    engine.abort_request(["a"])
    assert (len(client.aborted), len(recorder.seen)) == (2, count)
    assert engine.has_unfinished_requests()


def test_shutdown_aborts_what_is_live(model_dir: Path) -> None:
    engine, client, _ = make_engine(model_dir)
    engine.add_request("a", [50], SamplingParams())
    for _ in range(2):
        engine.shutdown()
        assert client.is_shut_down
        assert not client.live


@pytest.fixture
def _sigint() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_sigint")
def test_ctrl_c_while_outputs_are_processed_loses_none(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, _ = make_engine(model_dir)
    engine.add_request("a", [50], SamplingParams(max_tokens=1))
    process = engine.output_processor.process_outputs

    def interrupted(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return process(*args)

    monkeypatch.setattr(engine.output_processor, "process_outputs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    assert engine.has_unfinished_requests()  # its output is still to be given
    (output,) = engine.step()
    assert output.finished
    assert not engine.has_unfinished_requests()


def test_a_deadline_is_an_error_and_ends_the_work(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    engine, client, _ = make_engine(model_dir, request_timeout_s=30.0)
    params = SamplingParams(n=2, max_tokens=40, temperature=1.0, output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add_request("default", [50], params)
    engine.add_request("own", [50], params.clone(), timeout_s=10)
    ended: dict[str, tuple[float, RequestOutput]] = {}
    while engine.has_unfinished_requests():
        now[0] += 4.0
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            ended[output.request_id] = now[0] - 100, output
    assert [(name, when) for name, (when, _) in ended.items()] == [("own", 12.0), ("default", 32.0)]
    for name, num_tokens, limit in (("own", 3, "10 s"), ("default", 8, "30 s")):
        for completion in ended[name][1].outputs:
            assert (completion.finish_reason, len(completion.token_ids)) == ("error", num_tokens)
            assert completion.error_message is not None
            assert f"within {limit}" in completion.error_message
    assert len(client.aborted) == 4
    assert not client.live
    with pytest.raises(ValidationError, match="timeout_s"):
        engine.add_request("bad", [50], timeout_s=-1)


def test_pass_through_calls(model_dir: Path) -> None:
    engine, client, _ = make_engine(model_dir)
    assert engine.get_supported_tasks() == ("generate",)
    assert engine.reset_prefix_cache() is True
    assert engine.collective_rpc("check_health", 1.0, (2,), {"x": 3}) == ["pong"]
    assert client.utilities[-1] == ("collective_rpc", "check_health", 1.0, (2,), {"x": 3})
    engine.do_log_stats()
    engine.pause_generation("keep", clear_cache=False)
    assert engine.is_paused() is False  # as the client says
    engine.resume_generation()
    engine.reset_encoder_cache()
    engine.reset_mm_cache()
    assert client.utilities[2:] == [
        ("pause_scheduler", "keep", False),
        ("is_scheduler_paused",),
        ("resume_scheduler",),
    ]


def test_verbs_of_adapters(model_dir: Path, tmp_path: Path) -> None:
    lora = LoRARequest("a", 1, str(write_adapter(tmp_path / "a")))
    engine, client, _ = make_engine(model_dir, enable_lora=True)
    client.utility_results.update(
        add_lora=AdapterInfo(1, 1, "d", 10, 4), remove_lora=True, pin_lora=True, list_loras=[1]
    )
    assert (engine.add_lora(lora), engine.remove_lora(1), engine.pin_lora(1)) == (True, True, True)
    assert engine.list_loras() == {1}
    assert client.utilities == [("add_lora", lora), ("remove_lora", 1), ("pin_lora", 1), ("list_loras",)]
    with pytest.raises(NotFoundError, match="there is no adapter at /nowhere"):
        engine.add_lora(LoRARequest("b", 2, "/nowhere"))
    without, client, _ = make_engine(model_dir)
    for call in (lambda: without.add_lora(lora), lambda: without.remove_lora(1), without.list_loras):
        with pytest.raises(ValidationError, match="start it with --enable-lora"):
            call()
    assert not client.utilities


def test_skip_tokenizer_init(model_dir: Path) -> None:
    engine, _, _ = make_engine(model_dir, skip_tokenizer_init=True)
    engine.add_request("a", [50], SamplingParams(max_tokens=1))
    (output,) = run(engine)
    assert (output.outputs[0].text, list(output.outputs[0].token_ids)) == ("", [51])
    with pytest.raises(ValidationError, match="skip_tokenizer_init"):
        engine.get_tokenizer()


def test_a_broken_tokenizer_is_found_while_the_core_starts(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_client(config: object, *, log_stats: bool, meanwhile: Callable[[], object]) -> object:
        meanwhile()
        return pytest.fail("the start went on")

    monkeypatch.setattr("quire.frontend.llm_engine.make_client", make_client)
    with pytest.raises(ConfigError, match="no such file"):
        LLMEngine.from_engine_args(EngineArgs(str(model_dir), chat_template="missing.jinja"))


def test_chat_template_flag(model_dir: Path) -> None:
    engine, _, _ = make_engine(model_dir, chat_template="{{ messages[0].content }}")
    assert engine.get_tokenizer().chat_template == "{{ messages[0].content }}"


def test_stream_interval_of_the_engine(model_dir: Path) -> None:
    engine, _, _ = make_engine(model_dir, stream_interval=4)
    engine.add_request("a", [50], SamplingParams(max_tokens=6, output_kind=RequestOutputKind.DELTA))
    assert [len(o.outputs[0].token_ids) for o in run(engine)] == [1, 4, 1]
