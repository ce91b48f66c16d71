"""Rows that no engine server should send, through sessions on sockets: one error of that turn, and it continues."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.engines.pool.pool import EnginePool
from harness.engines.scripted import Script, ScriptedEngine
from harness.token_rows import RowState
from tests.builders import user
from tests.fake_engines.fake_server import FakeServer
from tests.fake_engines.fake_server import serving as serving_fake
from tests.fake_engines.providers import fake_provider, make_fake
from tests.session_servers.served import Client, Served, says, serving_with
from tests.session_servers.true_rows import masks_must_be_true, must_be_true, rows_of
from tests.unit.engines.test_routed_experts import mixture

KINDS = ("sglang", "vllm")
EXPERTS: dict[str, Any] = {"record": ["routed_experts"]}
MASKS: dict[str, Any] = {"record": ["sampling_mask"], "sampling": {"top_p": 0.9}}
BAD_ROWS = {
    "half a token": lambda rows: rows.reshape(-1)[:-1],
    "another shape": lambda rows: np.tile(rows, (1, 2, 1)),
    "ids beyond the experts": lambda rows: rows + np.uint8(8),
    "all, whatever the offset": lambda rows: np.concatenate([rows[:1], rows]),
    "none of the prompt": lambda rows: rows[-1:],
}
BAD_MASKS = {
    "without its token": lambda masks: [[]] * len(masks),
    "beyond the vocabulary": lambda masks: [[*mask, 9999] for mask in masks],
    "of another output": lambda masks: masks[1:],
}


@asynccontextmanager
async def served(kind: str, folder: Path) -> AsyncIterator[tuple[FakeServer, Client[Any]]]:
    """A fake of a kind of engine server, and a session server in front of it."""
    tokenizer = mixture(folder)
    fake = make_fake(kind, ScriptedEngine(tokenizer, Script(says("one", "two", "three"))))
    fake.returns_masks = kind == "vllm"
    async with (
        serving_fake(fake, notices_disconnects=True),
        serving_with(fake_provider(fake, tokenizer=tokenizer)) as client,
    ):
        yield fake, client


async def must_refuse(client: Client[Any], session: Served, word: str) -> None:
    """The next turn is one clear error; nothing of it is recorded, and the session continues."""
    refused = await client.chat(session, [user("question 0")])
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (502, "engine_reply_invalid")
    assert word in error["message"]
    [turn] = (await client.record(session))["turns"]
    assert (turn["output_length"], turn["notes"].get("row_bytes", 0)) == (0, 0)


async def must_balance(client: Client[Any], session: Served) -> None:
    ledger = (await client.record(session))["ledger"]
    assert ledger["generated"] == ledger["trained"] + sum(ledger["dropped"].values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("change", "bad"), [*product(["change_rows"], BAD_ROWS), *product(["change_masks"], BAD_MASKS)]
)
async def test_bad_rows_and_masks_are_an_error_of_their_turn(kind: str, change: str, bad: str, tmp_path: Path) -> None:
    of_rows = change == "change_rows"
    async with served(kind, tmp_path) as (fake, client):
        session = await client.create(**(EXPERTS if of_rows else MASKS))
        setattr(fake, change, (BAD_ROWS if of_rows else BAD_MASKS)[bad])
        await must_refuse(client, session, "expected" if of_rows else "sampling mask")
        setattr(fake, change, lambda honest: honest)
        await client.converse(session, 2)
        [sample] = await client.samples(session)
        await must_balance(client, session)
    (must_be_true if of_rows else masks_must_be_true)(sample)


async def test_more_rows_than_any_prompt_has_are_an_error_of_their_turn(tmp_path: Path) -> None:
    async with served("sglang", tmp_path) as (fake, client):
        session, body = await client.create(**EXPERTS), fake._body
        much = "A" * 120_000_000
        fake._body = lambda *told: (answer := body(*told), answer["meta_info"].update(routed_experts=much))[0]
        await must_refuse(client, session, "a line of more than")
        fake._body = body
        await client.converse(session, 2)
        [sample] = await client.samples(session)
    must_be_true(sample)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_ignores_offsets_later_fails_the_turn_that_has_one(kind: str, tmp_path: Path) -> None:
    """As after a restart with another version: it passed the test at connect."""
    async with served(kind, tmp_path) as (fake, client):
        session = await client.create(**EXPERTS)
        first = await client.say(session, [user("question 0")])
        fake.honors_offset = False
        refused = await client.chat(session, [user("question 0"), first, user("question 1")])
        fake.honors_offset = True
        await client.say(session, [user("question 0"), first, user("question 2")])
        [sample] = await client.samples(session)
        await must_balance(client, session)
    assert (refused.status_code, refused.json()["error"]["code"]) == (502, "engine_reply_invalid")
    must_be_true(sample)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_sends_none_leaves_them_missing(kind: str, tmp_path: Path) -> None:
    """As one that serves a dense model now: no reply has any."""
    async with served(kind, tmp_path) as (fake, client):
        session = await client.create(**EXPERTS)
        fake.change_rows = lambda rows: None
        await client.converse(session, 2)
        [sample] = await client.samples(session)
    must_be_true(sample, {RowState.NOT_RETURNED})


async def test_rows_of_a_dense_model_are_not_read(tmp_path: Path) -> None:
    """VLLM sends what it has with every reply; a session cannot record it."""
    tokenizer = mixture(tmp_path, num_hidden_layers=2)
    fake = make_fake("vllm", ScriptedEngine(tokenizer, Script(says("one"))))
    async with (
        serving_fake(fake, notices_disconnects=True),
        serving_with(fake_provider(fake, tokenizer=tokenizer)) as client,
    ):
        refused = await client.http.post("/sessions", json=EXPERTS)
        session = await client.create()
        await client.converse(session, 1)
        [sample] = await client.samples(session)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "record")
    assert "routed_experts" not in sample


async def test_workers_may_send_different_dtypes(tmp_path: Path) -> None:
    """Samples have the narrowest one."""
    tokenizer = mixture(tmp_path)
    fakes = [make_fake("vllm", ScriptedEngine(tokenizer, Script(says("one", "two")))) for _ in range(2)]
    fakes[1].change_rows = lambda rows: rows.astype(np.int32)
    async with (
        serving_fake(fakes[0], notices_disconnects=True),
        serving_fake(fakes[1], notices_disconnects=True),
        serving_with(EnginePool([fake_provider(fake, tokenizer=tokenizer) for fake in fakes])) as client,
    ):
        sessions = [await client.create(**EXPERTS) for _ in range(2)]
        for session in sessions:
            await client.converse(session, 2)
        samples = [sample for session in sessions for sample in await client.samples(session)]
    assert all(fake.sampled for fake in fakes)
    for sample in samples:
        must_be_true(sample)
        assert rows_of(sample).values.dtype == np.uint8


async def test_a_worker_without_rows_serves_other_sessions_only(tmp_path: Path) -> None:
    """It joins a pool whose sessions record; once the last one that returns rows has left, a turn is a 503."""
    tokenizer, script = mixture(tmp_path), Script(says("one", "two", "three"))
    able, unable = ScriptedEngine(tokenizer, script), ScriptedEngine(tokenizer, script, routed_experts=None)
    unable.capabilities = replace(unable.capabilities, max_mask_ids=0)
    pool = EnginePool([able])
    async with serving_with(pool) as client:
        before = await client.create(**EXPERTS)
        await client.converse(before, 1)
        await pool.workers.join("unable", unable)
        sessions = [before, *[await client.create(**record) for record in (EXPERTS, MASKS) for _ in range(3)]]
        for session in sessions:
            await client.converse(session, 2)
        samples = [sample for session in sessions for sample in await client.samples(session)]
        [name] = [name for name, each in pool.workers.providers.items() if each is able]
        await pool.workers.retire(name, "test")
        refused = await client.chat(before, [user("more")])
        await client.converse(await client.create(), 1)

    assert (refused.status_code, "returns the rows" in refused.json()["error"]["message"]) == (503, True)
    for sample in samples:
        (must_be_true if "routed_experts" in sample else masks_must_be_true)(sample)
