"""Spans of requests through OpenTelemetry (the extra `otel`), and nothing else imports it.

A span is made when its request has finished, from stamps taken before, and handed to the SDK's batch processor: a
thread of that exports. A collector that is slow, wrong or gone costs spans, and no request.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Mapping
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation import set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from quire.errors import ConfigError
from quire.frontend.tracing import RequestRecord, StartPhase
from quire.resolve import resolve
from quire.version import __version__

Attribute = str | int | float | bool | tuple[str, ...]

END_S = 2.0
"""Longest wait for a collector when the engine ends."""
SEMCONV_SWITCH = "OTEL_SEMCONV_STABILITY_OPT_IN"
LATEST = "gen_ai_latest_experimental"
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP, GRPC = "http/protobuf", "grpc"
GRPC_EXPORTER = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter:OTLPSpanExporter"
"""Dotted name of the gRPC exporter: gRPC is loaded only where it is used."""
_CHAT_IDS = ("chatcmpl-", "resp_", "msg_")
"""Prefixes of the server's ids of conversations."""


class SpanSender:
    """Turns records into spans and sends these to `endpoint`."""

    def __init__(self, endpoint: str, *, is_detailed: bool = False, processor: SpanProcessor | None = None) -> None:
        """`is_detailed`: a span has children: queue, prefill, decode. Raises ConfigError for an invalid endpoint, or a
        protocol that is not OTLP's over HTTP or gRPC."""
        self._exporter: SpanExporter | None = None
        if processor is None:
            self._exporter = make_exporter(endpoint)
            processor = BatchSpanProcessor(self._exporter)
        names = {"service.name": "quire", "service.version": __version__}
        given = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        if os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in given:
            del names["service.name"]  # the operator's wins
        self._provider = TracerProvider(resource=Resource.create(names), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("quire", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._is_detailed = is_detailed
        _route_log()
        atexit.register(self.close)
        self._is_latest = LATEST in [word.strip() for word in os.environ.get(SEMCONV_SWITCH, "").split(",")]

    def send(self, record: RequestRecord) -> None:
        """Makes the spans of a request. The SDK and the request's parent decide whether they are sampled."""
        headers = {name.lower(): value for name, value in record.trace_headers.items()}
        operation = operation_of(record)
        span = self._tracer.start_span(
            f"{operation} {record.model}" if self._is_latest else "llm_request",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes=_known(latest_attributes(record, operation) if self._is_latest else vllm_attributes(record)),
            start_time=_nanoseconds(record.arrival_time),
        )
        if record.error is not None:
            span.set_status(Status(StatusCode.ERROR))
        if self._is_detailed and span.is_recording():
            self._send_stages(span, record)
        span.end(_nanoseconds(max(record.end_time, record.arrival_time)))

    def _send_stages(self, span: Span, record: RequestRecord) -> None:
        context = set_span_in_context(span)
        for name, times in (
            ("llm_request.queue", record.queue),
            ("kv.load", record.load),
            ("llm_request.prefill", record.prefill),
            ("llm_request.decode", record.decode),
        ):
            if times is not None:
                stage = self._tracer.start_span(name, context, start_time=_nanoseconds(times[0]))
                stage.end(_nanoseconds(times[1]))

    def send_start(self, start: StartPhase) -> None:
        """Makes the spans of a start. TRACEPARENT and TRACESTATE of the environment name their parent."""
        carrier = {name: os.environ.get(name.upper(), "") for name in ("traceparent", "tracestate")}
        self._send_phase(start, self._propagator.extract(carrier))

    def _send_phase(self, phase: StartPhase, context: Context) -> None:
        attributes = {"quire.cpu_seconds": round(phase.cpu_s, 6)}
        span = self._tracer.start_span(
            phase.name, context, attributes=attributes, start_time=_nanoseconds(phase.start_time)
        )
        for part in phase.phases:
            self._send_phase(part, set_span_in_context(span))
        span.end(_nanoseconds(phase.end_time))

    def close(self) -> None:
        """Sends what is left, if the collector takes it within END_S. Idempotent."""
        atexit.unregister(self.close)
        end = threading.Thread(target=self._provider.shutdown, name="SpanSenderEnd", daemon=True)
        end.start()
        end.join(END_S)
        if end.is_alive() and self._exporter is not None:
            self._exporter.shutdown()


def _route_log() -> None:
    """Sends log messages of the SDK about the collector where ours go, unless the application handles them."""
    log = logging.getLogger("opentelemetry")
    if not log.handlers and not logging.getLogger().handlers:
        log.handlers = list(logging.getLogger("quire").handlers)
        log.propagate = False


def make_exporter(endpoint: str) -> SpanExporter:
    """Returns the exporter to `endpoint`, for the protocol that the environment names. Raises ConfigError."""
    protocol = protocol_of(endpoint)
    if protocol == HTTP:
        return OTLPSpanExporter(endpoint=traces_url(endpoint))
    address, is_insecure = grpc_address(endpoint)
    try:
        exporter_class = resolve(GRPC_EXPORTER)
    except (ImportError, ConfigError) as e:
        raise ConfigError(
            f"OTLP over gRPC needs its exporter, which is not there ({e}); pip install 'quire[otel]'"
        ) from None
    exporter: SpanExporter = exporter_class(endpoint=address, insecure=is_insecure)
    return exporter


def protocol_of(endpoint: str) -> str:
    """Returns the OTLP protocol that the environment names; without one HTTP, or gRPC for a URL of that scheme.

    Raises ConfigError for one that is neither.
    """
    given = next((os.environ[name] for name in PROTOCOL_VARIABLES if os.environ.get(name)), None)
    protocol = given or (GRPC if endpoint.startswith("grpc://") else HTTP)
    if protocol not in (HTTP, GRPC):
        raise ConfigError(f"OTLP protocol {protocol!r} is not supported; traces go out as {HTTP} or {GRPC}")
    return protocol


def traces_url(endpoint: str) -> str:
    """Returns the URL for the traces of `endpoint`: OTLP over HTTP has a path of its own. Raises ConfigError."""
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint!r} is no HTTP URL; give the collector's OTLP/HTTP port, for example "
            f"http://localhost:4318/v1/traces, or set {PROTOCOL_VARIABLES[0]}={GRPC}"
        )
    return urlunsplit(url._replace(path="/v1/traces")) if url.path in ("", "/") else endpoint


def grpc_address(endpoint: str) -> tuple[str, bool]:
    """Returns (host:port, whether the connection is without TLS). Raises ConfigError."""
    url = urlsplit(endpoint if "://" in endpoint else f"grpc://{endpoint}")
    if url.scheme not in ("grpc", "http", "https") or not url.hostname or url.path not in ("", "/"):
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint!r} is no address for gRPC; give the collector's OTLP/gRPC port, for "
            "example http://localhost:4317 (https:// for TLS)"
        )
    return url.netloc, url.scheme != "https"


def operation_of(record: RequestRecord) -> str:
    """Returns the gen_ai.operation.name that follows from the id and the parameters of a request."""
    if record.params is None:
        return "embeddings"
    return "chat" if record.request_id.startswith(_CHAT_IDS) else "text_completion"


def vllm_attributes(record: RequestRecord) -> dict[str, Attribute | None]:
    """Returns the attributes by vLLM's names."""
    params = record.params
    return {
        "gen_ai.response.model": record.model,
        "gen_ai.request.id": record.request_id,
        "gen_ai.request.n": record.n,
        "gen_ai.request.max_tokens": None if params is None else params.max_tokens,
        "gen_ai.request.temperature": None if params is None else params.temperature,
        "gen_ai.request.top_p": None if params is None else params.top_p,
        "gen_ai.usage.num_sequences": record.n,
        "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": record.num_output_tokens,
        "gen_ai.latency.time_in_queue": _length(record.queue),
        "gen_ai.latency.time_to_first_token": record.time_to_first_token,
        "gen_ai.latency.time_in_model_prefill": _length(record.prefill),
        "gen_ai.latency.time_in_model_decode": _length(record.decode),
        "gen_ai.latency.time_in_model_inference": (
            None if record.prefill is None or record.decode is None else record.decode[1] - record.prefill[0]
        ),
        "gen_ai.latency.e2e": max(0.0, record.end_time - record.arrival_time),
        "error.type": record.error,
    }


def latest_attributes(record: RequestRecord, operation: str) -> dict[str, Attribute | None]:
    """Returns the attributes by the GenAI convention's names, without those that hold text (stop sequences,
    messages)."""
    params = record.params
    attributes: dict[str, Attribute | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": record.model,
        "gen_ai.request.stream": record.is_stream,
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.model": record.model,
        "gen_ai.response.finish_reasons": tuple(record.finish_reasons),
        "gen_ai.response.time_to_first_chunk": record.time_to_first_token,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        "error.type": record.error,
    }
    if params is not None:
        attributes |= {
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.choice.count": record.n if record.n != 1 else None,
        }
    return attributes


def _known(attributes: Mapping[str, Attribute | None]) -> dict[str, Attribute]:
    return {name: value for name, value in attributes.items() if value is not None}


def _length(times: tuple[float, float] | None) -> float | None:
    return None if times is None else times[1] - times[0]


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
