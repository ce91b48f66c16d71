"""Lets processes of vLLM sleep while they wait for each other: a plugin of the group `vllm.general_plugins`.

Whoever reads the shared memory between the engine and its worker goes on looking for a second after each message, which
is all the time while anything is sampled. Where every process has a core of its own that saves microseconds; on two
cores it takes one of them from the worker that is waited for. Without that second a reader sleeps until it is told, as
it does in an idle server.

A reader may miss that it is told, between its look and its sleep; vLLM has it look again after five seconds. Readers
that sleep at every step look again much sooner.
"""

from typing import Any

_LOOK_AGAIN_MS = 20


def register() -> None:
    """Called by vLLM 0.32 in each of its processes, before any of them waits."""
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.SpinCondition.record_read = _forget
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = _LOOK_AGAIN_MS


def _forget(condition: Any) -> None:
    """In the place of what remembers when the last message came: long ago."""
    condition.last_read = float("-inf")
