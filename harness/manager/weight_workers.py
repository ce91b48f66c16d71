"""The workers of a weight update: providers of this process, and engine servers that are only controlled from here.

A server that is named by its address is not asked to generate anything, so nothing is assumed of its vocabulary or its
logprobs. One that cannot be reached when the update begins is left out and reported: the session servers will see that
it missed the update, and fence it.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

from harness.engines.base import LogprobScale, TokenProvider
from harness.errors import EngineError, ScenarioError

_VOCAB_SIZE = 2**31 - 1  # no ids are sent


class Engines(NamedTuple):
    """Engines that can be told what to do."""

    reached: dict[str, TokenProvider]
    """By name: the address, or the position among those that were given."""
    errors: list[str]
    """Why the others cannot."""


async def reach(engines: Sequence[TokenProvider | str], stack: AsyncExitStack) -> Engines:
    """`engines`, where an address such as `sglang=http://10.0.0.1:30000` is connected until `stack` is left.

    Raises `ScenarioError` for an address of no known kind.
    """
    found = Engines({}, [])
    for index, engine in enumerate(engines):
        if not isinstance(engine, str):
            found.reached[str(index)] = engine
            continue
        try:
            found.reached[engine] = await stack.enter_async_context(_controlled(engine))
        except EngineError as error:
            found.errors.append(error.message)
    return found


def _controlled(address: str) -> TokenProvider:
    # aiohttp takes a third of a second to import, which updates in one process need not pay.
    from harness.engines.sglang import SGLangTokenProvider
    from harness.engines.vllm import VLLMTokenProvider

    kind, _, url = address.partition("=")
    providers: dict[str, type[SGLangTokenProvider | VLLMTokenProvider]] = {
        "sglang": SGLangTokenProvider,
        "vllm": VLLMTokenProvider,
    }
    if kind not in providers or not url:
        raise ScenarioError(f"expected sglang=URL or vllm=URL, got {address!r}")
    return providers[kind](url, vocab_size=_VOCAB_SIZE, logprob_scale=LogprobScale.AFTER_TEMPERATURE)
