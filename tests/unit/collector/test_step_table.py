"""Steps in a run's database: whatever dies between two writes, each rollout is in one committed step at most."""

import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import LedgerImbalance, StepError, StoreError, StoreFull
from harness.server.store.sqlite import SQLiteStore, count_generated
from harness.sessions.ledger import Ledger
from harness.sessions.lifecycle import CloseReason
from harness.sessions.session import Session
from harness.sessions.session_config import SessionConfig
from harness.training.collector.groups import RolloutIndex, ScoredRollout
from harness.training.collector.record.step_ledger import book_step
from harness.training.collector.record.step_record import StepRecord, pack_again
from harness.training.collector.record.step_table import StepTable, read_step
from harness.training.collector.segment_maker import SegmentMaker
from harness.training.collector.step_outcome import CarriedGroup, Disposition
from tests.builders import take_turn, user
from tests.thoroughness import examples
from tests.unit.collector.packed_steps import Step, index_of, pack_step, scored_rollout, session_of, usual_uses

MAKER = SegmentMaker(packing_length=48)


class Clock:
    """Seconds that pass whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class Run:
    """A run directory's database, with a session server's store in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = Clock()
        self.generated = 0
        """Tokens of all its sessions."""
        self.records: dict[int, StepRecord] = {}
        """What its steps were when they were collected last."""

    @contextmanager
    def table(self, keep_steps: int | None = 2) -> Iterator[StepTable]:
        """The table, as a process has it from its beginning to its end."""
        with StepTable(self.path, keep_steps, self.clock) as table:
            yield table

    @asynccontextmanager
    async def store(self) -> AsyncIterator[SQLiteStore]:
        """The store, as its server has it."""
        async with SQLiteStore(self.path, clock=self.clock) as store:
            yield store

    async def sessions(self, tokens: dict[str, int], *, close: bool = True) -> None:
        """Sessions that have sampled so many tokens each, and are closed."""
        async with self.store() as store:
            for session_id, sampled in tokens.items():
                session = Session(session_id, f"sk-{session_id}", SessionConfig(), self.clock())
                await store.create(session)
                self.generated += sampled
                if sampled:
                    turn = take_turn(session, [user("a")], "x" * (sampled - 1))
                    await store.commit(session_id, turn)
                session.close()
                if close:
                    await store.set_phase(session)

    async def end(self, scored: ScoredRollout) -> None:
        """The session of `scored` is closed."""
        await self.sessions({scored.rollout.session_id or "": scored.rollout.session["ledger"]["generated"]})

    async def more(self, session_id: str | None, sampled: int) -> None:
        """One more turn of a session that is closed already."""
        session = Session(session_id or "", "sk", SessionConfig(), self.clock())
        for text in "pqrs":
            turn = take_turn(session, [user(text)], "x" * (sampled - 1))
        async with self.store() as store:
            await store.commit(session.session_id, turn)
        self.generated += sampled

    async def collect(self, table: StepTable, step: Step) -> StepRecord:
        """Everything up to the moment when `step` is collected."""
        number = step.packed.collected.step
        table.plan(number)
        await self.sessions({each.session_id: each.ledger["generated"] for each in step.packed.collected.rollouts})
        for each in step.packed.collected.rollouts:
            if each.use is Disposition.DELIVERED:
                table.keep(step.rollouts[each.index])
        return table.collect(record_of(step))

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """What stands in the database."""
        with closing(sqlite3.connect(self.path)) as connection:
            return connection.execute(sql).fetchall()


async def new_run(folder: Path) -> Run:
    """A run whose session server has started once."""
    run = Run(folder / "run.db")
    with run.table():  # a trainer opens it first
        pass
    await run.sessions({})
    return run


@pytest.fixture(name="run")
async def _run(tmp_path: Path) -> Run:
    return await new_run(tmp_path)


def record_of(step: Step) -> StepRecord:
    """The record of `step`."""
    return StepRecord.of(step.packed, 17, book_step(step.packed))


def usual(step: int) -> Step:
    """A step with groups of every kind."""
    return pack_step(step, MAKER, usual_uses(step))


async def test_a_step_is_planned_collected_and_committed(run: Run):
    """The next step is the number of committed ones; the ledger of the run is the sum of theirs."""
    with run.table() as table:
        assert table.position == (0, Ledger())
        ledgers = []
        for number in range(3):
            record = await run.collect(table, usual(number))
            assert record.ledger == book_step(usual(number).packed)
            ledgers.append(table.commit(number))
            assert table.position == (number + 1, ledgers[-1])
    assert ledgers[2].generated == sum(book_step(usual(number).packed).generated for number in range(3))
    assert ledgers[2].difference == 0

    with run.table() as table:
        assert table.position == (3, ledgers[2])
        assert table.close_books() == ledgers[2]


async def test_a_step_is_packed_again_from_the_database(run: Run):
    """Its record and its rollouts are there for as long as it is kept."""
    step = usual(0)
    with run.table() as table:
        await run.collect(table, step)
        table.commit(0)
        record, rollouts = read_step(run.path, 0)
        with pytest.raises(StoreError, match="there is no step 1: it has not been collected"):
            read_step(run.path, 1)

    again = pack_again(record, rollouts, MAKER)

    assert [pack.digest() for pack in again] == [pack.digest() for pack in step.packs]


async def test_steps_out_of_order_are_refused_by_name(run: Run):
    """Nothing is committed that was not collected, or whose predecessor was not committed; nothing twice."""
    with run.table() as table:
        with pytest.raises(StoreError, match="there is no step 0: it was not planned"):
            table.collect(record_of(usual(0)))
        with pytest.raises(StoreError, match="expected step 0 to be committed next, got 1"):
            table.commit(1)
        table.plan(0)
        table.plan(0)  # it had failed
        with pytest.raises(StoreError, match="expected step 0 to be collected, it is planned"):
            table.commit(0)
        table.collect(record_of(usual(0)))
        with pytest.raises(StoreError, match="UNIQUE"):
            table.plan(0)
        with pytest.raises(StoreError, match="expected step 0 to be planned, it is collected"):
            table.collect(record_of(usual(0)))
        table.commit(0)
        with pytest.raises(StoreError, match="expected step 1 to be committed next, got 0"):
            table.commit(0)
        assert table.position.step == 1


async def test_a_group_is_in_one_committed_step_of_the_whole_run(run: Run):
    """The database refuses it, also when the step that trained it first has been forgotten."""
    with run.table(keep_steps=1) as table:
        for number in range(3):
            await run.collect(table, usual(number))
            table.commit(number)
            table.forget()
        again = pack_step(0, MAKER, {index_of(0, 1, 0): Disposition.DELIVERED})
        record = msgspec.structs.replace(record_of(again), step=3)
        table.plan(3)
        table.collect(record)
        with pytest.raises(StoreError, match=r"UNIQUE constraint failed: trained_groups"):
            table.commit(3)
        assert table.position.step == 3


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE steps SET state = 'planned'", "a step is planned, then collected, then committed"),
        ("UPDATE steps SET state = 'collected'", "a step is planned, then collected, then committed"),
        ("UPDATE steps SET state = 'done'", "a step is planned|CHECK"),
        ("UPDATE step_rollouts SET step = 1", "the rollout is in a committed step"),
        ("UPDATE step_rollouts SET step = NULL", "the rollout is in a committed step"),
        ("INSERT INTO step_rollouts VALUES ('other', 0, 1, 0, 0, 1, 5, NULL)", "UNIQUE constraint failed"),
        ("UPDATE steps SET run_ledger = NULL", "CHECK constraint failed"),
    ],
)
async def test_the_database_itself_keeps_a_committed_step_as_it_is(run: Run, statement: str, message: str):
    """Whoever writes to it."""
    with run.table() as table:
        await run.collect(table, usual(0))
        table.commit(0)
    with closing(sqlite3.connect(run.path)) as connection, pytest.raises(sqlite3.IntegrityError, match=message):
        connection.execute(statement)


async def train(run: Run, table: StepTable, life: int) -> AsyncIterator[None]:
    """Three steps, as a trainer takes them in its life number `life`; it may die wherever this yields."""
    while (number := table.position.step) < 3:
        table.plan(number)
        yield
        rollouts: dict[RolloutIndex, ScoredRollout] = {}
        for index, use in usual_uses(number, groups=2).items():
            known = table.recall(index)
            rollouts[index] = known or scored_rollout(index, f"{life:04d}{session_of(index)[4:]}")
            if known is None:
                await run.end(rollouts[index])
                yield
                if use is Disposition.DELIVERED:
                    table.keep(rollouts[index])
                    yield
        step = pack_step(number, MAKER, usual_uses(number, groups=2), rollouts=rollouts)
        run.records[number] = table.collect(record_of(step))
        yield
        table.commit(number)
        yield
        table.forget()
        yield


@settings(max_examples=examples(15))
@given(st.lists(st.integers(1, 24), max_size=5), st.integers(1, 3))
async def test_a_trainer_that_dies_between_any_two_writes_goes_on(
    tmp_path_factory: pytest.TempPathFactory, deaths: list[int], keep_steps: int
):
    """Every rollout is in one committed step, the ledger has every token, and rollouts that were kept are used."""
    run = await new_run(tmp_path_factory.mktemp("run"))
    for life, death in enumerate([*deaths, None]):
        with run.table(keep_steps) as table:
            writes = train(run, table, life)
            written = 0
            async for _ in writes:
                written += 1
                if written == death:
                    break
            await writes.aclose()

    with run.table(keep_steps) as table:
        table.forget()
        ledger, position = table.close_books(), table.position
    trained = [each.session_id for record in run.records.values() for each in record.rollouts if not each.cause]
    assert len(set(trained)) == len(trained) == 3 * 4
    assert position.step == 3
    assert (ledger.generated, ledger.difference) == (run.generated, 0)
    assert ledger.trained == sum(record.ledger.trained for record in run.records.values())
    assert run.query("SELECT COUNT(*) FROM steps") == [(min(keep_steps, 3),)]


async def test_rollouts_of_a_dead_process_are_recalled_once(run: Run):
    """They wait for their step; in it, or when it did not want them, they do no longer."""
    kept, unwanted, ahead = index_of(0, 0), index_of(0, 7), index_of(1, 0)
    with run.table() as table:
        table.plan(0)
        for index in (kept, unwanted, ahead):
            table.keep(scored_rollout(index))
    with run.table() as table:
        table.plan(0)
        recalled = table.recall(kept)
        assert recalled is not None
        assert recalled.rollout.session_id == session_of(kept)
        step = pack_step(0, MAKER, {kept: Disposition.DELIVERED}, rollouts={kept: recalled})
        table.collect(record_of(step))

        assert [table.recall(index) is not None for index in (kept, unwanted, ahead)] == [False, False, True]


async def test_a_carried_rollout_waits_for_the_next_step(run: Run):
    """It is in the books of the step in which its group is whole."""
    ended, group = index_of(0, 1, 0), index_of(0, 1).group
    with run.table() as table:
        table.plan(0)
        await run.end(scored_rollout(ended))
        table.keep(scored_rollout(ended))
        carried = CarriedGroup(group, ended={0: scored_rollout(ended)})
        first = pack_step(0, MAKER, {ended: Disposition.CARRIED}, carried=[carried])
        assert table.collect(record_of(first)).ledger == Ledger()
        table.commit(0)
        assert table.recall(ended) is not None
        table.plan(1)
        second = pack_step(1, SegmentMaker(48, max_staleness=1), {ended: Disposition.DELIVERED})
        assert table.collect(record_of(second)).ledger.generated == run.generated
        table.commit(1)
        assert table.close_books().generated == run.generated


async def test_a_carried_rollout_that_is_counted_is_booked_once(run: Run):
    """Nothing is kept of it, for it trains nothing; still it waits for the step in which its group is whole."""
    failed, ended = index_of(0, 9, 0), index_of(0, 9, 1)
    rollouts = {each: scored_rollout(each) for each in (failed, ended)}
    carried = [CarriedGroup(failed.group, ended=rollouts)]
    ledgers = []
    with run.table() as table:
        for number in range(3):
            table.plan(number)
            if not number:
                await run.end(rollouts[failed])
            use = Disposition.COUNTED if number == 2 else Disposition.CARRIED
            left = carried if number < 2 else []
            ledgers.append(table.collect(record_of(pack_step(number, MAKER, {failed: use}, carried=left))).ledger)
            table.commit(number)
        assert ledgers[:2] == [Ledger(), Ledger()]
        assert ledgers[2].generated == run.generated
        assert "interrupted" not in ledgers[2].dropped
        assert table.close_books() == ledgers[2]


@pytest.mark.parametrize("has_reward", [True, False])
async def test_a_rollout_that_was_carried_for_long_is_booked_when_its_process_has_died(run: Run, has_reward: bool):
    """By the first step of the next process, which knows nothing of its group; also one without a reward."""
    ended = index_of(0, 9, 0)
    carried = [CarriedGroup(ended.group, ended={0: scored_rollout(ended)})]
    with run.table() as table:
        for number in range(4):
            table.plan(number)
            if not number:
                await run.end(scored_rollout(ended))
                if has_reward:
                    table.keep(scored_rollout(ended))
            step = pack_step(number, MAKER, {ended: Disposition.CARRIED} if not number else {}, carried=carried)
            table.collect(record_of(step))
            table.commit(number)
    with run.table() as table:
        for number, interrupted in ((4, run.generated), (5, None)):
            table.plan(number)
            ledger = table.collect(record_of(pack_step(number, MAKER, {}))).ledger
            assert ledger.dropped.get("interrupted") == interrupted
            table.commit(number)
        assert table.close_books().generated == run.generated
        for number in (6, 7):
            table.plan(number)
            table.collect(record_of(pack_step(number, MAKER, {})))
            table.commit(number)
            table.forget()
    assert not count_generated(run.path)


async def test_what_a_step_had_booked_is_booked_again_when_it_was_not_committed(run: Run):
    """However long ago the session ended, and however often the process dies before it commits."""
    ended = index_of(0, 9, 0)
    carried = [CarriedGroup(ended.group, ended={0: scored_rollout(ended)})]
    with run.table() as table:
        for number in range(5):
            table.plan(number)
            if not number:
                await run.end(scored_rollout(ended))
            use, left = (Disposition.COUNTED, []) if number == 4 else (Disposition.CARRIED, carried)
            table.collect(record_of(pack_step(number, MAKER, {ended: use}, carried=left)))
            if number < 4:
                table.commit(number)
    for _ in range(3):
        with run.table() as table:
            table.plan(4)
            ledger = table.collect(record_of(pack_step(4, MAKER, {}))).ledger
            assert ledger.dropped.get("interrupted") == run.generated
    with run.table() as table:
        assert table.close_books().generated == run.generated


async def test_a_session_that_nobody_stands_for_is_interrupted(run: Run):
    """That of a rollout that was cancelled, and that of a process that died; once, and by the step planned after it."""
    with run.table() as table:
        table.plan(0)
        await run.sessions({"c" * 32: 9, "d" * 32: 0})
        assert table.collect(record_of(usual(0))).ledger.dropped.get("interrupted") is None
        assert table.close_books().dropped == {"interrupted": 9}
        table.commit(0)
        await run.sessions({"e" * 32: 5}, close=False)
        for number, interrupted in ((1, 9), (2, None)):
            table.plan(number)
            assert table.collect(record_of(usual(number))).ledger.dropped.get("interrupted") == interrupted
            table.commit(number)
        assert table.close_books().dropped["interrupted"] == 9 + 5


async def test_tokens_that_come_after_their_session_was_read_are_undelivered(run: Run):
    """They are in the books of the next step, and of a run that ends without one."""
    first = usual(0)
    late = first.packed.collected.rollouts[1]
    with run.table() as table:
        await run.collect(table, first)
        table.commit(0)
        await run.more(late.session_id, 4)
        books = table.close_books()
        assert (books.generated, books.dropped["undelivered"]) == (run.generated, 4)
        table.plan(1)
        ledger = table.collect(record_of(usual(1))).ledger
        assert ledger.dropped["undelivered"] == 4
        table.commit(1)
        table.plan(2)
        assert "undelivered" not in table.collect(record_of(usual(2))).ledger.dropped


async def test_the_books_of_a_run_have_a_step_that_was_collected_and_not_committed(run: Run):
    """All of it is interrupted, in the process that collected it as in the next one."""
    with run.table() as table:
        await run.collect(table, usual(0))
        ledger = table.commit(0)
        await run.collect(table, usual(1))
        books = table.close_books()
    assert books.generated == run.generated
    assert books.dropped["interrupted"] == run.generated - ledger.generated
    with run.table() as table:
        assert table.close_books() == books


async def test_a_ledger_that_says_more_than_the_store_is_an_imbalance(run: Run):
    """And nothing is collected."""
    step = usual(0)
    with run.table() as table:
        table.plan(0)
        sessions = {each.session_id: each.ledger["generated"] for each in step.packed.collected.rollouts}
        sessions[step.packed.collected.rollouts[2].session_id] -= 1
        await run.sessions(sessions)
        with pytest.raises(LedgerImbalance, match=r"step 0: the store holds \d+ sampled tokens of session 0000"):
            table.collect(record_of(step))
        assert run.query("SELECT state FROM steps") == [("planned",)]


async def test_a_session_that_was_taken_over_is_its_successors(run: Run):
    """What it left behind is in the successor's ledger, and its rows go with the steps of that time."""
    previous, index = Session("a" * 32, "sk-a", SessionConfig(), run.clock()), index_of(0, 0)
    turns = [take_turn(previous, [user("a")], "x" * 7), take_turn(previous, [user("b")], "y" * 3)]
    scored = scored_rollout(index, "b" * 32)
    generated = scored.rollout.session["ledger"]["generated"]
    successor = Session("b" * 32, "sk-b", SessionConfig(left_behind=4), run.clock())
    successor.restore(turns[0])
    with run.table(keep_steps=1) as table:
        async with run.store() as store:
            await store.create(previous)
            for turn in turns:
                await store.commit(previous.session_id, turn)
            previous.close(CloseReason.TAKEN_OVER)
            await store.take_over(successor, previous)
            successor.close()
            await store.set_phase(successor)
        table.plan(0)
        await run.more("b" * 32, generated - 12)
        table.keep(scored)
        step = pack_step(0, MAKER, {index: Disposition.DELIVERED}, rollouts={index: scored})
        assert table.collect(record_of(step)).ledger == book_step(step.packed)
        table.commit(0)
        assert table.close_books().generated == generated

        await run.collect(table, usual(1))
        table.commit(1)
        table.forget()
    assert run.query("SELECT COUNT(*) FROM sessions WHERE session_id IN ('" + "a" * 32 + "', '" + "b" * 32 + "')") == [
        (0,)
    ]


async def test_the_database_does_not_grow_with_the_run(run: Run):
    """What leaves makes room for what comes; sessions that are not closed stay, without being counted again."""
    sizes: list[tuple[Any, ...]] = []
    with run.table(keep_steps=2) as table:
        for number in range(24):
            await run.collect(table, usual(number))
            table.commit(number)
            table.forget()
            sizes += run.query("PRAGMA page_count")
    assert sizes[-1][0] <= 1.1 * sizes[3][0]
    assert len(count_generated(run.path)) == 2 * len(usual_uses(0))
    assert run.query("SELECT step FROM steps") == [(22,), (23,)]
    assert run.query("SELECT COUNT(*) FROM trained_groups") == [(24 * 3,)]


async def test_the_database_shrinks_after_a_large_step(run: Run):
    """No more than twice what it keeps, however large a step in between was."""
    large = {index_of(1, 0): scored_rollout(index_of(1, 0), longest=200_000)}
    sizes: list[int] = []
    with run.table(keep_steps=1) as table:
        for number in range(4):
            uses = {index_of(number, 0): Disposition.DELIVERED}
            step = pack_step(number, SegmentMaker(200_010), uses, rollouts=large if number == 1 else None)
            await run.collect(table, step)
            table.commit(number)
            table.forget()
            [(pages,)], [(free,)] = run.query("PRAGMA page_count"), run.query("PRAGMA freelist_count")
            assert pages <= 2 * (pages - free)
            sizes.append(pages)
    assert sizes[1] > 10 * sizes[0] >= 5 * sizes[3]


async def test_everything_stays_when_it_is_wanted(run: Run):
    """`keep_steps=None`."""
    with run.table(keep_steps=None) as table:
        for number in range(4):
            await run.collect(table, usual(number))
            table.commit(number)
            table.forget()
        assert len(read_step(run.path, 0).rollouts) == 6
    assert len(count_generated(run.path)) == 4 * len(usual_uses(0))


async def test_a_session_that_is_not_closed_is_not_taken_away(run: Run):
    """Its server still has it; it is given back once it is closed, and counted once."""
    with run.table(keep_steps=1) as table:
        table.plan(0)
        step = usual(0)
        await run.sessions(
            {each.session_id: each.ledger["generated"] for each in step.packed.collected.rollouts}, close=False
        )
        table.collect(record_of(step))
        table.commit(0)
        for number in (1, 2):
            await run.collect(table, usual(number))
            table.commit(number)
            table.forget()
        assert len(count_generated(run.path)) == 2 * len(usual_uses(0))
        ledger = table.close_books()
    assert "interrupted" not in ledger.dropped
    assert ledger.generated == run.generated


async def test_another_trainer_is_refused(run: Run):
    """It would commit steps that the first knows nothing of; the first continues."""
    with run.table() as table:
        with pytest.raises(StoreError, match="another trainer uses it"), run.table():
            pass
        await run.collect(table, usual(0))
        table.commit(0)
    with run.table() as table:
        assert table.position.step == 1


def test_a_table_is_closed_behind_the_call_that_is_at_work(tmp_path: Path):
    """Whoever awaited it may be cancelled, and its thread continues."""
    is_asked, goes_on, path = threading.Event(), threading.Event(), tmp_path / "run.db"

    def tell_time() -> float:
        is_asked.set()
        assert goes_on.wait(30)
        return 1_000.0

    with StepTable(path, clock=tell_time) as table:
        planning = threading.Thread(target=table.plan, args=(0,))
        planning.start()
        assert is_asked.wait(30)
        threading.Timer(0.1, goes_on.set).start()
    planning.join()
    assert Run(path).query("SELECT state FROM steps") == [("planned",)]


def test_a_run_without_a_store_of_its_own_has_steps_too(tmp_path: Path):
    """Its sessions are on another server, which counts and forgets them itself."""
    run = Run(tmp_path / "run.db")
    with run.table(keep_steps=1) as table:
        for number in range(3):
            step = usual(number)
            table.plan(number)
            for scored in step.rollouts.values():
                table.keep(scored)
            table.collect(record_of(step))
            table.commit(number)
            table.forget()
        assert table.position.step == 3
    assert run.query("SELECT COUNT(*) FROM step_rollouts") == [(len(usual_uses(0)),)]


def test_a_full_disk_is_named_and_leaves_the_step_as_it_was(run: Run):
    """Between any two writes."""
    with run.table() as table:
        table.plan(0)
        table._connection.execute("PRAGMA max_page_count = 1")
        scored = scored_rollout(index_of(0, 0), longest=5_000)
        with pytest.raises(StoreFull, match="free some space, then resume the run"):
            table.keep(scored)
        assert table.recall(index_of(0, 0)) is None
        table._connection.execute("PRAGMA max_page_count = 100000")
        table.keep(scored)
        table.collect(record_of(usual(0)))
        table.commit(0)


def test_a_table_that_keeps_no_step_is_refused():
    """A run continues from its last step."""
    with pytest.raises(StepError, match="keep_steps: expected at least 1, got 0"):
        StepTable(Path("run.db"), 0)
