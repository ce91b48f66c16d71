"""Let vLLM processes sleep while they wait: a plugin of the group `vllm.general_plugins`.

Readers of shared memory spin for a second after each message, so always while sampling. On two cores that starves the
worker they wait for.
"""

from typing import Any

_LOOK_AGAIN_MS = 20  # a sleeping reader may miss a notification; vLLM's own 5 s are too long for every step


def register() -> None:
    """Patch vLLM 0.32; called in each process before any waits."""
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.SpinCondition.record_read = _forget
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = _LOOK_AGAIN_MS


def _forget(condition: Any) -> None:
    condition.last_read = float("-inf")  # replaces vLLM's record of the last message
