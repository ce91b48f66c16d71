"""Sampling masks through a server: recorded on request, kept by the store, pinned, and refused when they are wrong."""

from dataclasses import replace
from pathlib import Path

from harness.engines.scripted import ScriptedEngine
from tests.builders import toy_tokenizer, user
from tests.session_servers.served import says, serving, serving_with
from tests.session_servers.true_rows import masks_must_be_true, must_be_true

RECORD = {"record": ["sampling_mask"], "sampling": {"top_p": 0.9}}


async def test_masks_come_with_experts_across_updates_branches_and_restarts(tmp_path: Path) -> None:
    """Memory has none of a finished turn, and a token keeps the candidates of its own version."""
    both = {**RECORD, "record": ["routed_experts", "sampling_mask"]}
    async with serving(*says("one", "two", "three"), store=tmp_path / "s.db") as client:
        session = await client.create(**both)
        history = await client.converse(session, 1)
        await client.engine.update_weights(tmp_path, "1")
        await client.converse(session, 1, history)
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
        await client.converse(session, 1)
        await client.http.post(f"/sessions/{session.session_id}/drain")
        successor = await client.create(resumes=session.session_id)
        [sample] = await client.samples(successor)

    assert "sampling_mask" not in sample


async def test_a_request_may_not_change_what_the_session_pins(client) -> None:
    """400 by name; the session continues, and its turn says what it was sampled with."""
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
        history = await client.converse(session, 1)
        await client.http.delete(f"/sessions/{session.session_id}")
        inherits = {"session_id": session.session_id}
        heir = await client.create(inherits=inherits, sampling=RECORD["sampling"])
        assert await client.converse(heir, 1) == history
        await client.converse(heir, 1, history)
        [sample] = await client.samples(heir)
    masks_must_be_true(sample)
    assert sample["metadata"]["filtered_turns"] == 2


async def test_more_candidates_than_the_engine_returns_are_refused(client) -> None:
    """Before a turn has sampled them."""
    answer = await client.http.post("/sessions", json={"record": ["sampling_mask"], "sampling": {"top_k": 5000}})
    assert answer.status_code == 400
    assert "sampling.top_k: expected at most" in answer.text
