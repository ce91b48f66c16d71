"""Having an engine produce the output of one turn, whatever happens to the requests on the way.

One request usually does it. The loop goes on when the engine cut the output short and the turn may be continued
(`sessions.continuation`), waits at the gate while the server is paused, repeats a request that failed in a way that may
pass, and stops the engine at once when the client leaves. All that has been produced is in `output` at any moment.

A request may break in the middle: the connection, or the engine. What has arrived of it by then is part of the output,
which goes on from there; the engine is asked for its answer in pieces, so that little is lost.

An output that was cut short goes on when the engine works again, under whatever version it serves then: so its tokens
meet their next version in the request that reads them anyway. A pause, or a new version, explains the cut. A cut that
nothing explains counts, and too many of those end the turn.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from harness.engines.base import TokenProvider, is_on_prompt_scale
from harness.errors import EngineError, EngineReplyInvalid, HarnessError, LimitReached
from harness.machine.clock import Clock
from harness.machine.log import get_logger
from harness.samples.versions import version_of
from harness.server.gatekeeper import Gatekeeper
from harness.server.http.connection import ClientConnection
from harness.server.live_version import LiveVersion
from harness.server.settings import ServerSettings
from harness.sessions.arrived import Arrived
from harness.sessions.continuation import Broken, Endings, Output
from harness.sessions.gate import Work
from harness.sessions.ledger import DropReason
from harness.sessions.session import Session
from harness.sessions.turn_outcome import Admission
from harness.tokens.outputs.live_text import LiveText
from harness.types import GenerationRequest, GenerationResult, Turn

_GIVEN_UP = "given_up"  # why the end of a request was not heard, where no engine failed

log = get_logger(__name__)


@dataclass(slots=True)
class Generation:
    """The output of one admitted turn in the making."""

    engine: TokenProvider
    gatekeeper: Gatekeeper
    live: LiveVersion
    endings: Endings
    settings: ServerSettings
    request_ids: Iterator[str]
    session: Session
    admission: Admission
    client: ClientConnection
    live_text: LiveText
    """Hears of every id as soon as it has come; silent where nobody reads along."""
    asked_in: int | None = None
    """The epoch of the gate in which the engine was asked for its weights for this turn; None when it was not."""
    clock: Clock = time.time
    output: Output = field(init=False)
    limit: LimitReached | None = None
    """Why the turn ended where it stands, when its tokens have become too old to go on."""
    failure: EngineError | None = None
    """Why the engine did not hand over the turn of a drained session."""
    _unsolicited_aborts: int = 0
    _arrived: Arrived | None = None
    """Of the request that is under way."""

    def __post_init__(self) -> None:
        self.output = self.admission.output_so_far().end_as_whole(self.admission.params, self.endings)

    @property
    def sampled(self) -> int:
        """Tokens that have come for the turn, those of the request under way included."""
        return int(self.output.ids.size) + (0 if self._arrived is None else self._arrived.sampled)

    @property
    def may_go_on(self) -> bool:
        """The turn can still be completed: its session is open, its client waits, it was not cut short too often."""
        return (
            self.session.is_open
            and self.limit is None
            and self.client.dismissal is None
            and self._unsolicited_aborts <= self.settings.max_unsolicited_aborts
        )

    async def run(self) -> None:
        """Ask the engine until the output is complete or may not go on; in a drained session a failure ends it too.

        Raises `EngineError`, `GateClosed`, `LimitReached` when nothing has been sampled that would be too old, or why
        the client was dismissed; `output` then holds what there was.
        """
        try:
            async with self._until_hand_over():
                while not self.output.is_complete:
                    self.live_text.settle(self.output.ids.tolist())
                    await self.gatekeeper.enter(Work.CONTINUATION, self.client, self.session)
                    if self.asked_in != self.gatekeeper.gate.epoch or self.live.is_unsettled:
                        await self.live.wait_for_weights(
                            self.client,
                            self.session.session_id,
                            lambda: self.may_go_on,
                            must_work=bool(self.output.segments),
                        )
                    self.asked_in = None
                    self._look_at_age()
                    if not self.may_go_on:
                        return
                    await self._ask_next_segment()
        except HarnessError as error:
            if not self.session.is_drained:
                raise
            if isinstance(error, EngineError):
                self.failure = error
            log.info("drained_turn_ended", code=error.code, error=error.message)

    def _look_at_age(self) -> None:
        """End the turn with its output when that is too old to go on; without any output it is refused."""
        try:
            self.session.require_fresh(self.admission.parent, self._live_version, self.output.version_spans)
        except LimitReached as error:
            if not self.output.ids.size:
                raise
            self.limit = error

    async def _ask_next_segment(self) -> None:
        """Ask for the rest of the output, and count a cut that no gate, no pause and no new weights explain."""
        epoch, before = self.gatekeeper.gate.epoch, self._newest
        self.output = self.output.keep_or_restart(self.admission.params)
        result = await self._ask()
        joined = self.output if result is None else self.output.join(result)
        self.output = joined.end_as_whole(self.admission.params, self.endings)
        if self._newest != before:
            self._unsolicited_aborts = 0  # it is seen only now what they were for
        if self.output.is_complete or not self.may_go_on:
            return
        session_id = self.session.session_id
        if self.gatekeeper.gate.epoch != epoch or (await self.live.worker_of(session_id).health()).paused:
            return
        await self.live.look_for(session_id)
        if self._newest in (None, self.live.worker_of(session_id).weight_version):
            self._unsolicited_aborts += 1

    @property
    def _live_version(self) -> int | None:
        return self.live.version_for(self.session.session_id)

    @property
    def _newest(self) -> str | None:
        """The label that sampled the last token."""
        return self.output.version_spans[-1].version if self.output.version_spans else None

    async def _ask(self) -> GenerationResult | None:
        """The engine's answer; failures that may pass are repeated, each time with a fresh request id.

        None when the request broke and something has arrived: that is part of the output now, which goes on from there
        like one that the engine cut short, and as often.
        """
        before, attempt = self.output.ids.size, 0
        while True:
            attempt += 1
            try:
                return await self._ask_once()
            except EngineError as error:
                if not error.retryable:
                    raise
                if self.output.ids.size > before:
                    if not self.may_go_on or self._unsolicited_aborts >= self.settings.max_unsolicited_aborts:
                        raise
                    log.warning("engine_request_broke", code=error.code, error=error.message)
                    return None
                if attempt >= self.settings.engine_attempts:
                    raise
                if self.may_go_on:  # then again after a while, and not before the gate lets it
                    async with self.client.patience():
                        await asyncio.sleep(self.settings.engine_retry_s * 2 ** (attempt - 1))
                    await self.gatekeeper.enter(Work.CONTINUATION, self.client, self.session)
                if not self.may_go_on:
                    raise
                log.warning("engine_request_repeated", engine_attempt=attempt, code=error.code, error=error.message)

    def is_comparable(self, turn: Turn) -> bool:
        """Whether the turn's logprobs are on the scale on which the engine scores its input."""
        return is_on_prompt_scale(self.engine.capabilities.logprob_scale, turn.params)

    @property
    def _is_own_output_comparable(self) -> bool:
        return is_on_prompt_scale(self.engine.capabilities.logprob_scale, self.admission.params)

    def _scoring_start(self) -> int | None:
        """From where the input waits for the version that is live: the request that is made anyway scores it (I7)."""
        version = self._live_version
        if version is None or not self.settings.score_inputs:
            return None
        before = self.session.scoring_start(self.admission.parent, version, self.is_comparable)
        starts = [] if before is None else [before]
        # Of what this turn has produced so far: once it was scored under that version it waits no more.
        is_scored = any(version_of(scoring) == version for scoring in self.output.scorings)
        if self._is_own_output_comparable and not is_scored:
            own = (span.start for span in self.output.version_spans if version_of(span) == version - 1)
            starts += [self.admission.path.length + start for start in own]
        return min(starts, default=None)

    async def _ask_once(self) -> GenerationResult:
        """The engine's answer to one request, with as much of its scoring as counts."""
        self._arrived = arrived = Arrived()
        live_text = self.live_text

        def hear(ids: Sequence[int]) -> None:
            arrived.heard += len(ids)
            live_text.hear(ids)

        request = self.output.next_request(
            self.admission.prompt_ids,
            self.admission.params,
            request_id=next(self.request_ids),
            session_id=self.session.session_id,
            prompt_logprobs_from=self._scoring_start(),
            script_ids=self.admission.script_ids,
            on_delta=arrived.add,
            on_ids=hear if live_text.is_open else None,
            write_prompt=self.admission.path.json,
        )
        version, began_at = self._live_version, self.clock()
        try:
            async with self._stop_on_dismissal(request.request_id):
                result = await self.engine.generate(request)
            result = replace(result, began_at=began_at, seconds=self._seconds_since(began_at))
            result = await self.live.number_labels(result)
        except BaseException as error:  # a cancellation too: nobody waits for it any more
            self._keep(request, arrived, error, began_at)
            raise
        finally:  # part of the output, as soon as whoever asked has it
            self._arrived = None
        scoring = result.prompt_logprobs
        if scoring is None:
            return result
        # Where the weights changed while an engine read the input, it says what the first token was sampled by: the
        # scoring is then of two versions, or of one that nobody asked about.
        if version is None or version_of(scoring) != version:
            return replace(result, prompt_logprobs=None)
        if self._is_own_output_comparable:
            return result
        of_prompt = scoring.logprobs[: max(0, self.admission.path.length - scoring.start)]
        return replace(result, prompt_logprobs=replace(scoring, logprobs=of_prompt))

    def _seconds_since(self, began_at: float) -> float:
        """None are less than none, although the clock of a machine may be set back."""
        return max(0.0, self.clock() - began_at)

    def _keep(self, request: GenerationRequest, arrived: Arrived, error: BaseException, began_at: float) -> None:
        """Keep what has arrived of a request that `error` has ended, and note what may have been sampled besides."""
        if isinstance(error, EngineError) and not error.may_have_sampled and not arrived.count:
            return
        is_valid = not isinstance(error, EngineReplyInvalid) and arrived.follows(request.script_ids)
        partial = arrived.partial(request, self.live.number_known(arrived.version_spans) if is_valid else ())
        partial = replace(partial, began_at=began_at, seconds=self._seconds_since(began_at))
        cause = Broken(
            error.code if isinstance(error, HarnessError) else _GIVEN_UP,
            DropReason.UNVERSIONED if is_valid else DropReason.INVALID_REPLY,
        )
        self.output = self.output.join_broken(partial, arrived.count, request.params.max_new_tokens, cause)

    @asynccontextmanager
    async def _until_hand_over(self) -> AsyncIterator[None]:
        """Sampling for the client; whatever the engine does, the block ends when the time to hand over is used up."""
        loop = asyncio.get_running_loop()

        def hurry() -> None:
            if not deadline.expired():
                deadline.reschedule(loop.time() + self.client.hand_over_s)

        try:
            async with asyncio.timeout(None) as deadline:
                with (
                    self.live.turn(),
                    self.client.on_dismissal(hurry),
                ):
                    yield
        except TimeoutError:
            if not deadline.expired():
                raise
            log.warning("engine_did_not_stop", waited_s=self.client.hand_over_s)
            self.client.require_there()

    @asynccontextmanager
    async def _stop_on_dismissal(self, request_id: str) -> AsyncIterator[None]:
        """End the request inside the engine when the client is dismissed."""
        stops: list[asyncio.Task[int]] = []
        try:
            with self.client.on_dismissal(lambda: stops.append(asyncio.create_task(self.engine.abort(request_id)))):
                yield
        finally:
            for task in stops:
                task.cancel()
            if stops:
                await asyncio.gather(*stops, return_exceptions=True)
