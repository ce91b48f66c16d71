"""What the engine of a server serves after a weight update, by its own word; a worker left behind serves nobody.

An update is driven from outside, past the providers of this process: what they believe is refreshed here, and a pool is
told which of its workers missed the update. A worker that has caught up by a later update serves again.
"""

from contextlib import suppress

import msgspec

from harness.engines.base import EngineWorkers, TokenProvider
from harness.engines.pool.workers import MISSED_UPDATE
from harness.errors import EngineError, MalformedRequest
from harness.samples.versions import is_version
from harness.sessions.weight_update import ExpectedWeights, LiveWeights


def parse_expected(body: bytes) -> ExpectedWeights:
    """The request in `body`. Raises `MalformedRequest`."""
    try:
        return msgspec.json.decode(body, type=ExpectedWeights)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedRequest(f"expected {{'version': N}}, got {error}", param="version") from error


async def settle_weights(engine: TokenProvider, expected: ExpectedWeights) -> LiveWeights:
    """Ask every worker for its version; those of a pool that have another one than `expected` are fenced.

    A pool in which no worker has it is left as it is: better the old weights than none. An engine on its own cannot be
    fenced.
    """
    with suppress(EngineError):  # what the others say counts, and nothing is heard from an engine of one's own
        await engine.read_version()
    if any(is_version(worker.weight_version, expected.version) for worker in engine.workers):
        _fence(engine.workers, expected.version)
    alone = engine.capabilities.engine
    return LiveWeights(
        expected.version,
        {worker.name or alone: worker.weight_version for worker in engine.workers if not worker.fence},
        {worker.name: worker.weight_version for worker in engine.workers if worker.fence},
    )


def _fence(workers: EngineWorkers, version: int) -> None:
    for worker in workers:
        has_it = is_version(worker.weight_version, version)
        if has_it and worker.fence == MISSED_UPDATE:
            workers.unfence(worker.name)
        elif not has_it and not worker.fence:
            workers.fence(worker.name, MISSED_UPDATE)
