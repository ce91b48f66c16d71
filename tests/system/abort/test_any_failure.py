"""Whatever fails, and in whatever combination: the steps come in their order, and in the end every gate is opened."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.rollouts.control.abort import abort_rollout
from harness.rollouts.control.abort_report import AbortBudget, AbortStep, AgentHooks, Fate
from tests.controllers.aborting import stubborn
from tests.session_servers.scripted import HANG_UP, SAY_NOTHING, CannedServer, canned_server, http_answer

BUDGET = AbortBudget(
    drain_s=1.5, engines_s=1, hooks_s=0.2, agents_s=0.05, kill_s=0.2, collect_s=0.1, cancel_s=0.2, resume_s=1.5
)
GATE = {"state": "open", "epoch": 2, "held": 0, "sessions": 0, "turns_in_flight": 0}
SERVERS = {
    "fine": http_answer(200, GATE),
    "busy": http_answer(200, GATE | {"turns_in_flight": 3}),
    "fails": http_answer(500, {}),
    "talks nonsense": http_answer(200, b"<html>"),
    "hangs up": HANG_UP,
    "hangs": SAY_NOTHING,
}
WORKERS = {
    "fine": http_answer(200, {}),
    "fails": http_answer(500, {}),
    "lacks it": http_answer(404, {}),
    "hangs": SAY_NOTHING,
}
TASKS = ("returns", "raises", "is cancelled", "hangs", "is deaf")
HOOKS = ("fine", "raises", "hangs", "is deaf")


class Events(list[str]):
    """What happened, in order, as everybody saw it."""

    def of(self, server: CannedServer, name: str) -> None:
        """Note the requests to `server` here as well."""
        server.requests = Requests(self, name)


class Requests(list[str]):
    """The requests to one server."""

    def __init__(self, events: Events, name: str) -> None:
        super().__init__()
        self._events = events
        self._name = name

    def append(self, request: str) -> None:
        """Note a request."""
        super().append(request)
        self._events.append(f"{self._name} {request}")


async def behave(kind: str, number: int = 0, *, deaf_s: float = 1.0) -> Any:
    """What a task or a hook does."""
    match kind:
        case "raises":
            raise RuntimeError("a malformed session")
        case "hangs":
            await asyncio.sleep(3600)
        case "is deaf":
            await stubborn(deaf_s)
    return number


def a_task(kind: str, number: int) -> asyncio.Future[Any]:
    """A pending task."""
    task = asyncio.ensure_future(behave(kind, number, deaf_s=60))
    if kind == "is cancelled":
        task.cancel()
    return task


def some_hooks(kind: str, events: Events) -> AgentHooks:
    """Hooks that note their calls."""

    async def abort() -> None:
        events.append("hook abort")
        await behave(kind)

    async def stop(seconds: float) -> list[str]:
        del seconds
        events.append("hook stop")
        await behave(kind)
        return []

    return AgentHooks(kind, lambda _: events.append("hook mark"), abort, stop, lambda: events.append("hook clear"))


def first(events: Events, what: str) -> int:
    """The place of the first event that has `what` in it; after all others when there is none."""
    return next((place for place, event in enumerate(events) if what in event), len(events))


class Surroundings(NamedTuple):
    """All that an abort meets, by how it behaves."""

    servers: Sequence[str]
    workers: Sequence[str]
    kinds: Sequence[str]
    """Of the tasks."""
    hook: str


SURROUNDINGS = st.builds(
    Surroundings,
    servers=st.lists(st.sampled_from(sorted(SERVERS)), max_size=3),
    workers=st.lists(st.sampled_from(sorted(WORKERS)), max_size=3),
    kinds=st.lists(st.sampled_from(TASKS), max_size=5),
    hook=st.sampled_from(HOOKS),
)


@pytest.mark.timeout(300)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(aborts=st.lists(SURROUNDINGS, min_size=3, max_size=3))
def test_the_steps_come_in_their_order_and_every_gate_opens(aborts: list[Surroundings]):
    """Drain, engines, hooks, stop, collect, resume; what could be collected was, and nobody was waited for too long.

    Aborts that know nothing of each other wait for their deadlines at the same time.
    """

    async def abort_all() -> None:
        async with asyncio.TaskGroup() as group:
            for each in aborts:
                group.create_task(_abort(*each))

    asyncio.run(abort_all())


async def _abort(servers: Sequence[str], workers: Sequence[str], kinds: Sequence[str], hook: str) -> None:
    events = Events()
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        gates = [await stack.enter_async_context(canned_server(SERVERS[kind])) for kind in servers]
        engines = [await stack.enter_async_context(canned_server(WORKERS[kind])) for kind in workers]
        for server in gates:
            events.of(server, "gate")
        for server in engines:
            events.of(server, "engine")
        tasks = [a_task(kind, number) for number, kind in enumerate(kinds)]
        for task in tasks:
            task.add_done_callback(lambda _: events.append("task ended"))
        report = await abort_rollout(
            tasks,
            session_servers=[gate.url for gate in gates],
            engine_workers=[f"sglang={each.url}" for each in engines],
            agent_hooks=[some_hooks(hook, events)],
            budget=BUDGET,
        )
        left = [failure for failure in report.failures if failure.fate is Fate.LEFT]
        ended_before = events[: first(events, "resume")].count("task ended")

        assert tuple(report.seconds) == tuple(AbortStep)
        assert report.results == tuple(number for number, kind in enumerate(kinds) if kind == "returns")
        assert len(report.results) + len(report.failures) == len(kinds)
        assert len(left) == kinds.count("is deaf")
        if gates:
            assert ended_before == len(kinds) - len(left)
        steps = ["hook mark", "drain", "POST /abort", "hook abort", "hook stop", "resume", "hook clear"]
        reached = [step for step in steps if any(step in event for event in events)]
        places = [first(events, step) for step in reached]
        assert places == sorted(places)
        assert all("POST /sessions/resume" in gate.requests for gate in gates)
        assert all(engine.requests for engine in engines)
        for kind, answer in zip(servers, report.resumed, strict=True):
            if kind not in ("fine", "busy"):
                assert answer.error is not None
            elif answer.error is not None:  # the machine was busy for all the time of the step
                assert "did not answer within" in answer.error or "TimeoutError" in answer.error, answer.error
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Deaf ones listen at the fourth time."""
    for _ in range(3):
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
