"""Open a run's router: a gateway in front of its engine servers. It ends with the run."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from harness.engines.repeat_guard import choose_guard
from harness.errors import EngineUnavailable
from harness.gateway.router.gateway_program import gateway_program
from harness.gateway.router.routed import Routed, RouterSettings, open_routed
from harness.server.settings import ServerSettings
from harness.tokens.chat_tokenizer import ChatTokenizer
from server_patch.router.gateway import GatewayKind

_JOIN_S = 300.0
"""Seconds, longer than an engine's self-test on a busy CPU."""
_LOOK_EVERY_S = 0.1


@asynccontextmanager
async def open_router(
    urls: Sequence[str], chat_tokenizer: ChatTokenizer, settings: ServerSettings, say: Callable[[str], None]
) -> AsyncIterator[Routed]:
    """Yield a router, with its own gateway, for `urls`. Raises `LaneError` or `ModelError` when it cannot start."""
    opening = open_routed(
        RouterSettings(worker_urls=tuple(urls), start_timeout_s=_JOIN_S),
        await gateway_program(GatewayKind.SMG, say),
        vocab_size=chat_tokenizer.tokenizer.vocab_size,
        tokenizer=chat_tokenizer.tokenizer,
        admin_token=settings.admin_token,
        is_guarded=choose_guard(settings.repeat_guard, os.environ) is not None,
    )
    async with opening as routed:
        yield routed


async def all_join(routed: Routed, urls: Sequence[str]) -> None:
    """Wait until every worker accepts sessions. Raises `EngineUnavailable`."""
    missing = {*urls}
    try:
        async with asyncio.timeout(_JOIN_S):
            while missing := {*urls} - {status.name for status in routed.pool.workers}:  # noqa: ASYNC110  # no event
                await asyncio.sleep(_LOOK_EVERY_S)
    except TimeoutError:
        reasons = "; ".join(f"{url}: {routed.pool.refused.get(url, 'not listed')}" for url in sorted(missing))
        raise EngineUnavailable(f"not every lane joined the router within {_JOIN_S:g} s: {reasons}") from None
