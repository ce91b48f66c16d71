"""Watch a run's sessions, once a second, for display. An error only costs one look."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

from harness.errors import SessionServerError
from harness.machine.deadlines import beside
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.client.session_server import SessionServerClient, SessionSummary
from harness.rollouts.manager import SessionManager

_EVERY_S = 1.0
_MOST = 100
_ANSWER_S = 5.0


@asynccontextmanager
async def watch_sessions(
    manager: SessionManager, address: SessionServerAddress, look: Callable[[Mapping[str, SessionSummary]], None]
) -> AsyncIterator[None]:
    """Call `look` once a second with the manager's sessions, by scenario and rollout number."""

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
                look({names[each.session_id]: each for each in seen if each.session_id in names})

    async with beside(keep_looking(), name="watch sessions"):
        yield


def _name(metadata: Any) -> str:
    return f"{metadata['scenario']}/{metadata['rollout']}"
