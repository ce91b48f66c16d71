"""Score a finished session by the scenario's `check.py`.

    def score(session: dict, result: dict | None, metadata: dict) -> float | dict: ...

A dict has `reward`, and may have `score` (figures by name), `reason`, `turn_rewards` and anything else to keep.

A check runs in another process with a deadline, and its failure costs only its own session the reward. Runs use a
process per session, so slow checks run in parallel. Training, with many short sessions, keeps one. A valid answer is
the only line since the question and carries its random id, so no stray line scores another session.
"""

import asyncio
import json
import secrets
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

from harness.errors import ScenarioError
from harness.machine.deadlines import within
from harness.machine.group_reaper import signal_group
from harness.machine.process_group import is_gone, reap
from harness.samples.rollout import stated_number
from harness.samples.turn_rewards import TurnRewards
from harness.types import Json

_RUNNER = Path(__file__).with_name("check_runner.py")
_MAX_ANSWER = 1 << 20
_MAX_ERROR = 500
_MAX_SHOWN = 60
_END_TIMEOUT_S = 2.0  # a child that left the process group may hold a pipe open forever
_POLL_S = 0.01

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


class CheckProcess:
    """A running check, for one question at a time."""

    def __init__(self, transport: asyncio.SubprocessTransport, pipes: "_Pipes") -> None:
        self._transport = transport
        self._pipes = pipes
        self._group = transport.get_pid()
        self._is_closed = False
        self.answered = 0

    @classmethod
    async def start(cls, check: Path) -> Self:
        """Start `check` in its own process group, which dies with this process."""
        command = (sys.executable, "-I", str(_RUNNER), str(check))
        loop = asyncio.get_running_loop()
        return cls(*await loop.subprocess_exec(_Pipes, *command, start_new_session=True))

    @property
    def is_ready(self) -> bool:
        """True if it runs and printed nothing unasked."""
        return self._transport.get_returncode() is None and not self._pipes.has_ended and not self._pipes.output

    async def ask(self, session: Json, result: Json | None, metadata: Json) -> Any:
        """Return the answer for a session. Raises `ScenarioError`; then the caller must `close` the process."""
        question = {"id": secrets.token_hex(8), "session": session, "result": result, "metadata": metadata}
        pipe = cast("asyncio.WriteTransport", self._transport.get_pipe_transport(0))  # uvloop's type is wrong
        pipe.write(json.dumps(question).encode() + b"\n")
        await self._pipes.wait_for_line()
        line, end, rest = bytes(self._pipes.output).partition(b"\n")
        if not end and len(line) <= _MAX_ANSWER:
            await self.close()
            last_words = self._pipes.messages.decode(errors="replace").strip()[-_MAX_ERROR:]
            code = self._transport.get_returncode()
            raise ScenarioError(f"ended with code {code} and no score; {last_words}".rstrip("; "))
        try:
            answer = json.loads(line)
            # Records are UTF-8, which has no lone surrogates.
            json.dumps(answer, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ScenarioError(f"expected text, got a lone surrogate ({error})") from None
        except ValueError:
            answer = None
        if rest or not isinstance(answer, dict) or answer.get("id") != question["id"]:
            raise ScenarioError(f"expected one line as the answer, got {bytes(self._pipes.output[:_MAX_SHOWN])!r}")
        self._pipes.output.clear()
        self.answered += 1
        return answer

    async def close(self) -> None:
        """Kill the process group. Idempotent; survives cancellation."""
        if self._is_closed:
            return
        self._is_closed = True
        signal_group(self._group, signal.SIGKILL)
        try:
            await within(_END_TIMEOUT_S, self._wait_until_gone())
        finally:
            self._transport.close()
            reap(self._group)

    async def _wait_until_gone(self) -> None:
        # A killed child closes its pipes a moment before the kernel reports its end.
        await self._pipes.closed.wait()
        while not is_gone(self._group):  # noqa: ASYNC110  # the kernel sends no event
            await asyncio.sleep(_POLL_S)


class _Pipes(asyncio.SubprocessProtocol):
    def __init__(self) -> None:
        self.output = bytearray()
        """Standard output since the last answer."""
        self.messages = bytearray()
        """End of standard error."""
        self.has_ended = False
        self.closed = asyncio.Event()
        # Pipes are always read: a full one would block the check.
        self._news = asyncio.Event()

    async def wait_for_line(self) -> None:
        """Wait for a line, an overlong line, or the end."""
        while b"\n" not in self.output and len(self.output) <= _MAX_ANSWER and not self.has_ended:
            self._news.clear()
            await self._news.wait()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 1:
            self.output += data
            self._news.set()
        else:
            self.messages += data
            del self.messages[: -4 * _MAX_ERROR]  # characters have up to four bytes

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # asyncio's signature
        if fd == 1:
            self.has_ended = True
            self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:  # asyncio's signature
        self.has_ended = True
        self._news.set()
        self.closed.set()
