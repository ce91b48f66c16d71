"""A `TokenProvider` that sees every request of a scenario with faults, and applies the faults of the network.

A request meets the errors that a provider makes of a broken server, at the same places. Where a real proxy stands
between the provider and its server (`network.py`), the proxy breaks the request and the provider draws its own
conclusions. This module decides nothing: a `Watcher` is told of every request and every token, and adds faults to the
request.

The ids tell which turn a request belongs to: a request whose prompt is that of a turn which has no whole answer yet
goes on with that turn, whatever its request id.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from harness.engines.base import Capabilities, EngineHealth, OneWorker, PauseMode, TokenProvider
from harness.errors import EngineConnectionLost, EngineError, EngineReplyInvalid, EngineUnavailable
from harness.suite.scenarios.fault import Action
from harness.types import (
    FinishReason,
    GenerationDelta,
    GenerationRequest,
    GenerationResult,
    PromptLogprobs,
    TokenIds,
)

DEADLINE_S = 600.0
"""How long a provider waits for a server that says nothing."""
_IN_THE_ANSWER: frozenset[Action] = frozenset({"cut_connection", "malformed_reply"})
_KILLED = "the engine was killed, a fault of the scenario"


class NetworkFault(NamedTuple):
    """A fault of one request on its way to the engine or back."""

    action: Action
    seconds: float | None = None


class Network(Protocol):
    """Stands between a provider and its server, and can break a request by its id."""

    def arm(self, request_id: str, fault: NetworkFault) -> None:
        """Apply `fault` to the request: at once when it is on its way, else as soon as it comes."""

    def disarm(self, request_id: str) -> None:
        """The request is over."""


class TurnCount:
    """The turns of one session, told apart by their prompts."""

    def __init__(self) -> None:
        self._open: dict[bytes, int] = {}
        self.begun = 0

    def begin(self, prompt: bytes) -> tuple[int, bool]:
        """The turn that a request with `prompt` belongs to, and whether it is its first one."""
        is_new = prompt not in self._open
        if is_new:
            self.begun += 1
            self._open[prompt] = self.begun
        return self._open[prompt], is_new

    def end(self, prompt: bytes) -> None:
        """The turn has its whole answer: the same prompt begins another one."""
        self._open.pop(prompt, None)


@dataclass(eq=False, slots=True)
class EngineCall:
    """One request under way."""

    request_id: str
    session_id: str
    turn: int
    """Of its session, from 1."""
    is_first: bool
    """It is the first request of its turn."""
    tokens: int
    """Sampled so far for the turn's output."""
    faults: list[NetworkFault] = field(default_factory=list)
    """Faults that are yet to be applied to it, in order."""
    ends_early: bool = False
    """The engine ends it as soon as it has begun."""
    error: EngineError | None = None
    _scope: asyncio.Timeout | None = None

    @asynccontextmanager
    async def breakable(self) -> AsyncIterator[None]:
        """A block that `fail` ends where it waits."""
        try:
            async with asyncio.timeout(None) as self._scope:
                yield
        except TimeoutError:
            if self.error is None:
                raise
            raise self.error from None

    def fail(self, error: EngineError) -> None:
        """End the request with `error`."""
        if self._scope is not None and self.error is None:
            self.error = error
            self._scope.reschedule(asyncio.get_running_loop().time())


class Watcher(Protocol):
    """Decides which faults the requests of a scenario get."""

    async def on_request(self, call: EngineCall) -> None:
        """A request is about to go to the engine; returns after the immediate effects of the faults that are due."""

    async def on_tokens(self, call: EngineCall) -> None:
        """A request has come to `call.tokens`; returns like `on_request`."""

    def counts_tokens(self, call: EngineCall) -> bool:
        """Whether `on_tokens` has to be called."""


class FaultyProvider:
    """`inner` as a scenario with faults meets it. Entering it enters nothing: the engine outlives its session servers.

    Args:
        inner: The engine, entered by somebody else.
        network: A real network that applies the faults; without one, the errors of a provider are raised here.
    """

    def __init__(self, inner: TokenProvider, network: Network | None = None) -> None:
        self._inner = inner
        self._network = network
        self._turns: dict[str, TurnCount] = {}
        self.watcher: Watcher | None = None
        self.live: dict[str, EngineCall] = {}
        """Requests under way, by their id."""
        self._is_dead = False

    @property
    def capabilities(self) -> Capabilities:
        """Those of the engine."""
        return self._inner.capabilities

    @property
    def weight_version(self) -> str:
        """That of the engine."""
        return self._inner.weight_version

    @property
    def workers(self) -> OneWorker:
        """The engine as one worker, whatever is behind it: its faults are those of the whole."""
        return OneWorker(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def turns_begun(self, session_id: str) -> int:
        """Model calls that the session has made."""
        return self._turns[session_id].begun if session_id in self._turns else 0

    async def abort_early(self, call: EngineCall) -> None:
        """Have the engine end a request unasked; one that has not reached it ends as soon as it has begun."""
        call.ends_early = not await self.abort(call.request_id)

    def kill(self) -> None:
        """The engine dies: what is under way is lost, and nothing is served until `revive`."""
        self._is_dead = True
        for call in list(self.live.values()):
            call.fail(EngineConnectionLost(_KILLED))

    def revive(self) -> None:
        """The engine serves again."""
        self._is_dead = False

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See `TokenProvider`; faults of the request are raised."""
        if self.watcher is None or request.session_id is None:
            self._require_alive()
            return await self._inner.generate(request)
        prompt = blake2b(request.input_ids[: request.input_ids.size - request.continues].tobytes()).digest()
        turns = self._turns.setdefault(request.session_id, TurnCount())
        call = EngineCall(request.request_id, request.session_id, *turns.begin(prompt), tokens=request.continues)
        self.live[call.request_id] = call
        try:
            async with call.breakable():
                await self.watcher.on_request(call)
                self._require_alive()
                # Without a network, a connection breaks, and an answer is malformed, once the tokens have been sampled.
                later = [each for each in call.faults if self._network is None and each.action in _IN_THE_ANSWER]
                call.faults = [each for each in call.faults if each not in later]
                await self._apply_faults(call)
                call.faults += later
                result = await self._sample(call, self.watcher, request)
                await self._apply_faults(call)
        finally:
            del self.live[call.request_id]
            if self._network is not None:
                self._network.disarm(call.request_id)
        if result.finish_reason is not FinishReason.ABORT:
            turns.end(prompt)
        return result

    def stream(self, request: GenerationRequest) -> AsyncIterator[GenerationDelta | GenerationResult]:
        """That of the engine; a session server asks for whole results, so no fault is looked for here."""
        return self._inner.stream(request)

    async def score(self, input_ids: TokenIds, *, start: int, session_id: str | None = None) -> PromptLogprobs:
        """See `TokenProvider`."""
        self._require_alive()
        return await self._inner.score(input_ids, start=start, session_id=session_id)

    async def abort(self, request_id: str | None) -> int:
        """See `TokenProvider`; a request that hangs on the network is not reached."""
        self._require_alive()
        return await self._inner.abort(request_id)

    async def pause(self, mode: PauseMode) -> None:
        """See `TokenProvider`."""
        self._require_alive()
        await self._inner.pause(mode)

    async def resume(self) -> None:
        """See `TokenProvider`."""
        self._require_alive()
        await self._inner.resume()

    async def update_weights(self, path: Path, version: str) -> None:
        """See `TokenProvider`."""
        self._require_alive()
        await self._inner.update_weights(path, version)

    async def read_version(self) -> str:
        """See `TokenProvider`."""
        self._require_alive()
        return await self._inner.read_version()

    async def health(self) -> EngineHealth:
        """See `TokenProvider`."""
        if self._is_dead:
            return EngineHealth(ready=False, paused=False, running=0, waiting=0, detail=_KILLED)
        return await self._inner.health()

    async def _sample(self, call: EngineCall, watcher: Watcher, request: GenerationRequest) -> GenerationResult:
        """The engine's answer; token by token where a fault waits for one."""
        if not (watcher.counts_tokens(call) or call.ends_early):
            return await self._inner.generate(request)
        plain = replace(request, on_delta=None, on_ids=None)  # or it would come in pieces of many tokens
        pieces = self._inner.stream(plain)
        async with aclosing(pieces):  # type: ignore[type-var]  # every provider's stream is a generator
            async for piece in pieces:
                if isinstance(piece, GenerationResult):
                    return piece
                request.tell(piece)
                call.tokens += piece.output_ids.size
                await watcher.on_tokens(call)
                await self._apply_faults(call)
                if call.ends_early:
                    await self.abort_early(call)
        raise EngineConnectionLost("the engine ended a stream without a result")

    async def _apply_faults(self, call: EngineCall) -> None:
        """Have the network break the request; without one, wait for and raise what a provider makes of each fault."""
        while call.faults:
            fault = call.faults.pop(0)
            if self._network is not None:
                self._network.arm(call.request_id, fault)
                continue
            match fault.action:
                case "engine_500":
                    raise EngineError("the engine answered with 500, a fault of the scenario")
                case "cut_connection":
                    raise EngineConnectionLost("the connection to the engine broke, a fault of the scenario")
                case "malformed_reply":
                    raise EngineReplyInvalid("the engine answered no JSON, a fault of the scenario")
                case "engine_hang":
                    seconds = fault.seconds or DEADLINE_S
                    await asyncio.sleep(seconds)
                    raise EngineConnectionLost(
                        f"the engine did not answer within {seconds:g} s, a fault of the scenario"
                    )
                case "slow_network":
                    await asyncio.sleep(fault.seconds or 0)
                case _:
                    raise AssertionError(f"{fault.action} is no fault of the network")

    def _require_alive(self) -> None:
        if self._is_dead:
            raise EngineUnavailable(_KILLED)
