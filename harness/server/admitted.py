"""Admitted turns, until each of them has its outcome.

A turn in flight holds others up: retries of it wait for it, its session cannot be taken over, an abort waits for it.
So there is one way from admission to answer, `until_outcome`: whatever raises or is cancelled in its block, the turn is
made durable, then recorded (I9), and those who wait for it are woken. A turn that was cut off before its own end keeps
what had arrived, for the retry.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from harness.engines.repeat_guard import SignalCheck
from harness.errors import HarnessError, StoreError
from harness.machine.clock import Clock
from harness.machine.deadlines import to_the_end, within
from harness.machine.log import bound, get_logger
from harness.server.generation import Generation
from harness.server.http.connection import HAND_OVER_S, ClientConnection
from harness.sessions.continuation import Output
from harness.sessions.paging import SessionStub
from harness.sessions.session import Session
from harness.sessions.turn_outcome import Admission, break_off_turn, lose_turn
from harness.store.base import SessionStore
from harness.telemetry.metrics import ServerMetrics
from harness.telemetry.tracing.tracer import SessionTracer
from harness.telemetry.turn_seconds import measure_turn
from harness.types import Turn

TURN_ENDED = "turn_ended"
"""Logged once for each outcome of a turn: its `end`, its tokens, its seconds by part, and the error in it."""

log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class AdmittedTurn:
    """A turn between its admission and its outcome."""

    session: Session
    admission: Admission
    client: ClientConnection
    generation: Generation | None = None
    """Samples it; None until that has begun."""
    outcome: Turn | None = None
    """How it ended, when nothing cut it off; whoever has it sampled says so."""
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    """Each will dismiss its client."""
    _held_before_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._held_before_s = self.client.held_s

    @property
    def held_s(self) -> float:
        """Seconds since its admission in which it was held."""
        return self.client.held_s - self._held_before_s

    @property
    def arriving(self) -> int:
        """Tokens that have come for it since it was admitted this time."""
        prior = self.admission.prior
        before = 0 if prior is None else int(prior.output_ids.size)
        return 0 if self.generation is None else max(0, self.generation.sampled - before)

    @property
    def output(self) -> Output:
        """As much as has been sampled for it and has arrived."""
        return self.admission.output_so_far() if self.generation is None else self.generation.output


@dataclass(slots=True)
class AdmittedTurns:
    """The turns in flight of one server."""

    store: SessionStore
    metrics: ServerMetrics
    signal_check: SignalCheck | None = None
    """Looks once more at what the repeat guard said; None when no guard is wanted."""
    clock: Clock = time.time
    tracer: SessionTracer | None = None
    """Told of each outcome; None when no spans are wanted."""
    commit_s: float = 60.0
    """Longer than a store needs that waits for its disk; a turn must not wait for one that is dead."""
    recorded: int = 0
    """Turns with an outcome since the start."""
    sampled: int = 0
    """Their tokens, wherever they went."""
    _turns: dict[tuple[str, int], AdmittedTurn] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._turns)

    async def wait_for(self, session: Session, index: int, client: ClientConnection) -> None:
        """Return when that turn has its outcome. Raises why `client` is dismissed when that comes before."""
        async with client.patience():
            await self._turns[session.session_id, index].is_over.wait()

    def end(
        self, session: Session, reason: HarnessError, *, after_s: float = 0.0, hand_over_s: float = HAND_OVER_S
    ) -> None:
        """Tell the engines, `after_s` from now, to hand over what they have of the turns of `session`.

        Each turn has its outcome, whatever they do, `hand_over_s` later.
        """
        loop = asyncio.get_running_loop()
        for turn in self._of(session):
            dismiss = partial(turn.client.dismiss, reason, hand_over_s=hand_over_s)
            if after_s:
                turn.timers.append(loop.call_later(after_s, dismiss))
            else:  # with no wait in between: what the engine hands over from now on finds it so
                dismiss()

    def arriving(self, session: Session | SessionStub) -> int:
        """Tokens that have come for the turns in flight of `session`, beyond those that are recorded."""
        return sum(turn.arriving for turn in self._of(session))

    @property
    def arriving_in_all(self) -> int:
        """The same of all sessions."""
        return sum(turn.arriving for turn in self._turns.values())

    def is_sampling(self, session: Session | SessionStub) -> bool:
        """An engine is asked for a turn of `session`, or is about to be."""
        return any(turn.generation is not None for turn in self._of(session))

    async def wait_until_ended(self, session: Session, *, within_s: float) -> None:
        """Return when no turn of `session` is in flight, after `within_s` at the latest."""
        await within(within_s, asyncio.gather(*(turn.is_over.wait() for turn in self._of(session))))

    @asynccontextmanager
    async def until_outcome(
        self, session: Session, admission: Admission, client: ClientConnection
    ) -> AsyncIterator[AdmittedTurn]:
        """The admitted turn; at the end of the block its outcome is durable and recorded.

        The block sets `outcome`, or what it raises becomes the reason why the turn broke off. Raises that, or the
        `StoreError` of a turn that could not be made durable: that one is recorded as FAILED.
        """
        turn = AdmittedTurn(session, admission, client)
        self._turns[session.session_id, admission.index] = turn
        try:
            self.metrics.turns_in_flight(len(self._turns))
            with (
                bound(turn=admission.index, attempt=admission.attempt),
                client.on_dismissal(lambda: session.abandon(admission.index)),
            ):
                try:
                    yield turn
                    assert turn.outcome is not None, "whoever has a turn sampled says how it ended"
                    await to_the_end(self._keep(turn, turn.outcome))
                # Whatever ends the block, the turn is kept before anybody hears of it. An error of ours is the client's
                # answer; should the store fail now, that takes its place: nobody may believe that the partial is kept.
                except HarnessError as error:
                    await self._break_off(turn, error)
                    raise
                # A cancellation or a bug goes its way whatever the store says, because somebody above waits for exactly
                # that. It comes last: a `HarnessError` is an `Exception`, and would be given up instead of named.
                except BaseException as error:
                    with suppress(StoreError):
                        await self._break_off(turn, _as_reason(error))
                    raise
        finally:  # nobody waits for the turn any more, even if a bug of ours has kept it from being recorded
            for timer in turn.timers:
                timer.cancel()
            if self._is_held(turn):
                session.forfeit(admission.index)
                del self._turns[session.session_id, admission.index]
            self.metrics.turns_in_flight(len(self._turns))
            turn.is_over.set()

    async def _break_off(self, turn: AdmittedTurn, error: HarnessError) -> None:
        """Keep what has arrived of `turn`, unless it has its outcome: what the store refused is recorded."""
        if self._is_held(turn) and turn.session.is_in_flight(turn.admission.index):
            broken_off = break_off_turn(turn.admission, turn.output, error, self.clock(), held_s=turn.held_s)
            await to_the_end(self._keep(turn, broken_off))

    async def _keep(self, turn: AdmittedTurn, outcome: Turn) -> None:
        """Make `outcome` durable, then record it; one that cannot be made durable is recorded as FAILED."""
        try:
            if not await within(self.commit_s, self.store.commit(turn.session.session_id, outcome)):
                raise StoreError(f"the store did not keep a turn within {self.commit_s:g} s")
        except BaseException as error:
            outcome = lose_turn(outcome, _as_reason(error))
            raise
        finally:
            new = turn.session.record(outcome)
            self.recorded, self.sampled = self.recorded + 1, self.sampled + new.sampled
            prior = turn.admission.prior
            seconds = measure_turn(outcome, prior)
            self.metrics.turn_recorded(outcome, new, seconds, is_first=prior is None)
            end, status, tokens = str(outcome.end), str(outcome.status), outcome.output_ids.size
            cause = outcome.notes.get("error")
            told = {} if cause is None else {"code": cause["code"], "error": cause["message"]}
            parts = {f"{part}_s": round(value, 4) for part, value in seconds._asdict().items()}
            if self.tracer is not None:
                self.tracer.tell_turn(turn.session, outcome)
            log.info(TURN_ENDED, end=end, status=status, tokens=tokens, **parts, **told)
            disagreement = self.signal_check and self.signal_check.disagreement(outcome)
            if disagreement:  # counted; what the guard said stands
                self.metrics.guard_disagreed()
                log.warning("repeat_guard_disagrees", **disagreement._asdict())

    def _of(self, session: Session | SessionStub) -> list[AdmittedTurn]:
        keys = ((session.session_id, admission.index) for admission in session.turns_in_flight)
        return [self._turns[key] for key in keys]

    def _is_held(self, turn: AdmittedTurn) -> bool:
        """It is still this one: a retry may have taken the turn up since it was recorded."""
        return self._turns.get((turn.session.session_id, turn.admission.index)) is turn


def _as_reason(error: BaseException) -> HarnessError:
    """The note on a turn that `error` has ended: a cancellation and a bug of ours get a name of ours."""
    if isinstance(error, HarnessError):
        return error
    return HarnessError(f"the turn was given up: {type(error).__name__} {error}")
