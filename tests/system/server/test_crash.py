"""Acknowledged means durable (I9): a server killed in the middle of its work, and a disk that is full."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from harness.dialects.model_request import WireCall
from harness.dialects.openai_chat import OpenAIChat
from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.server.store.base import MemoryStore
from harness.turn_ends import TurnStatus
from harness.types import Turn
from tests.builders import body, new_session, patient_client, toy_template, toy_tokenizer, turn_service, user
from tests.session_servers.served import serving
from tests.session_servers.store_file import ledger_of, read_file
from tests.small_disk import small_disk

PROGRAM = Path(__file__).with_name("serve_until_killed.py")
HI = [user("hi")]


@asynccontextmanager
async def server_process(store: Path, *options: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A server in a process of its own, and its URL; it is killed when the block ends."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), str(store), *options, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            url = (await process.stdout.readline()).decode().strip()
        yield process, url
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()


class StuckDisk(MemoryStore):
    """Its first write never comes to an end."""

    is_stuck = True

    async def commit(self, session_id: str, turn: Turn) -> None:
        """Keep the outcome of a turn."""
        if self.is_stuck:
            self.is_stuck = False
            await asyncio.Event().wait()


async def test_a_turn_that_was_given_up_before_it_was_durable_is_never_replayed():
    """Nobody knows whether the file has it: the same request continues with the turn and makes it durable."""
    engine = ScriptedEngine(toy_tokenizer(), Script(steps=(ScriptStep(text="first"), ScriptStep(text="second"))))
    service, session = turn_service(engine, toy_template(), StuckDisk()), new_session()
    service.admitted.commit_s = 0.05  # the disk is stuck for good, however long one waits
    asking = asyncio.create_task(
        service.serve(await service.read(session, OpenAIChat(), WireCall(body(HI)), patient_client()))
    )
    while engine.played.total() == 0 or engine.live:
        await asyncio.sleep(0)
    asking.cancel()
    [cancelled] = await asyncio.gather(asking, return_exceptions=True)
    [given_up] = session.turns
    again = await service.serve(await service.read(session, OpenAIChat(), WireCall(body(HI)), patient_client()))

    assert isinstance(cancelled, asyncio.CancelledError)
    assert given_up.status is TurnStatus.FAILED
    assert (again.turn.index, again.turn.reply["content"]) == (0, "second")
    assert (session.ledger().difference, session.ledger().dropped) == (0, {"failed_turn": given_up.output_ids.size})


async def test_a_full_disk_refuses_turns_and_loses_none(tmp_path):
    """503 by name, every acknowledged turn readable, the ledger balanced, and service again once there is space."""
    with small_disk(tmp_path / "disk", megabytes=3) as disk:
        await fill(disk)


async def fill(disk: Path) -> None:
    store, ballast = disk / "sessions.db", disk / "ballast"
    ballast.write_bytes(bytes(1_000_000))
    async with serving(ScriptStep(tokens=tuple(range(3, 259)) * 40), store=store) as client:
        session = await client.create()
        answered = 0
        while (answer := await client.chat(session, [user(f"request {answered}")])).status_code == 200:
            answered += 1
        creation = [await client.http.post("/sessions", json={"metadata": {"text": "x" * 100_000}}) for _ in range(30)]
        record = await client.record(session)
        readable = read_file(store)[session.session_id]
        ballast.unlink()
        again = await client.chat(session, [user("again")])
        drained = await client.http.post("/sessions/drain")

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_full")
    assert "sessions.db" in answer.json()["error"]["message"]
    assert {each.json()["error"]["code"] for each in creation if each.status_code != 200} == {"store_full"}
    assert answered > 5
    assert [turn.status for turn in readable.turns.values()] == ["completed"] * answered
    assert [turn["status"] for turn in record["turns"]] == ["completed"] * answered + ["failed"]
    ledger = record["ledger"]
    assert ledger["generated"] == ledger["trained"] + sum(ledger["dropped"].values()) == (answered + 1) * 40 * 256
    assert ledger["dropped"]["failed_turn"] == 40 * 256
    assert (again.status_code, drained.status_code) == (200, 200)
    final = read_file(store)
    assert {stored.phase for stored in final.values()} == {"closing"}
    assert ledger_of(final[session.session_id])["trained"] == (answered + 1) * 40 * 256
