"""Spans that a session server sends while it serves: those of its record, whatever becomes of turns and sessions."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from harness.engines.scripted import Script, ScriptedEngine, ScriptedFault, ScriptStep
from harness.errors import ScenarioError
from harness.server.serving import serve
from harness.server.settings import ServerSettings
from harness.server.store.sqlite import open_store
from harness.server.telemetry.tracing.collector import HEADERS_VARIABLES
from harness.server.telemetry.tracing.sender import STOP_S
from harness.viewer.spans import SPANS_FILE, write_spans
from tests.builders import toy_template, toy_tokenizer, user
from tests.harness_command import harness, write_scenario
from tests.otlp_collector import OtlpCollector, collecting, read_request, said
from tests.session_servers.served import Client, SetClock, bearer, eventually, says, serving, session_on, url_of


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in HEADERS_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def to(collector: OtlpCollector, **settings: Any) -> ServerSettings:
    """Settings with which spans go there."""
    return ServerSettings(otlp_endpoint=collector.url, **settings)


def exported(store: Path, folder: Path) -> dict[bytes, Span]:
    """What `harness report STORE --format otel` makes of the record."""
    folder.mkdir()
    missing: list[str] = []
    write_spans(store, folder, missing)
    assert missing == []
    lines = (folder / SPANS_FILE).read_text("utf-8").splitlines()
    return {span.span_id: span for line in lines for span in read_request(line)}


def names(spans: dict[bytes, Span]) -> list[str]:
    """How many of which, sorted."""
    return sorted(span.name for span in spans.values())


async def test_live_spans_are_those_of_the_record(tmp_path: Path):
    """Deleted and left open, a branch, an answer asked for again, a drained turn, one that failed: as the export."""
    store = tmp_path / "sessions.db"
    broken = ScriptStep(text="never", fault=ScriptedFault.UNAVAILABLE)
    hanging = ScriptStep(text="a long answer", fault=ScriptedFault.HANG, fault_after=3)
    async with collecting() as collector:
        settings = to(collector, engine_attempts=1)
        async with serving(*says("One.", "Two.", "Other."), broken, store=store, settings=settings) as client:
            first = await client.create()
            answer = await client.say(first, [user("Begin.")])
            body = [user("Begin."), answer, user("Go on.")]
            await client.say(first, body)
            again = await client.http.post(
                url_of(first),
                json={"model": "m", "messages": body},
                headers={**bearer(first.api_key), "x-stainless-retry-count": "1"},
            )
            assert again.status_code == 200
            await client.say(first, [user("Begin."), answer, user("Elsewhere.")])
            assert (await client.chat(first, [user("Fails.")])).status_code >= 500
            await client.http.delete(f"/sessions/{first.session_id}")
            second = await client.create()
            await client.say(second, [user("Stays.")])
            client.engine._script = client.engine._script.__class__((hanging,))
            asking = asyncio.create_task(client.chat(second, [user("Is drained.")]))
            await client.turns_in_flight(1)
            await client.sampling()
            await client.http.post("/sessions/drain")
            await client.engine.abort(None)
            assert (await asking).status_code == 404
        assert collector.spans == exported(store, tmp_path / "spans")

    assert names(collector.spans).count("session") == 2
    ends = {said(span)["harness.turn.end"] for span in collector.spans.values() if span.name == "turn"}
    assert ends == {"model", "engine_failed", "drained"}
    assert set(collector.paths) == {"/v1/traces"}
    heard = b"".join(collector.bodies)
    assert not [text for text in (b"Begin", b"Two.", b"sk-harness-", b"Stays") if text in heard]
    assert len(collector.taken) == len(collector.spans), "nothing came twice"


async def test_spans_leave_while_the_server_serves():
    """A turn a moment after its end, its session when that is deleted; the page of metrics counts them."""
    async with collecting() as collector, serving(*says("One."), settings=to(collector)) as client:
        session = await client.create()
        await client.say(session, [user("Begin.")])
        await eventually(lambda: len(collector.taken) == 2)
        assert names(collector.spans) == ["engine request", "turn"]
        await client.http.delete(f"/sessions/{session.session_id}")
        await eventually(lambda: len(collector.taken) == 3)
        assert names(collector.spans) == ["engine request", "session", "turn"]
        async with asyncio.timeout(30):
            while "harness_spans_sent_total 3.0" not in (await client.http.get("/metrics")).text:
                await asyncio.sleep(0.01)


async def test_a_turn_that_broke_off_and_goes_on_is_one_span(tmp_path: Path):
    """It is sent as it broke off, and again with the same id when it has come to its end."""
    store = tmp_path / "sessions.db"
    hanging = ScriptStep(text="a long answer", fault=ScriptedFault.HANG, fault_after=3)
    async with collecting() as collector:
        async with session_on(hanging, store=store, settings=to(collector)) as (client, session):
            asking = asyncio.create_task(client.chat(session, [user("Begin.")]))
            await client.turns_in_flight(1)
            await client.sampling()
            asking.cancel()
            await eventually(lambda: any(span.name == "turn" for span in collector.taken))
            client.engine._script = client.engine._script.__class__(says("a long answer"))
            await client.say(session, [user("Begin.")])
        assert collector.spans == exported(store, tmp_path / "spans")

    told = [said(span) for span in collector.taken if span.name == "turn"]
    assert [(each["harness.turn.end"], each["harness.turn.attempts"]) for each in told] == [
        ("client_left", 1),
        ("model", 2),
    ]
    assert len({span.span_id for span in collector.taken if span.name == "turn"}) == 1


async def test_a_server_that_was_killed_and_its_successor_send_the_same_ids(tmp_path: Path):
    """What the first had not sent yet is missing, and can be had from the record; nothing has two ids."""
    store = tmp_path / "sessions.db"
    async with collecting() as collector:
        template, engine = toy_template(), ScriptedEngine(toy_tokenizer(), Script(says("One.", "Two.")))
        async with (
            serve(engine, template, open_store(str(store)), to(collector)) as running,
            httpx.AsyncClient(base_url=running.url, timeout=30) as http,
        ):
            client = Client(http, engine, running.server, running.url, 0)
            session = await client.create()
            answer = await client.say(session, [user("Begin.")])
            await eventually(lambda: len(collector.taken) == 2)
            sent, body = dict(collector.spans), [user("Begin."), answer, user("Go on.")]
            told = await client.say(session, body)
            running.hang_up()
        assert len(collector.taken) == 2, "a server that is killed sends nothing more"
        async with serving(*says("Three."), store=store, settings=to(collector)) as client:
            await client.say(session, [*body, told, user("And on.")])
            await client.http.delete(f"/sessions/{session.session_id}")
        spans = exported(store, tmp_path / "spans")
    assert sent.items() <= collector.spans.items() <= spans.items()
    assert names({key: spans[key] for key in spans.keys() - collector.spans.keys()}) == ["engine request", "turn"]


async def test_a_turn_has_a_link_to_the_span_of_its_agent(tmp_path: Path):
    """As `traceparent` names it; the trace stays that of the session, and what is no such header is not kept."""
    store = tmp_path / "sessions.db"
    async with collecting() as collector:
        async with session_on(*says("One.", "Two."), store=store, settings=to(collector)) as (client, session):
            for text, parent in (("Begin.", f"00-{'a' * 32}-{'b' * 16}-01"), ("Again.", "00-secret")):
                body = {"model": "m", "messages": [user(text)]}
                headers = {**bearer(session.api_key), "traceparent": parent}
                assert (await client.http.post(url_of(session), json=body, headers=headers)).status_code == 200
            notes = [turn["notes"]["client"] for turn in (await client.record(session))["turns"]]
        assert collector.spans == exported(store, tmp_path / "spans")
    linked, other = [span for span in collector.taken if span.name == "turn"]
    [link] = linked.links
    assert (link.trace_id.hex(), link.span_id.hex()) == ("a" * 32, "b" * 16)
    assert linked.trace_id == other.trace_id != link.trace_id
    assert not other.links
    assert "traceparent" not in notes[1]


@pytest.mark.xdist_group("command")
async def test_the_server_of_a_run_sends_spans(tmp_path: Path):
    """With the ids of its report, which knows besides how each rollout ended."""
    folder, run = write_scenario(tmp_path / "small"), tmp_path / "run"
    async with collecting() as collector:
        options = ("--engine", "scripted", "--out", run, "--otlp", collector.url)
        ended = await asyncio.to_thread(harness, "run", folder, *options)
        assert ended.code == 0, ended.stderr
        folder = tmp_path / "spans"
        folder.mkdir()
        write_spans(run, folder, [])
    lines = (folder / SPANS_FILE).read_text("utf-8").splitlines()
    spans = {span.span_id: span for line in lines for span in read_request(line)}
    assert names(collector.spans) == names(spans)
    for key, span in spans.items():
        live = said(collector.spans[key])
        assert live.items() <= said(span).items()
        assert {*said(span)} - {*live} <= {f"harness.{name}" for name in ("scenario", "rollout", "outcome", "reward")}


@pytest.mark.xdist_group("command")
def test_a_run_on_a_server_of_others_sends_no_spans_and_says_so(tmp_path: Path):
    """Its server sends them, where it was told to; nothing is left of the run."""
    folder, run = write_scenario(tmp_path / "small"), tmp_path / "run"
    nobody = "http://127.0.0.1:9"
    ended = harness("run", folder, "--server", nobody, "--out", run, "--otlp", nobody)
    assert (ended.code, "expected --server or --otlp" in " ".join(ended.stderr.split())) == (4, True)
    assert not run.exists()


async def test_a_clock_that_is_set_back_makes_no_time_negative(tmp_path: Path):
    """Neither in the record nor in a span: a request and its turn end no earlier than they begin."""
    store, clock = tmp_path / "sessions.db", SetClock()
    slow = ScriptStep(text="One two three.", token_delay_s=0.05)
    async with collecting() as collector:
        async with session_on(slow, store=store, settings=to(collector), clock=clock) as (client, session):
            asking = asyncio.create_task(client.say(session, [user("Begin.")]))
            await client.sampling()
            clock.now -= 3600
            await asking
            [turn] = (await client.record(session))["turns"]
        assert collector.spans == exported(store, tmp_path / "spans")
    assert (turn["seconds"], [each["seconds"] for each in turn["segments"]]) == (0.0, [0.0])
    assert [span for span in collector.taken if span.end_time_unix_nano < span.start_time_unix_nano] == []


async def test_a_session_that_is_paged_out_has_its_span_when_it_is_deleted(tmp_path: Path):
    """Nobody reads it back for that."""
    store, clock = tmp_path / "sessions.db", SetClock()
    async with collecting() as collector:
        settings = to(collector, idle_page_out_s=10.0)
        async with session_on(*says("One."), store=store, settings=settings, clock=clock) as (client, session):
            await client.say(session, [user("Begin.")])
            held = client.server.sessions.in_memory(session.session_id)
            assert held is not None
            await eventually(lambda: held.turns[0].delivered)
            await client.server._turns.store.set_phase(held)  # behind the note of that
            clock.now += 60
            await client.server.sessions.page_out_idle()
            assert client.server.sessions.in_memory(session.session_id) is None
            await client.http.delete(f"/sessions/{session.session_id}")
            assert "harness_session_read_back_seconds_count 0.0" in (await client.http.get("/metrics")).text
        assert collector.spans == exported(store, tmp_path / "spans")
    assert names(collector.spans) == ["engine request", "session", "turn"]


async def say_nothing(request: web.Request) -> web.Response:
    """Keep the sender waiting until it gives up."""
    await asyncio.sleep(3600)
    return web.Response()


async def say_garbage(request: web.Request) -> web.Response:
    """Answer as no collector does."""
    return web.Response(status=418, body=b"\x1b[2J\xff" * 100_000, content_type="text/html")


async def send_elsewhere(request: web.Request) -> web.Response:
    """Lead to another place, where nobody may follow with the keys of this one."""
    return web.Response(status=307, headers={"location": "/elsewhere"})


async def fail(request: web.Request) -> web.Response:
    """Be out of order."""
    return web.Response(status=503)


@asynccontextmanager
async def nobody() -> AsyncIterator[OtlpCollector]:
    """An address at which nobody listens."""
    async with collecting() as collector:
        pass
    yield collector


@pytest.mark.parametrize("answer", [say_nothing, say_garbage, send_elsewhere, fail, None])
async def test_a_collector_that_fails_costs_no_turn(answer: Any, tmp_path: Path):
    """Turns and their record are the same, and the server ends in time; what was dropped is counted."""
    opening = nobody() if answer is None else collecting(answer)
    loop = asyncio.get_running_loop()
    async with opening as collector:
        async with session_on(*says("One.", "Two."), settings=to(collector)) as (client, session):
            for text in ("Begin.", "Again.", "Once more."):
                await client.say(session, [user(text)])
            turns = (await client.record(session))["turns"]
            assert [turn["status"] for turn in turns] == ["completed"] * 3
            metrics, began = client.server._metrics, loop.time()
        assert loop.time() - began < STOP_S + 10
    dropped = [
        line for line in metrics.render().decode().splitlines() if line.startswith("harness_spans_dropped_total")
    ]
    assert sum(float(line.split()[-1]) for line in dropped) == 7
    assert "/elsewhere" not in collector.paths


@pytest.mark.parametrize(
    "endpoint",
    ["", "127.0.0.1:4318", "grpc://h:4317", "http://", "http://h:x", "http://h/?key=1", "http://h/ b", "http://h/#a"],
)
def test_an_address_that_is_none_is_refused(endpoint: str):
    """With an example of one that is."""
    with pytest.raises(ScenarioError, match=re.escape("such as http://127.0.0.1:4318")):
        ServerSettings(otlp_endpoint=endpoint).check()


def test_a_secret_in_the_address_is_refused_and_not_shown():
    """The message says where it belongs."""
    with pytest.raises(ScenarioError, match="OTEL_EXPORTER_OTLP_HEADERS") as raised:
        ServerSettings(otlp_endpoint="https://user:hunter2@collector").check()
    assert "hunter2" not in str(raised.value)
