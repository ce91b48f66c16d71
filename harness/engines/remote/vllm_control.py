"""Control verbs of vLLM: pause, resume, weights, aborts.

Most need dev mode (`VLLM_SERVER_DEV_MODE=1`). Without it, weights cannot change over HTTP, so the label stays vLLM's
first one.
"""

import asyncio
from abc import abstractmethod
from pathlib import Path

import msgspec

from harness.engines.base import PauseMode
from harness.engines.remote.provider import RemoteProvider
from harness.engines.remote.weight_change import require_fitting
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


class VLLMControl(RemoteProvider):
    """Control verbs of one server."""

    kind = "vllm"
    first_label = FIRST_LABEL

    _has_dev_mode = False
    _started_with = ""
    """Folder of the server's first weights."""

    async def abort(self, request_id: str | None) -> int:
        """See `TokenProvider.abort`; in dev mode None also aborts other clients' requests."""
        told = await self._flight.tell_to_end(request_id)
        if request_id is None and self._has_dev_mode:
            await self._post("/abort_requests", {})
        elif told:
            await self._end_in_engine(*(live.request_id for live in told))
        await self._flight.tell_again(told)
        return len(told)

    async def pause(self, mode: PauseMode) -> None:
        # New requests wait inside vLLM, which can abort them there. Frozen ones (`PauseMode.KEEP`) drop their cache and
        # recompute it on resume, so weights can change in between.
        self._require_dev_mode("pause")
        await self._post(f"/pause?mode={_PAUSES[mode]}&clear_cache=true", {})

    async def resume(self) -> None:
        self._require_dev_mode("resume")
        # Without usable weights, as after a failed reload, the server would end at its next token.
        await self._change.require_settled()
        await self._post("/resume", {})

    async def update_weights(self, path: Path, version: str) -> None:
        self._require_dev_mode("updates of weights")
        await super().update_weights(path, version)

    async def read_version(self) -> str:
        moment = self._served.asking()
        self._served.learn(await self._read_label(), moment)
        return self._served.label

    async def is_paused(self) -> bool:
        """See `ChangingServer`; detects any client's pause."""
        if not self._has_dev_mode:
            return False
        return (await self._client.get("/is_paused", _PausedAnswer, deadline_s=_QUICK_S)).is_paused

    async def require_fitting(self, path: Path) -> None:
        await asyncio.to_thread(require_fitting, Path(self._started_with), path)

    async def announce_change(self, label: str) -> None:
        await self._post("/update_weight_version", {"new_version": label})
        reported = await self._read_label()
        if reported != label:
            raise EngineReplyInvalid(
                f"{self._client.name} reports weight version {reported!r} after it was labeled {label!r}"
            )

    async def load(self, path: Path, version: str) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        await self._client.post("/collective_rpc", body, deadline_s=_WEIGHTS_S)

    async def adopt(self, version: str) -> None:
        await self._post("/reset_prefix_cache", {})
        await self.announce_change(version)

    async def _read_label(self) -> str:
        if not self._has_dev_mode:
            return FIRST_LABEL
        return (await self._client.get("/weight_info", _WeightInfo, deadline_s=_QUICK_S)).weight_version

    def _require_dev_mode(self, what: str) -> None:
        if not self._has_dev_mode:
            raise EngineRejected(
                f"{self._client.name} offers no {what}: start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment"
            )

    @abstractmethod
    async def _end_in_engine(self, *request_ids: str) -> None:
        """Abort requests."""

    async def _post(self, path: str, body: Json) -> None:
        await self._client.post(path, body, deadline_s=_DEADLINE_S)
