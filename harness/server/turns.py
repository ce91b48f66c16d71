"""The life of a turn: from a model call to a recorded, durable turn.

The steps, numbered as in docs/architecture.md:

1. `read`: the body becomes a normalized request.
2. `serve`: the call passes the gate; the session finds the known turn, or wants a new one.
3. to 5. `_admit`: attach point, prompt delta, and admission.
6. to 8. `_sample`: the engine's output is parsed, made durable, then recorded.

`Session` decides in single calls that change everything or nothing, with an `await` of the encoder, the engine or the
store between them. Nothing is locked, and anything may happen to the session meanwhile, so each condition is checked
again after an `await`.
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self, assert_never

import msgspec
from msgspec import structs

from harness.dialects.dialect import Dialect
from harness.dialects.model_request import AnswerHead, ModelRequest, ToolMode, WireCall, reply_message
from harness.dialects.prompt_noise import NoiseRules
from harness.engines.base import TokenProvider
from harness.engines.repeat_guard import SignalCheck
from harness.errors import MalformedRequest, ServerBusy, StoreError, StrayRefused, TurnAborted, TurnRefused
from harness.machine.clock import Clock
from harness.machine.deadlines import to_the_end
from harness.machine.log import bound
from harness.machine.peer_processes import PeerProcesses
from harness.samples.roles import find_stray
from harness.server.admitted import AdmittedTurns
from harness.server.gatekeeper import Gatekeeper
from harness.server.generation import Generation
from harness.server.http.connection import Callers, ClientConnection
from harness.server.live_version import LiveVersion
from harness.server.prompts import TAIL, HeavyWork, Prompts, ReadCall
from harness.server.scripts import require_scripts
from harness.server.settings import ServerSettings
from harness.server.store.base import SessionStore
from harness.server.store.rows import TokenizerName
from harness.server.telemetry.metrics import ServerMetrics
from harness.server.telemetry.printable import shorten_secrets
from harness.server.telemetry.tracing.tracer import SessionTracer
from harness.sessions.admission import require_pinned, require_served
from harness.sessions.continuation import Endings
from harness.sessions.divergence import Toolset
from harness.sessions.gate import Work
from harness.sessions.lifecycle import end_of_output
from harness.sessions.retries import Treatment
from harness.sessions.session import KnownAnswer, Session
from harness.sessions.session_config import Recorded, Strays, StreamingMode
from harness.sessions.turn_outcome import Admission, Reply, TurnRequest, break_off_turn, end_turn
from harness.tokens.chat_tokenizer import ChatTokenizer, SampledOutput
from harness.tokens.outputs.live_text import LiveText
from harness.tokens.parsing import begins_json
from harness.top_logprobs import TopLogprobs
from harness.types import Json, Turn, TurnNotes

_NOTICE_S = 0.02
_NOTICE_ROUNDS = 5


class ServedTurn(msgspec.Struct, frozen=True):
    """A turn to answer with."""

    turn: Turn
    top_logprobs: TopLogprobs | None = None
    """Alternatives to its output tokens if just sampled; not stored."""


class ModelCall(msgspec.Struct, frozen=True):
    session: Session
    read: ReadCall
    digest: str
    """Digest of body and dialect, by which the session recognizes a retry."""
    client: ClientConnection
    head: AnswerHead
    own_id: str
    known: KnownAnswer | None
    """Answer whose id the head has; None if the id is `own_id`."""
    began_at: float
    live_text: LiveText = msgspec.field(default_factory=LiveText)
    """Receives the text while it is sampled; silent unless opened."""

    @property
    def request(self) -> ModelRequest:
        return self.read.request

    def id_for(self, index: int | None) -> str:
        """Return the response id for turn `index`; None: a fresh id.

        Never another turn's id: the retried answer may have become a different turn while we waited.
        """
        return self.head.response_id if self.known is None or self.known.turn == index else self.own_id


@dataclass(slots=True)
class TurnService:
    engine: TokenProvider
    chat_tokenizer: ChatTokenizer
    store: SessionStore
    metrics: ServerMetrics
    gatekeeper: Gatekeeper
    settings: ServerSettings
    signal_check: SignalCheck | None = None
    """Verifies the repeat guard's signals, if any."""
    clock: Clock = time.time
    tracer: SessionTracer | None = None
    """Receives turns and sessions, if tracing."""
    prompts: Prompts = field(init=False)
    heavy_work: HeavyWork = field(init=False)
    live: LiveVersion = field(init=False)
    _request_ids: Iterator[str] = field(init=False)
    admitted: AdmittedTurns = field(init=False)
    callers: Callers = field(default_factory=Callers)
    processes: PeerProcesses = field(default_factory=PeerProcesses)

    def __post_init__(self) -> None:
        tokenizer = self.chat_tokenizer.tokenizer
        self.store.tokenizer = TokenizerName(str(tokenizer.folder or "") or None, tokenizer.digest or None)
        self.admitted = AdmittedTurns(self.store, self.metrics, self.signal_check, self.clock, self.tracer)
        self.heavy_work = HeavyWork(self.metrics, self.settings.limits.waiting_bytes)
        self.prompts = Prompts(
            self.engine, self.chat_tokenizer, self.heavy_work, self.settings.limits, NoiseRules(self.settings.noise)
        )
        self.live = LiveVersion(self.engine, self.store, patience_s=self.settings.pause_timeout_s)
        # Ids of 32 hex digits: a random half per server and a count. All have one length, so none is another's prefix.
        server = secrets.token_hex(8)
        self._request_ids = (f"{server}{count:016x}" for count in itertools.count())

    @property
    def model(self) -> str:
        return self.settings.model or self.engine.capabilities.model

    async def __aenter__(self) -> Self:
        self.processes.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.heavy_work.close()
        await self.processes.close()

    async def read(self, session: Session, dialect: Dialect, wire: WireCall, client: ClientConnection) -> ModelCall:
        """Read a call of `session` in `dialect` (step 1). Raises `RequestError`, `ServerBusy`."""
        began_at = self.clock()
        client.look_up(self.processes, session)
        read = await self.prompts.read(dialect, wire, session, client.idempotency_key)
        digest = session.known_digest(read.digest, read.older_digests, read.request.dialect)
        asked, able = read.request.sampling, self.engine.capabilities
        if (asked.top_logprobs or 0) > able.max_top_logprobs:
            raise MalformedRequest(
                f"top_logprobs: expected 0..{able.max_top_logprobs}, got {asked.top_logprobs}", param="top_logprobs"
            )
        if asked.json_schema is not None and not able.follows_json_schema:
            raise MalformedRequest(
                f"response_format: expected type 'text', {able.engine} follows no schema", param="response_format"
            )
        if Recorded.SAMPLING_MASK in session.config.record:
            require_pinned(asked, session.config.sampling)
        known, own_id = session.known_answer(digest, says_retry=client.says_retry), next(self._request_ids)
        if known is None and session.inherits:
            known = _inherited_answer(session, read)
        head = AnswerHead(read.request, own_id if known is None else known.response_id, self.model, began_at)
        return ModelCall(session, read, digest, client, head, own_id, known, began_at)

    async def serve(self, call: ModelCall) -> ServedTurn:
        """Return the turn that answers a model call (steps 2 to 8).

        Raises `RequestError` (nothing changed), `TurnRefused`, `GateClosed`, `EngineError`, `StoreError`, or
        `ClientLeft`. A retry continues an interrupted turn. An aborted turn is refused, unless the session accepts
        incomplete turns (I2).
        """
        session = call.session
        if session.config.script is not None:  # an earlier server may have accepted it
            require_scripts(self.settings, self.engine.capabilities)
        with bound(session_id=shorten_secrets(session.session_id), dialect=call.request.dialect):
            await self.gatekeeper.enter(Work.TURN, call.client, session)
            served = await self._find_or_sample(call)
        turn = served.turn
        if not session.serves(turn):
            raise TurnAborted(
                f"turn {turn.index} was aborted after {turn.output_ids.size} tokens; no turn can follow it"
            )
        return served

    async def count(self, call: ModelCall) -> int:
        """Count the tokens of the call's prompt, at any gate. Raises `RequestError`, `TurnRefused` or `ServerBusy`."""
        point = call.session.attach(call.read.prefixes, call.request.messages)
        point, context_ids = await self.prompts.encode(call.session, point, call.read)
        parent = None if point.parent is None else call.session.turn(point.parent)
        before = 0 if parent is None else parent.prompt_length + int(parent.output_ids.size)
        return before + int(context_ids.size)

    async def _find_or_sample(self, call: ModelCall) -> ServedTurn:
        # A repeated body gets the outcome of the earlier call (I5). Each `await` may change what the call means, so the
        # session decides again after it.
        has_looked_twice = False
        while True:
            call.client.require_there()
            if call.session.inherits and (repeated := await self._repeat_inherited(call)) is not None:
                return repeated
            treatment, index = call.session.treatment(call.digest, says_retry=call.client.says_retry)
            match treatment:
                case Treatment.SAMPLE if index >= 0 and not has_looked_twice:
                    await _notice_disconnects()
                    has_looked_twice = True
                case Treatment.SAMPLE:
                    epoch = self.gatekeeper.gate.epoch
                    admission = await self._admit(call)
                    if admission is not None:
                        return await self._sample(call, admission, asked_in=epoch)
                case Treatment.CONTINUE:
                    admission = call.session.take_up(index, self.clock(), call.id_for(index))
                    return await self._sample(call, admission)
                case Treatment.REPLAY:
                    return ServedTurn(call.session.turn(index))
                case Treatment.JOIN:
                    await self.admitted.wait_for(call.session, index, call.client)
                case _:
                    assert_never(treatment)

    async def _admit(self, call: ModelCall) -> Admission | None:
        # Returns None if the call's meaning changed meanwhile: the same call was admitted from elsewhere.
        session, asked = call.session, call.request
        if session.config.strict:
            require_served(asked.ignored)
        await self.live.wait_for_weights(call.client, session.session_id, lambda: session.is_open)
        point = session.attach(call.read.prefixes, asked.messages)
        step = session.script_step(point)  # before a template that cannot continue makes this a new root
        tools = Toolset(asked.tools, call.read.prefixes[0].key.hex())
        diverged = session.divergence(point, asked.messages, asked.sampling, tools)
        point, context_ids = await self.prompts.encode(session, point, call.read)
        await call.client.know_process()  # here: a turn with tokens and no outcome would miss a sweep
        call.client.require_there()
        if session.treatment(call.digest, says_retry=call.client.says_retry)[0] is not Treatment.SAMPLE:
            return None
        delta = tuple(asked.messages[point.matched :])
        notes = structs.replace(
            asked.notes if point.parent is not None else _root_notes(call.read, session.turns),
            dialect=asked.dialect,
            response_id=call.id_for(None),
            client=call.client.notes(),
            ambiguous=tuple(sorted(point.others)),
            held_before_s=call.client.held_s,
            diverged={} if diverged is None else diverged.to_json(),
            script_step=step,
        )
        if session.config.strays is Strays.REFUSE and (reason := find_stray(session.turns, notes, delta)):
            raise StrayRefused(f"a call of another program than the session's agent: {reason}")
        loosely = session.loose_matches(point, asked.messages, asked.recall.known)
        notes = structs.replace(notes, matched_loosely=tuple(each.to_json() for each in loosely))
        request = TurnRequest(delta, context_ids, asked.sampling, call.digest, asked.tools, notes)
        session.require_fresh(point.parent, self.live.version_for(session.session_id))
        if session.records_rows:
            limits, in_flight = self.settings.limits, self.admitted.row_bytes
            limits.require("session_row_bytes", session.row_bytes, "record")
            if in_flight > limits.row_bytes:
                raise ServerBusy(f"rows of turns in flight have {in_flight} bytes, the limit is {limits.row_bytes}")
        for name in asked.ignored:
            self.metrics.parameter_ignored(asked.dialect, name)
        return session.admit(point, request, self.engine.capabilities.context_length, self.clock())

    async def _repeat_inherited(self, call: ModelCall) -> ServedTurn | None:
        # The recorded answer needs no engine, so neither weights nor an encoder are waited for. A retry gets the answer
        # of its first attempt; any other equal call gets the next recorded one.
        session, read = call.session, call.read
        await call.client.know_process()
        if session.treatment(call.digest, says_retry=call.client.says_retry)[1] >= 0 and call.client.says_retry:
            return None
        turn = session.find_inherited(session.attach(read.prefixes, read.request.messages), read.request.sampling)
        if turn is None:
            return None
        taken = session.take_inherited(turn, call.digest, call.client.notes())
        try:
            await to_the_end(self.store.commit(session.session_id, taken))
        except StoreError:
            session.give_back_inherited(turn, call.digest)
            raise
        return ServedTurn(taken)

    async def _sample(self, call: ModelCall, admission: Admission, asked_in: int | None = None) -> ServedTurn:
        # `asked_in` is the gate epoch in which admission queried the weight version.
        session, tokenizer = call.session, self.chat_tokenizer.tokenizer
        async with self.admitted.until_outcome(session, admission, call.client) as turn:
            turn.generation = generation = Generation(
                self.engine,
                self.gatekeeper,
                self.live,
                Endings(
                    tokenizer.eos_ids, tokenizer.decode, self.engine.capabilities.may_stop_early, tokenizer.byte_ids
                ),
                self.settings,
                self._request_ids,
                session,
                admission,
                call.client,
                call.live_text,
                asked_in,
                self.clock,
            )
            self._open_live_text(call, admission)
            await generation.run()
            # Scores belong to earlier turns, so they are stored before this one.
            for scoring in generation.output.scorings:
                changed = session.take_scores(admission.parent, scoring, generation.is_comparable)
                if changed:
                    await self.store.keep_scores(session.session_id, changed)
            turn.outcome = outcome = self._end(call, generation, turn.held_s)
        if generation.limit is not None:
            raise generation.limit
        if not outcome.is_usable:
            call.client.require_there()
        return ServedTurn(outcome, generation.output.top_logprobs)

    def _open_live_text(self, call: ModelCall, admission: Admission) -> None:
        # Text goes out live only if it can be parsed as `_end` parses the whole. Output under a grammar restarts when
        # it is cut short, and a turn may have another id than its stream. Both are sent at the end only.
        asked, params, mode = call.request, admission.params, call.session.config.streaming or self.settings.streaming
        if mode is not StreamingMode.LIVE or asked.streaming is None or params.json_schema is not None:
            return
        if admission.request.notes.response_id != call.head.response_id:
            return
        stop_ids = frozenset(params.stop_token_ids) - self.chat_tokenizer.tokenizer.eos_ids
        stream = self.chat_tokenizer.open_output(self._unread(call, admission), _tools(asked), params.stop, stop_ids)
        if stream is not None:
            call.live_text.open(stream)

    def _unread(self, call: ModelCall, admission: Admission) -> SampledOutput:
        context_ids = admission.request.context_ids[-TAIL:].tolist()
        return SampledOutput((), context_ids, self.prompts.forced_ids(call.request))

    def _end(self, call: ModelCall, generation: Generation, held_s: float) -> Turn:
        admission, output = generation.admission, generation.output
        dismissal, is_drained = call.client.dismissal, call.session.is_drained
        # A turn that could continue but for its client waits for the retry. A drained session does not continue: the
        # output so far ends the turn, and is the last of its sample.
        if not output.is_complete and dismissal is not None and not is_drained:
            return break_off_turn(admission, output, dismissal, self.clock(), held_s=held_s)
        stop = output.matched_stop if isinstance(output.matched_stop, str) else None
        sampled = self._unread(call, admission)._replace(ids=output.ids.tolist(), stop=stop)
        tools = _tools(call.request)
        parsed = self.chat_tokenizer.parse(sampled, tools)
        if admission.params.json_schema is not None and not parsed.content and begins_json(parsed.reasoning):
            # Most engines hold the first token to the grammar, even where the prompt has begun the reasoning.
            sampled = sampled._replace(context_ids=())
            parsed = self.chat_tokenizer.parse(sampled, tools)
        is_at_own_stop = (
            output.matched_stop in set(admission.params.stop_token_ids) - self.chat_tokenizer.tokenizer.eos_ids
        )
        if is_at_own_stop and not parsed.tool_calls:  # no content, like a stop string; may end a call
            parsed = self.chat_tokenizer.parse(sampled._replace(ids=sampled.ids[:-1]), tools)
        has_calls, is_stale = bool(parsed.tool_calls), generation.limit is not None
        reply = Reply(
            # Call ids are part of the conversation: unique in a session, and the same in every run (I10).
            reply_message(parsed, f"call_{admission.key.hex()[:12]}{admission.ordinal}_"),
            end_of_output(output.finish, has_calls=has_calls, is_drained=is_drained, is_stale=is_stale),
            parsed.malformed,
            stop or "",
        )
        error = generation.limit or generation.failure
        return end_turn(admission, output, reply, self.clock(), error, held_s=held_s)


def _inherited_answer(session: Session, read: ReadCall) -> KnownAnswer | None:
    with suppress(TurnRefused):  # refused once it is served
        turn = session.find_inherited(session.attach(read.prefixes, read.request.messages), read.request.sampling)
        if turn is not None and turn.notes.response_id:
            return KnownAnswer(turn.index, turn.notes.response_id)
    return None


def _root_notes(read: ReadCall, turns: Sequence[Turn]) -> TurnNotes:
    family, tools, toolset = read.chat.describe(), read.request.tools, read.prefixes[0].key.hex()
    return structs.replace(
        read.request.notes,
        tools=len(tools),
        toolset=toolset,
        tool_definitions=() if any(turn.notes.toolset == toolset for turn in turns) else tuple(tools),
        template_variables=dict(family.template_variables),
        model_family_faults=tuple(family.faults if tools else family.reasoning_faults),
        noise=read.noise,
    )


def _tools(asked: ModelRequest) -> Sequence[Json]:
    return () if asked.tool_mode is ToolMode.NONE else asked.tools


async def _notice_disconnects() -> None:
    # A retry may be read before the end of the connection that it replaces: a lost connection takes some rounds of the
    # loop from the socket to its watcher. Only afterwards does the same body mean another sample.
    await asyncio.sleep(_NOTICE_S)
    for _ in range(_NOTICE_ROUNDS):
        await asyncio.sleep(0)
