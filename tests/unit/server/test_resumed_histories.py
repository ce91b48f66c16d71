"""Rollouts that are killed at random and resumed have the samples of those that were never killed."""

import asyncio
import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engines.scripted import ScriptedEngine, ScriptedFault, ScriptStep
from harness.server.store.sqlite import list_sessions
from harness.types import Json, Message
from tests.builders import tool, user
from tests.session_servers.served import Client, Served, bearer, eventually, serving, url_of
from tests.thoroughness import examples

EXAMPLES = int(os.environ.get("HARNESS_SOAK_EXAMPLES", max(3, examples(8))))
LOOK = '\n<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call>'
TOOLS = [tool("look", n={"type": "integer"})]


def step(number: int) -> ScriptStep:
    """Say something new; each third reply has a tool call, each fifth is cut by the engine, and some take time."""
    how: Any = {1: {"token_delay_s": 0.001}, 4: {"fault": ScriptedFault.ABORT, "fault_after": 2}}.get(number % 5, {})
    return ScriptStep(text=f"answer {number} of many{LOOK if number % 3 == 0 else ''}", delay_s=0.004, **how)


STEPS = tuple(map(step, range(16)))


class Move(StrEnum):
    """A call of the agent."""

    SAY = "say"
    AGAIN = "again"
    """The last body once more, for another answer."""
    REWIND = "rewind"
    """From behind the first answer, as a branch."""
    COMPACT = "compact"
    """For a summary, with which the conversation begins anew."""
    GIVE_UP = "give_up"
    """Its connection is lost, and it asks again."""


class Death(StrEnum):
    """The end of a life."""

    BETWEEN_CALLS = "between_calls"
    IN_FLIGHT = "in_flight"
    DRAINED = "drained"
    """In flight too, and the turn is kept as ABORTED."""


class Plan(NamedTuple):
    """A deterministic agent, and what happens to it."""

    moves: Sequence[tuple[int, Move]]
    """By conversation; the third has no tools."""
    updates: Sequence[int]
    """Numbers of sampled turns at which the weights change."""
    kills: Sequence[tuple[int, Death]]
    """Calls that a life makes, and its end."""


class Life(NamedTuple):
    """An agent on a session."""

    client: Client[ScriptedEngine]
    session: Served
    plan: Plan

    async def play(self, calls: int, death: Death) -> None:
        """Make the first `calls` calls, and the next one as it dies."""
        talks: dict[int, list[Message]] = {}
        for number, (talk, move) in enumerate(self.plan.moves):
            said = talks.setdefault(talk, [{"role": "system", "content": f"system {talk}"}, user("go")])
            body: Json = {"messages": _asked(said, move, number), "tools": [] if talk == 2 else TOOLS}
            await self._prepare()
            if number == calls:
                if death is not Death.BETWEEN_CALLS:
                    await self._leave(body, number, is_drained=death is Death.DRAINED)
                return
            if move is Move.GIVE_UP:
                await self._leave(body, number)
                await self._prepare()
            reply = await self._ask(body, is_retry=move is Move.GIVE_UP)
            talks[talk] = (
                [*said[:1], user(f"Go on from: {reply['content']}")]
                if move is Move.COMPACT
                else [*body["messages"], reply, *_results(reply, number)]
            )

    async def _prepare(self) -> None:
        record = await self.client.record(self.session)
        while record["turns_in_flight"]:
            await asyncio.sleep(0.002)
            record = await self.client.record(self.session)
        sampled = sum(turn["status"] == "completed" for turn in record["turns"])
        partial = any(turn["status"] == "aborted" and turn["output_length"] for turn in record["turns"])
        self.client.engine.play_from(self.session.session_id, sampled + partial)  # a continuation plays the last step
        self.client.engine.relabel(str(sum(sampled >= update for update in self.plan.updates)))

    async def _ask(self, body: Json, *, is_retry: bool) -> Message:
        retry = {"x-stainless-retry-count": "1"} if is_retry else {}
        headers = bearer(self.session.api_key) | retry
        answer = await self.client.http.post(url_of(self.session), json={"model": "m", **body}, headers=headers)
        assert answer.status_code == 200, answer.text
        message: Message = answer.json()["choices"][0]["message"]
        return message

    async def _leave(self, body: Json, number: int, *, is_drained: bool = False) -> None:
        # At the start of the generation, or after its first tokens; an inherited answer comes at once.
        call = asyncio.create_task(self._ask(body, is_retry=False))
        least, engine = 2 * (number % 2), self.client.engine
        await eventually(lambda: call.done() or any(each.sampled >= least for each in engine.live))
        if is_drained:
            await self.client.http.post(f"/sessions/{self.session.session_id}/drain")
        else:
            call.cancel()
        await asyncio.gather(call, return_exceptions=True)  # a drained call is refused


def _asked(said: list[Message], move: Move, number: int) -> list[Message]:
    answers = [place for place, message in enumerate(said) if message["role"] == "assistant"]
    match move:
        case Move.AGAIN if answers:
            return said[: answers[-1]]
        case Move.REWIND if answers:
            return [*said[: answers[0] + 1], user(f"instead {number}")]
        case Move.COMPACT:
            return [*said, user("Summarize what happened, for whoever continues from here.")]
        case _:
            return said


def _results(reply: Message, number: int) -> list[Message]:
    calls = reply.get("tool_calls") or ()
    results: list[Message] = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"result {number}"} for call in calls
    ]
    return results or [user(f"more {number}")]


async def _run(plan: Plan, store: Path) -> tuple[list[Json], Json, int]:
    async with serving(*STEPS, store=store) as client:
        session = await client.create(sampling={"seed": 7})
        for calls, death in plan.kills:
            await Life(client, session, plan).play(min(calls, len(plan.moves) - 1), death)
            await client.http.delete(f"/sessions/{session.session_id}")
            session = await client.create(sampling={"seed": 7}, inherits={"session_id": session.session_id})
        await Life(client, session, plan).play(len(plan.moves), Death.BETWEEN_CALLS)
        samples, record = await client.samples(session), await client.record(session)
        await client.http.delete(f"/sessions/{session.session_id}")
    return samples, record, sum(line.sampled for line in list_sessions(store).values())


PLANS = st.builds(
    Plan,
    moves=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(Move)), min_size=1, max_size=9),
    updates=st.lists(st.integers(0, 9), max_size=2),
    kills=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(Death)), min_size=1, max_size=3),
)
COMPARED = ("tokens", "loss_mask", "rollout_log_probs", "behavior_versions", "weight_versions", "status")


@pytest.mark.timeout(240 + 10 * EXAMPLES)
@settings(max_examples=EXAMPLES)
@given(PLANS)
def test_a_resumed_rollout_is_the_one_that_was_never_killed(plan: Plan) -> None:
    """Bit by bit, with the same seeds and the same ledger, and each turn sampled once by the engine."""
    with TemporaryDirectory() as place:
        killed, record, sampled = asyncio.run(_run(plan, Path(place) / "a.db"))
        whole, reference, once = asyncio.run(_run(plan._replace(kills=()), Path(place) / "b.db"))

    assert len(killed) == len(whole)
    for ours, theirs in zip(killed, whole, strict=True):
        for name in COMPARED:
            assert np.array_equal(ours[name], theirs[name]), name
    turns, others = record["turns"], reference["turns"]
    assert [turn["role"] for turn in turns] == [turn["role"] for turn in others]
    assert [turn["sampling"]["used"]["seed"] for turn in turns] == [turn["sampling"]["used"]["seed"] for turn in others]
    ledger, other = record["ledger"], reference["ledger"]
    assert [ledger[name] for name in ("trained", "masked", "dropped")] == [
        other[name] for name in ("trained", "masked", "dropped")
    ]
    assert ledger["generated"] + ledger.get("inherited", 0) == other["generated"] == once
    # Only calls that were in flight at a kill are sampled twice, and the first output is never trained.
    cut = sum(death is not Death.BETWEEN_CALLS for _, death in plan.kills)
    assert once <= sampled <= once + cut * max(len(each.text) for each in STEPS)
