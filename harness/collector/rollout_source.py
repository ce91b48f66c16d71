"""Where the rollouts of a step come from: the seam between a collector and whoever knows prompts, agents and rewards.

A collector says which rollout begins, and which ones end early; a source runs, scores and ends them. It knows nothing
of groups, budgets or attempts. `SessionSource` is the one for a `SessionManager` and agents that are functions.
"""

import asyncio
from collections.abc import Mapping
from typing import Protocol

from harness.collector.rollout_index import RolloutIndex, ScoredRollout
from harness.control.abort_report import Keep


class RolloutSource(Protocol):
    """Runs the rollouts that a collector asks for; any number at once."""

    async def run(self, index: RolloutIndex, resumes: str | None = None) -> ScoredRollout:
        """Run and score one rollout to its end, whatever that is.

        `resumes` is the session of a rollout with this index that was ended with `Keep.SESSIONS`: this one goes on from
        it. What goes wrong with a rollout is in its outcome, or in `error`; what is raised fails the step. Cancelled,
        it leaves no session and no agent behind, in bounded time.
        """
        ...

    async def end(self, running: Mapping[RolloutIndex, asyncio.Task[ScoredRollout]], keep: Keep) -> None:
        """End these rollouts and nobody else's: their tasks are done afterwards, in bounded time.

        Those that have a session return what they came to, without a reward. With `Keep.SESSIONS` the session stays on
        its server, and one that has ended already is still scored. Those that have no session are cancelled.
        """
        ...

    async def give_back(self, session_id: str) -> None:
        """A session that was kept is not wanted any more. Bounded; what fails is logged and nothing more."""
        ...
