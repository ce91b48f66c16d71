"""The sessions of a run while they run, looked at once a second.

One small request, by the ids of the sessions that have run longest, at most as many as one request takes: a run looks
at its own sessions only, also on a server that has others. Watching is for a reader alone: a server that does not
answer in time, say because a fault has just killed it, is asked again a second later, and nothing else comes of it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, NamedTuple

from harness.client.connections import SessionServerAddress
from harness.client.session_server import SessionServerClient
from harness.errors import SessionServerError
from harness.machine.deadlines import beside
from harness.rollouts.manager import SessionManager

_EVERY_S = 1.0
_MOST = 100
_ANSWER_S = 5.0


class LiveSession(NamedTuple):
    """A session that runs, as it was a moment ago."""

    name: str
    """Scenario and number of the rollout."""
    state: str
    """What it waits for; a `SessionState`, or whatever a server says that is newer than this program."""
    turns: int
    """Recorded."""
    tokens: int
    """Sampled so far, as far as they have come."""


@asynccontextmanager
async def watch_sessions(
    manager: SessionManager, address: SessionServerAddress, look: Callable[[Sequence[LiveSession]], None]
) -> AsyncIterator[None]:
    """In the block, `look` is told once a second how the rollouts of `manager` stand."""

    async def keep_looking() -> None:
        async with SessionServerClient(address) as server:
            while True:
                await asyncio.sleep(_EVERY_S)
                names = {each: _name(task.session["metadata"]) for each, task in islice(manager.live.items(), _MOST)}
                try:
                    seen = await server.look(list(names), deadline_s=_ANSWER_S)
                except SessionServerError:
                    continue
                look(
                    [
                        LiveSession(names[s.session_id], s.state, s.turns, s.tokens)
                        for s in seen
                        if s.session_id in names
                    ]
                )

    async with beside(keep_looking(), name="watch sessions"):
        yield


def _name(metadata: Any) -> str:
    return f"{metadata['scenario']}/{metadata['rollout']}"
