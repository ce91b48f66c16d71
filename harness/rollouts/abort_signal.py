"""The signal that ends a manager's rollouts: announced first, later enforced.

It is never reset: rollouts that begin after an abort get a new one, so none misses an abort or suffers from an earlier
one.
"""

import asyncio
from typing import Any
from weakref import WeakSet


class AbortSignal:
    """Signal to the rollouts between two aborts, or to one of them. Needs a running loop."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.announced: asyncio.Future[None] = loop.create_future()
        """Done when nothing may begin; running agents may end by themselves."""
        self.enforced: asyncio.Future[None] = loop.create_future()
        """Done when running agents are ended."""
        self.grace_s = float("inf")
        """Most seconds between SIGTERM and SIGKILL."""
        self.keeps_sessions = False
        """True if sessions stay on their server to be resumed."""
        self._branches: WeakSet[AbortSignal] = WeakSet()

    def branch(self) -> "AbortSignal":
        """Return a signal for one rollout that follows this one."""
        branch = AbortSignal()
        self._branches.add(branch)
        if self.announced.done():
            branch.announce(keep_sessions=self.keeps_sessions)
        if self.enforced.done():
            branch.enforce(grace_s=self.grace_s)
        return branch

    def announce(self, *, keep_sessions: bool) -> None:
        """Let nothing begin. Idempotent."""
        if not self.announced.done():
            self.keeps_sessions = keep_sessions
            self.announced.set_result(None)
        for branch in self._branches:
            branch.announce(keep_sessions=keep_sessions)

    def enforce(self, *, grace_s: float) -> None:
        """End every running agent. Idempotent."""
        self.announce(keep_sessions=self.keeps_sessions)
        if not self.enforced.done():
            self.grace_s = grace_s
            self.enforced.set_result(None)
        for branch in self._branches:
            branch.enforce(grace_s=grace_s)


async def ends_before(work: asyncio.Future[Any], *signals: asyncio.Future[None], timeout_s: float) -> bool:
    """Wait for `work`, a signal or the timeout. Return whether `work` is done. Cancels nothing."""
    await asyncio.wait({work, *signals}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return work.done()
