"""Looks at a session server for browsers: what each is told, and what that costs the server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
from msgspec import to_builtins
from starlette.types import ASGIApp, Receive, Scope, Send

from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.rollouts.client.session_server import (
    SampledBy,
    SessionList,
    SessionServerClient,
    SessionSummary,
    SessionTotals,
)
from harness.server.app import SessionServer
from harness.server.serving import serve
from harness.server.store.base import MemoryStore
from harness.sessions.gate import GateReport, GateState, HoldKind, HoldReport
from harness.types import Json
from harness.viewer.live.live_look import BrowserState, LiveLook
from harness.viewer.live.live_reading import LiveSessions, Reading
from tests.builders import toy_template, toy_tokenizer, user
from tests.session_servers.scripted import canned_server, http_answer
from tests.session_servers.served import Client, SetClock

NOTHING = BrowserState(0, 0, "", 0)
GATE: Json = {"state": "open", "epoch": 0, "held": 0, "sessions": 1, "turns_in_flight": 0}


class Scene(NamedTuple):
    client: Client[ScriptedEngine]
    look: LiveLook
    clock: SetClock
    asked: list[str]
    """What the server was asked since this was last cleared, without `/sessions`."""

    async def tell(self, asked: BrowserState) -> Any:
        """What a browser is told at the next look, which alone is in `asked` then."""
        self.clock.now += 60
        self.asked.clear()
        return await self.look.tell(asked)


@asynccontextmanager
async def looking(*texts: str) -> AsyncIterator[Scene]:
    """A server that says `texts`, a look at it, and a clock that stands still."""
    engine = ScriptedEngine(toy_tokenizer(), Script(steps=tuple(ScriptStep(text=text) for text in texts)))
    asked: list[str] = []
    clock = SetClock()

    @asynccontextmanager
    async def counted(server: SessionServer) -> AsyncIterator[ASGIApp]:
        app = server.app()

        async def count(scope: Scope, receive: Receive, send: Send) -> None:
            query = scope["query_string"].decode()
            if scope["method"] == "GET":
                asked.append(scope["path"].removeprefix("/sessions") + (f"?{query}" if query else ""))
            await app(scope, receive, send)

        yield count

    async with (
        serve(engine, toy_template(), MemoryStore(), around=counted) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as http,
        SessionServerClient(running.url) as server,
    ):
        client = Client(http, engine, running.server, running.url, 0)
        yield Scene(client, LiveLook(server, toy_tokenizer(), clock), clock, asked)


async def test_a_look_costs_what_has_changed():
    """Nobody reads a record that is not open, or of which nothing has changed."""
    async with looking("Understood.") as scene:
        one, other = [await scene.client.create() for _ in range(2)]
        for session in (one, other):
            await scene.client.say(session, [user("Begin.")])
        has = BrowserState(0, 0, one.session_id, 0)
        costs: list[list[str]] = []
        for changed in (None, None, other, one):
            if changed is not None:
                await scene.client.say(changed, [user("Begin again.")])
            await scene.tell(has)
            costs.append(scene.asked[:2] + scene.asked[3:])

    look = ["/gate", ""]
    first, idle, elsewhere, here = costs
    assert first[:2] == look
    assert first[2:] == [f"/times?from={other.session_id}:0&from={one.session_id}:0", f"/{one.session_id}"]
    assert idle == look
    assert elsewhere == [*look, f"/times?from={other.session_id}:1"]
    assert here == [*look, f"/times?from={one.session_id}:1", f"/{one.session_id}?since=1"]


async def test_the_page_says_what_top_says():
    """Totals with their speed, holds and workers; and of a session in flight its tokens per second."""
    growing = [SessionSummary("a" * 32, "open", 0, 1, "engine", tokens) for tokens in (0, 120)]
    listed = [
        SessionList([each], SessionTotals({"engine": 1}, 0, each.tokens), [SampledBy("", "v3", "", 1, 1)])
        for each in growing
    ]
    gate = http_answer(200, {**GATE, "state": "paused", "holds": [{"holder": "it", "kind": "pause", "ends_in_s": 9.0}]})
    holds, times = http_answer(200, {"now": 1.0, "holds": []}), http_answer(200, {"now": 1.0, "times": {}})
    first_list, second_list = (http_answer(200, to_builtins(each)) for each in listed)
    clock = SetClock()
    async with (
        canned_server(gate, first_list, holds, times, gate, second_list, holds) as canned,
        SessionServerClient(canned.url) as server,
    ):
        look = LiveLook(server, toy_tokenizer(), clock)
        first: Any = await look.tell(NOTHING)
        clock.now += 60
        told: Any = await look.tell(NOTHING)

    live = LiveSessions()
    for second, each in ((0, growing[0]), (60, growing[1])):
        live.look({each.session_id: each}, each.tokens, second)
    hold = HoldReport("it", HoldKind.PAUSE, ends_in_s=9.0)
    seen = Reading(GateReport(GateState.PAUSED, 0, 0, 1, 0, (hold,)), listed[1], live)
    assert told["facts"]["said"] == [f"{name}: {words}" for name, words in seen.facts()]
    assert told["facts"]["said"][1:] == [
        "gate: paused, 0 requests wait",
        "hold: it  pause, ends in 9 s",
        "worker: the engine  version v3, serves, 1 in flight",
    ]
    assert "120 tokens since the start, 2 tokens/s" in told["facts"]["said"][0]
    assert [each["sessions"][0]["why"] for each in (first, told)] == ["1 in flight", "1 in flight, 2 tokens/s"]


async def test_any_number_of_browsers_is_one_look():
    """At once, and within the second after it; a look that failed is one, too."""
    async with looking("Understood.") as scene:
        await scene.tell(NOTHING)
        alone = len(scene.asked)
        scene.clock.now += 60
        scene.asked.clear()
        await asyncio.gather(*(scene.look.tell(NOTHING) for _ in range(20)))
        scene.clock.now += 0.9
        await scene.look.tell(NOTHING)
        together = len(scene.asked)
        scene.clock.now += 0.2
        await scene.look.tell(NOTHING)

    assert together == alone == 3
    assert len(scene.asked) == 2 * alone


async def test_of_the_sessions_that_browsers_have_open_the_last_are_kept():
    """Tokens of a session are memory; one that was let go is read again, whole, and told to whoever has it open."""
    async with looking("Understood.") as scene:
        sessions = [await scene.client.create() for _ in range(10)]
        for session in sessions:
            await scene.client.say(session, [user("Begin.")])
        told = [await scene.tell(BrowserState(0, 0, session.session_id, 0)) for session in sessions]
        version = told[0]["session"]["version"]
        again = await scene.tell(BrowserState(told[0]["version"], 0, sessions[0].session_id, version))
        read_again = scene.asked[-1]
        await scene.tell(BrowserState(0, 0, sessions[9].session_id, 0))

    assert read_again == f"/{sessions[0].session_id}"
    assert len(again["session"]["turns"]) == 1
    assert not any(sessions[9].session_id in each for each in scene.asked)
