"""A small HTTP server for tests that let a process send POST requests somewhere: a collector, a token endpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

#: Takes path, headers by their names in lower case, and body; returns the type and the body of the answer.
Post = Callable[[str, Mapping[str, str], bytes], tuple[str, bytes]]


@contextmanager
def posting_server(answer: Post) -> Iterator[str]:
    """Answer POST requests with this function, on a thread for each connection, until the block ends; give the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            content_type, content = answer(self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Collector:
    """What a collector of OpenTelemetry has received."""

    def __init__(self) -> None:
        self.received: list[ExportTraceServiceRequest] = []

    def take(self, path: str, _headers: Mapping[str, str], body: bytes) -> tuple[str, bytes]:
        """Take a request that sends spans by OTLP."""
        if path == "/v1/traces":
            self.received.append(ExportTraceServiceRequest.FromString(body))
        return "application/x-protobuf", b""

    def all_spans(self) -> list[Span]:
        """Every span, in the order of their ends."""
        return [
            span
            for request in self.received
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def spans(self) -> dict[str, tuple[Span, dict[str, str]]]:
        """Every span by its name, with the attributes of its process."""
        return {
            span.name: (span, {each.key: each.value.string_value for each in resource.resource.attributes})
            for request in self.received
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }


@contextmanager
def collector() -> Iterator[tuple[str, Collector]]:
    """Run a server that takes traces by OTLP; give its URL, and what it received."""
    receiving = Collector()
    with posting_server(receiving.take) as url:
        yield url, receiving
