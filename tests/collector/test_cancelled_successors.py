"""A rollout that continues from a kept session and is cancelled: each token is in the books of the run once."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from harness.engines.scripted import ScriptStep
from harness.errors import SessionServerError
from harness.rollouts.client.session_server import SessionHandle, SessionServerClient
from harness.rollouts.manager import SessionManager
from harness.server.store.sqlite import SQLiteStore
from harness.server.store.stored_sessions import count_sessions
from harness.suite.record.rundir import RunDirectory
from harness.suite.training.journal import Checkpoints, TrainingJournal
from harness.training.collector.pipeline import StepPipeline
from harness.training.collector.record.step_table import StepTable
from harness.training.collector.segment_maker import SegmentMaker
from harness.training.collector.step_rules import Partial, StepBudget, StepRules
from harness.training.learner.learner import ScriptedLearner
from harness.types import Json
from tests.collector.training import DEADLINES, playing

SLOW = ScriptStep(text="A slow answer.", token_delay_s=0.02)


class StandingClient(SessionServerClient):
    """A session that takes another one over stands still on its way here, until the rollout gives up."""

    def __init__(self, url: str, *, is_taken: bool) -> None:
        super().__init__(url, deadlines=DEADLINES)
        self.is_taken = is_taken
        """The server has taken the old session over, and its answer is late; else it has not been asked."""
        self.stood = 0

    async def create(self, body: Json, *, give_up: tuple[asyncio.Future[None], ...] = ()) -> SessionHandle:
        """See `SessionServerClient`."""
        if "resumes" not in body:
            return await super().create(body, give_up=give_up)
        session = await super().create(body) if self.is_taken else None
        self.stood += 1
        await asyncio.wait(give_up, return_when=asyncio.FIRST_COMPLETED)
        if session is None:
            raise SessionServerError("given up", code="given_up", was_refused=True)
        return session


@pytest.mark.parametrize("is_taken", [True, False], ids=["after it took over", "before it took over"])
async def test_tokens_of_a_kept_session_are_booked_once(tmp_path: Path, is_taken: bool):
    """In the successor's session, or in the old one, which is given back; no step can tell which."""
    database, directory, learner = tmp_path / "run.db", RunDirectory(tmp_path), ScriptedLearner()
    rules = StepRules(StepBudget(1), concurrency=3, over_sampling=2, partial=Partial.RESUME)
    with StepTable(database, keep_steps=None) as table:
        journal = TrainingJournal(
            directory, table, Checkpoints(directory, 0), seed=1, packing_length=400, is_guarded=False
        )
        async with playing(tmp_path, SLOW, store=SQLiteStore(database)) as field:
            field.turns = lambda index: 1 if index.group.step or not index.group.number else 50
            client = StandingClient(field.server.url, is_taken=is_taken)
            async with (
                client,
                SessionManager(field.server.url, engines=[field.engine], grace_s=0.5, client=client) as manager,
                StepPipeline(
                    field.source(manager=manager),
                    rules,
                    learner,
                    SegmentMaker(400, max_staleness=2),
                    journal=journal,
                    last_step=1,
                ) as pipeline,
            ):
                for step in range(2):
                    await journal.commit(await pipeline.run(step, version=0), learner)
            assert field.sessions() == 0
        books = table.close_books()
    with closing(sqlite3.connect(database)) as connection:
        held = [stored.generated for stored in count_sessions(connection) if not stored.is_taken_over]
    assert client.stood == 2
    assert (books.generated, books.difference) == (sum(held), 0)
