"""Sampling masks through a server: recorded on request, kept by the store, pinned, and refused when they are wrong."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.token_rows import RaggedRows, RowState
from harness.types import GenerationRequest, GenerationResult
from tests.builders import toy_tokenizer, user
from tests.session_servers.served import Client, Served, says, serving, serving_with
from tests.session_servers.true_rows import masks_must_be_true, must_be_true

RECORD = {"record": ["sampling_mask"], "sampling": {"top_p": 0.9}}


class LyingEngine(ScriptedEngine):
    """Returns other masks than its own, for its first answer."""

    def __init__(self, lie: Any) -> None:
        super().__init__(toy_tokenizer(), Script(says("one", "two", "three")))
        self.lie = lie

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        result = await super().generate(request)
        if result.masks is not None and self.lie is not None:
            result, self.lie = structs.replace(result, masks=self.lie(result.masks)), None
        return result


LIES = {
    "without its token": lambda masks: RaggedRows(masks.start, masks.values + 1, masks.offsets),
    "beyond the bound": lambda masks: RaggedRows.of(masks.start, [[40] * 5000] * (len(masks.offsets) - 1)),
    "beyond the vocabulary": lambda masks: RaggedRows(masks.start, masks.values + 9999, masks.offsets),
    "a token too few": lambda masks: masks.until(masks.stop - 1),
    "none of a token": lambda masks: RaggedRows.of(masks.start, [[]] * (len(masks.offsets) - 1)),
}


async def converse(client: Client[Any], session: Served, turns: int, history: list[Any] | None = None) -> list[Any]:
    """Take `turns`; the history after them."""
    history = list(history or ())
    for number in range(turns):
        history.append(user(f"question {number}"))
        history.append(await client.say(session, history))
    return history


async def test_masks_come_with_experts_across_updates_branches_and_restarts(tmp_path: Path) -> None:
    """Memory has none of a finished turn, and a token keeps the candidates of its own version."""
    both = {**RECORD, "record": ["routed_experts", "sampling_mask"]}
    async with serving(*says("one", "two", "three"), store=tmp_path / "s.db") as client:
        session = await client.create(**both)
        history = await converse(client, session, 1)
        await client.engine.update_weights(tmp_path, "1")
        await converse(client, session, 1, history)
        held = client.server.sessions.in_memory(session.session_id)
        assert held is not None
        assert [turn.masks for turn in held.turns] == [None, None]

    async with serving(*says("four", "five"), store=tmp_path / "s.db") as client:
        await client.say(session, [*history, user("another")])
        samples = await client.samples(session)

    assert len(samples) == 2
    for sample in samples:
        masks_must_be_true(sample)
        must_be_true(sample)


async def test_a_session_without_a_filter_moves_without_masks(tmp_path: Path) -> None:
    """Its turns keep no blob, for the successor either."""
    async with serving(*says("one", "two"), store=tmp_path / "s.db") as client:
        session = await client.create(record=["sampling_mask"])
        await converse(client, session, 1)
        await client.http.post(f"/sessions/{session.session_id}/drain")
        successor = await client.create(resumes=session.session_id)
        [sample] = await client.samples(successor)

    assert "sampling_mask" not in sample


async def test_a_cut_request_goes_on_with_its_masks(tmp_path: Path) -> None:
    slow = ScriptStep(text="a slow answer", token_delay_s=0.002)
    async with serving(slow, store=tmp_path / "s.db") as client:
        session = await client.create(**RECORD)
        async with asyncio.TaskGroup() as group:
            group.create_task(client.say(session, [user("question")]))
            await client.sampling()
            await client.engine.update_weights(tmp_path, "1")
            await client.engine.abort(None)
        [sample] = await client.samples(session)

    masks_must_be_true(sample)
    assert {*sample["behavior_versions"]} == {0, 1}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_wrong_masks_are_an_error_of_their_turn_alone(lie: Any) -> None:
    """Nothing of the reply is kept, and the session goes on."""
    async with serving_with(LyingEngine(lie)) as client:
        session = await client.create(**RECORD)
        refused = await client.chat(session, [user("question 0")])
        await converse(client, session, 2)
        [sample] = await client.samples(session)
        ledger = (await client.record(session))["ledger"]

    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (502, "engine_reply_invalid")
    assert "mask" in error["message"]
    masks_must_be_true(sample)
    assert sample["sampling_mask"]["dtype"] == "<u2"
    assert ledger["generated"] == ledger["trained"] + sum(ledger["dropped"].values())


async def test_an_engine_that_returns_no_masks_leaves_them_missing() -> None:
    async with serving_with(LyingEngine(lambda masks: None)) as client:
        session = await client.create(**RECORD)
        await converse(client, session, 2)
        [sample] = await client.samples(session)

    masks_must_be_true(sample, {RowState.NOT_RETURNED})


async def test_a_request_may_not_change_what_the_session_pins() -> None:
    """400 by name; the session goes on, and its turn says what it was sampled with."""
    async with serving(*says("one")) as client:
        session = await client.create(**RECORD)
        refused = await client.chat(session, [user("a")], temperature=0.5)
        await client.say(session, [user("a")], top_p=0.9)
        record = await client.record(session)

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "temperature"
    assert "sampling masks" in refused.json()["error"]["message"]
    [turn] = record["turns"]
    assert turn["sampling"]["used"]["sampling_mask"] is True


async def test_masks_are_refused_where_the_engine_has_none() -> None:
    engine = ScriptedEngine(toy_tokenizer())
    engine.capabilities = replace(engine.capabilities, max_mask_ids=0)
    async with serving_with(engine) as client:
        refused = await client.http.post("/sessions", json=RECORD)

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "record"
    assert "no sampling_mask" in refused.json()["error"]["message"]


async def test_an_heir_keeps_the_masks_of_what_it_inherits(tmp_path: Path) -> None:
    """It says nothing of rows: without masks, a trainer would take its logprobs for those of all ids."""
    async with serving(*says("one", "two"), store=tmp_path / "s.db") as client:
        session = await client.create(**RECORD)
        history = await converse(client, session, 1)
        await client.http.delete(f"/sessions/{session.session_id}")
        inherits = {"session_id": session.session_id}
        heir = await client.create(inherits=inherits, sampling=RECORD["sampling"])
        assert await converse(client, heir, 1) == history
        await converse(client, heir, 1, history)
        [sample] = await client.samples(heir)
    masks_must_be_true(sample)
    assert sample["metadata"]["filtered_turns"] == 2


async def test_more_candidates_than_the_engine_returns_are_refused() -> None:
    """Before a turn has sampled them."""
    async with serving(*says("one")) as client:
        answer = await client.http.post("/sessions", json={"record": ["sampling_mask"], "sampling": {"top_k": 5000}})
    assert answer.status_code == 400
    assert "sampling.top_k: expected at most" in answer.text
