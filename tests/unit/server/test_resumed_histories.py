"""Rollouts that are killed at random and resumed have the samples of those that were never killed."""

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engines.scripted import ScriptedEngine, ScriptStep
from harness.server.store.sqlite import list_sessions
from harness.types import Json
from tests.builders import user
from tests.session_servers.served import Client, Served, serving

EXAMPLES = int(os.environ.get("HARNESS_SOAK_EXAMPLES", "8"))
STEPS = tuple(ScriptStep(text=f"answer {number} of many", delay_s=0.01) for number in range(16))


class Plan(NamedTuple):
    """A deterministic agent: the conversation of each of its calls, and when the weights change."""

    calls: Sequence[int]
    update: int
    kills: Sequence[tuple[int, bool]]
    """Calls that a life makes, and whether the next one is in flight when it ends."""


class Life(NamedTuple):
    """An agent on a session."""

    client: Client[ScriptedEngine]
    session: Served
    plan: Plan

    async def play(self, calls: int, *, dies_in_flight: bool) -> None:
        """Make the first `calls` calls, and give one more up if `dies_in_flight`."""
        talks: dict[int, list[Any]] = {}
        for number, talk in enumerate(self.plan.calls):
            messages = talks.setdefault(talk, [{"role": "system", "content": f"system {talk}"}, user("go")])
            sampled = await self._count()
            self.client.engine.play_from(self.session.session_id, sampled)
            if sampled >= self.plan.update:
                self.client.engine.relabel("1")
            if number == calls:
                if dies_in_flight:
                    with suppress(TimeoutError, httpx.HTTPError):
                        async with asyncio.timeout(0.03):
                            await self.client.chat(self.session, messages)
                return
            messages += [await self.client.say(self.session, messages), user(f"result {number}")]

    async def _count(self) -> int:
        turns = (await self.client.record(self.session))["turns"]
        return sum(turn["status"] == "completed" for turn in turns)


async def _end(client: Client[Any], session: Served) -> None:
    await client.http.delete(f"/sessions/{session.session_id}")


async def _run(plan: Plan, store: Path) -> tuple[list[Json], Json, int]:
    async with serving(*STEPS, store=store) as client:
        session = await client.create()
        for calls, in_flight in plan.kills:
            await Life(client, session, plan).play(min(calls, len(plan.calls) - 1), dies_in_flight=in_flight)
            await _end(client, session)
            session = await client.create(inherits={"session_id": session.session_id})
        await Life(client, session, plan).play(len(plan.calls), dies_in_flight=False)
        samples, record = await client.samples(session), await client.record(session)
        await _end(client, session)
    return samples, record, sum(line.sampled for line in list_sessions(store).values())


PLANS = st.builds(
    Plan,
    calls=st.lists(st.integers(0, 2), min_size=1, max_size=8),
    update=st.integers(0, 8),
    kills=st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=3),
)
COMPARED = ("tokens", "loss_mask", "rollout_log_probs", "behavior_versions", "weight_versions", "status")


@pytest.mark.timeout(240 + 10 * EXAMPLES)
@settings(max_examples=EXAMPLES)
@given(PLANS)
def test_a_resumed_rollout_is_the_one_that_was_never_killed(plan: Plan) -> None:
    """Bit by bit, with balanced ledgers, and each turn sampled once by the engine."""
    with TemporaryDirectory() as place:
        killed, record, sampled = asyncio.run(_run(plan, Path(place) / "a.db"))
        whole, _, once = asyncio.run(_run(plan._replace(kills=()), Path(place) / "b.db"))

    assert len(killed) == len(whole)
    for sample, reference in zip(killed, whole, strict=True):
        for name in COMPARED:
            assert np.array_equal(sample[name], reference[name]), name
    ledger = record["ledger"]
    inherited = ledger.get("inherited", 0)
    assert ledger["generated"] + inherited == ledger["trained"] + ledger["masked"] + sum(ledger["dropped"].values())
    # Only calls that were in flight at a kill are sampled twice, and the first output is never trained.
    cut = sum(in_flight for _, in_flight in plan.kills)
    assert once <= sampled <= once + cut * max(len(step.text or "") for step in STEPS)
    assert set(ledger["dropped"]) <= {"side"}
