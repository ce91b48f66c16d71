"""From a request body to prompt ids: what a model call says, and the ids that its session does not have yet.

Both are work for a processor, in proportion to what the agent sent, or goes on from by an id. What is small is read and
encoded on the spot, what is large off the event loop; what cannot fit into the context is refused before it is
rendered.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import TypeVar

from msgspec import json

from harness.dialects.dialect import Dialect
from harness.dialects.model_request import ModelRequest, ToolMode, WireCall
from harness.dialects.noise import NoiseRules
from harness.dialects.request_limits import RequestLimits
from harness.engines.base import TokenProvider
from harness.errors import MalformedRequest, ServerBusy
from harness.sessions.retries import CallParts, digest_kind, earlier_digests, request_digest
from harness.sessions.session import Session
from harness.sessions.session_config import AfterIncomplete
from harness.sessions.tree import AttachPoint
from harness.telemetry.metrics import ServerMetrics
from harness.tokens.chat_tokenizer import ChatTokenizer, SampledTurn
from harness.tokens.fitting import require_fitting, require_possible
from harness.tokens.history import Prefix
from harness.tokens.sent_body import KEY_BYTES, SentBody
from harness.types import TokenIds, Turn, as_ids

_T = TypeVar("_T")
_Find = Callable[[str], Turn | None]

TAIL = 256
"""Ids at the end of a prompt: enough to see what the generation prompt began."""

_LARGE_BODY = 100_000  # bytes that are new, read in a few milliseconds
_LARGEST_KNOWN = 400_000  # bytes; should nothing of them be known after all, they hold the loop for some milliseconds
_MANY_OBJECTS = 2_000  # braces: messages, tools and calls, each of which costs a reader more than its bytes
_LONG_TEXT = 20_000  # characters, rendered and encoded in as many
_BYTES_PER_TOKEN = 4  # of what was said before, which costs what a body costs
_MOST_TOKENS = 4  # for one character, which has as many bytes at most
_PLACES = 2  # threads


class HeavyWork:
    """Work that would stop the event loop for longer than a moment: reading and encoding large requests.

    It has two threads of its own, so that neither records nor the store wait behind a giant prompt. Work that waits for
    one of them is counted and bounded by its size in memory; beyond that a request is refused for now (`ServerBusy`).
    Encoding lets other threads run meanwhile; the rest of such work is cut into pieces where it is done, because a
    single call into C holds the interpreter until it returns.
    """

    def __init__(self, metrics: ServerMetrics, most_bytes: int) -> None:
        self._executor = ThreadPoolExecutor(_PLACES, thread_name_prefix="heavy-work")
        self._metrics = metrics
        self._most_bytes = most_bytes
        self._held_bytes = 0
        self._lock = Lock()  # ends of work are noted in its own thread, whoever still waits for it

    async def do(self, size_bytes: int, work: Callable[[], _T]) -> _T:
        """Do `work` off the event loop and return or raise as it does; it holds `size_bytes` until it is done.

        Raises `ServerBusy` when too much is held already. Work that nobody waits for any more does not begin.
        """
        with self._lock:
            if self._held_bytes and self._held_bytes + size_bytes > self._most_bytes:
                raise ServerBusy(
                    f"{self._held_bytes} bytes of requests wait to be read and encoded; expected at most"
                    f" {self._most_bytes} with this one of {size_bytes}; ask again in a moment"
                )
            self._held_bytes += size_bytes
        self._metrics.heavy_work_began(size_bytes)

        def release(future: Future[_T]) -> None:
            del future
            with self._lock:
                self._held_bytes -= size_bytes
            self._metrics.heavy_work_ended(size_bytes)

        future = self._executor.submit(work)
        future.add_done_callback(release)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Begin nothing more; what has begun comes to its end, for nobody."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class _LongBefore(Exception):
    """A call goes on from an answer by its id, or refers to some, and what was said in it is long."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.size_bytes = size_bytes


def _turns_nearby(turns_until: Callable[[str], Sequence[Turn]], response_id: str) -> Sequence[Turn]:
    """The turns up to an answer. Raises `_LongBefore` where they are no work for the event loop."""
    turns = turns_until(response_id)
    size_bytes = _BYTES_PER_TOKEN * turns[-1].prompt_length if turns else 0
    if size_bytes > _LARGE_BODY:
        raise _LongBefore(size_bytes)
    return turns


@contextmanager
def _nearby() -> Iterator[Callable[[_Find], _Find]]:
    """Bound look-ups in the record: within the block they raise `_LongBefore` when they find too much for the loop.

    Messages that are known may be read behind the block.
    """
    size_bytes, is_within = 0, True

    def bounded(look_up: _Find) -> _Find:
        def find(some_id: str) -> Turn | None:
            nonlocal size_bytes
            turn = look_up(some_id)
            size_bytes += 0 if turn is None else _BYTES_PER_TOKEN * int(turn.output_ids.size)
            if is_within and size_bytes > _LARGE_BODY:
                raise _LongBefore(size_bytes)
            return turn

        return find

    try:
        yield bounded
    finally:
        is_within = False


@dataclass(frozen=True, slots=True)
class ReadCall:
    """A request body, read."""

    request: ModelRequest
    prefixes: Sequence[Prefix]
    """Those of its conversation: element i covers the tools and the first i messages."""
    digest: str
    """Of the body (`sessions.retries`)."""
    older_digests: Sequence[str]
    """The same as earlier servers have made it, for a session that has turns of theirs."""
    chat: ChatTokenizer
    """The family with the variables that this request is rendered with."""
    noise: str = ""
    """The beginning of what was taken out of its head (`dialects.noise`)."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Reads the model calls of one server and encodes their prompts."""

    engine: TokenProvider
    chat_tokenizer: ChatTokenizer
    heavy_work: HeavyWork
    limits: RequestLimits
    noise: NoiseRules
    _digest_key: bytes = field(default_factory=partial(secrets.token_bytes, KEY_BYTES))
    """Of the digests of bodies; no client learns it."""

    def __post_init__(self) -> None:
        assert self.chat_tokenizer.tokenizer.longest_token  # looked up now: it takes a while the first time

    async def read(self, dialect: Dialect, wire: WireCall, session: Session, idempotency_key: str) -> ReadCall:
        """The call of `session` that `wire` is in `dialect`.

        Raises `RequestError` when it is malformed, over a limit, or cannot fit whatever it is encoded as; `ServerBusy`.
        """
        body, sent, history = wire.body, SentBody(wire.body, self._digest_key), session.history
        kinds = frozenset(session.digest_kinds)

        def work(wire: WireCall = wire) -> ReadCall:
            call = replace(wire, sent=sent)
            asked, noise = self.noise.take_out(dialect.parse(call, self.limits, history))
            chat = self._chat_for(session, asked)
            variables = dict(chat.describe().template_variables)
            prefixes = history.read(asked.messages, asked.tools, asked.recall, variables)
            context_length = self.engine.capabilities.context_length
            told, said = prefixes[-1].told, prefixes[-1].said
            require_possible(self.chat_tokenizer.tokenizer, len(asked.messages), told, said, context_length)
            history.body_bytes = len(body) if asked.recall.known else 0
            parts = CallParts(body, dialect.name, idempotency_key, prefixes[-1].exact)
            digest = request_digest(parts, sent)
            older = earlier_digests(kinds - {digest_kind(digest)}, parts)
            return ReadCall(asked, prefixes, digest, older, chat, noise)

        new_bytes = len(body) if len(body) > _LARGEST_KNOWN else len(body) - history.body_bytes
        size_bytes, known_bytes = len(body), 0 if len(body) > _LARGEST_KNOWN else history.known_bytes(sent)
        is_long = new_bytes > _LARGE_BODY or body.count(b"{", known_bytes) > _MANY_OBJECTS
        if not is_long:
            try:
                with _nearby() as bounded:
                    nearby = partial(_turns_nearby, wire.turns_until)
                    answered_as, caller = bounded(wire.answered_as), bounded(wire.caller)
                    return work(replace(wire, turns_until=nearby, answered_as=answered_as, caller=caller))
            except _LongBefore as before:  # nothing has been read but the small body
                size_bytes += before.size_bytes
        return await self.heavy_work.do(size_bytes, work)

    async def encode(self, session: Session, point: AttachPoint, call: ReadCall) -> tuple[AttachPoint, TokenIds]:
        """The ids that `point` does not have; a template that cannot extend there makes the request a new root.

        Raises `RequestError` when the prompt does not fit or the template refuses it; `ServerBusy`.
        """
        if point.parent is not None:
            ids = await self._encode_behind(session.turn(point.parent), point.matched, call)
            if ids is not None:
                return point, ids
        ids = await self._encode_behind(None, 0, call)
        assert ids is not None, "a whole conversation can always be rendered, or is refused"
        return AttachPoint(None, 0, point.key), ids

    def forced_ids(self, asked: ModelRequest) -> list[int]:
        """How an answer that must be a tool call begins: part of the prompt, exact, never sampled, never trained."""
        return self.chat_tokenizer.call_beginning_ids(asked.tool_name) if asked.tool_mode is ToolMode.REQUIRED else []

    def _chat_for(self, session: Session, asked: ModelRequest) -> ChatTokenizer:
        """The family with the variables of server, session and request.

        Raises `MalformedRequest` naming one that the template does not read, or that the session does not leave open.
        """
        own = self.chat_tokenizer.with_variables(session.config.template_variables)
        if not asked.template_variables:
            return own
        config, known = session.config, own.describe().template_variables
        is_open = config.request_template_variables
        if is_open is None:
            is_open = config.after_incomplete is AfterIncomplete.SERVE
        try:
            wished = own.with_variables(asked.template_variables)
        except MalformedRequest as error:
            raise MalformedRequest(error.message, param="chat_template_kwargs") from error
        for name, value in {} if is_open else asked.template_variables.items():
            if name not in known or json.encode(known[name]) != json.encode(value):
                raise MalformedRequest(
                    f"chat_template_kwargs.{name}: expected the session's value ({known.get(name, 'not set')!r}); its"
                    " owner may set `template_variables`, or allow others with `request_template_variables`",
                    param="chat_template_kwargs",
                )
        return wished

    async def _encode_behind(self, parent: Turn | None, known: int, call: ReadCall) -> TokenIds | None:
        """The ids of what `call` says behind its first `known` messages, the last of which is the answer of `parent`.

        None when the template cannot go on behind that turn.
        """
        asked, context_length = call.request, self.engine.capabilities.context_length
        size = call.prefixes[-1].size - (call.prefixes[known].size - call.prefixes[0].size)

        def work() -> TokenIds | None:
            before, new = call.prefixes[known], asked.messages[known:]
            if _MOST_TOKENS * size > context_length:  # hardly ever, and counting takes a while
                require_fitting(self.chat_tokenizer.tokenizer, new, asked.tools, context_length)
            ids: Sequence[int] | None
            if parent is None:
                ids = call.chat.render_ids(new, asked.tools)
            else:
                previous = SampledTurn(
                    parent.reply,
                    parent.output_ids.tolist(),
                    parent.context_ids[-TAIL:].tolist(),
                    opens_with_system=before.opens_with_system,
                    after_tools=before.after_tools,
                )
                ids = call.chat.extend_ids(previous, new, asked.tools)
            return None if ids is None else as_ids([*ids, *self.forced_ids(asked)])

        return await self.heavy_work.do(size, work) if size > _LONG_TEXT else work()
