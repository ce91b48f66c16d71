"""A source of rollouts that end as they are told to, and a tiny server that knows which sessions are alive."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count

from harness.rollouts.control.abort_report import Keep
from harness.samples.rollout import Outcome, OutcomeKind, Rollout
from harness.sessions.ledger import Ledger
from harness.training.collector.groups import RolloutIndex, ScoredRollout
from harness.types import Sample


@dataclass(frozen=True, slots=True)
class Part:
    """How a rollout goes: rounds of the event loop until it has a session, is played, and is scored; and its end."""

    rounds: tuple[int, int, int] = (0, 1, 0)
    kind: OutcomeKind = OutcomeKind.FINISHED
    reward: float | None = 1.0
    raises: bool = False
    is_refused: bool = False
    """It gets no session when it wants to continue from one."""
    is_deaf: bool = False
    """It ignores that it is ended, and obeys its cancellation only."""
    cut_as: OutcomeKind = OutcomeKind.DRAINED
    """How it ends when it is ended: an agent may make something else of it that its turn was cut."""


@dataclass(slots=True)
class StagedSource:
    """A `RolloutSource` on a server of its own; every session samples one token in each round that it is played."""

    part_of: Callable[[RolloutIndex], Part] = lambda _: Part()
    sessions: dict[str, int] = field(default_factory=dict)
    """Those that are alive, with the tokens in them."""
    sampled: int = 0
    """Over all sessions that ever were."""
    running: set[RolloutIndex] = field(default_factory=set)
    most_running: int = 0
    began: list[RolloutIndex] = field(default_factory=list)
    ended: set[RolloutIndex] = field(default_factory=set)
    """Told to end."""
    lost: int = 0
    """Tokens of sessions whose rollouts were cancelled."""
    samples_of: Callable[[RolloutIndex], tuple[Sample, ...]] = lambda _: ()
    _told: dict[RolloutIndex, Keep] = field(default_factory=dict)
    _numbers: "count[int]" = field(default_factory=count)

    async def run(self, index: RolloutIndex, resumes: str | None = None) -> ScoredRollout:
        """Play `part_of(index)`."""
        assert index not in self.running, f"{index} runs twice at once"
        self.running.add(index)
        self.began.append(index)
        self.most_running = max(self.most_running, len(self.running))
        self._told.pop(index, None)
        try:
            await self._wait_for_session(self.part_of(index).rounds[0], resumes)
            return await self._run(index, self.part_of(index), resumes)
        finally:
            self.running.remove(index)

    async def end(self, running: Mapping[RolloutIndex, asyncio.Task[ScoredRollout]], keep: Keep) -> None:
        """Those that are played end in their next round."""
        self.ended |= running.keys()
        for index in running:
            self._told.setdefault(index, keep)
        await asyncio.wait(running.values(), timeout=0.01)

    async def give_back(self, session_id: str) -> None:
        """The session is gone, if nobody has taken it over."""
        self.sessions.pop(session_id, None)

    async def _wait_for_session(self, rounds: int, resumes: str | None) -> None:
        try:
            for _ in range(rounds):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.lost += self.sessions.get(resumes or "", 0)
            raise

    async def _run(self, index: RolloutIndex, part: Part, resumes: str | None) -> ScoredRollout:
        if part.raises:
            raise OSError("no space left on device")
        if part.is_refused and resumes:
            refused = Outcome(OutcomeKind.NOT_STARTED, None, "no session")
            return ScoredRollout(index, Rollout(None, refused, (), {}, None, seconds=0.0), None)
        session, kind, is_cut = f"session {next(self._numbers)}", part.kind, False
        self.sessions[session] = self.sessions.pop(resumes, 0) if resumes else 0
        try:
            rounds = 0
            while rounds < part.rounds[1] or part.is_deaf:
                if index in self._told and not part.is_deaf:
                    kind, is_cut = part.cut_as, True
                    break
                self.sessions[session] += 1
                self.sampled += 1
                rounds += 1
                await asyncio.sleep(0)
            for _ in range(part.rounds[2]):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.lost += self.sessions.pop(session)
            raise
        else:
            tokens = self.sessions[session]
            is_kept = is_cut and self._told.get(index) is Keep.SESSIONS
            if not is_kept:
                del self.sessions[session]
        record = {"ledger": Ledger(tokens, tokens).to_json()}
        rollout = Rollout(session, Outcome(kind, None, "as planned"), self.samples_of(index), record, None, seconds=0.0)
        is_scored = kind in (OutcomeKind.FINISHED, OutcomeKind.LIMITED) and index not in self._told
        return ScoredRollout(index, rollout, part.reward if is_scored else None, has_kept_session=is_kept)
