"""A sender of spans and its collector over real sockets: batches, tries, what is dropped, and what is never lost."""

import asyncio
import html
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import ScenarioError
from harness.server.telemetry.metrics import ServerMetrics
from harness.server.telemetry.tracing.collector import (
    Answer,
    DeliveryVerdict,
    SpanCollector,
    judge_answer,
    read_headers,
    traces_url,
)
from harness.server.telemetry.tracing.sender import (
    SPANS_NOT_TAKEN,
    SPANS_TAKEN,
    SendingPace,
    SpanDropReason,
    SpanSender,
)
from harness.server.telemetry.tracing.spans import TracedRequest, TracedTurn, read_traceparent
from tests.checkout import ROOT
from tests.logged import capture_logs
from tests.otlp_collector import Answering, OtlpCollector, collecting, said, take
from tests.thoroughness import examples

QUICK = SendingPace(every_s=0.01, first_pause_s=0.01, longest_pause_s=0.02)


def turn(index: int, *, requests: int = 1, at: float = 1_000.0) -> TracedTurn:
    """The turn with that index, of one session."""
    asked = [TracedRequest(f"r{index}.{place}", 0, 1, at, 0.5, 0.0, "", "stop") for place in range(requests)]
    return TracedTurn(
        "a", index, None, "completed", "model", 1, 0.0, None, 3, 1, [("1", 0, 1)], asked, at, at + 1, None
    )


def counted(metrics: ServerMetrics) -> dict[str, int]:
    """The counters that have something to say of spans."""
    lines = (line.split() for line in metrics.render().decode().splitlines() if line.startswith("harness_span"))
    found = {
        name.removeprefix("harness_").replace("_total", ""): int(float(value))
        for name, value in lines
        if "_created" not in name
    }
    return {name: value for name, value in found.items() if value}


def sender_to(url: str, pace: SendingPace = QUICK, timeout_s: float = 5.0) -> tuple[SpanSender, ServerMetrics]:
    """A sender, and the metrics that it counts in."""
    metrics = ServerMetrics()
    return SpanSender(SpanCollector(traces_url(url), timeout_s=timeout_s), metrics, pace), metrics


async def until(holds: Callable[[], bool]) -> None:
    """Return once `holds()` is true."""
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.002)


def in_turn(*answers: Answering) -> Answering:
    """One after the other, the last one for ever."""
    left = list(answers)

    async def answer(request: web.Request) -> web.Response:
        return await (left.pop(0) if len(left) > 1 else left[0])(request)

    return answer


def with_status(status: int, text: str = "", **headers: str) -> Answering:
    """That answer."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, text=text, headers=headers)

    return answer


async def hang(request: web.Request) -> web.Response:
    """Never answer."""
    await asyncio.sleep(3600)
    return web.Response()


async def test_many_spans_leave_in_batches():
    """None is longer than a batch and the turn that ends it; all of them arrive, in order."""
    async with collecting() as collector:
        sender, metrics = sender_to(collector.url, QUICK._replace(batch_length=50))
        async with sender.sending():
            for index in range(500):
                sender.offer(turn(index))
            await until(lambda: counted(metrics).get("spans_sent") == 1000)  # a batch without an answer is sent again
        assert len(collector.bodies) == 20
    assert [said(span)["harness.turn.index"] for span in collector.taken if span.name == "turn"] == [*range(500)]
    assert counted(metrics) == {"spans_sent": 1000}


async def test_a_batch_is_sent_again_until_it_is_taken():
    """After those statuses alone that may be asked again, and after the time that the collector wants."""
    refusals = [with_status(503), with_status(429, **{"Retry-After": "0"}), with_status(502), with_status(504)]
    loop = asyncio.get_running_loop()
    async with collecting(in_turn(*refusals, take)) as collector:
        sender, metrics = sender_to(collector.url)
        began = loop.time()
        async with sender.sending():
            sender.offer(turn(0))
            await until(lambda: bool(collector.taken))
        assert loop.time() - began > 4 * QUICK.first_pause_s / 2
    assert len(set(collector.bodies)) == 1
    assert counted(metrics) == {"spans_sent": 2, "span_posts_failed": 4}


async def test_the_time_that_a_collector_wants_is_respected():
    """The next request comes no earlier, and meanwhile nothing else is asked."""
    asked_at: list[float] = []
    loop = asyncio.get_running_loop()

    async def answer(request: web.Request) -> web.Response:
        asked_at.append(loop.time())
        return web.Response(status=503, headers={"Retry-After": "1"}) if len(asked_at) == 1 else web.json_response({})

    async with collecting(answer) as collector:
        sender, _ = sender_to(collector.url)
        async with sender.sending():
            sender.offer(turn(0))
            await until(lambda: bool(collector.taken))
    assert asked_at[1] - asked_at[0] >= 1.0


@pytest.mark.parametrize("status", [301, 307, 400, 401, 404, 413, 500, 501])
async def test_what_is_refused_is_not_sent_again(status: int):
    """It is counted, and what comes next is sent."""
    async with collecting(in_turn(with_status(status, Location="/elsewhere"), take)) as collector:
        sender, metrics = sender_to(collector.url)
        async with sender.sending():
            sender.offer(turn(0))
            await until(lambda: len(collector.bodies) == 1)
            sender.offer(turn(1))
            await until(lambda: bool(collector.taken))
        assert {said(span)["harness.turn.index"] for span in collector.taken if span.name == "turn"} == {1}
        assert set(collector.paths) == {"/v1/traces"}
    assert counted(metrics) == {"spans_sent": 2, 'spans_dropped{reason="refused"}': 2, "span_posts_failed": 1}


async def test_spans_that_a_collector_rejects_one_by_one_are_counted():
    """`partialSuccess`: it has the others, so nothing is sent again."""
    said_so = '{"partialSuccess": {"rejectedSpans": "3", "errorMessage": "too old"}}'
    async with collecting(in_turn(with_status(200, said_so), take)) as collector:
        sender, metrics = sender_to(collector.url)
        with capture_logs() as events:
            async with sender.sending():
                for index in range(2):
                    sender.offer(turn(index))
                await until(lambda: "spans_sent" in counted(metrics))  # its answer has been read, too
    assert len(collector.bodies) == 1
    assert counted(metrics) == {"spans_sent": 1, 'spans_dropped{reason="refused"}': 3}
    assert [(each["event"], each["detail"]) for each in events] == [(SPANS_NOT_TAKEN, "too old")]


async def test_a_full_queue_drops_what_comes_and_says_so_in_the_metrics():
    """It holds what it can, and waits for nobody; a collector that comes back gets what was held."""
    async with collecting(hang) as collector:
        sender, metrics = sender_to(collector.url, QUICK._replace(queue_length=20, batch_length=4), timeout_s=0.2)
        async with sender.sending():
            for index in range(100):
                sender.offer(turn(index))
            assert counted(metrics) == {'spans_dropped{reason="queue_full"}': 180}
            collector.answer = take
            await until(lambda: len(collector.spans) == 20)
    assert counted(metrics)["spans_sent"] == 20


async def test_a_collector_that_starts_later_gets_what_has_waited():
    """Its failure is logged once, with its address, and so is its coming."""
    async with collecting() as first:
        pass
    sender, metrics = sender_to(first.url)
    with capture_logs() as events:
        async with sender.sending():
            sender.offer(turn(0))
            await until(lambda: counted(metrics).get("span_posts_failed", 0) >= 3)
            async with collecting(port=int(first.url.rpartition(":")[2])) as collector:
                await until(lambda: len(collector.taken) == 2)
    assert [(each["event"], each["collector"]) for each in events] == [
        (SPANS_NOT_TAKEN, f"{first.url}/v1/traces"),
        (SPANS_TAKEN, f"{first.url}/v1/traces"),
    ]


async def test_a_batch_that_nobody_takes_is_given_up():
    """So the spans behind it have their turn."""
    async with collecting(with_status(503)) as collector:
        sender, metrics = sender_to(collector.url, QUICK._replace(batch_length=2, give_up_s=0.1))
        async with sender.sending():
            sender.offer(turn(0))
            await until(lambda: counted(metrics).get('spans_dropped{reason="given_up"}') == 2)
            collector.answer = take
            sender.offer(turn(1))
            await until(lambda: len(collector.taken) == 2)


async def test_the_end_of_the_block_sends_what_is_left():
    """At once: the batch that was being sent, and all that waits."""
    async with collecting(hang) as collector:
        sender, metrics = sender_to(collector.url, QUICK._replace(batch_length=10))
        async with sender.sending():
            for index in range(30):
                sender.offer(turn(index))
            await until(lambda: len(collector.bodies) == 1)
            collector.answer = take
        assert len(collector.spans) == 60
    assert counted(metrics) == {"spans_sent": 60}


@pytest.mark.parametrize("answer", [hang, with_status(503, **{"Retry-After": "3600"}), None])
async def test_the_end_of_the_block_is_bounded(answer: Answering | None):
    """However the collector fails; a cancelled block ends as well."""
    loop = asyncio.get_running_loop()
    async with collecting(answer or take) as collector:
        url = collector.url if answer else "http://127.0.0.1:9"
        sender, metrics = sender_to(url, QUICK._replace(stop_s=0.3))

        async def serve() -> None:
            async with sender.sending():
                for index in range(10):
                    sender.offer(turn(index))
                await asyncio.sleep(3600)

        serving = asyncio.create_task(serve())
        await asyncio.sleep(0.05)
        began = loop.time()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert loop.time() - began < 2
    assert counted(metrics)['spans_dropped{reason="stopped"}'] == 20


async def test_a_time_that_is_none_costs_its_own_spans():
    """Those before it and behind it are sent."""
    async with collecting() as collector:
        sender, metrics = sender_to(collector.url)
        async with sender.sending():
            for each in (turn(0), turn(1, at=-1e300), turn(2, at=float("nan")), turn(3)):
                sender.offer(each)
        assert len(collector.taken) == 4
    assert counted(metrics) == {"spans_sent": 4, 'spans_dropped{reason="invalid"}': 4}


async def test_an_answer_without_end_is_read_no_further_than_it_is_needed():
    """It costs a bounded time and bounded memory, and the spans count as taken: the status said so."""

    async def talk(request: web.Request) -> Any:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"{" * 10_000)

    async with collecting(talk) as collector:
        collector_of = SpanCollector(traces_url(collector.url), timeout_s=5.0)
        async with collector_of.connect():
            answer = await collector_of.post(b'{"resourceSpans":[{"scopeSpans":[{"spans":[]}]}]}')
    assert (answer.verdict, answer.trouble) == (DeliveryVerdict.TAKEN, "answered with what is no OTLP")
    assert len(answer.detail) <= 200


async def test_a_key_that_a_collector_says_again_is_in_no_log():
    """The words of others are shown, the key is not."""
    async with collecting(with_status(401, "no access for hunter2hunter2\x1b[2J")) as collector:
        collector_of = SpanCollector(traces_url(collector.url), {"authorization": "Bearer hunter2hunter2"})
        async with collector_of.connect():
            answer = await collector_of.post(b"{}")
        assert "hunter2" not in repr(collector_of)
    assert answer == Answer(DeliveryVerdict.REFUSED, "answered 401", "no access for ...\\x1b[2J")


@pytest.mark.parametrize("key", ["hunter2hunter2", "ab/cd+ef==", 'a"b\\c&d'])
async def test_a_key_is_in_no_log_however_it_is_written(key: str):
    """Across the place where the words are cut, too; as JSON, as HTML, and as an address has it."""
    written = [key, json.dumps(key)[1:-1], key.replace("/", "\\/"), html.escape(key), quote(key, safe="")]
    said = [f"{'x' * before}{each}" for before in (190, 199, 0) for each in written]
    async with collecting(in_turn(*(with_status(401, each) for each in said))) as collector:
        collector_of = SpanCollector(traces_url(collector.url), {"authorization": f"Bearer {key}"})
        async with collector_of.connect():
            answers = [await collector_of.post(b"{}") for _ in said]
    assert {each.detail.strip("x.") for each in answers} == {""}


async def test_a_tenant_that_is_a_number_does_not_change_what_an_answer_means():
    """Keys are looked for in the words alone."""
    text = '{"partialSuccess": {"rejectedSpans": 12, "errorMessage": "tenant 12 is full"}}'
    async with collecting(with_status(200, text)) as collector:
        collector_of = SpanCollector(traces_url(collector.url), {"x-tenant": "12"})
        async with collector_of.connect():
            answer = await collector_of.post(b'{"resourceSpans":[{"scopeSpans":[{"spans":[]}]}]}')
    assert (answer.rejected, answer.detail) == (12, "tenant ... is full")


async def test_whoever_hurries_ends_what_is_left():
    """While it is being sent, and as often as he likes."""
    loop = asyncio.get_running_loop()
    async with collecting(hang) as collector:
        sender, metrics = sender_to(collector.url, QUICK._replace(stop_s=60.0), timeout_s=60.0)

        async def serve() -> None:
            async with sender.sending():
                sender.offer(turn(0))

        serving = asyncio.create_task(serve())
        await until(lambda: bool(collector.bodies))
        began = loop.time()
        sender.hurry()
        sender.hurry()
        await asyncio.wait_for(serving, 30)
        assert loop.time() - began < 10
    sender.hurry()
    assert counted(metrics) == {'spans_dropped{reason="stopped"}': 2}


async def test_what_is_not_new_leaves_half_of_the_queue_to_what_is():
    """However much of it comes at once."""
    async with collecting(hang) as collector:
        sender, metrics = sender_to(collector.url, QUICK._replace(queue_length=20, batch_length=4), timeout_s=0.2)
        async with sender.sending():
            for index in range(100):
                sender.offer(turn(index), is_new=False)
            assert counted(metrics) == {'spans_dropped{reason="queue_full"}': 190}
            for index in range(100, 105):
                sender.offer(turn(index))
            assert counted(metrics) == {'spans_dropped{reason="queue_full"}': 190}
            collector.answer = take
            await until(lambda: len(collector.spans) == 20)


ANSWERS = st.sampled_from(["take", "503", "429", "400", "partial", "hang"])
STEPS = st.lists(st.one_of(st.integers(0, 3), st.just("wait")), max_size=30)


@settings(max_examples=examples(40), deadline=None)
@given(steps=STEPS, answers=st.lists(ANSWERS, max_size=12))
def test_every_span_is_sent_or_counted_as_dropped(steps: list[Any], answers: list[str]):
    """However offers, failures and the end interleave: the counters add up, and all that count as sent have arrived."""
    kinds = {
        "take": take,
        "503": with_status(503),
        "429": with_status(429, **{"Retry-After": "0"}),
        "400": with_status(400),
        "partial": with_status(200, '{"partialSuccess": {"rejectedSpans": 1}}'),
        "hang": hang,
    }
    pace = SendingPace(8, 4, 0.001, 0.001, 0.002, 0.01, 0.1)

    async def play() -> tuple[int, dict[str, int], OtlpCollector]:
        offered = 0
        async with collecting(in_turn(*(kinds[each] for each in answers), take)) as collector:
            sender, metrics = sender_to(collector.url, pace, timeout_s=0.02)
            async with sender.sending():
                for index, step in enumerate(steps):
                    if step == "wait":
                        await asyncio.sleep(0.003)
                    else:
                        sender.offer(turn(index, requests=step))
                        offered += 1 + step
            assert not [task for task in asyncio.all_tasks() if "SpanSender" in repr(task.get_coro())]
        return offered, counted(metrics), collector

    offered, counts, collector = asyncio.run(play())
    counts.pop("span_posts_failed", None)
    assert sum(counts.values()) == offered
    assert counts.get("spans_sent", 0) <= len(collector.spans)


@pytest.mark.parametrize(
    ("status", "content", "after", "expected"),
    [
        (200, b"", "", Answer(DeliveryVerdict.TAKEN)),
        (200, b"{}", "", Answer(DeliveryVerdict.TAKEN)),
        (202, b'{"partialSuccess": {}}', "", Answer(DeliveryVerdict.TAKEN)),
        (200, b'{"partialSuccess": null, "more": 1}', "", Answer(DeliveryVerdict.TAKEN)),
        (200, b"<html>", "", Answer(DeliveryVerdict.TAKEN, "answered with what is no OTLP", "<html>")),
        (200, b"[" * 9_999, "", Answer(DeliveryVerdict.TAKEN, "answered with what is no OTLP", "[" * 200)),
        (503, b"", " 7 ", Answer(DeliveryVerdict.AGAIN, "answered 503", wait_s=7.0)),
        (429, b"busy", "soon", Answer(DeliveryVerdict.AGAIN, "answered 429", "busy")),
        (503, b"", "-1", Answer(DeliveryVerdict.AGAIN, "answered 503")),
        (503, b"", "\N{SUPERSCRIPT TWO}", Answer(DeliveryVerdict.AGAIN, "answered 503")),
        (500, b"", "7", Answer(DeliveryVerdict.REFUSED, "answered 500")),
        (304, b"", "", Answer(DeliveryVerdict.REFUSED, "answered 304")),
    ],
)
def test_answers(status: int, content: bytes, after: str, expected: Answer):
    """As the protocol has them."""
    assert judge_answer(status, content, after, 0.0) == expected


def test_a_date_says_how_long_to_wait():
    """One that is over says that there is nothing to wait for."""
    date = format_datetime(datetime(2026, 1, 1, tzinfo=UTC), usegmt=True)
    at = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
    assert judge_answer(503, b"", date, at - 90).wait_s == 90.0
    assert judge_answer(503, b"", date, at + 90).wait_s == 0.0


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


def test_the_headers_of_traces_go_before_those_of_everything():
    """The first variable that is set counts, whole."""
    both = {"OTEL_EXPORTER_OTLP_HEADERS": "a=1", "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "B=2%2C3, c=,"}
    assert read_headers(both) == {"b": "2,3", "c": ""}
    assert read_headers({"OTEL_EXPORTER_OTLP_HEADERS": "a=1=2"}) == {"a": "1=2"}
    assert read_headers({}) == {}


@pytest.mark.parametrize("value", ["a", "=1", "a b=1", "a=%0d%0aX: 1", "a=\N{EM DASH}"])
def test_headers_that_are_none(value: str):
    """None of them can break out of its line."""
    with pytest.raises(ScenarioError, match="OTEL_EXPORTER_OTLP_HEADERS"):
        read_headers({"OTEL_EXPORTER_OTLP_HEADERS": value})


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
    assert set(re.findall(r"^\| `(\w+)` \|", page.partition("\n## ")[0], flags=re.MULTILINE)) == set(SpanDropReason)
