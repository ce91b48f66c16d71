"""Routed experts through a server: recorded on request, kept by the store, and refused when they are wrong."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from harness.dialects.request_limits import RequestLimits
from harness.engines.base import PauseMode
from harness.engines.pool.pool import EnginePool
from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.engines.teachers import TeacherSpec
from harness.samples.codec import sample_from_json
from harness.server.settings import ServerSettings
from harness.server.store.sqlite import SQLiteStore
from harness.token_rows import RaggedRows, RowState, TokenRows
from harness.types import GenerationRequest, GenerationResult, Json, SampleStatus, TokenIds, VersionSpan
from tests.builders import toy_tokenizer, user
from tests.session_servers.served import Client, Served, SetClock, eventually, says, serving, serving_with
from tests.session_servers.true_rows import masks_must_be_true, must_be_true, rows_of

RECORD = {"record": ["routed_experts"]}
MASKS = {"record": ["sampling_mask"], "sampling": {"top_p": 0.9}}
KINDS: dict[str, tuple[Json, Any, str]] = {
    "rows": (RECORD, must_be_true, "nothing of it is used"),
    "masks": (MASKS, masks_must_be_true, "mask"),
}
"""By the name of a column: what a session records, what must hold of its samples, what an error of a lie says."""


class LyingEngine(ScriptedEngine):
    """Returns other rows than it was asked for, or other masks, for its first answer."""

    def __init__(self, column: str, lie: Any) -> None:
        super().__init__(toy_tokenizer(), Script(says("one", "two", "three")))
        self.column, self.lie = column, lie
        self.asked: list[int | None] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.asked.append(request.rows_from)
        result = await super().generate(request)
        true = getattr(result, self.column)
        if true is not None and self.lie is not None:
            result, self.lie = structs.replace(result, **{self.column: self.lie(true)}), None
        return result


class ForgetfulEngine(ScriptedEngine):
    """Returns no rows when it continues with a request."""

    def _route(self, request: GenerationRequest, output: TokenIds, spans: list[VersionSpan]) -> TokenRows | None:
        return None if request.continues else super()._route(request, output, spans)


LIES: dict[str, tuple[str, Any]] = {
    "half a token": ("rows", lambda rows: TokenRows(rows.start, rows.values[:-1])),
    "one layer": ("rows", lambda rows: TokenRows(rows.start, rows.values[:, :1])),
    "more experts of a token": ("rows", lambda rows: TokenRows(rows.start, np.tile(rows.values, 2))),
    "an id beyond the experts": ("rows", lambda rows: TokenRows(rows.start, rows.values + np.uint8(8))),
    "another dtype": ("rows", lambda rows: TokenRows(rows.start, rows.values.astype(np.uint16))),
    "another offset": ("rows", lambda rows: TokenRows(rows.start + 1, rows.values)),
    "no row": ("rows", lambda rows: TokenRows(rows.start, rows.values[:0])),
    "without its token": ("masks", lambda masks: RaggedRows(masks.start, masks.values + 1, masks.offsets)),
    "beyond the bound": ("masks", lambda masks: RaggedRows.of(masks.start, [[40] * 5000] * (len(masks.offsets) - 1))),
    "beyond the vocabulary": ("masks", lambda masks: RaggedRows(masks.start, masks.values + 9999, masks.offsets)),
    "a token too few": ("masks", lambda masks: masks.until(masks.stop - 1)),
    "none of a token": ("masks", lambda masks: RaggedRows.of(masks.start, [[]] * (len(masks.offsets) - 1))),
}


async def test_an_evicted_session_and_the_next_server_still_have_all_rows(tmp_path: Path) -> None:
    """Memory has none of a finished turn; the blobs of the file are all there is."""
    clock, settings, store = SetClock(), ServerSettings(idle_page_out_s=60.0), tmp_path / "s.db"
    async with serving(*says("one", "two"), store=store, settings=settings, clock=clock) as client:
        session = await client.create(**RECORD)
        history = await client.converse(session, 2)
        held = client.server.sessions.in_memory(session.session_id)
        assert held is not None
        assert [turn.rows for turn in held.turns] == [None, None]
        await eventually(lambda: all(turn.delivered for turn in held.turns))
        await client.server._turns.store.set_phase(held)  # behind the notes of deliveries
        clock.now += 60.0
        await client.server.sessions.page_out_idle()
        assert client.server.sessions.in_memory(session.session_id) is None
        [evicted] = await client.samples(session)
        must_be_true(evicted)

    async with serving(*says("three"), store=store) as client:
        await client.converse(session, 1, history)
        [sample] = await client.samples(session)
    must_be_true(sample)
    assert sample["response_length"] > evicted["response_length"]


async def test_a_successor_continues_a_cut_turn_with_its_rows(tmp_path: Path) -> None:
    """What was drained in flight keeps the rows that it has, and asks for those behind them."""
    slow = ScriptStep(text="a slow answer", token_delay_s=0.01)
    async with serving(*says("one"), slow, store=tmp_path / "s.db") as client:
        old = await client.create(**RECORD)
        history = await client.converse(old, 1)
        async with asyncio.TaskGroup() as group:
            group.create_task(client.chat(old, [*history, user("continue")]))
            await client.sampling()
            await client.http.post(f"/sessions/{old.session_id}/drain")
        await client.engine.update_weights(tmp_path, "1")
        new = await client.create(resumes=old.session_id)
        assert await client.converse(new, 1) == history
        await client.say(new, [*history, user("continue")])

        [sample] = await client.samples(new)
    must_be_true(sample)
    assert {*sample["behavior_versions"]} >= {0, 1}


async def say_across_an_update(client: Client[ScriptedEngine], session: Served) -> None:
    """One turn, cut in its middle and continued under weights of version 1."""
    async with asyncio.TaskGroup() as group:
        group.create_task(client.say(session, [user("question")]))
        await client.sampling()
        await client.engine.update_weights(Path("unused"), "1")
        await client.engine.abort(None)


@pytest.mark.parametrize(("record", "must_hold", "_"), KINDS.values(), ids=KINDS)
async def test_a_cut_request_continues_behind_its_rows(record: Json, must_hold: Any, _: str, tmp_path: Path) -> None:
    """The engine is asked from the last known token on, in a session that the next server continues with."""
    slow = ScriptStep(text="a slow answer", token_delay_s=0.002)
    async with serving(slow, store=tmp_path / "s.db") as client:
        session = await client.create(**record)
        await say_across_an_update(client, session)
        [sample] = await client.samples(session)
    must_hold(sample)
    assert {*sample["behavior_versions"]} == {0, 1}


async def test_a_sample_that_requires_rows_ends_where_a_continued_request_lost_them(tmp_path: Path) -> None:
    """In the middle of its turn: what the first request sampled is trained."""
    slow = ScriptStep(text="a slow answer", token_delay_s=0.002)
    async with serving_with(ForgetfulEngine(toy_tokenizer(), Script((slow,))), store=tmp_path / "s.db") as client:
        session = await client.create(**RECORD, missing_rows="require")
        await say_across_an_update(client, session)
        [sample] = await client.samples(session)
        record = await client.record(session)

    must_be_true(sample)
    [turn] = record["turns"]
    assert (sample["status"], sample["response_length"]) == ("truncated", turn["notes"]["rows_until"])
    assert {*sample["behavior_versions"]} == {0}
    left = turn["output_length"] - sample["response_length"]
    assert (record["ledger"]["trained"], record["ledger"]["dropped"]) == (
        sample["response_length"],
        {"missing_rows": left},
    )


@pytest.mark.parametrize("limit", ["session_row_bytes", "row_bytes"])
async def test_rows_have_a_limit_in_bytes(limit: str) -> None:
    """A session that has more takes no further turn; a server whose turns in flight have more asks to come again."""
    slow = ScriptStep(text="a slow answer", token_delay_s=0.002)
    bound = ServerSettings(limits=RequestLimits(**{limit: 1}))
    async with serving(slow, settings=bound) as client:
        session, other = [await client.create(**RECORD) for _ in range(2)]
        if limit == "session_row_bytes":
            await client.converse(session, 1)
            refused = await client.chat(session, [user("more")])
        else:
            async with asyncio.TaskGroup() as group:
                cut = group.create_task(client.say(session, [user("question")]))
                await client.sampling()
                await client.engine.pause(PauseMode.ABORT)
                await eventually(lambda: client.server._turns.admitted.row_bytes > 1)
                refused = await client.chat(other, [user("more")])
                await client.engine.resume()
                await cut
        assert await client.say(other, [user("more")])

    status, code = (400, "over_limit") if limit == "session_row_bytes" else (503, "server_busy")
    assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(("column", "lie"), LIES.values(), ids=LIES)
async def test_wrong_rows_and_masks_are_an_error_of_their_turn_alone(column: str, lie: Any) -> None:
    """Nothing of the reply is kept, and the session continues."""
    config, must_hold, word = KINDS[column]
    async with serving_with(LyingEngine(column, lie)) as client:
        session = await client.create(**config)
        refused = await client.chat(session, [user("question 0")])
        await client.converse(session, 2)
        [sample] = await client.samples(session)
        ledger = (await client.record(session))["ledger"]

    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (502, "engine_reply_invalid")
    assert word in error["message"]
    must_hold(sample)
    assert ledger["generated"] == ledger["trained"] + sum(ledger["dropped"].values())
    assert sample.get("sampling_mask", {}).get("dtype", "<u2") == "<u2"


@pytest.mark.parametrize("column", KINDS)
async def test_an_engine_that_returns_none_leaves_them_missing(column: str) -> None:
    config, must_hold, _ = KINDS[column]
    async with serving_with(LyingEngine(column, lambda true: None)) as client:
        session = await client.create(**config)
        await client.converse(session, 2)
        [sample] = await client.samples(session)

    must_hold(sample, {RowState.NOT_RETURNED})
    if column == "rows":
        assert rows_of(sample).states[0] == RowState.NOT_RETURNED
        assert list(sample["metadata"]["missing_rows"]) == ["not_returned"]


async def test_a_session_without_record_asks_for_no_rows_and_stores_none(tmp_path: Path) -> None:
    async with serving_with(LyingEngine("rows", None), store=SQLiteStore(tmp_path / "s.db")) as client:
        session = await client.create()
        await client.converse(session, 2)
        [sample] = await client.samples(session)

        assert client.engine.asked == [None, None]
    assert "routed_experts" not in sample
    with closing(sqlite3.connect(tmp_path / "s.db")) as connection:
        assert connection.execute("SELECT count(*) FROM turn_rows").fetchone() == (0,)


async def test_a_closed_session_leaves_no_rows_behind(tmp_path: Path) -> None:
    async with serving(*says("one"), store=tmp_path / "s.db") as client:
        session = await client.create(**RECORD)
        await client.converse(session, 1)
        await client.http.delete(f"/sessions/{session.session_id}")
        assert await client.server._turns.store.forget_closed(-1.0, 10) == 1
    with closing(sqlite3.connect(tmp_path / "s.db")) as connection:
        assert connection.execute("SELECT count(*) FROM turn_rows").fetchone() == (0,)


async def test_a_turn_that_is_cut_at_a_gap_keeps_the_most_likely_tokens_of_what_is_left(tmp_path: Path) -> None:
    """Those of a teacher; its end is no longer the model's."""
    engine = ForgetfulEngine(toy_tokenizer(), Script((ScriptStep(text="a slow answer", token_delay_s=0.002),)))
    teacher = TeacherSpec("big", lambda: ScriptedEngine(toy_tokenizer()), top_k=3)
    async with (
        serving_with(engine, store=tmp_path / "s.db", settings=ServerSettings(teachers=(teacher,))) as client,
        asyncio.TaskGroup() as group,
    ):
        session = await client.create(**RECORD, missing_rows="require")
        group.create_task(client.say(session, [user("question")]))
        await client.sampling()
        await engine.update_weights(tmp_path, "1")
        await engine.abort(None)
        await eventually(lambda: client.server.sessions.in_memory(session.session_id).turns)
        [sample] = [sample_from_json(each) for each in await client.samples(session)]

    assert sample.teacher_tops["big"].ids.shape == (sample.response_length, 3)
    assert (sample.status, sample.metadata["end"]) == (SampleStatus.TRUNCATED, "length")


async def test_a_worker_that_leaves_has_answered_what_only_it_could() -> None:
    """The pool's other worker has no experts."""
    slow = Script((ScriptStep(text="a slow answer", token_delay_s=0.02),))
    first, other = (ScriptedEngine(toy_tokenizer(), slow, **more) for more in ({}, {"routed_experts": None}))
    pool = EnginePool([first, other])
    async with serving_with(pool) as client, asyncio.TaskGroup() as group:
        session = await client.create(**RECORD)
        asking = group.create_task(client.chat(session, [user("question")]))
        await eventually(lambda: first.live)
        await pool.workers.retire(next(iter(pool.workers.providers)), "gone")

    assert asking.result().status_code == 200, asking.result().text
