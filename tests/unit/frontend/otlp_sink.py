"""OTLP collectors on loopback, over HTTP and gRPC: they keep the spans they are sent, or misbehave."""

from __future__ import annotations

import http.server
import importlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Received:
    """`spans` are protobuf spans of requests in the order they came, `start_spans` those of an engine's start."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.start_spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []

    def take(self, export: ExportTraceServiceRequest) -> None:
        """One message of an exporter."""
        for part in export.resource_spans:
            self.resources.append(values(part.resource.attributes))
            for scope in part.scope_spans:
                for span in scope.spans:
                    is_start = any(attribute.key == "quire.cpu_seconds" for attribute in span.attributes)
                    (self.start_spans if is_start else self.spans).append(span)


class Sink(Received):
    """`with Sink() as sink:` over HTTP; `paths` are those it was asked for."""

    def __init__(self, status: int = 200) -> None:
        super().__init__()
        self.paths: list[str] = []
        sink = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if status == 200:
                    sink._take(self.path, body)
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def _take(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        self.take(ExportTraceServiceRequest.FromString(body))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Sink:
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class GrpcSink(Received):
    """`with GrpcSink() as sink:` over gRPC, without TLS."""

    def __init__(self) -> None:
        super().__init__()
        grpc = importlib.import_module("grpc")
        export = grpc.unary_unary_rpc_method_handler(
            self._export, ExportTraceServiceRequest.FromString, ExportTraceServiceResponse.SerializeToString
        )
        service = "opentelemetry.proto.collector.trace.v1.TraceService"
        self._server = grpc.server(ThreadPoolExecutor(1))
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": export}),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def _export(self, export: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
        self.take(export)
        return ExportTraceServiceResponse()

    def __enter__(self) -> GrpcSink:
        self._server.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._server.stop(None).wait()


def values(attributes: Any) -> dict[str, Any]:
    """Protobuf attributes as Python values."""
    found: dict[str, Any] = {}
    for attribute in attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        found[attribute.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found
