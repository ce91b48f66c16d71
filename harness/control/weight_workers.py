"""The workers of a weight update: providers of this process, and engine servers that are only controlled from here.

A server that is named by its address is not asked to generate anything, so nothing is assumed of its vocabulary or its
logprobs, and no repeat guard is proven. One that cannot be reached when the update begins is left out and reported: the
session servers will see that it missed the update, and fence it.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

from harness.control.engines import EngineServer
from harness.engines.base import LogprobScale, TokenProvider
from harness.errors import ScenarioError
from harness.machine.deadlines import attempt
from server_patch.repeat_terminate import RepeatTerminateConfig

_VOCAB_SIZE = 2**31 - 1  # no ids are sent
_NO_GUARD = RepeatTerminateConfig()  # whatever the environment says: proving one generates tokens


class Engines(NamedTuple):
    """Engines that can be told what to do."""

    reached: dict[str, TokenProvider]
    """By name: the address, or the position among those that were given."""
    errors: list[str]
    """Why the others cannot."""


async def reach(
    engines: Sequence[TokenProvider | EngineServer | str], stack: AsyncExitStack, seconds: float
) -> Engines:
    """`engines`, where an address such as `sglang=http://10.0.0.1:30000` is connected until `stack` is left.

    All at once, each for `seconds` at most. Raises `ScenarioError` for an address of no known kind.
    """
    found: dict[str, TokenProvider] = {}
    addressed: dict[str, TokenProvider] = {}
    for index, engine in enumerate(engines):
        if isinstance(engine, str | EngineServer):
            name = engine if isinstance(engine, str) else engine.name
            found[name] = addressed[name] = _control(engine)
        else:
            found[str(index)] = engine

    async def connect(address: str, provider: TokenProvider) -> str | None:
        stack.push_async_exit(provider)  # also of one that could not be entered: nothing of it is left then
        return await attempt(provider.__aenter__, seconds, name=f"connect to {address}")

    problems = await asyncio.gather(*(connect(*each) for each in addressed.items()))
    errors = {address: problem for address, problem in zip(addressed, problems, strict=True) if problem is not None}
    reached = {name: engine for name, engine in found.items() if name not in errors}
    return Engines(reached, [f"{address}: {problem}" for address, problem in errors.items()])


def _control(engine: EngineServer | str) -> TokenProvider:
    """A provider that controls `engine` and generates nothing."""
    # aiohttp takes a third of a second to import, which updates in one process need not pay.
    from harness.engines.remote.sglang import SGLangTokenProvider
    from harness.engines.remote.vllm import VLLMTokenProvider

    if isinstance(engine, str):
        kind, _, url = engine.partition("=")
        api_key = ""
    else:
        kind, url, api_key = engine.kind or "", engine.url, engine.api_key
    providers: dict[str, type[SGLangTokenProvider | VLLMTokenProvider]] = {
        "sglang": SGLangTokenProvider,
        "vllm": VLLMTokenProvider,
    }
    if kind not in providers or not url:
        raise ScenarioError(f"expected sglang=URL or vllm=URL, got {engine!r}")
    return providers[kind](
        url,
        vocab_size=_VOCAB_SIZE,
        logprob_scale=LogprobScale.AFTER_TEMPERATURE,
        repeat_guard=_NO_GUARD,
        api_key=api_key,
    )
