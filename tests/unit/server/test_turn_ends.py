"""Why a turn ended: for each end a turn through the HTTP API, and what its record, sample, metric and log line say."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from harness.engines.scripted import Script, ScriptedEngine, ScriptedFault, ScriptStep
from harness.errors import EngineConnectionLost
from harness.server.admitted import TURN_ENDED
from harness.server.settings import ServerSettings
from harness.turn_ends import TURN_ENDS, TurnEnd, TurnStatus, status_of
from harness.types import GenerationResult, Json
from server_patch.repeat_terminate import RepeatTerminateConfig
from tests.builders import tool, toy_tokenizer, user
from tests.logged import capture_logs
from tests.session_servers.served import PATIENCE_S, Client, Served, eventually, serving_with, session_on, url_of

HI = [user("hi")]
TEXT = "a long and slow answer"
CUT = ScriptStep(text=TEXT, fault=ScriptedFault.HANG, fault_after=4)
CALL = ScriptStep(text='<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
GUARD = RepeatTerminateConfig.from_mapping(
    {"enabled": True, "min_new_tokens": 0, "max_consecutive_token_repeats": 4, "ngram_size": 0}
)


class BuggyEngine(ScriptedEngine):
    """Raises what nobody foresaw."""

    async def generate(self, *args: object, **kwargs: object) -> GenerationResult:
        """See `TokenProvider`."""
        raise ZeroDivisionError


async def sampling(client: Client) -> None:
    """Return once the engine has sampled all that it will of `CUT`."""
    await eventually(lambda: any(live.sampled == CUT.fault_after for live in client.engine.live))


async def in_flight(client: Client, session: Served) -> asyncio.Task[httpx.Response]:
    """A model call of which the engine has sampled a part."""
    request = asyncio.create_task(client.chat(session, HI))
    await sampling(client)
    return request


async def ask(client: Client, session: Served) -> httpx.Response:
    return await client.chat(session, HI)


async def call_a_tool(client: Client, session: Served) -> httpx.Response:
    return await client.chat(session, HI, tools=[tool(a={"type": "integer"})])


async def ask_for_little(client: Client, session: Served) -> httpx.Response:
    return await client.chat(session, HI, max_tokens=3)


async def drain(client: Client, session: Served) -> httpx.Response:
    request = await in_flight(client, session)
    await client.http.post("/sessions/drain")
    return await request


async def update_weights(client: Client, session: Served) -> httpx.Response:
    request = await in_flight(client, session)
    await client.engine.update_weights(Path("/nowhere"), "1")
    await client.engine.abort(None)
    return await request


async def leave(client: Client, session: Served) -> None:
    async with httpx.AsyncClient(base_url=client.url, timeout=30) as http:
        request = asyncio.create_task(http.post(url_of(session), json={"messages": HI}))
        await sampling(client)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await eventually(lambda: not client.server.sessions.in_memory(session.session_id).turns_in_flight)


async def end_session(client: Client, session: Served) -> httpx.Response:
    request = await in_flight(client, session)
    await client.http.post(f"/sessions/{session.session_id}/end")
    return await request


async def pause_for_too_long(client: Client, session: Served) -> httpx.Response:
    request = await in_flight(client, session)
    await client.http.post("/sessions/pause")
    await client.engine.abort(None)
    return await request


async def stop_server(client: Client, session: Served) -> httpx.Response:
    request = await in_flight(client, session)
    await client.server.callers.send_away(grace_s=0.0)
    return await request


@dataclass(frozen=True)
class Case:
    """How a turn is made to end, the status of its answer, and the code of the error that its record names."""

    provoke: Callable[[Client, Served], Awaitable[httpx.Response | None]] = ask
    step: ScriptStep = CUT
    settings: ServerSettings = field(default_factory=ServerSettings)
    limits: Mapping[str, int] = field(default_factory=dict)
    engine: type[ScriptedEngine] = ScriptedEngine
    status: int = 200
    code: str | None = None
    store_trigger: str = ""

    @property
    def answer(self) -> tuple[int, str | None] | None:
        """Status and code of the answer; None where nobody stays for it."""
        if self.provoke is leave:
            return None
        return self.status, self.code or ("turn_aborted" if self.status == 404 else None)


CASES: Mapping[TurnEnd, Case] = {
    TurnEnd.MODEL: Case(step=ScriptStep(text=TEXT)),
    TurnEnd.TOOL_CALLS: Case(call_a_tool, CALL),
    TurnEnd.LENGTH: Case(ask_for_little, ScriptStep(text=TEXT)),
    TurnEnd.REPEAT: Case(step=ScriptStep(text="Nooooooooo"), settings=ServerSettings(repeat_guard=GUARD)),
    TurnEnd.DRAINED: Case(drain, status=404, settings=ServerSettings(drain_grace_s=0.2)),
    TurnEnd.ENGINE_ABORTED: Case(
        step=ScriptStep(text=TEXT, fault=ScriptedFault.ABORT, fault_after=4),
        settings=ServerSettings(max_unsolicited_aborts=0),
        status=404,
    ),
    TurnEnd.STALE: Case(update_weights, status=404, limits={"staleness": 0}, code="limit_reached"),
    TurnEnd.CLIENT_LEFT: Case(leave, code="client_left"),
    TurnEnd.SESSION_ENDED: Case(end_session, status=404, code="session_closed"),
    TurnEnd.GATE_TIMEOUT: Case(
        pause_for_too_long, status=503, settings=ServerSettings(pause_timeout_s=2.0), code="gate_closed"
    ),
    TurnEnd.ENGINE_FAILED: Case(
        step=ScriptStep(text=TEXT, fault=ScriptedFault.REJECT), status=400, code="engine_rejected"
    ),
    TurnEnd.SERVER_STOPPED: Case(stop_server, status=503, code="server_stopping"),
    TurnEnd.SERVER_FAILED: Case(engine=BuggyEngine, status=500, code="internal_error"),
    TurnEnd.STORE_FAILED: Case(
        step=ScriptStep(text=TEXT),
        status=503,
        code="store_failed",
        store_trigger="CREATE TRIGGER t BEFORE INSERT ON turns BEGIN SELECT RAISE(ABORT, 'no'); END",
    ),
}


def serve(case: Case, store: Path) -> AbstractAsyncContextManager[Client]:
    engine = case.engine(toy_tokenizer(), Script((case.step,)), repeat_guard=case.settings.repeat_guard)
    return serving_with(engine, store=store, settings=case.settings)


@pytest.mark.parametrize("end", list(TURN_ENDS))
async def test_answer_record_sample_metric_and_log_say_why_a_turn_ended(end: TurnEnd, tmp_path: Path):
    """One word in four places, the words of the error where there was one, and what the agent is to do."""
    case, store = CASES[end], tmp_path / "s.db"
    with capture_logs() as logs:
        async with serve(case, store) as client:
            session = await client.create(limits=dict(case.limits))
            if case.store_trigger:
                with closing(sqlite3.connect(store)) as operator:
                    operator.execute(case.store_trigger)
            answer = await case.provoke(client, session)
            record, samples = await client.record(session), await client.samples(session)
            metrics = (await client.http.get("/metrics")).text

    [turn] = record["turns"]
    error = turn["notes"].get("error")
    assert case.answer == (answer and (answer.status_code, answer.json().get("error", {}).get("code")))
    assert case.status != 404 or answer.headers["x-should-retry"] == "false"
    assert (turn["end"], turn["status"]) == (end, status_of(end, len(turn["output_ids"])))
    assert error is None if case.code is None else error["code"] == case.code
    assert f'harness_turn_ends_total{{end="{end}"}} 1.0' in metrics
    lines = [line for line in logs if line["event"] == TURN_ENDED]
    parts = [{name: line.pop(name) for name in ("gate_s", "queue_s", "engine_s")} for line in lines]
    assert all(0 <= seconds <= PATIENCE_S for each in parts for seconds in each.values())
    assert lines == [
        {
            "event": TURN_ENDED,
            "log_level": "info",
            "session_id": f"{session.session_id[:8]}…",
            "dialect": "openai_chat",
            "turn": 0,
            "attempt": 1,
            "end": end,
            "status": turn["status"],
            "tokens": len(turn["output_ids"]),
        }
        | ({} if error is None else {"code": error["code"], "error": error["message"]})
    ]
    told = [(sample["metadata"]["end"], sample["metadata"].get("end_error")) for sample in samples]
    assert told == ([(end, error)] if is_sample(end, turn) else [])


def is_sample(end: TurnEnd, turn: Json) -> bool:
    return not TURN_ENDS[end].waits and turn["status"] != TurnStatus.FAILED


class DyingEngine(ScriptedEngine):
    """Its connection breaks when it hands over."""

    async def generate(self, *args: object, **kwargs: object) -> GenerationResult:
        """See `TokenProvider`."""
        await super().generate(*args, **kwargs)
        raise EngineConnectionLost("the connection to the engine was lost")


async def test_the_record_of_a_drained_turn_has_the_words_of_the_engine_that_failed():
    """The drain is why it ended; the engine is why nothing arrived."""
    engine = DyingEngine(toy_tokenizer(), Script((CUT,)))
    async with serving_with(engine, settings=ServerSettings(drain_grace_s=0.2)) as client:
        session = await client.create()
        await drain(client, session)
        [turn] = (await client.record(session))["turns"]

    assert (turn["end"], turn["notes"]["error"]["message"]) == ("drained", "the connection to the engine was lost")


async def test_deleting_a_session_ends_its_turns_as_ending_it_does():
    """Nobody samples for it any more; its record is gone, and the log says what became of the turn."""
    with capture_logs() as logs:
        async with session_on(CUT) as (client, session):
            request = await in_flight(client, session)
            deleted = await client.http.delete(f"/sessions/{session.session_id}")
            running, answer = len(client.engine.live), await request

    assert (deleted.status_code, running, answer.status_code) == (204, 0, 404)
    assert [line["end"] for line in logs if line["event"] == TURN_ENDED] == [TurnEnd.SESSION_ENDED]


async def test_every_line_of_a_turn_says_which_turn_and_which_attempt():
    """A turn that breaks off and continues is one turn and two attempts; a repeated engine request is neither."""
    slow = ScriptStep(text=TEXT, token_delay_s=0.02)
    absent = ScriptStep(text=TEXT, fault=ScriptedFault.UNAVAILABLE)
    engine = ScriptedEngine(toy_tokenizer(), Script((absent, slow)))
    settings = ServerSettings(engine_retry_s=0.01)
    with capture_logs() as logs:
        async with serving_with(engine, settings=settings) as client:
            session = await client.create()
            async with httpx.AsyncClient(base_url=client.url, timeout=30) as http:
                request = asyncio.create_task(http.post(url_of(session), json={"messages": HI}))
                await client.sampling()
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)
            await eventually(lambda: not client.server.sessions.in_memory(session.session_id).turns_in_flight)
            answer = await client.http.post(url_of(session), json={"messages": HI})
            [turn] = (await client.record(session))["turns"]

    of_turn = [line for line in logs if line["event"] in {TURN_ENDED, "engine_request_repeated"}]
    assert answer.status_code == 200
    assert {(line["session_id"], line["turn"]) for line in of_turn} == {(f"{session.session_id[:8]}…", 0)}
    assert [(line["event"], line["attempt"]) for line in of_turn] == [
        ("engine_request_repeated", 1),
        (TURN_ENDED, 1),
        (TURN_ENDED, 2),
    ]
    assert [line["end"] for line in of_turn if "end" in line] == ["client_left", "model"]
    assert (turn["end"], turn["notes"]["attempts"], "error" in turn["notes"]) == ("model", 2, False)
