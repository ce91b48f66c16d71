"""The life of a turn: from a request body to a recorded, durable answer.

The steps are those of docs/architecture.md. Decisions are made by `Session`; this module awaits the encoder, the engine
and the store between them. An answer leaves only after the store has made its turn durable (I9).
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from harness.dialects.openai_chat import ChatRequest, ToolMode, completion, parse_request, reply_message
from harness.engines.base import TokenProvider
from harness.errors import EngineError, HarnessError, MalformedRequest, StoreError, TurnAborted
from harness.sessions.outcome import Admission, Reply, TurnRequest, completed_turn, failed_turn, lost_turn
from harness.sessions.session import AfterIncomplete, Session
from harness.sessions.tree import AttachPoint
from harness.store.base import SessionStore
from harness.telemetry.metrics import ServerMetrics
from harness.tokens.chat_tokenizer import ChatTokenizer, SampledOutput, SampledTurn
from harness.tokens.matching import chain_keys
from harness.types import FinishReason, GenerationResult, Json, Message, TokenIds, Turn, as_ids

_LONG_TEXT = 20_000  # characters; encoding more than that is done off the event loop
_TAIL = 256  # ids at the end of a prompt: enough to see what the generation prompt began


class Clock(Protocol):
    """Unix time in seconds."""

    def __call__(self) -> float: ...


@dataclass(frozen=True, slots=True)
class ServedTurn:
    """A turn and the answer to it."""

    turn: Turn
    body: Json


def _fresh_request_ids() -> Iterator[str]:
    """Ids of 32 hex digits: a random half per server and a count. One length, so none is another's prefix."""
    server = secrets.token_hex(8)
    return (f"{server}{count:016x}" for count in itertools.count())


@dataclass(slots=True)
class TurnService:
    """Serves model calls of sessions."""

    engine: TokenProvider
    chat_tokenizer: ChatTokenizer
    store: SessionStore
    metrics: ServerMetrics
    model: str
    clock: Clock = time.time
    _request_ids: Iterator[str] = field(default_factory=_fresh_request_ids)

    async def serve_chat(self, session: Session, body: bytes) -> ServedTurn:
        """Answer one chat completion of `session`.

        Raises `RequestError` (nothing changed), `TurnRefused`, `EngineError` (the turn is recorded as FAILED) or
        `StoreError`.
        """
        began = self.clock()
        chat = parse_request(body)
        self._check_offered(chat)
        admission = await self._admit(session, chat, blake2b(body, digest_size=16).hexdigest())
        result, reply = await self._sample(session, admission, chat)
        turn = completed_turn(admission, result, reply, self.clock())
        await self._keep(session, turn)
        self._require_servable(session, turn)
        self.metrics.turn_served(self.clock() - began - turn.seconds)
        token_text = self.chat_tokenizer.tokenizer.token_text if chat.wants_logprobs else None
        return ServedTurn(turn, completion(turn, result, self.model, token_text))

    async def _admit(self, session: Session, chat: ChatRequest, digest: str) -> Admission:
        point = session.attach(chain_keys(chat.messages, chat.tools, session.normal_form))
        diverged = session.divergence(point, chat.messages)
        point, context_ids = await self._encode(session, point, chat)
        request = TurnRequest(chat.messages[point.matched :], context_ids, chat.sampling, digest, diverged)
        admission = session.admit(point, request, self.engine.capabilities.context_length, self.clock())
        self.metrics.turn_started()
        return admission

    async def _encode(self, session: Session, point: AttachPoint, chat: ChatRequest) -> tuple[AttachPoint, TokenIds]:
        """The ids that `point` does not have; a template that cannot extend there makes the request a new root."""
        text_length = sum(len(message.get("content") or "") for message in chat.messages[point.matched :])
        if text_length > _LONG_TEXT:
            return await asyncio.to_thread(self._encode_now, session, point, chat)
        return self._encode_now(session, point, chat)

    def _encode_now(self, session: Session, point: AttachPoint, chat: ChatRequest) -> tuple[AttachPoint, TokenIds]:
        parent = session.parent_turn(point)
        forced_ids = self._forced_ids(chat)
        if parent is not None:
            previous = _sampled_turn(parent, chat.messages[: point.matched])
            ids = self.chat_tokenizer.extend_ids(previous, chat.messages[point.matched :], chat.tools)
            if ids is not None:
                return point, as_ids(ids + forced_ids)
        ids = self.chat_tokenizer.render_ids(chat.messages, chat.tools)
        return AttachPoint(None, 0, point.key), as_ids(ids + forced_ids)

    def _forced_ids(self, chat: ChatRequest) -> list[int]:
        """How an answer that must be a tool call begins: part of the prompt, exact, never sampled, never trained."""
        return self.chat_tokenizer.call_beginning_ids(chat.tool_name) if chat.tool_mode is ToolMode.REQUIRED else []

    async def _sample(
        self, session: Session, admission: Admission, chat: ChatRequest
    ) -> tuple[GenerationResult, Reply]:
        """Have the engine sample; however that ends, the admitted turn gets an outcome."""
        try:
            result = await self.engine.generate(
                admission.prompt_ids,
                admission.params,
                request_id=next(self._request_ids),
                session_id=session.session_id,
            )
            return result, self._reply(admission, chat, result)
        except EngineError as error:
            await self._keep(session, failed_turn(admission, error, self.clock()))
            raise
        except BaseException as error:
            reason = HarnessError(f"the turn was given up: {type(error).__name__} {error}")
            self._record(session, failed_turn(admission, reason, self.clock()))
            raise

    async def _keep(self, session: Session, turn: Turn) -> None:
        """Make `turn` durable, then record it; one that cannot be made durable is recorded as FAILED."""
        try:
            await self.store.commit(session.session_id, turn)
        except StoreError as error:
            turn = lost_turn(turn, error)
            raise
        finally:
            self._record(session, turn)

    def _record(self, session: Session, turn: Turn) -> None:
        session.record(turn)
        self.metrics.turn_recorded(turn)

    def _reply(self, admission: Admission, chat: ChatRequest, result: GenerationResult) -> Reply:
        """What the agent reads: content and tool calls parsed from the sampled ids."""
        stop = result.matched_stop if isinstance(result.matched_stop, str) else None
        context_ids = admission.request.context_ids[-_TAIL:].tolist()
        output = SampledOutput(result.output_ids.tolist(), context_ids, self._forced_ids(chat), stop)
        parsed = self.chat_tokenizer.parse(output, chat.tools if chat.tool_mode is not ToolMode.NONE else ())
        message = reply_message(parsed, _call_id_prefix(admission))
        finish = "tool_calls" if parsed.tool_calls and result.finish_reason is FinishReason.STOP else None
        notes = {"malformed_tool_call": True} if parsed.malformed else {}
        return Reply(message, finish or str(result.finish_reason), notes)

    def _require_servable(self, session: Session, turn: Turn) -> None:
        """Raises `TurnAborted` for an aborted turn unless the session wants to see incomplete ones (I2)."""
        if turn.finish_reason != FinishReason.ABORT or session.config.after_incomplete is AfterIncomplete.SERVE:
            return
        raise TurnAborted(
            f"turn {turn.index} was aborted after {turn.output_ids.size} tokens; the session cannot go on from it"
        )

    def _check_offered(self, chat: ChatRequest) -> None:
        most = self.engine.capabilities.max_top_logprobs
        if (chat.sampling.top_logprobs or 0) > most:
            raise MalformedRequest(
                f"top_logprobs: expected 0..{most}, got {chat.sampling.top_logprobs}", param="top_logprobs"
            )


def _sampled_turn(turn: Turn, known: Sequence[Message]) -> SampledTurn:
    """`turn`, which answered the messages `known` but the last, as what comes next depends on it."""
    return SampledTurn(
        turn.reply,
        turn.output_ids.tolist(),
        turn.context_ids[-_TAIL:].tolist(),
        opens_with_system=known[0]["role"] in ("system", "developer"),
        after_tools=any(message["role"] == "tool" for message in known),
    )


def _call_id_prefix(admission: Admission) -> str:
    """Call ids are part of the conversation: unique in a session, and the same in every run (I10)."""
    return f"call_{admission.key.hex()[:12]}{admission.ordinal}_"
