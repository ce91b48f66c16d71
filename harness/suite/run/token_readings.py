"""Compare the engines' token counters with the ledger: one reading before the first session, one after the last.

`witness.json` gets an entry each time that engines serve the run, so a resumed run keeps all.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from harness.decoding import read_json
from harness.engines.base import CountsTokens, EngineCount
from harness.errors import EngineError, EngineRejected, RunError
from harness.machine.disk import disk_failures
from harness.suite.faults.firing import FaultLog
from harness.suite.judge.accounting import count_tokens, count_unheard
from harness.suite.judge.witness import Look, TokenReading, hear
from harness.suite.record.rundir import RunDirectory
from harness.suite.run.services import OwnServices, Services

_SETTLE_S = 5.0
"""Seconds for counters to catch up with the replies; usually not needed."""
_LOOK_EVERY_S = 0.1

SHARED = "others use the server that it ran on"


@asynccontextmanager
async def read_engine_counts(choice: str, services: Services, directory: RunDirectory) -> AsyncIterator[None]:
    """Record what the engines (`choice` in `lock.json`) sample during the block. Raises `StoreError`."""
    before = await _look(services, directory)
    yield
    patience = asyncio.get_running_loop().time() + _SETTLE_S
    reading = hear(choice, before, await _look(services, directory))
    while reading.may_change and asyncio.get_running_loop().time() < patience:
        await asyncio.sleep(_LOOK_EVERY_S)
        reading = hear(choice, before, await _look(services, directory))
    heard = [*read_token_readings(directory), reading]
    directory.write_json(directory.witness, {"engines": msgspec.to_builtins(heard)})


def read_token_readings(directory: RunDirectory) -> list[TokenReading]:
    """Read `witness.json`. Raises `RunError` when it is damaged."""
    if not directory.witness.is_file():
        return []
    with disk_failures(directory.witness):
        content = directory.witness.read_bytes()
    try:
        return read_json(content, _Heard).engines
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RunError(
            f"{directory.witness}: expected what engines have counted, got something else: {error}"
        ) from error


class _Heard(msgspec.Struct):
    engines: list[TokenReading]


async def _look(services: Services, directory: RunDirectory) -> Look:
    engines: dict[str, EngineCount] = {}
    problem = SHARED
    if isinstance(services, OwnServices):
        problem = ""
        try:
            for name, provider in services.engine.workers.providers.items():
                if not isinstance(provider, CountsTokens):
                    raise EngineRejected(f"the {provider.capabilities.engine} engine does not count what it samples")
                engines[name] = await provider.count_sampled()
        except EngineError as error:
            problem = error.message
    # Engines before ledger: a token in between makes the ledger too large, and the caller then reads again.
    tokens = await asyncio.to_thread(count_tokens, directory.database)
    unknown = await asyncio.to_thread(count_unheard, directory.database)
    kills = sum(firing.action == "kill_server" for firing in FaultLog(directory.faults).read())
    return Look(engines, sum(tokens.values()), unknown.tokens, kills, problem)
