"""Sessions whose agents ask for turns while the weights of their engine change."""

import asyncio
from pathlib import Path
from typing import Any

from harness.engines.base import PauseMode, TokenProvider
from harness.rollouts.control.weights import WeightUpdater
from harness.rollouts.control.weights_report import UpdateReport
from harness.types import Json
from tests.builders import user
from tests.ground_truth import TruthReport, compare
from tests.session_servers.served import Client, Served


class Agents:
    """Agents of one session server, and an updater of the engine behind it.

    Args:
        turn: Fields of every model call; its turns must end by themselves.
        long_turn: The same for a turn that is long enough for updates to fall into it.
    """

    def __init__(
        self, client: Client, engine: TokenProvider, checkpoints: dict[int, Path], *, turn: Json, long_turn: Json
    ) -> None:
        self.client = client
        self.engine = engine
        self.checkpoints = checkpoints
        self._turn = turn
        self._long_turn = long_turn
        self._histories: dict[str, list[Any]] = {}

    async def create(self) -> Served:
        """A session with a seed of its own."""
        number = len(self._histories)
        session = await self.client.create(sampling={"seed": number})
        self._histories[session.session_id] = [user(f"Tell story number {number}, about a lighthouse and a storm.")]
        return session

    async def turn(self, session: Served) -> None:
        """One turn, and a tool result behind it."""
        await self._ask(session, self._turn)

    async def long_turn(self, session: Served) -> asyncio.Task[None]:
        """A last turn that is in the middle of its output and far from its end."""
        self._histories[session.session_id][-1] = user("Write all numbers from one to one hundred in words.")
        asking = asyncio.create_task(self._ask(session, self._long_turn))
        await self.further(asking)
        return asking

    async def further(self, *asking: asyncio.Task[None]) -> None:
        """Return when the engine has sampled some tokens more for the turns in flight, or all of them have ended."""
        raise NotImplementedError

    async def update(self, version: int, mode: PauseMode = PauseMode.ABORT) -> UpdateReport:
        """The engine serves the checkpoint `version`; returns the report."""
        async with WeightUpdater([self.engine], [self.client.url], mode=mode).update(version) as update:
            await update.apply(self.checkpoints[version])
        return update.report

    async def sample(self, session: Served) -> Json:
        """The one sample of a session."""
        [sample] = await self.client.samples(session)
        return sample

    async def verdict(self, *sessions: Served) -> TruthReport:
        """The samples of `sessions` against the truth."""
        samples = [await self.sample(session) for session in sessions]
        return await asyncio.to_thread(compare, samples, self.checkpoints)

    async def _ask(self, session: Served, fields: Json) -> None:
        history = self._histories[session.session_id]
        answer = await self.client.say(session, history, **fields)
        history += [answer, user("And then?")]


def unmet_versions(sample: Json) -> set[int]:
    """Behavior versions of the tokens that have not met their next version."""
    columns = zip(sample["behavior_versions"], sample["proximal_versions"], strict=True)
    return {behavior for behavior, proximal in columns if proximal == behavior >= 0}


def versions_of(sample: Json) -> set[int]:
    """The versions that sampled its tokens."""
    return set(sample["behavior_versions"]) - {-1}
