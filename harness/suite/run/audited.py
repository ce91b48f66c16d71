"""Audit of a run: some of its rollouts while it goes on, or all of them afterwards. `audit.json` keeps the report."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from harness.errors import HarnessError, MalformedRequest, RunError, TokenizerError
from harness.machine.deadlines import beside, to_the_end
from harness.server.store.sqlite import list_sessions, read_record, read_rows
from harness.suite.record.lock import read_lock
from harness.suite.record.rollout_table import RolloutRecord
from harness.suite.record.rundir import RunDirectory
from harness.suite.scenarios.folder import ScenarioFolder
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.tokens.model_family import open_chat_tokenizer
from harness.types import Json

if TYPE_CHECKING:  # it imports torch
    from harness.training.audit.audit import AuditReport
    from harness.training.audit.branches import AuditedBranch

_SEEDS = 1 << 16
_MOST_SESSIONS = 128
_ALARM = 0.05  # nats in the mean; bfloat16 differs by less


def find_weights(directory: RunDirectory) -> dict[int, Path]:
    """Return the folders of a run's weights that are still there, by version."""
    found = {int(each.name): each for each in directory.checkpoints.glob("*") if each.name.isdecimal()}
    models = [*read_lock(directory.lock).get("tokenizers", {}).values()]
    return {0: Path(models[0]), **found} if len(models) == 1 and Path(models[0]).is_dir() else found


def audit_sessions(store: Path, session_ids: Collection[str], weights: Mapping[int, Path]) -> "AuditReport":
    """Audit sessions of a store, or some from first to last if `session_ids` is empty, against the newest `weights`.

    Blocks for some forward passes of each branch. Raises `RunError`, `StoreError`, `ModelError`.
    """
    if not weights:
        raise RunError("expected weights to compare with, found none: name them with --weights VERSION=FOLDER")
    try:
        from harness.training.audit.audit import audit
        from harness.training.audit.reference import Reference
    except ModuleNotFoundError as error:
        raise RunError(f"{error}: an audit needs `pip install 'session-harness[learner]'`") from None

    names = [*(session_ids or list_sessions(store))]
    chosen = names if session_ids else names[:: -(-len(names) // _MOST_SESSIONS) or 1]
    return audit(_read_branches(store, chosen, _open_template(weights)), Reference(weights, max(weights)))


def _open_template(weights: Mapping[int, Path]) -> ChatTokenizer | None:
    # The trainer's template is that of its weights, whose folders may hold weights alone.
    for version in sorted(weights, reverse=True):
        with suppress(TokenizerError, MalformedRequest, OSError):
            return open_chat_tokenizer(weights[version])
    return None


def _read_branches(
    store: Path, session_ids: Iterable[str], template: ChatTokenizer | None
) -> "Iterator[AuditedBranch]":
    from harness.training.audit.branches import AuditedBranch

    for session_id in session_ids:
        session = read_record(store, session_id).session
        if session.records_rows:
            session.put_rows(read_rows(store, session_id))
        yield from AuditedBranch.of_session(session, template)


@dataclass(slots=True)
class RunAudit:
    """Audit of a share of a run's rollouts, one at a time, while others run."""

    directory: RunDirectory
    shares: Mapping[str, float]
    """Share of the rollouts, by scenario."""
    say: Callable[[str], None]
    _waiting: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    _chosen: list[str] = field(default_factory=list)

    def add(self, rollout: RolloutRecord) -> None:
        """Audit an ended rollout, if it is one of the share of its scenario."""
        # Multiplying by an odd number spreads neighboring seeds.
        is_chosen = (rollout.seed * 40503) % _SEEDS < self.shares.get(rollout.scenario, 0.0) * _SEEDS
        if is_chosen and rollout.session_id is not None:
            self._chosen.append(rollout.session_id)
            self._waiting.put_nowait(rollout.session_id)

    async def run(self) -> None:
        """Audit each rollout as it ends, and say which has a gap. Never ends."""
        while True:
            session_id = await self._waiting.get()
            found = await self._try([session_id])
            if found is not None and found.attribution.gap > _ALARM:
                self.say(f"audit of session {session_id[:8]}: {found.verdicts[0]}")

    async def finish(self) -> None:
        """Audit all chosen rollouts together, and write the report."""
        found = await self._try(self._chosen) if self._chosen else None
        if found is not None:
            self.directory.write_json(self.directory.audit, found.to_json())

    async def _try(self, session_ids: Sequence[str]) -> "AuditReport | None":
        try:
            weights = find_weights(self.directory)
            auditing = asyncio.to_thread(audit_sessions, self.directory.database, session_ids, weights)
            return await to_the_end(auditing)  # cannot stop the thread: two at once would share the processor
        except (HarnessError, RuntimeError, ValueError, LookupError, MemoryError) as error:  # it never ends a run
            self.say(f"audit: {error}")
            return None


@asynccontextmanager
async def auditing(
    folders: Sequence[ScenarioFolder], directory: RunDirectory, say: Callable[[str], None]
) -> AsyncIterator[RunAudit | None]:
    """Audit beside the block what the scenarios ask for, and all of it together after it; None if they do not ask."""
    shares = {folder.name: folder.scenario.audit.share for folder in folders if folder.scenario.audit is not None}
    if not shares:
        yield None
        return
    audit = RunAudit(directory, shares, say)
    async with beside(audit.run(), name="audit"):
        yield audit
    await audit.finish()


def read_audit(directory: RunDirectory) -> Json | None:
    """Return the report of a run's audit, if it has one. Raises `RunError` if it is damaged."""
    if not directory.audit.is_file():
        return None
    try:
        report: Json = msgspec.json.decode(directory.audit.read_bytes(), type=Json)
    except (OSError, msgspec.MsgspecError) as error:
        raise RunError(f"{directory.audit}: {error}; make it anew with `harness audit`") from error
    return report
