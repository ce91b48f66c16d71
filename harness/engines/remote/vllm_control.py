"""Control verbs of vLLM: pause, resume, weights, aborts.

Most need dev mode (`VLLM_SERVER_DEV_MODE=1`), which `connect` detects. Without it, weights cannot change over HTTP, so
the label stays vLLM's first one.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness.engines.base import PauseMode
from harness.engines.remote.checkpoint import require_fitting
from harness.engines.remote.http_client import EngineClient, HttpCall
from harness.errors import EngineRejected, EngineReplyInvalid
from harness.types import Json

MISSING = frozenset({403, 404, 405})
"""Statuses of a missing or disabled route."""

FIRST_LABEL = "default"
"""Label of the weights that vLLM starts with."""

_DEADLINE_S = 60.0
_QUICK_S = 5.0
_WEIGHTS_S = 600.0
_PAUSES = {PauseMode.ABORT: "abort", PauseMode.KEEP: "keep"}


class _WeightInfo(msgspec.Struct):
    weight_version: str


class _PausedAnswer(msgspec.Struct):
    is_paused: bool


class VersionAnswer(msgspec.Struct):
    """`/version`."""

    version: str = "of unknown version"


class VLLMControl:
    """Control verbs of one server."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._started_with = ""
        self.has_dev_mode = False

    async def connect(self, weights: str) -> None:
        """Detect dev mode; `weights` is the folder of the server's first weights."""
        answer = await self._client.ask(HttpCall("GET", "/is_paused", _DEADLINE_S))
        self.has_dev_mode = answer.status not in MISSING
        self._started_with = weights

    async def version(self) -> str:
        return (await self._client.get("/version", VersionAnswer, deadline_s=_QUICK_S)).version

    async def label(self) -> str:
        if not self.has_dev_mode:
            return FIRST_LABEL
        return (await self._client.get("/weight_info", _WeightInfo, deadline_s=_QUICK_S)).weight_version

    async def is_paused(self) -> bool:
        """Return True if any client has paused the server."""
        if not self.has_dev_mode:
            return False
        return (await self._client.get("/is_paused", _PausedAnswer, deadline_s=_QUICK_S)).is_paused

    async def pause(self, mode: PauseMode) -> None:
        """Pause; frozen requests drop their cache, so that weights can change."""
        self.require_dev_mode("pause")
        await self._post(f"/pause?mode={_PAUSES[mode]}&clear_cache=true", {})

    async def resume(self) -> None:
        self.require_dev_mode("resume")
        await self._post("/resume", {})

    async def abort_all(self) -> None:
        await self._post("/abort_requests", {})

    async def abort(self, engine_ids: Sequence[str], *, has_scale_out: bool) -> None:
        """Abort requests by the engine's ids; vLLM silently ignores unknown ones."""
        if not self.has_dev_mode and not has_scale_out:
            raise EngineRejected(
                f"{self._client.name} offers no abort: start vLLM with --enable-scale-out or VLLM_SERVER_DEV_MODE=1"
            )
        path = "/abort_requests" if self.has_dev_mode else "/inference/v1/abort_requests"
        await self._post(path, {"request_ids": list(engine_ids)})

    async def require_fitting(self, path: Path) -> None:
        """Raise `EngineRejected` if the checkpoint in `path` has other tensors than the server."""
        await asyncio.to_thread(require_fitting, Path(self._started_with), path)

    async def relabel(self, label: str) -> None:
        """Set the label of tokens from now on; the engine must be paused."""
        await self._post("/update_weight_version", {"new_version": label})
        reported = await self.label()
        if reported != label:
            raise EngineReplyInvalid(
                f"{self._client.name} reports weight version {reported!r} after it was labeled {label!r}"
            )

    async def reload(self, path: Path) -> None:
        """Load the checkpoint in `path`; the engine must be paused. A failure leaves no usable weights."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        await self._client.post("/collective_rpc", body, deadline_s=_WEIGHTS_S)

    async def flush(self) -> None:
        await self._post("/reset_prefix_cache", {})

    def require_dev_mode(self, what: str) -> None:
        """Raise `EngineRejected` unless the server runs in dev mode."""
        if not self.has_dev_mode:
            raise EngineRejected(
                f"{self._client.name} offers no {what}: start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment"
            )

    async def _post(self, path: str, body: Json) -> None:
        await self._client.post(path, body, deadline_s=_DEADLINE_S)
