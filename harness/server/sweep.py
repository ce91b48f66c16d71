"""The proximal sweep: recompute logprobs for all tokens that wait for the live policy version, before it disappears.

Runs during turns, oldest sessions first, within bounds of concurrency and time. Tokens not
reached keep their behavior values and are counted. A failed request skips its branch. A score under another version is
dropped, and ends the sweep of its session.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import msgspec

from harness.engines.base import TokenProvider, is_on_prompt_scale
from harness.errors import EngineError, MalformedRequest, StoreError
from harness.machine.deadlines import work_through
from harness.machine.log import get_logger
from harness.samples.versions import version_of
from harness.server.live_version import LiveVersion
from harness.server.registry import SessionRegistry
from harness.server.store.base import SessionStore
from harness.server.telemetry.printable import shorten_secrets
from harness.sessions.paging import SessionStub, waiting_of
from harness.sessions.session import Session
from harness.sessions.weights.scoring import count_waiting, next_scoring
from harness.sessions.weights.weight_update import SweepReport, SweepRequest
from harness.types import Turn

log = get_logger(__name__)


class Sweep:
    """One sweep over `sessions`, which may change meanwhile."""

    def __init__(
        self,
        engine: TokenProvider,
        live: LiveVersion,
        store: SessionStore,
        sessions: SessionRegistry,
        request: SweepRequest,
    ) -> None:
        self._engine = engine
        self._live = live
        self._store = store
        self._sessions = sessions
        self._request = request
        self._failures: Counter[str] = Counter()
        self.report = SweepReport(request.version)

    async def run(self) -> SweepReport:
        """Score waiting tokens until done or out of time. Raises `MalformedRequest` if another version is live."""
        began, version = time.monotonic(), self._request.version
        await self._live.look()  # the known version may predate an external update
        if self._live.version != version:
            live = self._engine.weight_version
            raise MalformedRequest(
                f"version: expected the live version {self._live.version}, which is labeled {live!r},"
                f" got {version}; sweep before the update",
                param="version",
            )
        await self._score_all(await self._count(), ends_at=began + self._request.budget_s)
        seconds = time.monotonic() - began
        left = [waiting_of(held, version, self._is_comparable).tokens async for held in self._in_turn()]
        self.report.tokens_left = sum(left)
        self.report.tokens_waiting = max(self.report.tokens_waiting, self.report.tokens_settled + sum(left))
        self.report.failures = dict(self._failures)
        self.report.seconds = seconds
        self.report.is_running = False
        log.info("sweep_ended", **msgspec.structs.asdict(self.report))
        return self.report

    async def _score_held(self, held: Session | SessionStub) -> None:
        try:
            async with self._sessions.borrow(held.session_id) as session:
                if session is not None:
                    await self._score_session(session)
        except StoreError as error:
            self._note_failure(held.session_id, error)
        self.report.sessions_done += 1

    async def _score_session(self, session: Session) -> None:
        version = self._request.version
        # Engines accept no input without room for one output token, so the last token of a full context is not scored.
        longest = self._engine.capabilities.context_length - 1
        given_up: set[int] = set()
        while task := next_scoring(session, version, self._is_comparable, longest, given_up):
            self.report.requests += 1
            self.report.tokens_read += int(task.input_ids.size)
            changed: Sequence[Turn] = ()
            try:
                scoring = await self._engine.score(task.input_ids, start=task.start, session_id=session.session_id)
                scoring = await self._live.number_label(scoring)
                # Mixed versions if the weights changed during the request.
                if version_of(scoring) != version:
                    break
                if self._sessions.in_memory(session.session_id) is not session:
                    break  # taken over or deleted meanwhile; a successor has its own place in the sweep
                waiting = count_waiting(session, version, self._is_comparable).tokens
                changed = session.take_scores(task.leaf, scoring, self._is_comparable)
                left = count_waiting(session, version, self._is_comparable).tokens
                self.report.tokens_settled += waiting - left
                if changed:  # in one write and without `await` before it, so that a resumed turn commits after it
                    await self._store.keep_scores(session.session_id, changed)
            except (EngineError, StoreError) as error:
                changed = ()
                self._note_failure(session.session_id, error)
            if not changed:
                given_up.add(task.leaf)

    def _note_failure(self, session_id: str, error: EngineError | StoreError) -> None:
        self._failures[error.code] += 1
        log.warning("sweep_failed", session_id=shorten_secrets(session_id), code=error.code, error=error.message)

    def _is_comparable(self, turn: Turn) -> bool:
        return is_on_prompt_scale(self._engine.capabilities.logprob_scale, turn.params)

    async def _score_all(self, waiting: Sequence[Session | SessionStub], *, ends_at: float) -> None:
        seen: set[str] = set()
        while True:
            seen.update(held.session_id for held in waiting)
            at_once, seconds = min(self._request.concurrency, len(waiting)), ends_at - time.monotonic()
            if not await work_through(iter(waiting), self._score_held, at_once=at_once, seconds=seconds):
                log.warning("sweep_out_of_time", version=self._request.version, budget_s=self._request.budget_s)
                return
            late = [held for held in self._sessions if held.session_id not in seen]
            waiting = [each for each in late if waiting_of(each, self._request.version, self._is_comparable).tokens]
            if not waiting:
                return
            self.report.sessions += len(waiting)

    async def _count(self) -> list[Session | SessionStub]:
        waiting: list[Session | SessionStub] = []
        async for held in self._in_turn():
            found = waiting_of(held, self._request.version, self._is_comparable)
            self.report.tokens_waiting += found.tokens
            self.report.tokens_incomparable += found.incomparable
            if found.tokens:
                waiting.append(held)
        self.report.tokens_left = self.report.tokens_waiting
        self.report.sessions = len(waiting)
        return waiting

    async def _in_turn(self) -> AsyncIterator[Session | SessionStub]:
        for held in sorted(self._sessions, key=lambda held: held.created_at):
            await asyncio.sleep(0)
            yield held
