"""Admitted turns, until each has its outcome.

A turn in flight blocks its retries, a takeover of its session, and an abort. So `until_outcome` is the only way from
admission to answer: whatever its block raises, the turn is made durable, then recorded (I9), and its waiters wake. An
interrupted turn keeps its tokens for the retry.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from msgspec import structs

from harness.engines.repeat_guard import SignalCheck
from harness.errors import HarnessError, StoreError
from harness.machine.clock import Clock
from harness.machine.deadlines import to_the_end, within
from harness.machine.log import bound, get_logger
from harness.server.generation import Generation
from harness.server.http.connection import HAND_OVER_S, ClientConnection
from harness.server.store.base import SessionStore
from harness.server.telemetry.metrics import ServerMetrics, measure_turn
from harness.server.telemetry.tracing.tracer import SessionTracer
from harness.sessions.continuation import Output
from harness.sessions.paging import SessionStub
from harness.sessions.session import Session
from harness.sessions.turn_outcome import Admission, break_off_turn, lose_turn
from harness.turn_ends import TurnStatus
from harness.types import Turn

TURN_ENDED = "turn_ended"
"""Logged once for each outcome of a turn."""

log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class AdmittedTurn:
    session: Session
    admission: Admission
    client: ClientConnection
    generation: Generation | None = None
    """None until sampling has begun."""
    outcome: Turn | None = None
    """Set by the block of `until_outcome` unless interrupted."""
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    """Each dismisses the client."""
    _held_before_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._held_before_s = self.client.held_s

    @property
    def held_s(self) -> float:
        return self.client.held_s - self._held_before_s

    @property
    def arriving(self) -> int:
        """Tokens received since this admission."""
        prior = self.admission.prior
        before = 0 if prior is None else int(prior.output_ids.size)
        return 0 if self.generation is None else max(0, self.generation.sampled - before)

    @property
    def output(self) -> Output:
        """Tokens so far, from earlier attempts too."""
        return self.admission.output_so_far() if self.generation is None else self.generation.output


@dataclass(slots=True)
class AdmittedTurns:
    """Turns in flight of one server."""

    store: SessionStore
    metrics: ServerMetrics
    signal_check: SignalCheck | None = None
    """Verifies the repeat guard's signals, if any."""
    clock: Clock = time.time
    tracer: SessionTracer | None = None
    """Receives each outcome, if tracing."""
    commit_s: float = 60.0
    """Longest wait for the store; a slow disk needs less."""
    recorded: int = 0
    """Turns with an outcome since the start."""
    sampled: int = 0
    on_recorded: Callable[[Session], None] = field(default=lambda _: None)
    """Called with the session of each recorded turn."""
    _turns: dict[tuple[str, int], AdmittedTurn] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.metrics.turns_in_flight.set_function(self._turns.__len__)

    def __len__(self) -> int:
        return len(self._turns)

    async def wait_for(self, session: Session, index: int, client: ClientConnection) -> None:
        """Return when the turn has its outcome. Raises the reason if `client` is dismissed first."""
        with client.patience():
            await self._turns[session.session_id, index].is_over.wait()

    def end(
        self, session: Session, reason: HarnessError, *, after_s: float = 0.0, hand_over_s: float = HAND_OVER_S
    ) -> None:
        """End the turns of `session`, `after_s` from now. Each has its outcome at most `hand_over_s` later."""
        loop = asyncio.get_running_loop()
        for turn in self._of(session):
            dismiss = partial(turn.client.dismiss, reason, hand_over_s=hand_over_s)
            if after_s:
                turn.timers.append(loop.call_later(after_s, dismiss))
            else:  # without `await`, so later output already meets the dismissal
                dismiss()

    def arriving(self, session: Session | SessionStub) -> int:
        """Count the received tokens of turns that are not recorded."""
        return sum(turn.arriving for turn in self._of(session))

    @property
    def arriving_in_all(self) -> int:
        return sum(turn.arriving for turn in self._turns.values())

    @property
    def row_bytes(self) -> int:
        """Bytes of the rows of turns in flight."""
        return sum(turn.output.row_bytes for turn in self._turns.values())

    def is_sampling(self, session: Session | SessionStub) -> bool:
        """Return True if an engine samples for `session`, or is about to."""
        return any(turn.generation is not None for turn in self._of(session))

    async def wait_until_ended(self, session: Session, *, within_s: float) -> None:
        """Return when no turn of `session` is in flight, after at most `within_s`."""
        await within(within_s, asyncio.gather(*(turn.is_over.wait() for turn in self._of(session))))

    @asynccontextmanager
    async def until_outcome(
        self, session: Session, admission: Admission, client: ClientConnection
    ) -> AsyncIterator[AdmittedTurn]:
        """Yield the admitted turn; on exit its outcome is durable and recorded.

        The block sets `outcome`, or raises the reason for an interruption. Raises that reason, or `StoreError` if the
        turn could not be made durable, which is then recorded as FAILED.
        """
        turn = AdmittedTurn(session, admission, client)
        self._turns[session.session_id, admission.index] = turn
        try:
            with (
                bound(turn=admission.index, attempt=admission.attempt),
                client.on_dismissal(lambda: session.abandon(admission.index)),
            ):
                try:
                    yield turn
                    assert turn.outcome is not None, "the caller that samples a turn reports its end"
                    await to_the_end(self._keep(turn, turn.outcome))
                # In both cases the turn is stored before any waiter learns of it. A `HarnessError` is the client's
                # answer. If the store fails now, its error replaces that answer, because the client must not believe
                # that the partial output is kept.
                except HarnessError as error:
                    await self._break_off(turn, error)
                    raise
                # A cancellation or a bug propagates even if the store fails, because a caller above waits for it. This
                # clause comes last: a `HarnessError` is an `Exception` too, and must keep its own reason.
                except BaseException as error:
                    with suppress(StoreError):
                        await self._break_off(turn, _as_reason(error))
                    raise
        finally:  # no task may wait for the turn now, even if a bug kept it from being recorded
            for timer in turn.timers:
                timer.cancel()
            if self._is_held(turn):
                session.forfeit(admission.index)
                del self._turns[session.session_id, admission.index]
            turn.is_over.set()

    async def _break_off(self, turn: AdmittedTurn, error: HarnessError) -> None:
        # Skip a turn that has its outcome: a write that the store refused is recorded too.
        if self._is_held(turn) and turn.session.is_in_flight(turn.admission.index):
            broken_off = break_off_turn(turn.admission, turn.output, error, self.clock(), held_s=turn.held_s)
            await to_the_end(self._keep(turn, broken_off))

    async def _keep(self, turn: AdmittedTurn, outcome: Turn) -> None:
        try:
            if not await within(self.commit_s, self.store.commit(turn.session.session_id, outcome)):
                raise StoreError(f"the store did not keep a turn within {self.commit_s:g} s")
            has_rows = outcome.rows is not None or outcome.masks is not None
            if has_rows and self.store.reads_back and outcome.status is not TurnStatus.ABORTED:
                # An aborted turn may continue, and then needs them.
                outcome = structs.replace(outcome, rows=None, masks=None)
        except BaseException as error:
            outcome = lose_turn(outcome, _as_reason(error))
            raise
        finally:
            new = turn.session.record(outcome)
            self.recorded, self.sampled = self.recorded + 1, self.sampled + new.sampled
            self.on_recorded(turn.session)
            prior = turn.admission.prior
            seconds = measure_turn(outcome, prior)
            self.metrics.turn_recorded(outcome, new, seconds, is_first=prior is None)
            end, status, tokens = str(outcome.end), str(outcome.status), outcome.output_ids.size
            cause = outcome.notes.error
            told = {"code": cause["code"], "error": cause["message"]} if cause else {}
            parts = {f"{part}_s": round(value, 4) for part, value in seconds._asdict().items()}
            if self.tracer is not None:
                self.tracer.tell_turn(turn.session, outcome)
            log.info(TURN_ENDED, end=end, status=status, tokens=tokens, **parts, **told)
            disagreement = self.signal_check and self.signal_check.disagreement(outcome)
            if disagreement:  # counted only; the guard's signal stands
                self.metrics.guard_disagreements.inc()
                log.warning("repeat_guard_disagrees", **disagreement._asdict())

    def _of(self, session: Session | SessionStub) -> list[AdmittedTurn]:
        keys = ((session.session_id, admission.index) for admission in session.turns_in_flight)
        return [self._turns[key] for key in keys]

    def _is_held(self, turn: AdmittedTurn) -> bool:
        # A retry may have continued the turn since it was recorded.
        return self._turns.get((turn.session.session_id, turn.admission.index)) is turn


def _as_reason(error: BaseException) -> HarnessError:
    if isinstance(error, HarnessError):
        return error
    return HarnessError(f"the turn was given up: {type(error).__name__} {error}")
