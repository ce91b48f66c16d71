"""Rollout source: the seam between a collector and prompts, agents and rewards.

It knows no groups, budgets or attempts.
"""

import asyncio
from collections.abc import Mapping
from typing import Protocol

from harness.rollouts.control.abort_report import Keep
from harness.training.collector.rollout_index import RolloutIndex, ScoredRollout


class RolloutSource(Protocol):
    """Runs any number of rollouts at once."""

    async def run(self, index: RolloutIndex, resumes: str | None = None) -> ScoredRollout:
        """Run and score one rollout. Exceptions fail the step; rollout failures go into its outcome or `error`.

        `resumes` is the kept session of the same rollout, to continue. If cancelled, leave no session or agent behind,
        in bounded time.
        """
        ...

    async def end(self, running: Mapping[RolloutIndex, asyncio.Task[ScoredRollout]], keep: Keep) -> None:
        """End these rollouts only, so that their tasks are done, in bounded time.

        With a session, return unscored; without, cancel. `Keep.SESSIONS` keeps sessions on the server and scores what
        ended already.
        """
        ...

    async def give_back(self, session_id: str) -> None:
        """Delete a kept session. Bounded; logs failures."""
        ...
