"""Workers of a pool that are slow to say how they stand: they delay the turns that they serve, and no others."""

from collections import Counter
from contextlib import AsyncExitStack

from harness.dialects.model_request import WireCall
from harness.dialects.openai_chat import OpenAIChat
from harness.engines.base import EngineHealth
from harness.engines.pool.pool import EnginePool
from harness.engines.scripted import Script, ScriptedEngine, ScriptedFault, ScriptStep
from harness.server.store.base import MemoryStore
from harness.server.turns import ServedTurn, TurnService
from harness.sessions.session import Session
from harness.sessions.session_config import SessionConfig
from tests.builders import body, new_session, patient_client, toy_template, toy_tokenizer, turn_service, user

CUT = ScriptStep(text="one two three four five", fault=ScriptedFault.ABORT, fault_after=2)
WHOLE = ScriptStep(text="one two three four five")


class AskedEngine(ScriptedEngine):
    """A scripted engine that counts how often it is asked how it stands."""

    def __init__(self, *steps: ScriptStep) -> None:
        super().__init__(toy_tokenizer(), Script(steps))
        self.asked: Counter[str] = Counter()

    async def read_version(self) -> str:
        """See `TokenProvider`."""
        self.asked["version"] += 1
        return await super().read_version()

    async def health(self) -> EngineHealth:
        """See `TokenProvider`."""
        self.asked["health"] += 1
        return await super().health()


async def say(service: TurnService, session: Session, history: list[object]) -> ServedTurn:
    """One more turn of a conversation."""
    call = await service.read(session, OpenAIChat(), WireCall(body(history)), patient_client())
    served = await service.serve(call)
    history += [dict(served.turn.reply), user("continue")]
    return served


async def test_a_turn_asks_the_worker_that_serves_it_and_no_other():
    """Also one that was cut short and has to know whether its engine is paused before it continues."""
    workers = [AskedEngine(CUT, WHOLE) for _ in range(8)]
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(EnginePool(workers))
        service = turn_service(pool, toy_template(), MemoryStore())
        for worker in workers:
            worker.asked.clear()
        session, history = new_session(), [user("a")]
        served = [await say(service, session, history) for _ in range(3)]

    [home] = {segment.worker for each in served for segment in each.turn.segments}
    assert [worker.asked.total() for name, worker in enumerate(workers) if str(name) != home] == [0] * 7
    assert workers[int(home)].asked["version"] >= 3
    assert workers[int(home)].asked["health"] >= 1


async def test_a_session_goes_by_the_version_of_its_own_worker():
    """Whatever the other workers of the pool have."""
    workers = [AskedEngine(WHOLE) for _ in range(2)]
    async with EnginePool(workers) as pool:
        service = turn_service(pool, toy_template(), MemoryStore())
        sessions = [Session(f"{n:032x}", "sk-harness-test", SessionConfig(), 1_000.0) for n in range(2)]
        histories: list[list[object]] = [[user("a")], [user("b")]]
        for session, history in zip(sessions, histories, strict=True):
            await say(service, session, history)
        workers[1].relabel("5")
        turns = [(await say(service, s, h)).turn for s, h in zip(sessions, histories, strict=True)]

        assert [turn.segments[0].worker for turn in turns] == ["0", "1"]
        assert [service.live.version_for(session.session_id) for session in sessions] == [0, 5]
        assert [turn.version_spans[0].version for turn in turns] == ["0", "5"]
