"""Weights of one engine server: their label, and updates, such that no token carries the version of other weights.

    1 announce   set a label that is no version, while the server still has its old weights
    2 load       load the new weights; if this fails, the weights are unknown
    3 adopt      drop the cache of the old weights, then set the label of the new ones

Each call may fail, time out or be cancelled; the server's label then decides. While it is no version, the server stays
paused until an update succeeds, and `resume` refuses.
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from harness.decoding import read_json
from harness.engines.base import PauseMode, TokenProvider
from harness.errors import EngineError, EngineRejected, WeightsUnsettled
from harness.machine.deadlines import to_the_end
from harness.samples.versions import is_unsettled, known_version, require_settled, unsettled_label
from harness.types import VersionSpan


class ServedLabel:
    """Present label of one worker's weights, initially `label`, learned from answers that may arrive out of order.

    An answer asked for after the present label was learned always wins: a restarted worker returns to its first label.
    An older answer can only advance the label.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self._heard = {label}
        self._moment = 0
        self._known_since = 0
        self._changed_at = 0
        self._confirmed_at = 0
        """Last question answered with `label`."""

    @property
    def is_unsettled(self) -> bool:
        """True while a weight update is under way or after one failed."""
        return is_unsettled(self.label)

    def asking(self) -> int:
        """Return the moment of a question, for `learn`."""
        self._moment += 1
        return self._moment

    def learn(self, label: str, asked: int) -> None:
        """Take in the answer to a question of moment `asked`."""
        mine, found = known_version(self.label), known_version(label)
        is_later = label not in self._heard if mine is None or found is None else found > mine
        if asked > self._known_since or is_later:
            self.set(label)
        if label == self.label:
            self._confirmed_at = max(self._confirmed_at, asked)

    def is_confirmed(self, label: str, since: int, until: int) -> bool:
        """Return True if the worker served only `label` from moment `since` to `until`."""
        # Two equal reads suffice: replaced weights never return under their old label (I6).
        is_same = self.label == label and not self.is_unsettled
        return is_same and self._changed_at <= since and until < self._confirmed_at

    def set(self, label: str) -> None:
        """Set a label known from elsewhere."""
        self._moment += 1
        if label != self.label:
            self._changed_at = self._moment
        self.label, self._known_since = label, self._moment
        self._heard.add(label)


class Unlabeled:
    """Tokens of a stream without versions. They get the `label` from before if a later read confirms it."""

    def __init__(self, served: ServedLabel, label: str, begun: int) -> None:
        self._served = served
        self._label = label
        self._begun = begun
        self._count = 0
        self._arrivals: list[tuple[int, int]] = []
        """Unconfirmed moments, and token counts by then."""
        self._confirmed = 0

    def note(self, tokens: int) -> None:
        self._count += tokens
        self._arrivals.append((self._served.asking(), self._count))

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Span of the tokens whose version is known."""
        while self._arrivals and self._served.is_confirmed(self._label, self._begun, self._arrivals[0][0]):
            self._confirmed = self._arrivals.pop(0)[1]
        return (VersionSpan(self._label, 0, self._confirmed),) if self._confirmed else ()


class ChangingServer(TokenProvider, Protocol):
    """Server whose weights can change. Methods raise `EngineError`."""

    async def is_paused(self) -> bool:
        """Return True if nothing is sampled now."""

    async def require_fitting(self, path: Path) -> None:
        """Raise `EngineRejected` if the checkpoint in `path` visibly does not fit."""

    async def announce_change(self, label: str) -> None:
        """Set `label`, which is no version."""

    async def load(self, path: Path, version: str) -> None:
        """Load the checkpoint in `path`."""

    async def adopt(self, version: str) -> None:
        """Drop the cache of the old weights, and set `version`."""


class WeightChange:
    """Updates of one server, one at a time. `server` carries out the steps, `served` is its label."""

    def __init__(self, name: str, server: ChangingServer, served: ServedLabel) -> None:
        self._name = name
        self._server = server
        self._served = served
        self._one_at_a_time = asyncio.Lock()  # two updates at once would label the weights of one with the other's
        self._has_paused = False
        """True while an update has left the server paused."""

    async def run(self, path: Path, version: str) -> None:
        """See `TokenProvider.update_weights`; a server that was paused stays paused."""
        require_settled(version)
        async with self._one_at_a_time:
            await self._server.require_fitting(path)
            if not self._has_paused and await self._server.is_paused():
                await self._change(path, version)
                return
            self._has_paused = True
            try:
                await self._server.pause(PauseMode.KEEP)
                await self._change(path, version)
            finally:
                # Only known weights may sample; otherwise the server stays paused.
                if not self._served.is_unsettled:
                    self._has_paused = False
                    await to_the_end(self._server.resume())

    async def expect(self, version: str) -> None:
        require_settled(version)
        async with self._one_at_a_time:
            self._served.set(unsettled_label(version))
            await self._server.announce_change(self._served.label)

    async def require_settled(self) -> None:
        """Read the label; raise `WeightsUnsettled` unless it is a version."""
        with suppress(EngineError):
            await self._server.read_version()
        if self._served.is_unsettled:
            raise WeightsUnsettled(
                f"{self._name} stays paused: its label is {self._served.label!r}, so an update of its weights is under"
                " way or broke off; update it again, or restart it"
            )

    async def _change(self, path: Path, version: str) -> None:
        # From the first call to the last the server carries a label that is no version, so tokens sampled in between
        # are refused.
        unsettled = unsettled_label(version)
        self._served.set(unsettled)
        try:
            await self._server.announce_change(unsettled)
            await self._server.load(path, version)
            await to_the_end(self._adopt(version))
        except BaseException as error:
            # The server may have finished a call that failed here, so its label decides; unsettled if it cannot say.
            # Old weights are never restored: their source may be known only to the program that runs the update.
            await to_the_end(self._look(unsettled))
            if not isinstance(error, EngineError):
                raise
            if self._served.is_unsettled:
                raise WeightsUnsettled(
                    f"{self._name} did not load the weights in {path}: {error.message}; its weights are unknown, so"
                    f" it serves no session, under the label {self._served.label!r}, until an update succeeds or it is"
                    " restarted"
                ) from error
            if self._served.label != version:  # the call that failed had changed nothing
                raise

    async def _look(self, otherwise: str) -> None:
        try:
            await self._server.read_version()
        except EngineError:
            self._served.set(otherwise)

    async def _adopt(self, version: str) -> None:
        await self._server.adopt(version)
        self._served.set(version)


_LENGTH_BYTES = 8
_LONGEST_HEADER_BYTES = 100 << 20  # as in the safetensors format
_MAY_BE_TIED = frozenset({"lm_head.weight"})
_SHOWN = 3


class _Tensor(msgspec.Struct):
    shape: tuple[int, ...]


def require_fitting(current: Path, new: Path) -> None:
    """Raise `EngineRejected` if the tensors in `new` differ from those in `current`, as far as both are readable.

    Other shapes end a SGLang server and leave a vLLM server without weights. Only headers are read, no weights.
    """
    if not current.is_dir():
        return
    if not new.is_dir():
        raise EngineRejected(f"expected a folder with a checkpoint, there is none at {new}; weights not changed")
    expected = _shapes(current)
    if not expected:
        return
    found = _shapes(new)
    misfits = [
        f"{name} has shape {found.get(name)}, expected {expected.get(name)}"
        for name in sorted((expected.keys() | found.keys()) - _MAY_BE_TIED)
        if expected.get(name) != found.get(name)
    ]
    if misfits:
        raise EngineRejected(
            f"the checkpoint in {new} does not fit the weights being served: {'; '.join(misfits[:_SHOWN])}"
            f" ({len(misfits)} of {len(expected)} tensors); weights not changed"
        )


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            content = file.read(min(length, _LONGEST_HEADER_BYTES))
        try:
            entries = read_json(content, dict[str, msgspec.Raw])
            entries.pop("__metadata__", None)
            shapes |= {name: read_json(entry, _Tensor).shape for name, entry in entries.items()}
        except (UnicodeDecodeError, msgspec.DecodeError) as error:
            raise EngineRejected(f"{path} is not a safetensors file ({error}); weights not changed") from error
    return shapes
