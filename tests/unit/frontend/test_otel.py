"""Spans of requests, as a collector on loopback receives them."""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from quire.config.observability import ObservabilityConfig
from quire.errors import ConfigError, GenerationError
from quire.frontend import otel
from quire.frontend.llm_engine import LLMEngine
from quire.frontend.otel import SpanSender, grpc_address, make_exporter, operation_of, protocol_of, traces_url
from quire.frontend.tracing import RequestRecord, RequestTracer, make_span_sender
from quire.sampling_params import SamplingParams

from .fake_client import FakeClient
from .otlp_sink import GrpcSink, Sink, values
from .test_llm_engine import make_engine as make_whole_engine

TRACE_ID, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"Traceparent": f"00-{TRACE_ID}-{PARENT}-01", "tracestate": "a=b"}
SERVER = 2
"""SpanKind of OTLP."""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Yields what tries again draws random numbers, which other tests of this process would notice."""
    yield
    for thread in threading.enumerate():
        if thread.name == "SpanSenderEnd":
            thread.join(120)
            assert not thread.is_alive()


def make_engine(model_dir: Path, **flags: Any) -> LLMEngine:
    return make_whole_engine(model_dir, FakeClient(), **flags)[0]


def traced(model_dir: Path, sink: Sink, **flags: Any) -> LLMEngine:
    return make_engine(model_dir, otlp_traces_endpoint=sink.url, **flags)


def run(engine: LLMEngine, request_id: str = "a", **fields: Any) -> None:
    params = SamplingParams(**{"max_tokens": 3, **fields.pop("params", {})})
    engine.add_request(request_id, {"prompt_token_ids": [5, 6, 7]}, params, **fields)
    while engine.has_unfinished_requests():
        engine.step()


def test_a_span_with_vllms_names(model_dir: Path) -> None:
    with Sink() as sink:
        engine = traced(model_dir, sink)
        run(engine, trace_headers=SAMPLED)
        engine.shutdown()
    (span,) = sink.spans
    assert set(sink.paths) == {"/v1/traces"}
    assert sink.resources[0]["service.name"] == "quire"
    assert (span.name, span.kind) == ("llm_request", SERVER)
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE_ID, PARENT, "a=b")
    assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
    found = values(span.attributes)
    assert found["gen_ai.request.id"] == "a"
    assert found["gen_ai.usage.prompt_tokens"] == 3
    assert found["gen_ai.usage.completion_tokens"] == 3
    assert (found["gen_ai.request.n"], found["gen_ai.request.max_tokens"]) == (1, 3)
    latencies = {name.removeprefix("gen_ai.latency.") for name in found if name.startswith("gen_ai.latency.")}
    assert latencies == {
        *("time_in_queue", "time_to_first_token", "time_in_model_prefill", "time_in_model_decode"),
        *("time_in_model_inference", "e2e"),
    }
    assert found["gen_ai.latency.time_in_model_decode"] == pytest.approx(2.0)  # the core's clock: a second a step
    assert "error.type" not in found
    assert not any("seed" in name or "stop" in name for name in found)


@pytest.mark.parametrize("with_variable", [True, False])
def test_spans_go_out_over_grpc(model_dir: Path, monkeypatch: pytest.MonkeyPatch, with_variable: bool) -> None:
    pytest.importorskip("grpc")
    with GrpcSink() as sink:
        endpoint = f"grpc://{sink.address}"
        if with_variable:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
            endpoint = f"http://{sink.address}"
        engine = make_engine(model_dir, otlp_traces_endpoint=endpoint)
        run(engine, trace_headers=SAMPLED)
        engine.shutdown()
    (span,) = sink.spans
    assert (span.name, span.trace_id.hex()) == ("llm_request", TRACE_ID)
    assert values(span.attributes)["gen_ai.usage.completion_tokens"] == 3
    assert sink.resources[0]["service.name"] == "quire"
    assert "engine start" in [span.name for span in sink.start_spans]


def test_the_start_is_a_trace(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEPARENT", f"00-{TRACE_ID}-{PARENT}-01")
    with Sink() as sink:
        traced(model_dir, sink).shutdown()
    by_name = {span.name: span for span in sink.start_spans}
    whole = by_name["engine start"]
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE_ID, PARENT)
    for name in ("interpreter", "engine ready"):
        assert by_name[name].parent_span_id == whole.span_id
        assert whole.start_time_unix_nano <= by_name[name].start_time_unix_nano <= whole.end_time_unix_nano
    assert not sink.spans


def test_the_latest_convention(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", "http,gen_ai_latest_experimental")
    with Sink() as sink:
        engine = traced(model_dir, sink)
        run(engine, "chatcmpl-1", params={"seed": 4, "top_p": 0.5})
        engine.shutdown()
    (span,) = sink.spans
    found = values(span.attributes)
    assert span.name == f"chat {engine.model_config.name}"
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.provider.name"] == "quire"
    assert found["gen_ai.usage.input_tokens"] == found["gen_ai.usage.output_tokens"] == 3
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert found["gen_ai.response.id"] == "chatcmpl-1"
    assert (found["gen_ai.request.seed"], found["gen_ai.request.top_p"]) == (4, 0.5)
    assert "gen_ai.request.id" not in found


def test_the_outputs_of_a_prompt_are_one_span_with_stages(model_dir: Path) -> None:
    with Sink() as sink:
        engine = traced(model_dir, sink, collect_detailed_traces="all")
        run(engine, params={"n": 3})
        engine.shutdown()
    spans = {span.name: span for span in sink.spans}
    assert len(sink.spans) == len(spans) == 4
    whole = spans["llm_request"]
    found = values(whole.attributes)
    assert (found["gen_ai.request.n"], found["gen_ai.usage.num_sequences"]) == (3, 3)
    assert (found["gen_ai.usage.prompt_tokens"], found["gen_ai.usage.completion_tokens"]) == (3, 9)
    for name in ("queue", "prefill", "decode"):
        stage = spans[f"llm_request.{name}"]
        assert (stage.parent_span_id, stage.trace_id) == (whole.span_id, whole.trace_id)
        assert stage.start_time_unix_nano <= stage.end_time_unix_nano
    assert spans["llm_request.queue"].end_time_unix_nano == spans["llm_request.prefill"].start_time_unix_nano


def test_a_load_of_kv_blocks_is_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[ReadableSpan] = []

    class Exporter(SpanExporter):
        def export(self, batch: Sequence[ReadableSpan]) -> SpanExportResult:
            spans.extend(batch)
            return SpanExportResult.SUCCESS

    monkeypatch.setattr(otel, "make_exporter", lambda endpoint: Exporter())
    sender = SpanSender("http://h", is_detailed=True)
    record = RequestRecord("a", "m", 1.0, 9.0, SamplingParams(), 1, False, {}, 1, 0)
    record.queue, record.load = (1.0, 5.0), (2.0, 4.0)
    sender.send(record)
    sender.close()
    assert [(span.name, span.start_time, span.end_time) for span in spans if span.name != "llm_request"] == [
        ("llm_request.queue", 10**9, 5 * 10**9),
        ("kv.load", 2 * 10**9, 4 * 10**9),
    ]


def test_who_is_not_sampled_is_not_sent(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Sink() as sink:
        engine = traced(model_dir, sink)
        run(engine, trace_headers={"traceparent": f"00-{TRACE_ID}-{PARENT}-00"})
        for broken in ({"traceparent": "nonsense"}, {"traceparent": ""}, {}):
            run(engine, trace_headers=broken)
        engine.shutdown()
        assert len(sink.spans) == 3
        assert all(not span.parent_span_id for span in sink.spans)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
        engine = traced(model_dir, sink)
        run(engine)
        engine.shutdown()
    assert len(sink.spans) == 3


def test_aborts_and_failures_are_spans_too(model_dir: Path) -> None:
    with Sink() as sink:
        engine = traced(model_dir, sink)
        engine.add_request("a", {"prompt_token_ids": [5]}, SamplingParams(max_tokens=30))
        engine.step()
        engine.abort_request(["a"])
        engine.add_request("b", {"prompt_token_ids": [5]}, SamplingParams(max_tokens=30))
        engine.pipeline.fail(list(engine.output_processor.request_states), GenerationError("secret text"))
        engine.shutdown()
    aborted, failed = sink.spans
    assert values(aborted.attributes)["gen_ai.usage.completion_tokens"] == 1
    assert values(failed.attributes)["error.type"] == "GenerationError"
    assert failed.status.code == 2
    assert b"secret" not in failed.SerializeToString()


def test_a_collector_that_is_gone_does_not_hold_the_end_up(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "END_S", 0.05)
    may_end = threading.Event()
    shutdown = TracerProvider.shutdown

    def try_again_and_again(provider: TracerProvider) -> None:
        may_end.wait()
        shutdown(provider)

    monkeypatch.setattr(TracerProvider, "shutdown", try_again_and_again)
    with Sink() as sink:
        engine = traced(model_dir, sink)
        run(engine)
        engine.shutdown()
        engine.shutdown()  # both come back although the spans are still to be sent
        may_end.set()


def test_what_is_tried_again_and_again_is_given_up_at_the_end(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(otel, "END_S", 0.2)
    with Sink(503) as sink:
        engine = traced(model_dir, sink)
        run(engine)
        engine.shutdown()
        for thread in threading.enumerate():
            if thread.name == "SpanSenderEnd":
                thread.join()
    assert caplog.text.count("Transient error") == 1, "it would wait a second, and longer each time"


@pytest.mark.parametrize("status", [500, 400])
def test_a_broken_collector_costs_no_request(model_dir: Path, status: int) -> None:
    with Sink(status) as sink:
        engine = traced(model_dir, sink)
        for _ in range(3):
            run(engine)
        assert not engine.has_unfinished_requests()
        engine.shutdown()


def test_an_exporter_that_raises_costs_no_request_and_is_told_once(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def send(record: RequestRecord) -> None:
        raise RuntimeError("the exporter is broken")

    engine = make_engine(model_dir)
    engine.output_processor._tracer = RequestTracer("m", send)
    run(engine)
    run(engine)
    assert caplog.text.count("the trace of a request was lost") == 1


class Kept(SpanExporter):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS


def test_without_statistics_what_is_known_is_sent(model_dir: Path) -> None:
    kept = Kept()
    sender = SpanSender("", processor=SimpleSpanProcessor(kept), is_detailed=True)
    engine = make_engine(model_dir, disable_log_stats=True)
    engine.output_processor._tracer = RequestTracer("m", sender.send)
    run(engine)
    (span,) = kept.spans
    assert span.attributes is not None
    assert span.attributes["gen_ai.usage.prompt_tokens"] == 3
    assert "gen_ai.latency.time_in_queue" not in span.attributes


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://h:4318", "http://h:4318/v1/traces"),
        ("https://h/", "https://h/v1/traces"),
        ("http://h:4318/v1/traces", "http://h:4318/v1/traces"),
        ("http://h/mine", "http://h/mine"),
    ],
)
def test_the_url_of_traces_follows_from_the_endpoint(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize("endpoint", ["grpc://localhost:4317", "localhost:4317", "http://", ""])
def test_what_is_no_endpoint(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="no HTTP URL"):
        traces_url(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "address", "is_insecure"),
    [
        ("grpc://h:4317", "h:4317", True),
        ("http://h:4317/", "h:4317", True),
        ("https://h:4317", "h:4317", False),
        ("h:4317", "h:4317", True),
    ],
)
def test_endpoints_of_grpc(endpoint: str, address: str, is_insecure: bool) -> None:
    assert grpc_address(endpoint) == (address, is_insecure)


@pytest.mark.parametrize("endpoint", ["", "http://", "ftp://h:4317", "http://h:4318/v1/traces"])
def test_what_is_no_endpoint_of_grpc(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="no address for gRPC"):
        grpc_address(endpoint)


def test_the_environment_chooses_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (protocol_of("http://h"), protocol_of("grpc://h")) == ("http/protobuf", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert protocol_of("http://h") == "grpc"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    assert protocol_of("http://h") == "http/protobuf"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="http/protobuf or grpc"):
        make_exporter("http://h")


def test_grpc_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[otel\]'"):
        make_exporter("grpc://h:4317")


def test_wrong_flags_of_tracing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_span_sender(ObservabilityConfig()) is None
    with pytest.raises(ConfigError, match="none of all, model, worker"):
        ObservabilityConfig(otlp_traces_endpoint="http://h", collect_detailed_traces="some")
    with pytest.raises(ConfigError, match="needs --otlp-traces-endpoint"):
        ObservabilityConfig(collect_detailed_traces="all")
    real_import = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name="opentelemetry")
        return real_import(name, *args)

    monkeypatch.delitem(sys.modules, "quire.frontend.otel")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[otel\]'"):
        make_span_sender(ObservabilityConfig(otlp_traces_endpoint="http://h"))


def test_the_operation_follows_from_the_id() -> None:
    def record(request_id: str, params: SamplingParams | None) -> RequestRecord:
        return RequestRecord(request_id, "m", 0.0, 1.0, params, 1, False, {}, 1, 0)

    names = [operation_of(record(i, SamplingParams())) for i in ("cmpl-1", "chatcmpl-1", "msg_1", "resp_1", "7")]
    assert names == ["text_completion", "chat", "chat", "chat", "text_completion"]
    assert operation_of(record("x", None)) == "embeddings"
