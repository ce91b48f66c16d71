"""Audit of a run: some of its rollouts while it goes on, or all of them afterwards. `audit.json` keeps the report."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from harness.errors import HarnessError, MalformedRequest, RunError, TokenizerError
from harness.machine.deadlines import beside, to_the_end
from harness.server.store.sqlite import list_sessions, read_record, read_rows
from harness.suite.record.config import RunConfig
from harness.suite.record.lock import read_lock
from harness.suite.record.rollout_table import RolloutRecord, read_rollouts
from harness.suite.record.rundir import RunDirectory
from harness.suite.scenarios.folder import ScenarioFolder, load_scenario
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


def find_template(directory: RunDirectory, weights: Mapping[int, Path]) -> ChatTokenizer | None:
    """Return the trainer's chat tokenizer: that of its newest weights, with the template of the run; None if gone."""
    with suppress(HarnessError):
        entries = RunConfig.load(directory.config).scenarios
        folders = [replace(load_scenario(Path(each.directory)), scenario=each.scenario) for each in entries]
        [template] = {folder.find_template() for folder in folders}
        return open_template(weights, template)
    return None


def open_template(weights: Mapping[int, Path], template: Path | None = None) -> ChatTokenizer | None:
    # Folders of later versions may hold weights alone.
    for version in sorted(weights, reverse=True):
        with suppress(TokenizerError, MalformedRequest, OSError):
            return open_chat_tokenizer(weights[version], template_file=template)
    return None


def audit_sessions(
    store: Path,
    session_ids: Sequence[str],
    weights: Mapping[int, Path],
    template: ChatTokenizer | None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> "AuditReport":
    """Audit sessions of a store, or some from first to last if `session_ids` is empty, against the newest `weights`.

    Blocks for some forward passes of each branch. Raises `RunError`, also once `is_stopped`, `StoreError`,
    `ModelError`.
    """
    if not weights:
        raise RunError("expected weights to compare with, found none: name them with --weights VERSION=FOLDER")
    try:
        from harness.training.audit.audit import audit
        from harness.training.audit.reference import Reference
    except ModuleNotFoundError as error:
        raise RunError(f"{error}: an audit needs `pip install 'session-harness[learner]'`") from None

    chosen = session_ids or _thin([*list_sessions(store)])
    return audit(_read_branches(store, chosen, template), Reference(weights, max(weights), is_stopped))


def _thin(session_ids: Sequence[str]) -> Sequence[str]:
    return session_ids[:: -(-len(session_ids) // _MOST_SESSIONS) or 1]


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
    is_stopped: Callable[[], bool]
    _waiting: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    def add(self, rollout: RolloutRecord) -> None:
        """Audit an ended rollout, if it is one of the share of its scenario."""
        if rollout.session_id is not None and self._is_chosen(rollout):
            self._waiting.put_nowait(rollout.session_id)

    async def run(self) -> None:
        """Audit each rollout as it ends, and say which has a gap. Never ends."""
        while True:
            session_id = await self._waiting.get()
            found = await self._try([session_id])
            if found is not None and found.attribution.gap > _ALARM:
                self.say(f"audit of session {session_id[:8]}: {found.verdicts[0]}")

    async def finish(self) -> None:
        """Audit the chosen rollouts together, those of earlier starts too, and write the report."""
        rollouts = read_rollouts(self.directory.database).values()
        chosen = [each.session_id for each in rollouts if each.session_id is not None and self._is_chosen(each)]
        found = await self._try(_thin(chosen)) if chosen and not self.is_stopped() else None
        if found is not None:
            self.directory.write_json(self.directory.audit, found.to_json())

    def _is_chosen(self, rollout: RolloutRecord) -> bool:
        # Multiplying by an odd number spreads neighboring seeds.
        return (rollout.seed * 40503) % _SEEDS < self.shares.get(rollout.scenario, 0.0) * _SEEDS

    async def _try(self, session_ids: Sequence[str]) -> "AuditReport | None":
        def work() -> "AuditReport":
            weights = find_weights(self.directory)
            template = find_template(self.directory, weights)
            return audit_sessions(self.directory.database, session_ids, weights, template, self.is_stopped)

        try:
            return await to_the_end(asyncio.to_thread(work))  # two at once would share the processor
        except Exception as error:  # noqa: BLE001  # whatever a model's code raises, the run goes on
            self.say(f"audit: {error}")
            return None


@asynccontextmanager
async def auditing(
    folders: Sequence[ScenarioFolder],
    directory: RunDirectory,
    say: Callable[[str], None],
    is_stopped: Callable[[], bool],
) -> AsyncIterator[RunAudit | None]:
    """Audit beside the block what the scenarios ask for, and all of it together after it; None if they do not ask."""
    shares = {folder.name: folder.scenario.audit.share for folder in folders if folder.scenario.audit is not None}
    if not shares:
        yield None
        return
    audit = RunAudit(directory, shares, say, is_stopped)
    async with beside(audit.run(), name="audit"):
        yield audit
    await audit.finish()


class _Written(msgspec.Struct):
    gap: float
    shares: list[dict[str, float | str]]
    verdicts: list[str]
    groups: dict[str, list[Json]]


def read_audit(directory: RunDirectory) -> Json | None:
    """Return the report of a run's audit, if it has one. Raises `RunError` if it is damaged."""
    if not directory.audit.is_file():
        return None
    try:
        content = directory.audit.read_bytes()
        msgspec.json.decode(content, type=_Written)
        report: Json = msgspec.json.decode(content)
    except (OSError, msgspec.MsgspecError) as error:
        raise RunError(f"{directory.audit}: {error}; make it anew with `harness audit`") from error
    return report
