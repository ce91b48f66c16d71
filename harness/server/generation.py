"""Production of one turn's output, across engine requests.

The loop continues an output that the engine cut short (`sessions.continuation`), waits at the gate during a pause,
retries a request after a transient failure, and stops the engine when the client leaves. When a request breaks, its
received tokens join `output`.

An interrupted output continues under the engine's version at that time, and the request that reads its tokens anyway
also scores them under it. A pause or a new version explains a cut. Too many unexplained cuts end the turn.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from harness.engines.base import TokenProvider, is_on_prompt_scale
from harness.engines.recorded_rows import check_masks, check_returned
from harness.errors import EngineError, EngineReplyInvalid, HarnessError, LimitReached
from harness.machine.clock import Clock
from harness.machine.deadlines import Deadline
from harness.machine.log import get_logger
from harness.samples.versions import version_of
from harness.server.gatekeeper import Gatekeeper
from harness.server.http.connection import ClientConnection
from harness.server.live_version import LiveVersion
from harness.server.settings import ServerSettings
from harness.sessions.continuation import Broken, Endings, Output
from harness.sessions.gate import Work
from harness.sessions.ledger import DropReason
from harness.sessions.partial_output import PartialOutput
from harness.sessions.session import Session
from harness.sessions.turn_outcome import Admission
from harness.tokens.outputs.live_text import LiveText
from harness.types import GenerationRequest, GenerationResult, Turn

_GIVEN_UP = "given_up"  # cause of a missing end, when no engine failed

log = get_logger(__name__)


@dataclass(slots=True)
class Generation:
    """Output of one admitted turn in progress."""

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
    """Receives every id on arrival; silent unless opened."""
    asked_in: int | None = None
    """Gate epoch in which the weight version was queried for this turn, if it was."""
    clock: Clock = time.time
    output: Output = field(init=False)
    limit: LimitReached | None = None
    """Error if the tokens became too old to continue."""
    failure: EngineError | None = None
    """Reason the engine did not hand over a drained session's turn."""
    _unsolicited_aborts: int = 0
    _kept: PartialOutput | None = None

    def __post_init__(self) -> None:
        self.output = self.admission.output_so_far().end_as_whole(self.admission.params, self.endings)

    @property
    def sampled(self) -> int:
        """Tokens received for the turn, including the current request."""
        return int(self.output.ids.size) + (0 if self._kept is None else self._kept.sampled)

    @property
    def may_go_on(self) -> bool:
        """True if the turn can still complete."""
        return (
            self.session.is_open
            and self.limit is None
            and self.client.dismissal is None
            and self._unsolicited_aborts <= self.settings.max_unsolicited_aborts
        )

    async def run(self) -> None:
        """Run requests until the output is complete or may not continue.

        In a drained session a failure also ends it. Raises `EngineError`, `GateClosed`, `LimitReached` if the turn is
        too old and empty, or the reason for a dismissal. `output` keeps the tokens so far.
        """
        try:
            await self._run_until_hand_over()
        except HarnessError as error:
            if not self.session.is_drained:
                raise
            if isinstance(error, EngineError):
                self.failure = error
            log.info("drained_turn_ended", code=error.code, error=error.message)

    async def _run(self) -> None:
        while not self.output.is_complete:
            self.live_text.settle(self.output.ids.tolist())
            await self.gatekeeper.enter(Work.CONTINUATION, self.client, self.session)
            if self.asked_in != self.gatekeeper.gate.epoch or self.live.is_unsettled:
                await self.live.wait_for_weights(
                    self.client, self.session.session_id, lambda: self.may_go_on, must_work=bool(self.output.segments)
                )
            self.asked_in = None
            self._look_at_age()
            if not self.may_go_on:
                return
            await self._ask_next_segment()

    def _look_at_age(self) -> None:
        # Too old: end the turn with its output. Without output, refuse it.
        try:
            live = self.live.version_for(self.session.session_id)
            self.session.require_fresh(self.admission.parent, live, self.output.version_spans)
        except LimitReached as error:
            if not self.output.ids.size:
                raise
            self.limit = error

    async def _ask_next_segment(self) -> None:
        epoch, before = self.gatekeeper.gate.epoch, self._newest
        self.output = self.output.keep_or_restart(self.admission.params)
        result = await self._ask()
        joined = self.output if result is None else self.output.join(result)
        self.output = joined.end_as_whole(self.admission.params, self.endings)
        if self._newest != before:
            self._unsolicited_aborts = 0  # the new version explains the earlier cuts
        if self.output.is_complete or not self.may_go_on:
            return
        session_id = self.session.session_id
        if self.gatekeeper.gate.epoch != epoch or (await self.live.worker_of(session_id).health()).paused:
            return
        await self.live.look_for(session_id)
        if self._newest in (None, self.live.worker_of(session_id).weight_version):
            self._unsolicited_aborts += 1

    @property
    def _newest(self) -> str | None:
        return self.output.version_spans[-1].version if self.output.version_spans else None

    async def _ask(self) -> GenerationResult | None:
        # Transient failures are retried with a fresh request id. Returns None if the request broke after tokens
        # arrived: the output then continues from there, like one that the engine cut short.
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
                if self.may_go_on:  # then after a pause, and only once the gate is open
                    with self.client.patience():
                        await asyncio.sleep(self.settings.engine_retry_s * 2 ** (attempt - 1))
                    await self.gatekeeper.enter(Work.CONTINUATION, self.client, self.session)
                if not self.may_go_on:
                    raise
                log.warning("engine_request_repeated", engine_attempt=attempt, code=error.code, error=error.message)

    def is_comparable(self, turn: Turn | Admission) -> bool:
        """Return True if the turn's logprobs are on the scale of the engine's input scores."""
        return is_on_prompt_scale(self.engine.capabilities.logprob_scale, turn.params)

    def _scoring_start(self, version: int | None) -> int | None:
        # The input from this index waits for the live `version`, and the next request scores it (I7).
        if version is None or not self.settings.score_inputs:
            return None
        before = self.session.scoring_start(self.admission.parent, version, self.is_comparable)
        starts = [] if before is None else [before]
        # A turn's own tokens wait only until they were scored under that version.
        is_scored = any(version_of(scoring) == version for scoring in self.output.scorings)
        if self.is_comparable(self.admission) and not is_scored:
            own = (span.start for span in self.output.version_spans if version_of(span) == version - 1)
            starts += [self.admission.path.length + start for start in own]
        return min(starts, default=None)

    async def _ask_once(self) -> GenerationResult:
        self._kept = kept = PartialOutput()
        version, live_text = self.live.version_for(self.session.session_id), self.live_text

        def hear(ids: Sequence[int]) -> None:
            kept.heard += len(ids)
            live_text.hear(ids)

        request = self.output.next_request(
            self.admission.prompt_ids,
            self.admission.params,
            request_id=next(self.request_ids),
            session_id=self.session.session_id,
            prompt_logprobs_from=self._scoring_start(version),
            script_ids=self.admission.script_ids,
            on_delta=kept.add,
            on_ids=hear if live_text.is_open else None,
            write_prompt=self.admission.path.json,
        )
        # A worker of a pool may leave before its answer is here, and take along what only it can do.
        began_at, able = self.clock(), self.engine.capabilities
        try:
            result = await self._generate(request)
            check_returned(able.engine, able.routed_experts, request, result)
            result = check_masks(able.engine, able.vocab_size, able.max_mask_ids, request, result)
            result = structs.replace(result, began_at=began_at, seconds=max(0.0, self.clock() - began_at))
            result = await self.live.number_labels(result)
        except BaseException as error:  # a cancellation too: no task waits for it then
            self._keep(request, kept, error, began_at)
            raise
        finally:  # counted in the output from here on
            self._kept = None
        scoring = result.prompt_logprobs
        if scoring is None:
            return result
        # If the weights changed while the engine read the input, it reports the version of the first token. The scoring
        # then mixes two versions, or has one that was not requested.
        if version is None or version_of(scoring) != version:
            return structs.replace(result, prompt_logprobs=None)
        if self.is_comparable(self.admission):
            return result
        of_prompt = scoring.logprobs[: max(0, self.admission.path.length - scoring.start)]
        return structs.replace(result, prompt_logprobs=replace(scoring, logprobs=of_prompt))

    def _keep(self, request: GenerationRequest, kept: PartialOutput, error: BaseException, began_at: float) -> None:
        if isinstance(error, EngineError) and not error.may_have_sampled and not kept.count:
            return
        is_valid = not isinstance(error, EngineReplyInvalid) and kept.follows(request.script_ids)
        partial = kept.partial(request, self.live.number_known(kept.version_spans) if is_valid else ())
        partial = structs.replace(partial, began_at=began_at, seconds=max(0.0, self.clock() - began_at))
        cause = Broken(
            error.code if isinstance(error, HarnessError) else _GIVEN_UP,
            DropReason.UNVERSIONED if is_valid else DropReason.INVALID_REPLY,
        )
        self.output = self.output.join_broken(partial, kept.count, request.params.max_new_tokens, cause)

    async def _run_until_hand_over(self) -> None:
        # Whatever the engine does, this ends once the time to hand over has passed.
        try:
            with (
                Deadline(None) as deadline,
                self.live.turn(),
                self.client.on_dismissal(lambda: deadline.move(self.client.hand_over_s)),
            ):
                await self._run()
        except TimeoutError:
            if not deadline.has_passed:
                raise
            log.warning("engine_did_not_stop", waited_s=self.client.hand_over_s)
            self.client.require_there()

    async def _generate(self, request: GenerationRequest) -> GenerationResult:
        stops: list[asyncio.Task[int]] = []
        try:
            with self.client.on_dismissal(
                lambda: stops.append(asyncio.create_task(self.engine.abort(request.request_id)))
            ):
                return await self.engine.generate(request)
        finally:
            for task in stops:
                task.cancel()
            if stops:
                await asyncio.gather(*stops, return_exceptions=True)
