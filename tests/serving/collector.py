"""An OpenTelemetry collector for traces: OTLP over HTTP, in this process."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Keeps the spans that it is sent."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._spans: list[Span] = []
        self._services: set[str] = set()
        self._lock = threading.Lock()

    def take(self, body: bytes) -> None:
        told = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            for resource in told.resource_spans:
                attributes = resource.resource.attributes
                self._services |= {one.value.string_value for one in attributes if one.key == "service.name"}
                for scope in resource.scope_spans:
                    self._spans += scope.spans

    def services(self) -> set[str]:
        with self._lock:
            return set(self._services)

    def trace(self, trace_id: str) -> list[Span]:
        """The spans of a trace that have come so far."""
        with self._lock:
            return [span for span in self._spans if span.trace_id.hex() == trace_id]


@contextmanager
def collector() -> Iterator[Collector]:
    """Run one on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            packed = self.headers.get("content-encoding") == "gzip"
            found = self.path == "/v1/traces"
            if found:
                running.take(gzip.decompress(body) if packed else body)
            self.send_response(200 if found else 404)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        running = Collector(server.server_port)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield running
        server.shutdown()
