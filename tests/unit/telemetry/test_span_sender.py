"""A sender of spans and its collector over real sockets: what is sent, dropped and counted."""

import asyncio
import logging
import re
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from harness.errors import ScenarioError
from harness.server.telemetry.metrics import ServerMetrics
from harness.server.telemetry.tracing.collector import HEADERS_VARIABLES, check_collector, traces_url
from harness.server.telemetry.tracing.sender import (
    QUEUE_LENGTH,
    SPANS_NOT_TAKEN,
    SPANS_TAKEN,
    STOP_S,
    SpanDropReason,
    SpanSender,
)
from harness.server.telemetry.tracing.spans import TracedTurn, read_traceparent
from harness.types import FinishReason, TurnSegment
from tests.checkout import ROOT
from tests.logged import capture_logs
from tests.otlp_collector import Answering, collecting, said, take
from tests.session_servers.served import eventually
from tests.thoroughness import examples


def turn(index: int, *, requests: int = 1, at: float = 1_000.0) -> TracedTurn:
    """The turn with that index, of one session."""
    asked = [TurnSegment(f"r{index}.{place}", 0, 1, FinishReason.STOP, at, 0.5) for place in range(requests)]
    return TracedTurn(
        "a", index, None, "completed", "model", 1, 0.0, None, 3, 1, [("1", 0, 1)], asked, at, at + 1, None
    )


def counted(metrics: ServerMetrics) -> dict[str, int]:
    """The counters that have something to say of spans, by their name or reason."""
    found = re.findall(r'^harness_(span\w+)_total(?:{reason="(\w+)"})? (\S+)$', metrics.render().decode(), re.MULTILINE)
    return {reason or name: int(float(value)) for name, reason, value in found if float(value)}


def sender_to(url: str) -> tuple[SpanSender, ServerMetrics]:
    """A sender, and the metrics that it counts in."""
    metrics = ServerMetrics()
    return SpanSender(traces_url(url), metrics), metrics


def in_turn(*answers: Answering) -> Answering:
    """One after the other, the last one for ever."""
    left = list(answers)

    async def answer(request: web.Request) -> web.StreamResponse:
        return await (left.pop(0) if len(left) > 1 else left[0])(request)

    return answer


def with_status(status: int, body: bytes = b"", reason: str | None = None, **headers: str) -> Answering:
    """That answer."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, reason=reason, body=body, headers=headers)

    return answer


async def hang(request: web.Request) -> web.Response:
    """Never answer."""
    await asyncio.sleep(3600)
    return web.Response()


def rejecting(count: int) -> Answering:
    """A success that leaves some of the spans out."""
    answer = ExportTraceServiceResponse()
    answer.partial_success.rejected_spans = count
    return with_status(200, answer.SerializeToString())


async def test_many_spans_leave_in_batches_and_in_order():
    """Over one connection; all that is left when the block ends, too."""
    async with collecting() as collector:
        sender, metrics = sender_to(collector.url)
        async with sender.sending():
            for index in range(1_000):
                sender.offer(turn(index))
            await eventually(lambda: counted(metrics).get("spans_sent") == 2_000)
            sender.offer(turn(1_000))
    assert [said(span)["harness.turn.index"] for span in collector.taken if span.name == "turn"] == [*range(1_001)]
    assert (5 <= len(collector.bodies) < 21, len(collector.connections)) == (True, 1)
    assert counted(metrics) == {"spans_sent": 2_002}


async def test_a_batch_is_sent_again_until_it_is_taken():
    """When the collector wants it; meanwhile nothing else is sent, and the log has the change alone."""
    loop, asked_at = asyncio.get_running_loop(), list[float]()
    answers = in_turn(with_status(503, **{"Retry-After": "0"}), with_status(429, **{"Retry-After": "1"}), take)

    async def answer(request: web.Request) -> web.StreamResponse:
        asked_at.append(loop.time())
        return await answers(request)

    async with collecting(answer) as collector:
        sender, metrics = sender_to(collector.url)
        with capture_logs() as events:
            async with sender.sending():
                sender.offer(turn(0))
                await eventually(lambda: len(collector.bodies) == 2)
                sender.offer(turn(1))
                await eventually(lambda: counted(metrics).get("spans_sent") == 4)
    assert asked_at[2] - asked_at[1] >= 1
    assert len(set(collector.bodies)) == 2
    assert counted(metrics) == {"spans_sent": 4, "span_posts_failed": 2}
    assert [each["event"] for each in events] == [SPANS_NOT_TAKEN, SPANS_TAKEN]
    assert (events[0]["collector"], "status 503" in events[0]["why"]) == (f"{collector.url}/v1/traces", True)


@pytest.mark.parametrize("status", [307, 401, 500])
async def test_what_is_refused_is_not_sent_again(status: int):
    """It is counted, and what comes next is sent. A redirect is a refusal: the keys are for this address alone."""
    refusal = with_status(status, b"no", Location="/elsewhere", **{"Set-Cookie": "a=b"})
    async with collecting(in_turn(refusal, take)) as collector:
        sender, metrics = sender_to(collector.url)
        async with sender.sending():
            sender.offer(turn(0))
            await eventually(lambda: counted(metrics).get("refused") == 2)
            sender.offer(turn(1))
    assert {said(span)["harness.turn.index"] for span in collector.taken if span.name == "turn"} == {1}
    assert set(collector.paths) == {"/v1/traces"}
    assert "cookie" not in collector.headers[1]
    assert counted(metrics) == {"spans_sent": 2, "refused": 2, "span_posts_failed": 1}


async def test_spans_that_a_collector_rejects_one_by_one_are_counted():
    """`partialSuccess`: it has the others, so nothing is sent again."""
    async with collecting(rejecting(3)) as collector:
        sender, metrics = sender_to(collector.url)
        with capture_logs() as events:
            async with sender.sending():
                for index in range(2):
                    sender.offer(turn(index))
    assert len(collector.bodies) == 1
    assert counted(metrics) == {"spans_sent": 1, "refused": 3}
    assert [(each["event"], each["why"]) for each in events] == [(SPANS_NOT_TAKEN, "rejected 3 spans")]


async def test_a_full_queue_drops_what_comes_and_what_is_not_new_leaves_half_of_it():
    """Whatever the collector does, who offers spans never waits."""
    async with collecting(hang) as collector:
        sender, metrics = sender_to(collector.url)
        async with sender.sending():
            for is_new, most in ((False, QUEUE_LENGTH // 2), (True, QUEUE_LENGTH)):
                before = counted(metrics).get("queue_full", 0)
                for index in range(QUEUE_LENGTH):
                    sender.offer(turn(index, requests=0), is_new=is_new)
                admitted = QUEUE_LENGTH - counted(metrics)["queue_full"] + before
                taken = 512 + counted(metrics).get("refused", 0)  # a batch that hangs, and those that hung too long
                assert QUEUE_LENGTH // 2 <= admitted <= QUEUE_LENGTH // 2 + taken, most
            sender.hurry()


async def test_a_collector_that_starts_later_gets_what_has_waited():
    """Its failure is logged once, and so is its coming; the SDK's own lines are left to other exporters."""
    with socket.socket() as reserved, capture_logs() as events:
        reserved.bind(("127.0.0.1", 0))  # the port refuses, and nothing else on the machine gets it
        host, port = reserved.getsockname()
        sender, metrics = sender_to(f"http://{host}:{port}")
        async with sender.sending():
            sender.offer(turn(0))
            await eventually(lambda: counted(metrics).get("span_posts_failed", 0) >= 2)
            reserved.close()
            async with collecting(port=port) as collector:
                await eventually(lambda: counted(metrics).get("spans_sent") == 2)
    assert len(collector.taken) == 2
    assert [each["event"] for each in events] == [SPANS_NOT_TAKEN, SPANS_TAKEN]


async def test_the_log_of_the_sdk_has_nothing_of_ours(caplog: pytest.LogCaptureFixture):
    """Neither its complaints nor a key that a collector says again; lines of other exporters stay."""
    async with collecting(with_status(401, b"hunter2", reason="no access for hunter2")) as collector:
        sender, metrics = sender_to(collector.url)
        async with sender.sending():
            sender.offer(turn(0))
            await eventually(lambda: counted(metrics).get("refused") == 2)
            logging.getLogger(OTLPSpanExporter.__module__).warning("of another exporter")
    assert "hunter2" not in caplog.text
    [ours, theirs] = [each.getMessage() for each in caplog.records]
    assert (SPANS_NOT_TAKEN in ours, "status 401" in ours, theirs) == (True, True, "of another exporter")


@pytest.mark.parametrize("answer", [hang, with_status(503), None])
async def test_the_end_of_the_block_is_bounded(answer: Answering | None):
    """However the collector fails; a cancelled block ends too, and leaves no thread but that of a request."""
    loop, before = asyncio.get_running_loop(), set(threading.enumerate())
    async with collecting(answer or take) as collector:
        sender, metrics = sender_to(collector.url if answer else "http://127.0.0.1:9")

        async def serve() -> None:
            async with sender.sending():
                for index in range(10):
                    sender.offer(turn(index))
                await asyncio.sleep(3600)

        serving = asyncio.create_task(serve())
        await asyncio.sleep(0)  # all is offered
        began = loop.time()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert loop.time() - began < STOP_S + 10
        if answer is not hang:
            await eventually(lambda: not any("Otel" in each.name for each in {*threading.enumerate()} - before))
    assert counted(metrics)["stopped"] == 20


async def test_a_caller_that_hurries_ends_what_is_left():
    """While it is being sent, and as often as it likes; nothing is sent after."""
    loop = asyncio.get_running_loop()
    async with collecting(hang) as collector:
        sender, metrics = sender_to(collector.url)
        async with sender.sending():
            sender.offer(turn(0))
            await eventually(lambda: bool(collector.bodies))
            began = loop.time()
            sender.hurry()
            sender.hurry()
            sender.offer(turn(1))
        assert loop.time() - began < 10
        assert len(collector.bodies) == 1
    assert counted(metrics) == {"stopped": 4}


async def test_a_time_that_is_none_costs_its_own_spans():
    """Those before it and behind it are sent."""
    async with collecting() as collector:
        sender, metrics = sender_to(collector.url)
        async with sender.sending():
            for each in (turn(0), turn(1, at=-1e300), turn(2, at=float("nan")), turn(3)):
                sender.offer(each)
    assert len(collector.taken) == 4
    assert counted(metrics) == {"spans_sent": 4, "invalid": 4}


async def test_an_answer_without_end_is_read_no_further_than_it_is_needed():
    """It costs bounded memory, and the spans count as taken: the status said so."""

    async def talk(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"{" * 10_000)

    async with collecting(talk) as collector:
        sender, metrics = sender_to(collector.url)
        async with sender.sending():
            sender.offer(turn(0))
            await eventually(lambda: counted(metrics) == {"spans_sent": 2})


@settings(max_examples=examples(20), deadline=None)
@given(
    offers=st.lists(st.one_of(st.integers(0, 3), st.just("wait")), max_size=30),
    answers=st.lists(st.sampled_from(["take", "503", "400", "partial"]), max_size=5),
    hurries=st.booleans(),
)
def test_every_span_is_sent_or_counted_as_dropped(offers: list[Any], answers: list[str], hurries: bool):
    """However offers, failures and the end interleave: the counters add up, and all that count as sent have arrived."""
    kinds = {
        "take": take,
        "503": with_status(503, **{"Retry-After": "0"}),
        "400": with_status(400),
        "partial": rejecting(1),
    }

    async def play() -> None:
        offered = 0
        async with collecting(in_turn(*(kinds[each] for each in answers), take)) as collector:
            sender, metrics = sender_to(collector.url)
            async with sender.sending():
                for index, step in enumerate(offers):
                    if step == "wait":
                        await asyncio.sleep(0.003)
                    else:
                        sender.offer(turn(index, requests=step))
                        offered += 1 + step
                if hurries:
                    sender.hurry()
            counts = counted(metrics)
            counts.pop("span_posts_failed", None)
            assert sum(counts.values()) == offered
            assert counts.get("spans_sent", 0) <= len(collector.spans)

    asyncio.run(play())


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("https://collector/otlp/", "https://collector/otlp/v1/traces"),
        ("http://collector/v1/traces", "http://collector/v1/traces"),
        ("http://[::1]:4318/", "http://[::1]:4318/v1/traces"),
    ],
)
def test_spans_go_below_the_address(endpoint: str, url: str):
    """As OpenTelemetry has it; an address that names the place already is taken as it is."""
    assert traces_url(endpoint) == url


@pytest.mark.parametrize("value", ["a", "=1", "a b=1", "a=%0d%0aX: 1", "a=\N{EM DASH}", 'a="secret"'])
def test_headers_that_are_none(value: str, monkeypatch: pytest.MonkeyPatch):
    """None of them can break out of its line, and the SDK does not get to log one."""
    monkeypatch.delenv(HEADERS_VARIABLES[0], raising=False)
    monkeypatch.setenv(HEADERS_VARIABLES[1], value)
    with pytest.raises(ScenarioError, match="OTEL_EXPORTER_OTLP_HEADERS") as raised:
        check_collector("http://127.0.0.1:4318")
    assert "secret" not in str(raised.value)


async def test_the_environment_has_the_headers(monkeypatch: pytest.MonkeyPatch):
    """The first variable that is set counts, whole; no proxy of the environment comes between."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "a=1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "Authorization=Bearer%20key,B = 2%2C3=4, c=,")
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with collecting() as collector:
        check_collector(collector.url)
        sender, _ = sender_to(collector.url)
        async with sender.sending():
            sender.offer(turn(0))
    [heard] = collector.headers
    assert (heard["authorization"], heard["b"], heard["c"], "a" in heard) == ("Bearer key", "2,3=4", "", False)


def test_spans_without_the_sdk_are_refused(monkeypatch: pytest.MonkeyPatch):
    """With the extra that brings it."""
    monkeypatch.delitem(sys.modules, "harness.server.telemetry.tracing.sender")
    monkeypatch.setitem(sys.modules, OTLPSpanExporter.__module__, None)
    with pytest.raises(ScenarioError, match=r"--otlp needs `pip install 'session-harness\[otel\]'`"):
        check_collector("http://127.0.0.1:4318")


def test_a_server_without_spans_imports_nothing_of_it():
    """Nor of what it brings along."""
    code = (
        "import sys, harness.server.serving; print({'opentelemetry', 'requests', 'google.protobuf'} & {*sys.modules})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT).stdout == b"set()\n"


GOOD = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD, GOOD),
        ("cc" + GOOD[2:] + "-more", "cc" + GOOD[2:]),
        (GOOD + "-more", None),
        ("ff" + GOOD[2:], None),
        (GOOD.upper(), None),
        (f"00-{'0' * 32}-{'b' * 16}-01", None),
        (f"00-{'a' * 32}-{'0' * 16}-01", None),
        (GOOD + "\n", None),
        ("", None),
    ],
)
def test_traceparents(text: str, expected: str | None):
    """As W3C Trace Context has them; nothing else is kept of what an agent sends there."""
    assert read_traceparent(text) == expected


def test_every_reason_is_in_the_table_of_the_docs():
    """The table is the one in force."""
    page = (ROOT / "docs" / "looking.md").read_text("utf-8").partition("### Spans while a server serves")[2]
    assert set(re.findall(r"^- `(\w+)`: ", page.partition("\n## ")[0], flags=re.MULTILINE)) == set(SpanDropReason)
