"""Score a finished session by the scenario's `check.py`.

    def score(session: dict, result: dict | None, metadata: dict) -> float | dict: ...

A dict has `reward`, and may have `score` (figures by name), `reason`, `turn_rewards` and anything else to keep.

A check runs in another process with a deadline, and its failure costs only its own session the reward. Runs use a
process per session, so slow checks run in parallel. Training, with many short sessions, keeps one.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from harness.errors import ScenarioError
from harness.samples.judgement import stated_number
from harness.samples.turn_rewards import TurnRewards
from harness.suite.judge.check_process import CheckProcess
from harness.types import Json

MAX_REASON = 2_000


@dataclass(frozen=True, slots=True)
class Score:
    reward: float | None = None
    """None without a check or after a failure."""
    details: Json = field(default_factory=dict)
    turn_rewards: TurnRewards = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    """Parts of the judgement, by name."""
    reason: str = ""
    """The check's words for its reward."""
    error: str | None = None


class StandingCheck:
    """Scores one session at a time in a long-lived process, replaced after any failure; a context manager."""

    def __init__(self, check: Path, *, deadline_s: float) -> None:
        self._check = check
        self._deadline_s = deadline_s
        self._turn = asyncio.Lock()
        self._process: CheckProcess | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end_process()

    async def score(self, session: Json, result: Json | None, metadata: Json) -> Score:
        """Score a session, within two deadlines after its turn comes."""
        async with self._turn:
            while True:
                has_served = self._process is not None and self._process.answered > 0
                try:
                    return await self._ask(session, result, metadata)
                except ScenarioError as error:
                    # An earlier session may have broken the process: retry in a new one.
                    if not has_served:
                        return Score(error=f"{self._check.name}: {error.message}")

    async def _ask(self, session: Json, result: Json | None, metadata: Json) -> Score:
        try:
            async with asyncio.timeout(self._deadline_s):
                if self._process is None or not self._process.is_ready:
                    await self._end_process()
                    self._process = await CheckProcess.start(self._check)
                answer = await self._process.ask(session, result, metadata)
            if "error" in answer:
                raise ScenarioError(answer["error"])
            return _read_score(answer["score"])
        except BaseException as error:  # a late answer must not reach the next question
            await self._end_process()
            if isinstance(error, TimeoutError):
                raise ScenarioError(f"gave no score within {self._deadline_s:g} s") from None
            raise

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.close()


async def score_session(check: Path, session: Json, result: Json | None, metadata: Json, *, deadline_s: float) -> Score:
    """Score a session in its own process."""
    async with StandingCheck(check, deadline_s=deadline_s) as standing:
        return await standing.score(session, result, metadata)


def _read_score(score: Any) -> Score:
    details = dict(score) if isinstance(score, dict) else {"reward": score}
    if "reward" not in details:
        raise ScenarioError(f"expected a number under 'reward', got the keys {sorted(details)}")
    stated = details.pop("reward")
    if (reward := stated_number(stated)) is None:
        raise ScenarioError(f"expected a finite number as the reward, got {stated!r:.60}")
    given = details.get("score", {})
    figures = given if isinstance(given, dict) else {"score": given}
    # What a check keeps under these names for itself stays in its details.
    if all(isinstance(figure, int | float) and not isinstance(figure, bool) for figure in figures.values()):
        details.pop("score", None)
    else:
        figures = {}
    for name, figure in figures.items():
        if stated_number(figure) is None:
            raise ScenarioError(f"expected a finite number as the figure {name!r:.60}, got {figure!r:.60}")
    reason = details.pop("reason", None) if isinstance(details.get("reason"), str | None) else None
    turns = details.pop("turn_rewards", {})
    if not isinstance(turns, dict):
        raise ScenarioError(f"turn_rewards: expected an object, by turn or tool call, got {turns!r:.60}")
    named = {name: float(figure) for name, figure in figures.items()}
    return Score(reward, details, turns, named, (reason or "").strip()[:MAX_REASON])
