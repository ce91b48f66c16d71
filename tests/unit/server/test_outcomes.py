"""Every admitted turn has an outcome, whatever raises or is cancelled between its admission and its answer (I4)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from harness.engines.base import Capabilities
from harness.engines.scripted import Script, ScriptedEngine, ScriptedFault, ScriptStep
from harness.errors import EngineUnavailable, StoreFull
from harness.server.app import SessionServer
from harness.server.settings import ServerSettings
from harness.server.store.sqlite import SQLiteStore
from harness.sessions.gate import ANONYMOUS
from harness.types import GenerationRequest, GenerationResult, Json, Turn
from tests.builders import body, toy_template, toy_tokenizer, turn_service, user
from tests.session_servers.asgi_client import Answer, Exchange
from tests.session_servers.served import eventually, says, serving_with, url_of
from tests.session_servers.store_file import NONE_UNKNOWN, ledger_of, read_file

HI = [user("hi")]
RETRY = {"x-stainless-retry-count": "1"}
SLOW = ScriptStep(text="a long and slow answer", fault=ScriptedFault.HANG, fault_after=4)


class FrailEngine(ScriptedEngine):
    """An engine that at times cannot say what it can do, as a pool that all workers have left, or has a bug."""

    has_vanished = False
    has_a_bug = False

    @property
    def capabilities(self) -> Capabilities:
        if self.has_vanished:
            raise EngineUnavailable("no worker is left")
        return self._capabilities

    @capabilities.setter
    def capabilities(self, stated: Capabilities) -> None:
        self._capabilities = stated

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        if self.has_a_bug:
            raise ZeroDivisionError
        return await super().generate(request)


class SlowStore(SQLiteStore):
    """A store whose disk does not answer for a while."""

    def __init__(self, path) -> None:
        super().__init__(path)
        self.disk = asyncio.Event()
        self.disk.set()
        self.waiting = 0

    async def commit(self, session_id: str, turn: Turn) -> None:
        self.waiting += 1
        await self.disk.wait()
        self.waiting -= 1
        await super().commit(session_id, turn)


@dataclass
class Bare:
    """A server without a socket, whose requests can be cancelled as uvicorn does when its patience ends."""

    server: SessionServer
    engine: FrailEngine
    store: SlowStore

    def ask(self, method: str, path: str, content: bytes = b"", headers: dict[str, str] | None = None) -> Exchange:
        return Exchange(self.server.app(), method, path, content, headers or {})

    def chat(self, session_id: str, headers: dict[str, str] | None = None) -> Exchange:
        return self.ask("POST", f"/sessions/{session_id}/v1/chat/completions", body(HI), headers)

    async def answer(self, method: str, path: str) -> Answer:
        asked = self.ask(method, path)
        await asked.task
        assert asked.answer is not None
        return asked.answer

    async def record(self, session_id: str) -> Json:
        return (await self.answer("GET", f"/sessions/{session_id}")).json()


@asynccontextmanager
async def bare(path, *steps: ScriptStep) -> AsyncIterator[Bare]:
    engine = FrailEngine(toy_tokenizer(), Script(steps))
    async with SlowStore(path) as store, engine:
        turns = turn_service(engine, toy_template(), store, engine_attempts=1)
        yield Bare(SessionServer(turns), engine, store)


async def test_a_turn_taken_up_by_an_engine_that_vanished_meanwhile_ends():
    """The retry is told so, the next one is served, and nothing stays in flight."""
    engine = FrailEngine(toy_tokenizer(), Script((ScriptStep(fault=ScriptedFault.UNAVAILABLE), *says("fine"))))
    async with serving_with(engine, settings=ServerSettings(engine_attempts=1)) as client:
        session = await client.create()
        failed = await client.http.post(url_of(session), content=body(HI))
        await client.http.post("/sessions/pause")
        held = asyncio.create_task(client.http.post(url_of(session), content=body(HI)))
        await client.held(1)
        engine.has_vanished = True
        await client.http.post("/sessions/resume")
        vanished = await held
        engine.has_vanished = False
        again = await client.http.post(url_of(session), content=body(HI), headers=RETRY)
        gate = await client.gate()

    assert [failed.status_code, vanished.status_code, again.status_code] == [503, 503, 200]
    assert (again.json()["choices"][0]["message"]["content"], gate["turns_in_flight"]) == ("fine", 0)


async def sampling(live: Bare) -> None:
    await eventually(lambda: any(each.sampled for each in live.engine.live))


async def held(live: Bare) -> None:
    """The engine has cut the turn short, and a pause holds the rest of it."""
    await sampling(live)
    await live.answer("POST", "/sessions/pause")
    await live.engine.abort(None)
    await eventually(lambda: live.server.gatekeeper.held == 1)


async def committing(live: Bare) -> None:
    """The engine has handed over a partial of the turn, which waits for the disk."""
    live.store.disk.clear()
    await sampling(live)
    await live.answer("POST", "/sessions/drain")
    await live.engine.abort(None)
    await eventually(lambda: live.store.waiting == 1)


@pytest.mark.parametrize("moment", [sampling, held, committing])
async def test_a_turn_that_is_cancelled_is_on_disk_and_in_the_ledger(tmp_path, moment: Callable[[Bare], Awaitable]):
    """At whatever moment: it is in flight no longer, and what the record says is what the file says."""
    async with bare(tmp_path / "s.db", SLOW) as live:
        session_id = (await live.answer("POST", "/sessions")).json()["session_id"]
        asked = live.chat(session_id)
        await moment(live)
        asked.task.cancel()
        await asyncio.sleep(0)
        live.store.disk.set()
        with pytest.raises(asyncio.CancelledError):
            await asked.task
        record = await live.record(session_id)
        [stored] = read_file(tmp_path / "s.db")[session_id].turns.values()
        ledger = ledger_of(read_file(tmp_path / "s.db")[session_id])

    [turn] = record["turns"]
    assert (turn["status"], turn["output_ids"], record["turns_in_flight"]) == (stored.status, stored.output, 0)
    assert record["ledger"] == ledger


async def test_whoever_waits_for_a_turn_that_is_cancelled_takes_it_up(tmp_path):
    """The retry that joined it continues from what had arrived."""
    async with bare(tmp_path / "s.db", SLOW) as live:
        session_id = (await live.answer("POST", "/sessions")).json()["session_id"]
        asked = live.chat(session_id)
        await sampling(live)
        joined = live.chat(session_id, RETRY)
        await held(live)
        asked.task.cancel()
        await live.answer("POST", "/sessions/resume")
        await joined.task
        record = await live.record(session_id)

    assert joined.answer is not None
    assert joined.answer.json()["choices"][0]["message"]["content"] == SLOW.text
    assert [len(turn["segments"]) for turn in record["turns"]] == [2]


class FullStore(SlowStore):
    """A store whose disk is full for one turn; the gate opens at the very moment at which that turns out."""

    open_gate: Callable[[], None] | None = None

    async def commit(self, session_id: str, turn: Turn) -> None:
        open_gate, self.open_gate = self.open_gate, None
        if open_gate is None:
            return await super().commit(session_id, turn)
        self.waiting += 1
        await self.disk.wait()
        open_gate()
        raise StoreFull("the disk is full")


async def test_a_retry_that_takes_a_lost_turn_up_before_its_loser_is_told_has_it_to_itself(tmp_path):
    """The call that lost the turn records nothing more of it: the retry's outcome is the turn's, and is answered."""
    store, engine = FullStore(tmp_path / "s.db"), FrailEngine(toy_tokenizer(), Script(says("lost", "kept")))
    async with store, engine:
        server = SessionServer(turn_service(engine, toy_template(), store))
        live = Bare(server, engine, store)
        session_id = (await live.answer("POST", "/sessions")).json()["session_id"]

        def open_gate() -> None:
            server.gatekeeper.gate.release(ANONYMOUS)
            server.gatekeeper.look_again()

        store.open_gate = open_gate
        store.disk.clear()
        loser = live.chat(session_id)
        await eventually(lambda: store.waiting == 1)
        await live.answer("POST", "/sessions/pause")
        retry = live.chat(session_id)
        await eventually(lambda: server.gatekeeper.held == 1)
        store.disk.set()
        await asyncio.gather(loser.task, retry.task)
        record = await live.record(session_id)
        ledger = ledger_of(read_file(tmp_path / "s.db")[session_id])

    assert loser.answer is not None
    assert retry.answer is not None
    assert (loser.answer.status, retry.answer.status) == (503, 200)
    assert retry.answer.json()["choices"][0]["message"]["content"] == "kept"
    assert [turn["status"] for turn in record["turns"]] == ["completed"]
    assert (
        record["ledger"]
        == ledger
        == {"generated": 10, "trained": 5, "masked": 0, "dropped": {"failed_turn": 5}, "unknown": NONE_UNKNOWN}
    )


async def test_a_bug_ends_the_turn_it_is_met_in(tmp_path):
    """500, FAILED on disk, and the next request of the same bytes is served as that turn."""
    async with bare(tmp_path / "s.db", *says("fine")) as live:
        session_id = (await live.answer("POST", "/sessions")).json()["session_id"]
        live.engine.has_a_bug = True
        failed = live.chat(session_id)
        with pytest.raises(ZeroDivisionError):  # Starlette answers 500, then raises for whoever serves it
            await failed.task
        [stored] = read_file(tmp_path / "s.db")[session_id].turns.values()
        live.engine.has_a_bug = False
        again = live.chat(session_id, RETRY)
        await again.task
        record = await live.record(session_id)

    assert failed.answer is not None
    assert again.answer is not None
    assert (failed.answer.status, stored.status, again.answer.status) == (500, "failed", 200)
    assert [turn["status"] for turn in record["turns"]] == ["completed"]
