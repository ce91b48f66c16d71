"""Weights labeled as their trainer likes: a label that is no number has the place at which it was seen, for good."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.engines.pool.pool import EnginePool
from harness.engines.pool.workers import MISSED_UPDATE
from harness.engines.scripted import Script, ScriptedEngine, ScriptStep, scripted_logprobs
from harness.errors import UnknownWeightVersion
from harness.samples.versions import LARGEST, LabelOrder, policy_version
from harness.types import Json, as_ids
from tests.builders import toy_tokenizer, user
from tests.session_servers.served import PATIENCE_S, Client, Served, serving_with


@asynccontextmanager
async def serving(*labels: str, store: str = "memory") -> AsyncIterator[tuple[Client, list[ScriptedEngine]]]:
    """A session server on a pool of workers that carry `labels`, or on one worker without a pool."""
    workers = [ScriptedEngine(toy_tokenizer(), Script((ScriptStep(text="Understood."),))) for _ in labels]
    for worker, label in zip(workers, labels, strict=True):
        worker.relabel(label)
    engine: Any = workers[0] if len(workers) == 1 else EnginePool(workers)
    async with serving_with(engine, store=store) as client:
        yield client, workers


async def say(client: Client, session: Served, history: list[Any]) -> None:
    """One more turn of a conversation."""
    history += [await client.say(session, history), user("continue")]


def sampled(sample: Json, column: str) -> list[Any]:
    """A column of the sampled tokens."""
    rows = zip(sample["behavior_versions"], sample[column], strict=True)
    return [value for behavior, value in rows if behavior >= 0]


def truth(sample: Json, labels: Sequence[str]) -> list[float]:
    """The logprob of every sampled token under its proximal version, whose label is the one at that place."""
    start = len(sample["tokens"]) - sample["response_length"]
    columns = zip(sample["behavior_versions"], sample["proximal_versions"], strict=True)
    ids = as_ids(sample["tokens"])
    return [
        float(scripted_logprobs(ids[at : at + 1], at, labels[proximal])[0])
        for at, (behavior, proximal) in enumerate(columns, start)
        if behavior >= 0
    ]


@pytest.mark.parametrize(
    "labels",
    [("w0", "w1", "w2"), ("step-300", "step-100", "step-200"), ("202611211530", "202611211545", "9" * 5000)],
    ids=["words", "no order of their own", "numbers beyond int32"],
)
async def test_a_label_of_any_spelling_has_the_place_at_which_it_was_seen(labels: tuple[str, ...]):
    """Turns are served and scored, and the label itself stands in the sample."""
    async with serving(labels[0]) as (client, [engine]):
        session = await client.create()
        history = [user("a")]
        for label in labels:
            engine.relabel(label)
            await say(client, session, history)
        [sample] = await client.samples(session)

        assert sample["weight_versions"] == list(labels)
        seen = sampled(sample, "behavior_versions")
        assert list(dict.fromkeys(seen)) == [0, 1, 2]
        assert sampled(sample, "proximal_versions") == [min(b + 1, 2) for b in seen]
        assert sampled(sample, "proximal_logprobs") == truth(sample, labels)
        assert sample["metadata"]["staleness"]["newest_version"] == 2


async def test_numbers_and_default_are_read_as_they_always_were():
    """An opaque label among them comes after the newest of them."""
    async with serving("default") as (client, [engine]):
        session = await client.create()
        history = [user("a")]
        for label in ("default", "1", "fixed", "7"):
            engine.relabel(label)
            await say(client, session, history)
        [sample] = await client.samples(session)

        assert set(sampled(sample, "behavior_versions")) == {0, 1, 2, 7}
        assert sample["weight_versions"] == ["default", "1", "fixed", "7"]


async def test_the_same_label_means_the_same_after_a_restart(tmp_path: Path):
    """Also one that nobody sampled under: what was seen between two others keeps its place."""
    store = str(tmp_path / "sessions.db")
    async with serving("w0", store=store) as (client, [engine]):
        session = await client.create()
        history = [user("a")]
        await say(client, session, history)
        engine.relabel("w1")
        await client.samples(session)
    async with serving("w2", store=store) as (client, _):
        await say(client, session, history)
        [sample] = await client.samples(session)

        assert sample["weight_versions"] == ["w0", "w2"]
        assert set(sampled(sample, "behavior_versions")) == {0, 2}
        assert set(sampled(sample, "proximal_versions")) == {0, 2}


async def say_until_fences_are(client: Client, session: Served, history: list[Any], fences: list[str]) -> None:
    """Go on with the conversation until the workers have these: all of them are asked once a second while turns run."""
    async with asyncio.timeout(PATIENCE_S):
        while [worker.fence for worker in client.engine.workers] != fences:
            await say(client, session, history)
            await asyncio.sleep(0.05)


async def test_workers_agree_on_the_place_of_a_label():
    """The one that has the label that was seen last has the newest weights; the others missed the update."""
    async with serving("w0", "w0") as (client, workers):
        session = await client.create()
        history = [user("a")]
        await say(client, session, history)
        workers[1].relabel("w1")
        await say_until_fences_are(client, session, history, [MISSED_UPDATE, ""])
        await say(client, session, history)
        workers[0].relabel("w1")
        await say_until_fences_are(client, session, history, ["", ""])
        [sample] = await client.samples(session)

        assert sample["weight_versions"] == ["w0", "w1"]


async def test_a_version_that_goes_down_is_taken_as_it_is_said():
    """An engine that was restarted: its tokens carry what it says, and nothing waits for a version twice."""
    async with serving("5") as (client, [engine]):
        session = await client.create(limits={"staleness": 1})
        history = [user("a")]
        for label in ("5", "4"):
            engine.relabel(label)
            await say(client, session, history)
        [sample] = await client.samples(session)

        assert sample["weight_versions"] == ["5", "4"]
        assert sample["metadata"]["staleness"]["lag_min"] == 0


async def test_concurrent_turns_under_a_label_that_nobody_has_seen_agree():
    """It is numbered once."""
    async with serving("w0") as (client, _):
        sessions = [await client.create() for _ in range(5)]
        await asyncio.gather(*(client.say(session, [user("a")]) for session in sessions))
        samples = [sample for session in sessions for sample in await client.samples(session)]

        assert {version for sample in samples for version in sampled(sample, "behavior_versions")} == {0}


def test_the_order_has_no_place_for_weights_that_nobody_knows():
    """Nor for more versions than a column can hold."""
    order = LabelOrder()
    assert [order.see(label) for label in ("a", "b", "a", "7", "c")] == [0, 1, 0, 7, 8]
    for label in ("", "updating-3"):
        with pytest.raises(UnknownWeightVersion):
            order.see(label)
    order.see(str(LARGEST))
    with pytest.raises(UnknownWeightVersion):
        order.see("d")
    with pytest.raises(UnknownWeightVersion):
        policy_version(str(LARGEST + 1))
