"""Reading of request bodies, and encoding of the prompt ids that a session lacks.

Small requests are handled on the event loop, large ones in a thread. A prompt that cannot fit is refused before it is
rendered.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import msgspec

from harness.dialects.dialect import Dialect
from harness.dialects.model_request import ModelRequest, ToolMode, WireCall
from harness.dialects.prompt_noise import NoiseRules
from harness.dialects.request_limits import RequestLimits
from harness.engines.base import TokenProvider
from harness.errors import MalformedRequest, ServerBusy
from harness.server.telemetry.metrics import ServerMetrics
from harness.sessions.edits import apply_edits
from harness.sessions.retries import CallParts, digest_kind, earlier_digests, request_digest
from harness.sessions.session import Session
from harness.sessions.session_config import AfterIncomplete
from harness.sessions.tree import AttachPoint
from harness.tokens.chat_tokenizer import ChatTokenizer, SampledTurn
from harness.tokens.fitting import require_fitting, require_possible
from harness.tokens.history import Prefix
from harness.tokens.sent_body import KEY_BYTES, SentBody
from harness.types import Paced, TokenIds, Turn, as_ids

_T = TypeVar("_T")
_Find = Callable[[str], Turn | None]

TAIL = 256
"""Length of a prompt's end that includes the generation prompt."""

_LARGE_BODY = 100_000  # new bytes, read in a few milliseconds
_LARGEST_ALIKE = 400_000  # bytes; if none of them is known after all, they block the loop for some milliseconds
_LARGEST_KNOWN = 1_000_000  # bytes, found in a millisecond; with other tools they are read again, in 16
_MANY_OBJECTS = 2_000  # braces: messages, tools and calls, each of which costs more than its bytes
_LONG_TEXT = 20_000  # characters, rendered and encoded in a few milliseconds
_BYTES_PER_TOKEN = 4  # of earlier messages, which cost as much as a body
_MOST_TOKENS = 4  # per character, which has at most as many bytes
_PLACES = 2  # threads
_EFFORT = "reasoning_effort"
_STINT_S, _REST_S = 0.0003, 0.001  # of a thread; a turn meanwhile takes 1.2 times as long, a large request 4 times


class HeavyWork:
    """Work too long for the event loop: reading and encoding large requests.

    Its own two threads keep records and the store from waiting behind a giant prompt. The size of waiting work is
    bounded. A single C call holds the GIL, so work other than encoding is split into pieces (`rest_between`).
    """

    def __init__(self, metrics: ServerMetrics, most_bytes: int) -> None:
        self._executor = ThreadPoolExecutor(_PLACES, thread_name_prefix="heavy-work")
        self._metrics = metrics
        self._most_bytes = most_bytes
        self._held_bytes = 0
        self._lock = Lock()  # a callback in the worker thread releases the bytes, even without a waiter

    async def do(self, size_bytes: int, work: Callable[[], _T]) -> _T:
        """Run `work` in a thread, holding `size_bytes`. Raises `ServerBusy`. Cancelled work does not begin."""
        with self._lock:
            if self._held_bytes and self._held_bytes + size_bytes > self._most_bytes:
                raise ServerBusy(
                    f"{self._held_bytes} bytes of requests wait to be read and encoded; expected at most"
                    f" {self._most_bytes} with this one of {size_bytes}; retry in a moment"
                )
            self._held_bytes += size_bytes
        self._metrics.heavy.inc()
        self._metrics.heavy_bytes.inc(size_bytes)

        def release(_: Future[_T]) -> None:
            with self._lock:
                self._held_bytes -= size_bytes
            self._metrics.heavy.dec()
            self._metrics.heavy_bytes.dec(size_bytes)

        future = self._executor.submit(work)
        future.add_done_callback(release)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Cancel waiting work, and drop the results of running work."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def rest_between(items: Iterable[_T]) -> Iterator[_T]:
    """Yield `items`. In between a worker thread rests, which would get half of the event loop's interpreter."""
    if _runs_a_loop():  # known messages are read on it, when something looks at them
        yield from items
        return
    due = time.monotonic() + _STINT_S
    for item in items:
        yield item
        if time.monotonic() > due:
            time.sleep(_REST_S)
            due = time.monotonic() + _STINT_S


def _runs_a_loop() -> bool:
    with suppress(RuntimeError):
        return asyncio.get_running_loop().is_running()
    return False


class _LongBefore(Exception):
    """The earlier answers that a call refers to are long."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.size_bytes = size_bytes


def _turns_nearby(turns_until: Callable[[str], Sequence[Turn]], response_id: str) -> Sequence[Turn]:
    turns = turns_until(response_id)
    size_bytes = _BYTES_PER_TOKEN * turns[-1].prompt_length if turns else 0
    if size_bytes > _LARGE_BODY:
        raise _LongBefore(size_bytes)
    return turns


@contextmanager
def _nearby() -> Iterator[Callable[[_Find], _Find]]:
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


class ReadCall(msgspec.Struct, frozen=True):
    request: ModelRequest
    prefixes: Sequence[Prefix]
    """Prefix i covers the tools and the first i messages."""
    digest: str
    """Digest of the body (`sessions.retries`)."""
    older_digests: Sequence[str]
    """Digests by the methods of earlier servers."""
    chat: ChatTokenizer
    """Model family with this request's template variables."""
    noise: str = ""
    """Start of the removed text (`dialects.noise`)."""


@dataclass(frozen=True, slots=True)
class Prompts:
    engine: TokenProvider
    chat_tokenizer: ChatTokenizer
    heavy_work: HeavyWork
    limits: RequestLimits
    noise: NoiseRules
    _digest_key: bytes = field(default_factory=partial(secrets.token_bytes, KEY_BYTES))
    """Secret key of body digests."""

    def __post_init__(self) -> None:
        assert self.chat_tokenizer.tokenizer.longest_token  # cached now, because the first lookup is slow

    async def read(self, dialect: Dialect, wire: WireCall, session: Session, idempotency_key: str) -> ReadCall:
        """Parse a call of `session`. Raises `RequestError` for a bad, too large or too long one; `ServerBusy`."""
        body, sent, history = wire.body, SentBody(wire.body, self._digest_key), session.history
        kinds = frozenset(session.digest_kinds)
        edits = () if session.config.inherits is None else session.config.inherits.edits

        def work(**lookups: Any) -> ReadCall:
            call = msgspec.structs.replace(wire, sent=sent, **lookups)
            asked, noise = self.noise.take_out(dialect.parse(call, self.limits, history))
            asked, chat = self._bind(session, asked)
            variables = dict(chat.describe().template_variables)
            prefixes = history.read(asked.messages, asked.tools, asked.recall, variables, call.paced)
            messages, prefixes = apply_edits(edits, asked.messages, prefixes, session.normal_form)
            asked = msgspec.structs.replace(asked, messages=messages)
            context_length = self.engine.capabilities.context_length
            told, said = prefixes[-1].told, prefixes[-1].said
            require_possible(self.chat_tokenizer.tokenizer, len(asked.messages), told, said, context_length)
            history.body_bytes = len(body) if asked.recall.known else 0
            parts = CallParts(body, dialect.name, idempotency_key, prefixes[-1].exact)
            digest = request_digest(parts, sent)
            older = earlier_digests(kinds - {digest_kind(digest)}, parts)
            return ReadCall(asked, prefixes, digest, older, chat, noise)

        size_bytes = len(body)
        known_bytes = history.known_bytes(sent) if size_bytes <= _LARGEST_KNOWN else 0
        alike_bytes = max(known_bytes, history.body_bytes if size_bytes <= _LARGEST_ALIKE else 0)
        is_long = size_bytes - alike_bytes > _LARGE_BODY or body.count(b"{", known_bytes) > _MANY_OBJECTS
        if not is_long:
            try:
                with _nearby() as bounded:
                    nearby = partial(_turns_nearby, wire.turns_until)
                    answered_as, caller = bounded(wire.answered_as), bounded(wire.caller)
                    return work(turns_until=nearby, answered_as=answered_as, caller=caller)
            except _LongBefore as before:  # only the small body has been read
                size_bytes += before.size_bytes
        return await self.heavy_work.do(size_bytes, partial(work, paced=rest_between))

    async def encode(self, session: Session, point: AttachPoint, call: ReadCall) -> tuple[AttachPoint, TokenIds]:
        """Encode the ids after `point`. If the template cannot extend there, the request becomes a new root.

        Raises `RequestError` if the prompt does not fit or the template refuses it; `ServerBusy`.
        """
        if point.parent is not None:
            ids = await self._encode_behind(session.turn(point.parent), point.matched, call)
            if ids is not None:
                return point, ids
        ids = await self._encode_behind(None, 0, call)
        assert ids is not None, "a whole conversation can always be rendered, or is refused"
        return AttachPoint(None, 0, point.key), ids

    def forced_ids(self, asked: ModelRequest, context_ids: Sequence[int] = ()) -> list[int]:
        """Return the start of an answer that must be a tool call: part of the prompt, never trained."""
        if asked.tool_mode is not ToolMode.REQUIRED:
            return []
        return self.chat_tokenizer.call_beginning_ids(asked.tool_name, context_ids)

    def _bind(self, session: Session, asked: ModelRequest) -> tuple[ModelRequest, ChatTokenizer]:
        # Precedence of template variables: request, session, server.
        own, config = self.chat_tokenizer.with_variables(session.config.template_variables), session.config
        wishes, known = asked.template_variables, own.describe().template_variables
        fields = {name: f"chat_template_kwargs.{name}" for name in wishes}
        is_open = config.request_template_variables
        if is_open is None:
            is_open = config.after_incomplete is AfterIncomplete.SERVE
        # Some agents send an effort unasked. It stays ignored where neither session nor template has a place for it.
        field, level = asked.effort or ("", "")
        if field and wishes.get(_EFFORT, level) == level and (is_open or _EFFORT in known):
            with suppress(MalformedRequest):
                own.with_variables({_EFFORT: level})
                wishes, fields = {_EFFORT: level, **wishes}, {_EFFORT: field, **fields}
                asked = asked.without_ignored(field)
        if not wishes:
            return asked, own
        try:
            wished = own.with_variables(wishes)
        except MalformedRequest as error:
            raise MalformedRequest(error.message, param="chat_template_kwargs") from error
        for name, value in {} if is_open else wishes.items():
            if name not in known or msgspec.json.encode(known[name]) != msgspec.json.encode(value):
                raise MalformedRequest(
                    f"{fields[name]}: expected the session's value ({known.get(name, 'not set')!r}); its"
                    " owner may set `template_variables`, or allow others with `request_template_variables`",
                    param=fields[name].removesuffix(f".{name}"),
                )
        return asked, wished

    async def _encode_behind(self, parent: Turn | None, known: int, call: ReadCall) -> TokenIds | None:
        # Returns None if the template cannot continue after `parent`, whose answer is the last known message.
        asked, context_length = call.request, self.engine.capabilities.context_length
        size = call.prefixes[-1].size - (call.prefixes[known].size - call.prefixes[0].size)

        def work(paced: Paced = iter) -> TokenIds | None:
            before, new = call.prefixes[known], asked.messages[known:]
            if _MOST_TOKENS * size > context_length:  # rare, and counting is slow
                require_fitting(self.chat_tokenizer.tokenizer, new, asked.tools, context_length, paced)
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
            return None if ids is None else as_ids([*ids, *self.forced_ids(asked, ids)])

        return await self.heavy_work.do(size, partial(work, rest_between)) if size > _LONG_TEXT else work()
