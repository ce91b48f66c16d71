"""How an abort reaches the rollouts that a manager runs: announced first, and enforced when their time is over.

A signal belongs to the rollouts that began under it and is never taken back; those that begin after the abort get a new
one. So a rollout cannot miss an abort by being slow, nor suffer from one that came before it. Each rollout has a branch
of the signal for itself, through which it can be ended alone.
"""

import asyncio
from typing import Any
from weakref import WeakSet


class AbortSignal:
    """Tells the rollouts of one period between two aborts, or one of them, to end; needs the running loop."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.announced: asyncio.Future[None] = loop.create_future()
        """Done when nothing may begin any more; what runs has time to end by itself."""
        self.enforced: asyncio.Future[None] = loop.create_future()
        """Done when agents that still run are ended."""
        self.grace_s = float("inf")
        """For an agent between SIGTERM and SIGKILL, if its manager does not give it less."""
        self.keeps_sessions = False
        """The sessions of aborted rollouts stay on their server, so that a later rollout can take them over."""
        self._branches: WeakSet[AbortSignal] = WeakSet()

    def branch(self) -> "AbortSignal":
        """A signal of one rollout: what is announced or enforced here is so there, and not the other way round."""
        branch = AbortSignal()
        self._branches.add(branch)
        if self.announced.done():
            branch.announce(keep_sessions=self.keeps_sessions)
        if self.enforced.done():
            branch.enforce(grace_s=self.grace_s)
        return branch

    def announce(self, *, keep_sessions: bool) -> None:
        """Nothing begins from now on. Idempotent."""
        if not self.announced.done():
            self.keeps_sessions = keep_sessions
            self.announced.set_result(None)
        for branch in self._branches:
            branch.announce(keep_sessions=keep_sessions)

    def enforce(self, *, grace_s: float) -> None:
        """End every agent that still runs. Idempotent."""
        self.announce(keep_sessions=self.keeps_sessions)
        if not self.enforced.done():
            self.grace_s = grace_s
            self.enforced.set_result(None)
        for branch in self._branches:
            branch.enforce(grace_s=grace_s)


async def ends_before(work: asyncio.Future[Any], *signals: asyncio.Future[None], timeout_s: float) -> bool:
    """Wait for `work`, for one of `signals`, or `timeout_s`; whether `work` is done. Cancels nothing."""
    await asyncio.wait({work, *signals}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return work.done()
