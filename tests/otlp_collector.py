"""A collector of OpenTelemetry on loopback that takes OTLP over HTTP, as strictly as the schema has it."""

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def take(request: web.Request) -> web.Response:
    """The answer of a collector that has taken everything."""
    return web.Response(content_type="application/x-protobuf")


class OtlpCollector:
    """What came, and how it is answered; spans count when they were answered with a success."""

    def __init__(self, url: str, answer: Answering) -> None:
        self.url = url
        self.answer = answer
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.connections: set[Any] = set()
        self.taken: list[Span] = []
        """In the order in which they came, with those that came again."""

    @property
    def spans(self) -> dict[bytes, Span]:
        """By its id, what was said of each span last."""
        return {span.span_id: span for span in self.taken}

    async def hear(self, request: web.Request) -> web.StreamResponse:
        """Answer a request."""
        body = await request.read()
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.paths.append(request.path)
        self.connections.add(request.transport)
        response = await self.answer(request)
        if 200 <= response.status < 300:
            assert request.content_type == "application/x-protobuf"
            self.taken += _spans_of(ExportTraceServiceRequest.FromString(body))
        return response


@asynccontextmanager
async def collecting(answer: Answering = take, *, port: int = 0) -> AsyncIterator[OtlpCollector]:
    """A collector for the time of the block."""
    app = web.Application()
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.0)
    collector = OtlpCollector("", answer)
    app.router.add_route("*", "/{path:.*}", collector.hear)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
    await site.start()
    [address] = runner.addresses
    collector.url = f"http://127.0.0.1:{address[1]}"
    try:
        yield collector
    finally:
        for each in collector.connections:  # a request that hangs ends now
            each.abort()
        await runner.cleanup()


def read_request(text: str) -> list[Span]:
    """The spans of a request in JSON, as the schema of OTLP has them: a field that it does not know is an error."""
    return _spans_of(ParseDict(_with_base64(json.loads(text)), ExportTraceServiceRequest()))


def said(span: Span) -> dict[str, Any]:
    """The attributes of a span."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value") or "") for each in span.attributes}


def _spans_of(request: ExportTraceServiceRequest) -> list[Span]:
    [resource] = request.resource_spans
    spans = list(resource.scope_spans[0].spans)
    for span in spans:  # the SDK writes flags of its own, and a status that is unset
        for each in (span, *span.links):
            each.flags = 0
        if not span.status.code:
            span.ClearField("status")
    return spans


def _with_base64(value: Any) -> Any:
    """Ids as protobuf's JSON has them, where OTLP's has hexadecimal digits."""
    if isinstance(value, list):
        return [_with_base64(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: base64.b64encode(bytes.fromhex(each)).decode()
        if key in ("traceId", "spanId", "parentSpanId")
        else _with_base64(each)
        for key, each in value.items()
    }
