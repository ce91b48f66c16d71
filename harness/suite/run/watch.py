"""Watch a run's sessions, once a second, for display. An error only costs one look."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, NamedTuple

from harness.errors import SessionServerError
from harness.machine.deadlines import beside
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.client.session_server import SessionServerClient
from harness.rollouts.manager import SessionManager

_EVERY_S = 1.0
_MOST = 100
_ANSWER_S = 5.0


class LiveSession(NamedTuple):
    """A running session, as last seen."""

    name: str
    """Scenario and rollout number."""
    state: str
    """A `SessionState`, or a state that only newer servers know."""
    turns: int
    """Recorded turns."""
    tokens: int
    """Tokens sampled and received so far."""


@asynccontextmanager
async def watch_sessions(
    manager: SessionManager, address: SessionServerAddress, look: Callable[[Sequence[LiveSession]], None]
) -> AsyncIterator[None]:
    """Call `look` with the manager's sessions once a second."""

    async def keep_looking() -> None:
        async with SessionServerClient(address) as server:
            while True:
                await asyncio.sleep(_EVERY_S)
                # By id: a shared server has other users' sessions. `_MOST` is the limit of one request.
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
