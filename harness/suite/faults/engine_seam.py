"""A `TokenProvider` that shows requests to a `Watcher` and applies network faults.

Faults raise what a real provider raises for a broken server, at the same places. With a proxy (`network.py`), the proxy
breaks the request, and the provider raises.

Prompt ids identify turns: a request with the prompt of an unfinished turn continues it, whatever its request id.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from harness.engines.base import Capabilities, EngineHealth, OneWorker, PauseMode, TokenProvider
from harness.errors import EngineConnectionLost, EngineError, EngineReplyInvalid, EngineUnavailable
from harness.suite.scenarios.fault import Action
from harness.types import FinishReason, GenerationDelta, GenerationRequest, GenerationResult, PromptLogprobs, TokenIds

DEADLINE_S = 600.0
"""Seconds that a provider waits for a silent server."""
_IN_THE_ANSWER: frozenset[Action] = frozenset({"cut_connection", "malformed_reply"})
_KILLED = "the engine was killed, a fault of the scenario"


class NetworkFault(NamedTuple):
    action: Action
    seconds: float | None = None


class Network(Protocol):
    """A breakable network in front of an engine server."""

    def arm(self, request_id: str, fault: NetworkFault) -> None:
        """Apply `fault` to the request, now or on arrival."""

    def disarm(self, request_id: str) -> None:
        """Forget a finished request."""


class TurnCount:
    """Turns of a session, identified by prompt."""

    def __init__(self) -> None:
        self._open: dict[bytes, int] = {}
        self.begun = 0

    def begin(self, prompt: bytes) -> tuple[int, bool]:
        """Return the turn of a request, and True for its first request."""
        is_new = prompt not in self._open
        if is_new:
            self.begun += 1
            self._open[prompt] = self.begun
        return self._open[prompt], is_new

    def end(self, prompt: bytes) -> None:
        """End the turn; the same prompt begins a new one."""
        self._open.pop(prompt, None)


@dataclass(eq=False, slots=True)
class EngineCall:
    request_id: str
    session_id: str
    turn: int
    """Number in its session, from 1."""
    is_first: bool
    tokens: int
    """Tokens of the turn's output so far."""
    faults: list[NetworkFault] = field(default_factory=list)
    """To be applied, in order."""
    ends_early: bool = False
    """True if the engine must end it as soon as it has begun."""
    error: EngineError | None = None
    _scope: asyncio.Timeout | None = None

    @asynccontextmanager
    async def breakable(self) -> AsyncIterator[None]:
        """Run a block that `fail` can interrupt."""
        try:
            async with asyncio.timeout(None) as self._scope:
                yield
        except TimeoutError:
            # Only `fail` expires this scope: another timeout comes from the block.
            if self.error is None:
                raise
            raise self.error from None

    def fail(self, error: EngineError) -> None:
        if self._scope is not None and self.error is None:
            self.error = error
            self._scope.reschedule(asyncio.get_running_loop().time())


class Watcher(Protocol):
    """Decides the faults of a scenario's requests."""

    async def on_request(self, call: EngineCall) -> None:
        """Handle a request before the engine. Returns after the immediate effects of due faults."""

    async def on_tokens(self, call: EngineCall) -> None:
        """Handle `call.tokens`. Returns like `on_request`."""

    def counts_tokens(self, call: EngineCall) -> bool:
        """Return True if `on_tokens` must be called."""


class FaultyProvider:
    """Wrapper of `inner`, which the caller enters. Without a `network`, it raises a provider's errors itself."""

    def __init__(self, inner: TokenProvider, network: Network | None = None) -> None:
        self._inner = inner
        self._network = network
        self._turns: dict[str, TurnCount] = {}
        self.watcher: Watcher | None = None
        self.live: dict[str, EngineCall] = {}
        """Requests under way, by id."""
        self._is_dead = False

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    @property
    def weight_version(self) -> str:
        return self._inner.weight_version

    @property
    def workers(self) -> OneWorker:
        """One worker: faults hit the engine as a whole."""
        return OneWorker(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def turns_begun(self, session_id: str) -> int:
        return self._turns[session_id].begun if session_id in self._turns else 0

    async def abort_early(self, call: EngineCall) -> None:
        """Abort a request in the engine, now or once it has begun."""
        call.ends_early = not await self.abort(call.request_id)

    def kill(self) -> None:
        """Fail all requests under way, and serve none until `revive`."""
        self._is_dead = True
        for call in list(self.live.values()):
            call.fail(EngineConnectionLost(_KILLED))

    def revive(self) -> None:
        self._is_dead = False

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See `TokenProvider`. Raises the request's faults."""
        if self.watcher is None or request.session_id is None:
            return await self._alive.generate(request)
        prompt = blake2b(request.input_ids[: request.input_ids.size - request.continues].tobytes()).digest()
        turns = self._turns.setdefault(request.session_id, TurnCount())
        call = EngineCall(request.request_id, request.session_id, *turns.begin(prompt), tokens=request.continues)
        self.live[call.request_id] = call
        try:
            async with call.breakable():
                await self.watcher.on_request(call)
                _ = self._alive  # raises if a fault has killed it
                # Without a network, raise a broken connection or a malformed answer after the tokens are sampled.
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
        """See `TokenProvider`. Without faults: session servers request whole results."""
        return self._inner.stream(request)

    async def score(
        self, input_ids: TokenIds, *, start: int, session_id: str | None = None, top: int = 0
    ) -> PromptLogprobs:
        return await self._alive.score(input_ids, start=start, session_id=session_id, top=top)

    async def abort(self, request_id: str | None) -> int:
        """See `TokenProvider`; cannot reach requests hanging on the network."""
        return await self._alive.abort(request_id)

    async def pause(self, mode: PauseMode) -> None:
        await self._alive.pause(mode)

    async def resume(self) -> None:
        await self._alive.resume()

    async def update_weights(self, path: Path, version: str) -> None:
        await self._alive.update_weights(path, version)

    async def read_version(self) -> str:
        return await self._alive.read_version()

    async def health(self) -> EngineHealth:
        if self._is_dead:
            return EngineHealth(ready=False, paused=False, running=0, waiting=0, detail=_KILLED)
        return await self._inner.health()

    async def _sample(self, call: EngineCall, watcher: Watcher, request: GenerationRequest) -> GenerationResult:
        if not (watcher.counts_tokens(call) or call.ends_early):
            return await self._inner.generate(request)
        plain = replace(request, on_delta=None, on_ids=None)  # with these, the engine would send many tokens at once
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

    @property
    def _alive(self) -> TokenProvider:
        if self._is_dead:
            raise EngineUnavailable(_KILLED)
        return self._inner
